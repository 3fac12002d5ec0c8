"""What a disk quota leaves to this user, where the kernel can be asked.

A file system's free space says nothing of quotas on local disks (XFS, ext4); network file systems
either count them in or keep them to themselves.

Source: quotactl(2) (``quotactl_fd`` since Linux 5.14, ``struct if_dqblk``), ``linux/fs.h``
(``FS_IOC_FSGETXATTR`` for the id of a folder's project).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

from dist_consolidate.doing import Doing
from dist_consolidate.errors import ResourceError
from dist_consolidate.units import format_bytes

_QUOTACTL_FD, _Q_GETQUOTA = 443, 0x800007
_USER, _GROUP, _PROJECT = range(3)
_LIMITS_VALID, _BLOCK_BYTES = 1, 1024
# Hard and soft limit in blocks, bytes in use, the same of inodes, two times, what is valid.
_RECORD = struct.Struct("<8QII")
_FSGETXATTR, _FSXATTR = 0x801C581F, struct.Struct("<12xI12x")

Ask = Callable[[int, int, int], bytes | None]


def check_quota(path: Path, num_bytes: int, *, num_there_bytes: int = 0) -> None:
    """Check that a result fits into this user's quotas before its first byte is written.

    Args:
        path: Where it will be written; need not exist yet.
        num_bytes: Size of all its files together.
        num_there_bytes: What of that an earlier run has left there, and is counted already.

    Raises:
        ResourceError: If a quota leaves less.
    """
    with Doing("looking at", path):
        existing = path.resolve()
        while not existing.is_dir() and existing != existing.parent:
            existing = existing.parent
        left = left_bytes(existing)
    if left is not None and num_bytes > left + num_there_bytes:
        raise ResourceError(
            f"{path} needs {format_bytes(num_bytes)} ({num_bytes:,} bytes), but a disk quota "
            f"leaves {format_bytes(left)} ({left:,} bytes) to this user there; free some space or "
            "choose another output folder"
        )


def left_bytes(folder: Path, ask: Ask | None = None) -> int | None:
    """Give how many bytes quotas leave to what this user writes into a folder.

    Args:
        folder: The folder.
        ask: Asks the kernel, for the descriptor of a folder, a kind of quota and an id.

    Returns:
        The least that any quota leaves; ``None`` where none is in force, or nobody says.
    """
    ask = ask or _ask_kernel
    if not os.geteuid() and ask is _ask_kernel:
        return None  # quotas do not hold for the superuser
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        group = os.fstat(descriptor)
        # In a folder with the set-group-id bit, files are its group's.
        gid = group.st_gid if group.st_mode & 0o2000 else os.getegid()
        ids = ((_USER, os.geteuid()), (_GROUP, gid), (_PROJECT, _project(descriptor)))
        found = [ask(descriptor, kind, number) for kind, number in ids if number is not None]
        left = [_left(record) for record in found if record is not None]
    finally:
        os.close(descriptor)
    return min((number for number in left if number is not None), default=None)


def _left(record: bytes) -> int | None:
    hard_blocks, _, used_bytes, *_, valid, _ = _RECORD.unpack(record)
    if not valid & _LIMITS_VALID or not hard_blocks:
        return None
    return max(int(hard_blocks) * _BLOCK_BYTES - int(used_bytes), 0)


def _project(descriptor: int) -> int | None:
    try:
        found = fcntl.ioctl(descriptor, _FSGETXATTR, bytes(_FSXATTR.size))
    except OSError:
        return None
    number = int(_FSXATTR.unpack(found)[0])
    return number or None  # 0 is what belongs to no project


def _ask_kernel(descriptor: int, kind: int, number: int) -> bytes | None:
    record = ctypes.create_string_buffer(_RECORD.size)
    command = _Q_GETQUOTA << 8 | kind
    # A kernel or file system without quotas says so; then there is none to be kept.
    library = ctypes.CDLL(None, use_errno=True)
    failed = library.syscall(
        ctypes.c_long(_QUOTACTL_FD),
        ctypes.c_int(descriptor),
        ctypes.c_int(command),
        ctypes.c_int(number),
        record,
    )
    return None if failed else record.raw
