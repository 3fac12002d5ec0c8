"""A task of a step that something happens to; it notes how it ended.

``python -m tests.slurm_task KIND NOTES ARGUMENT...`` runs the command line with the arguments.
``NOTES`` is a folder that gets a file for each rank: ``code.RANK`` with its exit code, and
``reads.RANK`` as soon as it has begun to read weights.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_consolidate import cli

PAUSE_SEC = 0.3
FAILING_RANK, FAILING_READ = 1, 3


def main(kind: str, notes: Path, arguments: list[str]) -> int:
    """Run the command line, slowed down or with a rank that cannot read."""
    rank = int(os.environ["SLURM_PROCID"])
    reads = iter(range(sys.maxsize))

    def happen() -> None:
        (notes / f"reads.{rank}").touch()
        if kind == "slow":
            time.sleep(PAUSE_SEC)
        elif kind == "fail" and rank == FAILING_RANK and next(reads) >= FAILING_READ:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    setattr(os, "preadv", before(os.preadv, happen))  # noqa: B010
    code: int | str | None = -1
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    finally:
        (notes / f"code.{rank}").write_text(str(code))
    return int(code or 0)


def before(function: Callable[..., Any], happen: Callable[[], None]) -> Callable[..., Any]:
    """Let something happen before each call of a function."""

    def called(*arguments: Any) -> Any:
        happen()
        return function(*arguments)

    return called


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
