"""Runs that are killed at random and gone on from, and a summary for docs/reliability.md.

``python -m tests.long.random_kills [--runs N] [--seed N] [--jobs N]``: 200 runs take seven
minutes on two cores. It ends with 1 if any did not come to the exact result.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.random_kills import Kills, Survival
from tests.zygote import Zygote


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill and go on.

    Args:
        arguments: Of the command line.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1000, help="the first run's; each has its own")
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    chosen = parser.parse_args(arguments)
    started, zygote = time.monotonic(), Zygote()
    with tempfile.TemporaryDirectory(prefix="random-kills-") as folder:
        try:
            kills = Kills(Path(folder), zygote.started)
            results = _survive(kills, chosen.seed, chosen.runs, Path(folder), chosen.jobs)
        finally:
            zygote.close()
    survived = [result for result in results if result is not None]
    states = collections.Counter(state for result in survived for state in result.states)
    print(f"runs: {len(survived)} came to the exact result, {len(results) - len(survived)} did not")
    print(f"kills: {sum(states.values())}; what was there after them: {dict(states.most_common())}")
    print(f"last runs that took something over: {sum(r.num_resumed_bytes > 0 for r in survived)}")
    print(f"kinds: {dict(collections.Counter(result.kind for result in survived))}")
    print(f"{time.monotonic() - started:.0f} s")
    return int(len(survived) < len(results))


def _survive(
    kills: Kills, first: int, num_runs: int, folder: Path, num_jobs: int
) -> list[Survival | None]:
    def survive(seed: int) -> Survival | None:
        here = folder / f"run{seed}"
        try:
            return kills.survive(seed, here)
        except Exception as error:  # noqa: BLE001 - all of them are shown
            text = "".join(traceback.format_exception(error, limit=-3))
            print(f"=== seed {seed}\n{text}", flush=True)
            return None
        finally:
            shutil.rmtree(here, ignore_errors=True)

    with concurrent.futures.ThreadPoolExecutor(num_jobs) as pool:
        return list(pool.map(survive, range(first, first + num_runs)))


if __name__ == "__main__":
    sys.exit(main())
