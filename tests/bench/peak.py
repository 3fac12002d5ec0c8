"""How much memory, reading and time one consolidation takes, on each rank.

    python tests/bench/peak.py CKPT_DIR OUTPUT_DIR --bucket-size 64MB
    torchrun --nproc_per_node=2 tests/bench/peak.py CKPT_DIR OUTPUT_DIR --transport gather

The arguments are those of ``dist-consolidate``. Each rank prints one line of JSON that begins with
``{"rank":``: the growth of its resident memory above the interpreter with torch imported, at its
peak; what it read (its own reads of any file, and the bytes that all ranks together read from
shards); the seconds taken; and whatever else :mod:`tests.bench.runner` tells.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> int:
    """Run the command line and print what it took.

    Args:
        arguments: For ``dist-consolidate``.

    Returns:
        Its exit code.
    """
    if sys.path[0] == str(Path(__file__).resolve().parent):
        # Run as a script: its folder's modules go by their full names.
        sys.path[0] = str(REPOSITORY)
    from tests.bench import runner

    return runner.main(["--growth", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
