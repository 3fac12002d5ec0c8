"""CRC-32, the checksum of zip files, at the speed of whichever library is installed.

ISA-L computes it with the processor's carry-less multiplication, several times as fast as zlib;
both give the same numbers. Source: https://pypi.org/project/isal.
"""

from __future__ import annotations

import zlib
from typing import Protocol


class _Crc32(Protocol):
    def __call__(self, data: bytes | bytearray | memoryview, value: int = 0, /) -> int: ...


def _fastest() -> _Crc32:
    try:
        from isal import isal_zlib
    except ImportError:  # there is no wheel for this platform
        return zlib.crc32
    return isal_zlib.crc32


_crc32: _Crc32 = _fastest()


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Give the CRC-32 of bytes.

    Args:
        data: The bytes; any contiguous buffer.
        value: CRC-32 of what stands before them.

    Returns:
        The checksum, from 0 to 2**32 - 1.
    """
    return _crc32(data, value)
