"""How much host memory this process could still take, and every limit it is under.

Cheap on purpose: torch is not imported to answer. What cannot be read sets no limit.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from dist_consolidate.runtime.cgroups import cgroup_rooms
from dist_consolidate.runtime.rooms import Reading, Room

# Address space that threads take beside what they are given: stacks and the allocator's arenas.
_ADDRESS_RESERVE_BYTES = 64 * 2**20
_RLIMITS = (
    ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize", _ADDRESS_RESERVE_BYTES),
    ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData", 0),
)


def read_host(root: Path = Path("/")) -> Reading:
    """Read everything about this machine that the budget needs.

    Args:
        root: Where ``proc`` and ``sys`` are.

    Returns:
        The reading, without a device.
    """
    host = socket.gethostname()
    machine = _first_line(root / "proc/sys/kernel/random/boot_id") or host
    rooms = [*cgroup_rooms(root), *_meminfo(root), *_resource_limits(root)]
    keyed = [
        Room(room.source, f"{machine} {room.key}", room.limit_bytes, room.free_bytes)
        for room in rooms
    ]
    return Reading(host, machine, os.getpid(), len(os.sched_getaffinity(0)), tuple(keyed))


def _meminfo(root: Path) -> Iterator[Room]:
    """Give the machine's own memory: a group's limit may be higher than what is left of that.

    Source: ``MemAvailable`` in proc_meminfo(5), what can be taken without swapping.
    """
    values = _kilobytes(root / "proc/meminfo")
    if "MemAvailable" in values:
        free = values["MemAvailable"]
        total = max(values.get("MemTotal", free), free)
        yield Room("MemAvailable in /proc/meminfo", "meminfo", total, free)


def _resource_limits(root: Path) -> Iterator[Room]:
    """Give the limits of this process alone (getrlimit(2)), such as ``ulimit -v`` sets."""
    used = _kilobytes(root / "proc/self/status")
    for name, number, field, reserve in _RLIMITS:
        limit, _ = resource.getrlimit(number)
        if limit != resource.RLIM_INFINITY and field in used:
            free = max(limit - used[field] - reserve, 0)
            # Containers of one machine may have the same numbers for their processes.
            key = f"{name} {socket.gethostname()} {os.getpid()}"
            yield Room(f"{name} of this process", key, limit, free)


def _kilobytes(path: Path) -> dict[str, int]:
    """Read lines such as ``VmSize:  1234 kB``, in bytes."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            parts = value.split()
            if len(parts) == 2 and parts[0].isdigit() and parts[1] == "kB":
                found[name] = int(parts[0]) * 1024
    return found


def _first_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip().partition("\n")[0]
    return ""
