"""Opening what a checkpoint folder holds under a shard's name: only ever a plain file.

A FIFO would block whoever opens it, a device may do something else at being opened, and some files
of the kernel's wait for news when they are read; they call themselves empty.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from dist_consolidate.errors import CheckpointError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


_SHARD = "a file that torch.save wrote"


def open_descriptor(path: Path, flags: int = 0, expected: str = _SHARD) -> int:
    """Open a file for reading, which must be a plain one, directly or through a link.

    Args:
        path: The file.
        flags: For open(2), on top of those for reading.
        expected: What it should be.

    Returns:
        The descriptor.

    Raises:
        CheckpointError: If it is no plain file.
        OSError: If it cannot be opened.
    """
    _check(path, path.stat(), expected)
    # It may have been replaced meanwhile: then nothing waits, and what was opened is looked at.
    safe = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, os.O_RDONLY | safe | flags)
    try:
        _check(path, os.fstat(descriptor), expected)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_plain(path: Path, expected: str = _SHARD) -> BinaryIO:
    """Open a file as :func:`open_descriptor` does, which must not be empty.

    Args:
        path: The file.
        expected: What it should be.

    Returns:
        A stream.

    Raises:
        CheckpointError: If it is no plain file, or an empty one.
        OSError: If it cannot be opened.
    """
    descriptor = open_descriptor(path, expected=expected)
    if not os.fstat(descriptor).st_size:
        os.close(descriptor)
        raise CheckpointError(
            f"{path}: is empty (0 bytes), expected {expected}; the save did not finish"
        )
    return os.fdopen(descriptor, "rb")


def _check(path: Path, status: os.stat_result, expected: str) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        found = _KINDS.get(kind, "no file")
        raise CheckpointError(f"{path}: is {found}, expected {expected}")
