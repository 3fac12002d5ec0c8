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

from tests.bench import runner

if __name__ == "__main__":
    sys.exit(runner.main(["--growth", *sys.argv[1:]]))
