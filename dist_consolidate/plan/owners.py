"""Which rank writes which ranges of the output files.

Ranges begin and end at multiples of a stripe, so that no two ranks write into one page or stripe:
on NFS two clients' partial pages can overwrite each other, on Lustre they wait for each other.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PAGE_BYTES = 4096
# Lustre's stripes are 1 or 4 MiB and NFS writes at most 1 MiB at a time; pages are smaller.
_STRIPE_BYTES = 4 << 20
# Whole files are dealt out to ranks if that leaves nobody with more than this over an equal share.
_MAX_IMBALANCE = 1.05


class Owned(NamedTuple):
    """A range of an output file that one rank fills."""

    file: int
    start_bytes: int
    stop_bytes: int


def deal_out(sizes: Sequence[int], num_writers: int) -> list[list[Owned]]:
    """Give each writer the ranges of the output files that it fills.

    Whole files go to the writer with the least so far, the largest first, where that is even
    enough. Otherwise all files, one after another, are cut into as many equal parts.

    Args:
        sizes: The output files' sizes in bytes.
        num_writers: Writers.

    Returns:
        For each writer its ranges, in file order.
    """
    total = sum(sizes)
    loads = [0] * num_writers
    dealt: list[list[Owned]] = [[] for _ in range(num_writers)]
    for file in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        writer = min(range(num_writers), key=lambda index: (loads[index], index))
        dealt[writer].append(Owned(file, 0, sizes[file]))
        loads[writer] += sizes[file]
    if max(loads) * num_writers <= total * _MAX_IMBALANCE:
        return [sorted(owned) for owned in dealt]
    return [list(_between(sizes, *share)) for share in _equal_shares(sizes, num_writers)]


def _equal_shares(sizes: Sequence[int], num_writers: int) -> Iterator[tuple[int, int]]:
    """Cut the files' concatenation into equal intervals, each cut at a stripe of its file."""
    total, low = sum(sizes), 0
    starts = [sum(sizes[:file]) for file in range(len(sizes))]
    # Small results, in which nobody would get a whole stripe, are cut at pages.
    stripe = _STRIPE_BYTES if total >= 4 * num_writers * _STRIPE_BYTES else PAGE_BYTES
    for writer in range(1, num_writers + 1):
        ideal = total * writer // num_writers
        file = max(bisect.bisect_right(starts, ideal) - 1, 0)
        cut = starts[file] + (ideal - starts[file]) // stripe * stripe
        high = total if writer == num_writers else max(cut, low)
        yield low, high
        low = high


def _between(sizes: Sequence[int], low: int, high: int) -> Iterator[Owned]:
    start = 0
    for file, size in enumerate(sizes):
        first, last = max(low, start), min(high, start + size)
        if first < last:
            yield Owned(file, first - start, last - start)
        start += size


class Owners:
    """Looks up who writes a range."""

    def __init__(self, dealt: Sequence[Sequence[Owned]]) -> None:
        """Sort what was dealt out.

        Args:
            dealt: For each writer its ranges; together they are every file, once.
        """
        self._by_file: dict[int, list[tuple[int, int, int]]] = {}
        for writer, owned in enumerate(dealt):
            for file, start, stop in owned:
                self._by_file.setdefault(file, []).append((start, stop, writer))
        for ranges in self._by_file.values():
            ranges.sort()

    def parts(self, file: int, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Cut a range of a file where the writer changes.

        Args:
            file: Index of the file.
            low: First byte.
            high: Behind the last byte.

        Yields:
            Writer, first byte, and the byte behind the last one.
        """
        ranges = self._by_file.get(file, ())
        first = max(bisect.bisect_right(ranges, low, key=lambda part: part[0]) - 1, 0)
        for index in range(first, len(ranges)):
            start, stop, writer = ranges[index]
            if start >= high:
                return
            if low < stop:
                yield writer, max(low, start), min(high, stop)
