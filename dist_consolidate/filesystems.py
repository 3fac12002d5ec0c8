"""What kind of file system a path is on."""

from __future__ import annotations

import os
from pathlib import Path

_IN_MEMORY = {"tmpfs", "ramfs"}


def is_in_memory(path: Path) -> bool:
    """Tell whether a path is on a file system that is nothing but memory.

    There, every page is allocated when it is reserved and touched again when it is written, and a
    copy by the kernel takes the file's lock for longer than one from memory does.

    Args:
        path: A file or folder that exists.

    Returns:
        Whether it is; false where the system does not say.
    """
    return _kind(path) in _IN_MEMORY


def has_lasting_inodes(path: Path) -> bool:
    """Tell whether a file keeps its inode number as long as it lives.

    Buckets and remote folders that are mounted by a program may get a new one whenever the system
    has forgotten them.

    Args:
        path: A file or folder that exists.

    Returns:
        Whether it does; true where the system does not say.
    """
    kind = _kind(path)
    return not (kind.startswith("fuse") or kind == "9p")


def _kind(path: Path) -> str:
    """Name the kind of file system; empty where the system does not say.

    Source: ``/proc/pid/mountinfo`` in proc_pid_mountinfo(5).
    """
    try:
        device = path.stat().st_dev
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    halves = (line.partition(" - ") for line in lines.splitlines())
    kinds = {mount.split()[2]: kind.split()[0] for mount, _, kind in halves if kind}
    return kinds.get(number, "")
