"""Every case of the fault matrix, and a table of what became of them, for docs/reliability.md.

``python -m tests.long.fault_matrix [--jobs N] [--every N] [--only WORD ...]``: about twenty minutes
on two cores. It ends with 1 if anything was not as it should be; each such case is shown.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.fault_matrix import VALUES, Case, Matrix, Outcome, all_cases
from tests.zygote import Zygote


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out all cases.

    Args:
        arguments: Of the command line.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time")
    parser.add_argument("--every", type=int, default=1, help="take each N-th case only")
    parser.add_argument("--only", nargs="*", default=[], help="words that a case's name must hold")
    chosen = parser.parse_args(arguments)
    cases = [c for c in all_cases() if set(chosen.only) <= set(str(c).split("-"))]
    cases = cases[:: chosen.every]
    started, before = time.monotonic(), set(Path("/dev/shm").iterdir())
    zygote = Zygote()
    with tempfile.TemporaryDirectory(prefix="fault-matrix-") as folder:
        try:
            matrix = Matrix(Path(folder, "references"), zygote.started)
            outcomes, failures = _carry_out(matrix, cases, Path(folder), chosen.jobs)
        finally:
            zygote.close()
    for line in _table(outcomes):
        print(line)
    num_resumed = sum(bool(outcome.num_resumed_bytes) for outcome in outcomes.values())
    print(f"{num_resumed} second runs went on from what the first had claimed")
    print(f"{len(outcomes)} cases as they should be, {len(failures)} not", end=", ")
    print(f"{time.monotonic() - started:.0f} s")
    if litter := sorted(set(Path("/dev/shm").iterdir()) - before):
        print(f"new in /dev/shm (of these ranks, or of other programs): {litter}")
    return int(bool(failures))


def _carry_out(
    matrix: Matrix, cases: Sequence[Case], folder: Path, num_jobs: int
) -> tuple[dict[Case, Outcome], dict[Case, str]]:
    outcomes, failures = dict[Case, Outcome](), dict[Case, str]()
    lock = threading.Lock()

    def carry_out(number: int, case: Case) -> None:
        here = folder / f"case{number}"
        try:
            outcome = matrix.carry_out(case, here)
            with lock:
                outcomes[case] = outcome
        except Exception as error:  # noqa: BLE001 - all of them are shown
            with lock:
                failures[case] = "".join(traceback.format_exception(error, limit=-3))
                print(f"=== {case}\n{failures[case]}", flush=True)
        shutil.rmtree(here, ignore_errors=True)
        with lock:
            done = len(outcomes) + len(failures)
            if done % 25 == 0:
                print(f"{done} of {len(cases)}, {len(failures)} failures", flush=True)

    with concurrent.futures.ThreadPoolExecutor(num_jobs) as pool:
        list(pool.map(carry_out, range(len(cases)), cases))
    return outcomes, failures


def _table(outcomes: Mapping[Case, Outcome]) -> list[str]:
    """Count what was there after the fault, in Markdown: faults by phases."""
    counts: dict[tuple[object, object], collections.Counter[str]] = {}
    for case, outcome in outcomes.items():
        counter = counts.setdefault((case.fault, case.phase), collections.Counter())
        counter[outcome.state] += 1
    phases = VALUES["phase"]
    lines = ["| | " + " | ".join(map(str, phases)) + " |", "| --- " * (len(phases) + 1) + "|"]
    for fault in VALUES["fault"]:
        cells = [
            ", ".join(
                f"{count} {state}"
                for state, count in sorted(counts.get((fault, phase), {}).items())
            )
            for phase in phases
        ]
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
