"""Which ranges of the output files are finished: sorted intervals that do not touch.

Ranges, and not buckets, are what one run leaves to the next: another number of ranks, another
transport or another bucket size cuts the same bytes otherwise.

Legend: an interval ``(low, high)`` holds ``low`` and not ``high``.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Sort intervals, and put together those that overlap or touch.

    Args:
        intervals: In any order; empty ones are dropped.

    Returns:
        Disjoint intervals with gaps between them, in order.
    """
    found: list[Interval] = []
    for low, high in sorted(intervals):
        if low >= high:
            continue
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """What of each output file is on disk already.

    Attributes:
        by_file: For each output file its finished intervals, as :func:`merged` gives them.
    """

    by_file: tuple[tuple[Interval, ...], ...] = ()

    def __bool__(self) -> bool:
        """Tell whether anything is."""
        return any(self.by_file)

    @property
    def num_bytes(self) -> int:
        """How many bytes are finished."""
        return sum(high - low for intervals in self.by_file for low, high in intervals)

    def covers(self, file: int, low: int, high: int) -> bool:
        """Tell whether a range of a file is finished as a whole.

        Args:
            file: Index of the file.
            low: First byte.
            high: Behind the last byte.
        """
        intervals: Sequence[Interval] = self.by_file[file] if file < len(self.by_file) else ()
        if low >= high:
            return True
        index = bisect.bisect_right(intervals, low, key=lambda interval: interval[0]) - 1
        return index >= 0 and intervals[index][1] >= high
