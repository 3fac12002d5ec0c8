"""DeepSpeed's zero_to_fp32 in a measured process, its import, conversion and fsync apart.

    python -m tests.bench.deepspeed_child [--growth] CKPT_DIR OUTPUT_DIR MAX_SHARD_SIZE

``none`` as the size makes one file. With ``--growth`` torch is imported first, and memory counted
from there. zero_to_fp32 maps the optimizer files, so that their pages in the cache count as its
resident memory; the kernel keeps no peak without them.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.self_proc import memory_bytes, read_bytes, start_peak, tell


def sync(folder: Path) -> None:
    """Bring every file of a folder to the disk, and the folder."""
    for path in (*sorted(folder.iterdir()), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def main(arguments: Sequence[str]) -> None:
    """Convert, and print what it took."""
    growth = arguments[0] == "--growth"
    checkpoint, out, size = arguments[1:] if growth else arguments
    base_bytes = None
    if growth:
        import torch.distributed

        assert torch.distributed.is_available()
        base_bytes = start_peak()
    # Its quickest way in: no search for accelerators, which it has no use for.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    marks = [time.perf_counter()]
    from deepspeed.utils import zero_to_fp32

    marks.append(time.perf_counter())
    read_before = read_bytes()
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        checkpoint, out, max_shard_size=None if size == "none" else size
    )
    marks.append(time.perf_counter())
    sync(Path(out))
    marks.append(time.perf_counter())
    import_sec, convert_sec, sync_sec = (b - a for a, b in itertools.pairwise(marks))
    peak_bytes = memory_bytes("VmHWM")
    tell(
        {
            "import_sec": import_sec,
            "convert_sec": convert_sec,
            "sync_sec": sync_sec,
            "peak_bytes": peak_bytes,
            "peak_growth_bytes": None if base_bytes is None else peak_bytes - base_bytes,
            "own_read_bytes": read_bytes() - read_before,
        }
    )


if __name__ == "__main__":
    main(sys.argv[1:])
