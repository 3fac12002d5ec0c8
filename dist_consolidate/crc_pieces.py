"""CRC-32 of data that is seen in pieces: put together, and noted while ranges are read.

A CRC is linear over GF(2), so the checksum of ``a + b`` follows from those of ``a`` and ``b`` and
the length of ``b``; no byte is read twice. The idea is that of zlib's ``crc32_combine``.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple

from dist_consolidate.checksums import crc32

# CRC-32 values are polynomials over GF(2) with the coefficient of x**0 in the highest bit.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combine_crc32(crc1: int, crc2: int, num_bytes2: int) -> int:
    """Give the CRC-32 of two byte strings put together.

    Args:
        crc1: CRC-32 of the first.
        crc2: CRC-32 of the second.
        num_bytes2: Length of the second in bytes.

    Returns:
        What ``zlib.crc32(first + second)`` returns.
    """
    return _product(_shift_by_bytes(num_bytes2), crc1) ^ crc2


def _product(left: int, right: int) -> int:
    """Multiply two polynomials modulo the CRC's."""
    result = 0
    while left:
        if left & _ONE:
            result ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return result


@functools.cache
def _shift_by_power(exponent: int) -> int:
    """Give x**(8 * 2**exponent): what 2**exponent further bytes multiply a checksum by."""
    if exponent == 0:
        return _ONE >> 8
    half = _shift_by_power(exponent - 1)
    return _product(half, half)


# Pieces come in a few sizes only (whole buckets and the rests of tensors).
@functools.lru_cache(maxsize=4096)
def _shift_by_bytes(num_bytes: int) -> int:
    """Give x**(8 * num_bytes)."""
    result = _ONE
    for exponent in range(num_bytes.bit_length()):
        if num_bytes >> exponent & 1:
            result = _product(_shift_by_power(exponent), result)
    return result


class CrcRange(NamedTuple):
    """The checksum of a range of a file.

    Attributes:
        start_bytes: Where it begins.
        stop_bytes: Where it ends.
        crc: Its CRC-32.
    """

    start_bytes: int
    stop_bytes: int
    crc: int


@dataclasses.dataclass(slots=True)
class _Run:
    """What one thread is reading of a file, range after range."""

    start_bytes: int
    stop_bytes: int
    crc: int


class ReadCrcs:
    """The checksums of what a process reads of files, in any order and by any thread.

    Ranges that follow one another are put together at once, so that what is held, and sent to
    another rank in the end, is as little as the order of the reads allows.
    """

    def __init__(self) -> None:
        """Start with nothing read."""
        self._lock = threading.Lock()
        self._runs: dict[tuple[int, str], _Run] = {}
        # Of each file, ranges by where they begin and by where they end.
        self._by_start: dict[str, dict[int, CrcRange]] = {}
        self._by_stop: dict[str, dict[int, CrcRange]] = {}

    def note(
        self, file: str, start_bytes: int, places: Sequence[memoryview], num_bytes: int
    ) -> None:
        """Note bytes that this thread has just read.

        Args:
            file: The file.
            start_bytes: Where the range begins.
            places: Where its bytes are, one place after another; more may follow behind them.
            num_bytes: How many there are.
        """
        key = (threading.get_ident(), file)
        run = self._runs.get(key)
        if run is None or run.stop_bytes != start_bytes:
            if run is not None:
                self._keep(file, CrcRange(run.start_bytes, run.stop_bytes, run.crc))
            run = self._runs[key] = _Run(start_bytes, start_bytes, 0)
        left = num_bytes
        for place in places:
            part = place if len(place) <= left else place[:left]
            run.crc = crc32(part, run.crc)
            left -= len(part)
            if not left:
                break
        run.stop_bytes += num_bytes

    def ranges(self) -> dict[str, tuple[CrcRange, ...]]:
        """Give what was read of each file, in order; to be called when nobody reads any more."""
        while self._runs:
            (_, file), run = self._runs.popitem()
            self._keep(file, CrcRange(run.start_bytes, run.stop_bytes, run.crc))
        return {file: tuple(sorted(found.values())) for file, found in self._by_start.items()}

    def _keep(self, file: str, found: CrcRange) -> None:
        """Take a range in, joined to its neighbours; of two that begin alike, keep the longer."""
        if found.start_bytes == found.stop_bytes:
            return
        with self._lock:
            starts, stops = self._by_start.setdefault(file, {}), self._by_stop.setdefault(file, {})
            same = starts.get(found.start_bytes)
            if same is not None:
                if same.stop_bytes >= found.stop_bytes:
                    return
                _drop(starts, stops, same)
            before = stops.get(found.start_bytes)
            if before is not None:
                _drop(starts, stops, before)
                found = joined(before, found)
            behind = starts.get(found.stop_bytes)
            if behind is not None:
                _drop(starts, stops, behind)
                found = joined(found, behind)
            starts[found.start_bytes] = stops[found.stop_bytes] = found


def joined(first: CrcRange, second: CrcRange) -> CrcRange:
    """Put two ranges together, the second of which begins where the first ends."""
    length = second.stop_bytes - second.start_bytes
    crc = combine_crc32(first.crc, second.crc, length)
    return CrcRange(first.start_bytes, second.stop_bytes, crc)


def _drop(starts: dict[int, CrcRange], stops: dict[int, CrcRange], gone: CrcRange) -> None:
    del starts[gone.start_bytes]
    # Another range may end at the same place; it stays, if only in the list by starts.
    if stops.get(gone.stop_bytes) == gone:
        del stops[gone.stop_bytes]
