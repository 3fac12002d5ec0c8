"""Memory limits of control groups, versions 1 and 2, from this process's own group to the root.

Batch systems and containers set the limit where they please: SLURM on the job or the step, whose
groups are ancestors of the task's; a container's runtime on the group that the container sees as
its root. So every ancestor that can be seen counts. What cannot be read sets no limit.

Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; cgroups(7);
``/proc/PID/mountinfo`` in proc_pid_mountinfo(5).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from dist_consolidate.runtime.rooms import Room

# Version 1 says "no limit" with the largest number of pages there is.
_NO_LIMIT_BYTES = 1 << 60
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclasses.dataclass(frozen=True, slots=True)
class _Version:
    """The files of one version.

    Attributes:
        limits: Files that may hold a limit; above ``memory.high`` a process is slowed to a crawl.
        usage: File with the bytes in use.
        cache: Field of ``memory.stat``: page cache that the kernel gives back for the asking.
    """

    limits: tuple[str, ...]
    usage: str
    cache: str


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")


def cgroup_rooms(root: Path = Path("/")) -> list[Room]:
    """Find every limit that this process's memory is under.

    Args:
        root: Where ``proc`` and the mounts are.

    Returns:
        One room for each group that has a limit.
    """
    own = dict(_own_groups(root))
    rooms = []
    for version, mount_root, mount_point in _mounts(root):
        if version in own:
            folders = _ancestors(root, own[version], mount_root, mount_point)
            rooms += [room for folder in folders for room in _rooms(root, folder, version)]
    return rooms


def _own_groups(root: Path) -> Iterator[tuple[_Version, str]]:
    """Give this process's group in each hierarchy that may limit memory."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield _V2, path
        elif "memory" in controllers.split(","):
            yield _V1, path


def _mounts(root: Path) -> Iterator[tuple[_Version, str, str]]:
    """Give each mounted hierarchy: which part of it is mounted, and where."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if not dash or len(fields) < 5 or len(kinds) < 3:
            continue
        where = _unescaped(fields[3]), _unescaped(fields[4])
        if kinds[0] == "cgroup2":
            yield (_V2, *where)
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            yield (_V1, *where)


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def _ancestors(root: Path, group: str, mount_root: str, mount_point: str) -> Iterator[Path]:
    """Give the folders of a group and of all above it, as far as they are mounted.

    In a container the group's name may be the host's, or ``/``, whatever the mount shows: what is
    not below the mount's root is that root.
    """
    top = root / mount_point.lstrip("/")
    try:
        inside = PurePosixPath(group).relative_to(mount_root)
    except ValueError:
        inside = PurePosixPath()
    folder = top if ".." in inside.parts else top / inside
    while folder != top:
        yield folder
        folder = folder.parent
    yield top


def _rooms(root: Path, folder: Path, version: _Version) -> Iterator[Room]:
    usage = _number(folder / version.usage)
    if usage is None:
        return
    # Groups of one kernel have numbers of their own, by whatever name a container sees them.
    key = f"cgroup {_inode(folder)}"
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    used = usage - min(_as_number(stat.get(version.cache)) or 0, usage)
    for name in version.limits:
        limit = _number(folder / name)
        if limit is not None and limit < _NO_LIMIT_BYTES:
            path = "/" + (folder / name).relative_to(root).as_posix()
            yield Room(path, f"{key} {name}", limit, max(limit - used, 0))


def _inode(folder: Path) -> str:
    with contextlib.suppress(OSError):
        status = folder.stat()
        return f"{status.st_dev}:{status.st_ino}"
    return str(folder)


def _number(path: Path) -> int | None:
    return _as_number(next(iter(_lines(path)), None))


def _as_number(text: str | None) -> int | None:
    """Read a number; ``max`` and whatever else is none."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 30 else None


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return []
