"""Starting write-back early: the disk works while bytes are still being moved.

Without it, Linux lets dirty pages gather and the closing fsync waits for all of them.

Source: sync_file_range(2); the flag asks for write-out of a range without waiting for it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
# A smaller range is not worth a call; its pages go out with the neighbours' or at the fsync.
_MIN_BYTES = 1 << 20


@functools.cache
def _sync_file_range() -> Callable[..., int] | None:
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), "sync_file_range", None)
    return function


def start_writeback(descriptor: int, offset_bytes: int, num_bytes: int) -> None:
    """Ask for a range's dirty pages to be written out, without waiting.

    Where the system has no such call, or the file system refuses it, nothing happens: the data is
    as safe as before, only later on disk.

    Args:
        descriptor: An open file.
        offset_bytes: Where the range begins.
        num_bytes: Its length.
    """
    if num_bytes >= _MIN_BYTES:
        _call(descriptor, offset_bytes, num_bytes, _WRITE)


def wait_for_writeback(descriptor: int, offset_bytes: int, num_bytes: int) -> None:
    """Write a range's dirty pages out and wait, where the system can; the file is not synced.

    Args:
        descriptor: An open file.
        offset_bytes: Where the range begins.
        num_bytes: Its length.
    """
    _call(descriptor, offset_bytes, num_bytes, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)


def _call(descriptor: int, offset_bytes: int, num_bytes: int, flags: int) -> None:
    function = _sync_file_range()
    if function is not None:
        start, length = ctypes.c_int64(offset_bytes), ctypes.c_int64(num_bytes)
        function(descriptor, start, length, flags)
