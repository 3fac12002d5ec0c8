"""How much memory, reading and time one consolidation takes, on each rank.

    python tests/bench/peak.py CKPT_DIR OUTPUT_DIR --bucket-size 64MB
    torchrun --nproc_per_node=2 tests/bench/peak.py CKPT_DIR OUTPUT_DIR --transport gather

The arguments are those of ``dist-consolidate``. Each rank prints one line of JSON that begins with
``{"rank":``: the growth of its resident memory above the interpreter with torch imported, at its
peak; what it read (its own reads of any file, and the bytes that all ranks together read from
shards); and the seconds taken.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from dist_consolidate import cli

if TYPE_CHECKING:
    from dist_consolidate.consolidation import Report


def main(arguments: Sequence[str]) -> int:
    """Run the command line and print what it took.

    Args:
        arguments: For ``dist-consolidate``.

    Returns:
        Its exit code.
    """
    assert torch.distributed.is_available(), "imported, so that it counts as the interpreter's"
    started, read_before = time.monotonic(), _read_bytes()
    base_bytes = _start_peak()
    reports = _keep_reports()
    code = cli.main(list(arguments))
    line = {
        "rank": int(os.environ.get("RANK", "0")),
        "returncode": code,
        "peak_growth_bytes": _memory_bytes("VmHWM") - base_bytes,
        "base_bytes": base_bytes,
        "own_read_bytes": _read_bytes() - read_before,
        "shard_read_bytes": reports[0].num_bytes_read if reports else None,
        "seconds": round(time.monotonic() - started, 3),
    }
    # One write, so that the lines of several ranks do not mix.
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), (json.dumps(line) + "\n").encode())
    return code


def _keep_reports() -> list[Report]:
    """Keep what the command line only prints."""
    from dist_consolidate import consolidation

    reports: list[Report] = []
    make = consolidation.Report

    def keep(*arguments: Any, **values: Any) -> Report:
        reports.append(make(*arguments, **values))
        return reports[-1]

    setattr(consolidation, "Report", keep)  # noqa: B010
    return reports


def _start_peak() -> int:
    """Set the peak counter to what is resident now, and give that."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory_bytes("VmRSS")


def _memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(value) * 1024


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
