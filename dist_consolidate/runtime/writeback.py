"""Starting write-back early: the disk works while bytes are still being moved.

Without it, Linux lets dirty pages gather and the closing fsync waits for all of them.

Source: sync_file_range(2); the flag asks for write-out of a range without waiting for it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_SYNC_FILE_RANGE_WRITE = 2
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
    function = _sync_file_range()
    if function is not None and num_bytes >= _MIN_BYTES:
        start, length = ctypes.c_int64(offset_bytes), ctypes.c_int64(num_bytes)
        function(descriptor, start, length, _SYNC_FILE_RANGE_WRITE)
