"""What a measured process can say about itself; needs nothing but /proc.

Every process that the benchmark starts prints one line of JSON that begins with ``{"rank":``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINE_START = '{"rank":'


def memory_bytes(name: str) -> int:
    """Give a line of /proc/self/status, such as ``VmHWM``.

    That peak belongs to the program that runs now. The ``ru_maxrss`` of wait4 does not: it begins
    with what the parent held when it forked.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(value) * 1024


def start_peak() -> int:
    """Set the peak counter to what is resident now, and give that."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")


def read_bytes() -> int:
    """Give the bytes this process has read by system calls; what it mapped is not counted."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def tell(facts: Mapping[str, Any]) -> None:
    """Print the facts of this rank, in one write, so that the lines of several ranks do not mix.

    Something else may have left a line unended.
    """
    line = {"rank": int(os.environ.get("RANK", "0")), **facts}
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"\n{json.dumps(line)}\n".encode())


def told(output: str) -> list[dict[str, Any]]:
    """Find the facts in the output of a command, by rank."""
    lines = [json.loads(x) for x in output.splitlines() if x.startswith(LINE_START)]
    return sorted(lines, key=lambda line: int(line["rank"]))
