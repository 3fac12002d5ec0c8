"""Consolidates changed checkpoints, many of them: ``python -m tests.long.fuzz --count 100000``.

Every input is made from a seed and its number, so that ``--only NUMBER`` makes it again. Each must
end with a result or with an error of the tool's own: no traceback, no hang, bounded memory, nothing
published where something was wrong, nothing left behind.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cases import CASES
from tests.hostile.mutations import MUTATIONS
from tests.hostile.worker import run_once

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SEC, LIMIT_BYTES = 5.0, 1 << 30
_HANGS_SEC = 120.0
CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]")


@dataclasses.dataclass
class Figures:
    """What came out.

    Attributes:
        codes: Exit codes and how often each came.
        kinds: Kinds of changes and how many inputs there were of each.
        slowest: Most processor seconds that one input took, and its number.
        largest: Most bytes of memory that one input took, and its number.
        failures: Numbers of inputs that failed, and why.
    """

    codes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    slowest: tuple[float, int] = (0.0, -1)
    largest: tuple[int, int] = (0, -1)
    failures: dict[int, str] = dataclasses.field(default_factory=dict)

    def add(self, found: dict[str, Any]) -> None:
        """Count one input."""
        number = found["number"]
        self.codes[found["code"]] += 1
        self.kinds[found["kind"]] += 1
        self.slowest = max(self.slowest, (found["seconds"], number))
        self.largest = max(self.largest, (found["peak_bytes"], number))
        if found["wrong"]:
            self.failures[number] = found["wrong"]


class Inputs:
    """Makes the inputs, one after another, in a folder of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.ckpt, self.out = folder / "work" / "ckpt", folder / "work" / "out"
        self._kept: dict[str, Path] = {}

    def make(self, number: int) -> str:
        """Make an input; give the kind of change."""
        choice = random.Random(f"{self.seed} {number}")
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        self._copy(choice.choice(sorted(CASES)))
        names = list(MUTATIONS)
        kind = choice.choices(names, [weight for _, weight in MUTATIONS.values()])[0]
        MUTATIONS[kind][0](self.ckpt, choice)
        return kind

    def _copy(self, case: str) -> None:
        if case not in self._kept:
            self._kept[case] = self.folder / "kept" / case
            shutil.copytree(CASES[case].ckpt, self._kept[case])
        shutil.copytree(self._kept[case], self.ckpt, copy_function=os.link)


def run_input(inputs: Inputs, number: int) -> dict[str, Any]:
    """Make an input, consolidate it, and say what is wrong with what happened."""
    kind = inputs.make(number)
    found = run_once([str(inputs.ckpt), str(inputs.out)])
    text, code = found.pop("text"), found["code"]
    left = {path.name for path in inputs.out.parent.iterdir()} - {"ckpt", "out"}
    wrong = [
        f"exit code {code}" * (code not in (0, 2, 3, 4)),
        "a traceback" * ("Traceback" in text),
        "control characters" * bool(CONTROLS.search(text)),
        "no message" * (code != 0 and "dist-consolidate: error: " not in text),
        f"{found['seconds']:.1f} s" * (found["seconds"] > LIMIT_SEC),
        f"{found['peak_bytes'] >> 20} MiB" * (found["peak_bytes"] > LIMIT_BYTES),
        "published" * (code != 0 and inputs.out.exists()),
        "no result" * (code == 0 and not inputs.out.is_dir()),
        f"left behind: {sorted(left)}" * bool(left),
    ]
    told = "; ".join(filter(None, wrong))
    return {**found, "number": number, "kind": kind, "wrong": f"{told}\n{text}" if told else ""}


def _child(first: int, stop: int, step: int, seed: int) -> None:
    import torch  # noqa: F401 - some layouts need it, and its import would count as theirs

    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(dir=base) as folder:
        inputs = Inputs(Path(folder), seed)
        for number in range(first, stop, step):
            print(json.dumps(run_input(inputs, number)), file=answers, flush=True)


def _answers(first: int, count: int, step: int, seed: int) -> Iterator[dict[str, Any]]:
    """Run one process through its share; one that hangs or dies is told, and another goes on."""
    while first < count:
        command = [sys.executable, "-m", "tests.long.fuzz", "--child", f"{first}:{count}:{step}"]
        with (
            subprocess.Popen(
                [*command, "--seed", str(seed)],
                stdout=subprocess.PIPE,
                cwd=ROOT,
                text=True,
                bufsize=1,
            ) as process,
            contextlib.ExitStack() as stack,
        ):
            assert process.stdout is not None
            stack.callback(process.kill)
            while first < count:
                ready, _, _ = select.select([process.stdout], [], [], _HANGS_SEC)
                line = process.stdout.readline() if ready else ""
                if not line:
                    process.kill()
                    wrong = "the process died" if ready else "it hangs"
                    yield {"number": first, "code": -1, "kind": "?", "seconds": 0.0,
                           "peak_bytes": 0, "wrong": wrong}  # fmt: skip
                    first += step
                    break
                yield json.loads(line)
                first += step


def fuzz(count: int, seed: int, num_processes: int, limit_sec: float = float("inf")) -> Figures:
    """Run inputs over several processes.

    Args:
        count: How many.
        seed: Of all randomness.
        num_processes: How many processes.
        limit_sec: When to end early.

    Returns:
        The figures.
    """
    figures, lock, start = Figures(), threading.Lock(), time.monotonic()

    def share(first: int) -> None:
        with contextlib.closing(_answers(first, count, num_processes, seed)) as answers:
            for found in answers:
                with lock:
                    figures.add(found)
                if time.monotonic() - start > limit_sec:
                    return

    threads = [threading.Thread(target=share, args=(n,)) for n in range(num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return figures


def main() -> int:
    """Run, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--only", type=int, help="make this one input again, and keep it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        first, stop, step = map(int, given.child.split(":"))
        _child(first, stop, step, given.seed)
        return 0
    if given.only is not None:
        folder = Path(tempfile.mkdtemp())
        print(folder, json.dumps(run_input(Inputs(folder, given.seed), given.only), indent=1))
        return 0
    start = time.monotonic()
    figures = fuzz(given.count, given.seed, given.processes, given.minutes * 60)
    for number, wrong in sorted(figures.failures.items()):
        print(f"--- input {number}: {wrong}")
    print(f"{sum(figures.codes.values())} inputs in {(time.monotonic() - start) / 60:.1f} minutes")
    print(f"exit codes: {dict(sorted(figures.codes.items()))}")
    print(f"kinds of changes: {dict(figures.kinds)}")
    print(f"slowest: {figures.slowest[0]:.2f} s of processor time (input {figures.slowest[1]})")
    print(f"most memory: {figures.largest[0] >> 20} MiB (input {figures.largest[1]})")
    print(f"failures: {len(figures.failures)}")
    return 1 if figures.failures else 0


if __name__ == "__main__":
    sys.exit(main())
