"""Direct work: which bytes of which output file a rank fills, from which shards.

Where shards and output are seen by everyone, each rank fills the ranges of the output files that it
owns: it reads what belongs there and writes it, and nothing crosses the network. It cuts its ranges
into buckets; a bucket is computed when it is asked for, so that no list of fragments is ever made.

Where tied names are written in full, a rank that owns several copies of the same elements reads
them once: the first copy's bucket fills the others, too.

Legend: an interval ``(low, high)`` holds ``low`` and not ``high``.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dist_consolidate.plan.owners import PAGE_BYTES, Owned
from dist_consolidate.plan.plan import Plan

_WIDEST_BYTES = 16  # no element may lie in two buckets
# Files that are filled at the same time. The kernel lets one thread at a time write into a file, so
# that several threads in one file wait for each other; many files at once make a disk jump.
_FILES_AT_ONCE = 4

Interval = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class FileMap:
    """Where everything in an output file lies.

    Attributes:
        num_bytes: Size of the finished file.
        literals: Pairs of offset in bytes and content: headers and what else is known already.
        data_offset_bytes: For each stored tensor, where its bytes begin.
    """

    num_bytes: int
    literals: tuple[tuple[int, bytes], ...]
    data_offset_bytes: tuple[int, ...]


class Kept(NamedTuple):
    """A range of a stored tensor that a bucket writes.

    Attributes:
        file: Output file.
        stored: Index of the stored tensor in it.
        start_bytes: Where the range begins in the tensor.
        at_bytes: Where it lies in the bucket.
        num_bytes: Length.
    """

    file: int
    stored: int
    start_bytes: int
    at_bytes: int
    num_bytes: int


class Filled(NamedTuple):
    """Elements of one tensor in a bucket.

    Attributes:
        tensor: Index in the plan.
        start_numel: The first element.
        num_numel: How many.
        at_bytes: Where in the bucket their output bytes begin.
        kept: Where they go: all of them to one place, and all or some to further ones.
    """

    tensor: int
    start_numel: int
    num_numel: int
    at_bytes: int
    kept: tuple[Kept, ...]


class Write(NamedTuple):
    """A range of a bucket that goes to a range of a file."""

    file: int
    offset_bytes: int
    at_bytes: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class DirectBucket:
    """What is filled and written at once.

    Attributes:
        num_bytes: Room it takes, output bytes.
        elements: What is read.
        literals: Pairs of place in the bucket and content.
        writes: Where its bytes go; some of them to several places.
    """

    num_bytes: int
    elements: tuple[Filled, ...]
    literals: tuple[tuple[int, bytes], ...]
    writes: tuple[Write, ...]


class _Segment(NamedTuple):
    """Something in a file: bytes of a tensor (its index in the plan), or a literal."""

    start_bytes: int
    stop_bytes: int
    tensor: int
    stored: int
    literal: bytes


class _Copy(NamedTuple):
    """An interval of a tensor's bytes that another place's buckets write here, too."""

    file: int
    stored: int
    start_bytes: int
    stop_bytes: int


def step_bytes(bucket_bytes: int) -> int:
    """Tell how long buckets of a size are: whole pages, or elements of any type."""
    unit = PAGE_BYTES if bucket_bytes >= PAGE_BYTES else _WIDEST_BYTES
    return max(bucket_bytes // unit, 1) * unit


class Share:
    """The buckets of one rank.

    Attributes:
        num_buckets: How many; each is a window of one file.
    """

    def __init__(
        self, plan: Plan, maps: Sequence[FileMap], owned: Sequence[Owned], bucket_bytes: int
    ) -> None:
        """Cut ranges into buckets.

        Args:
            plan: The plan.
            maps: Its output files.
            owned: What this rank fills.
            bucket_bytes: The most output bytes in a bucket.
        """
        self._plan, self._maps, self._owned = plan, maps, owned
        self._step_bytes = step_bytes(bucket_bytes)
        self._segments = _segments(plan, maps, {part.file for part in owned})
        self._led, self._copies = _split_copies(plan, maps, owned)
        self._windows = list(_by_turns([self._cut(part) for part in owned]))
        self.num_buckets = len(self._windows)

    def _cut(self, part: Owned) -> Iterator[Owned]:
        # At multiples of the step in the file, so that all but the first begin aligned.
        low = part.start_bytes
        while low < part.stop_bytes:
            high = min((low // self._step_bytes + 1) * self._step_bytes, part.stop_bytes)
            yield Owned(part.file, low, high)
            low = high

    @property
    def max_bucket_bytes(self) -> int:
        """Room for any of the buckets."""
        return max((w.stop_bytes - w.start_bytes for w in self._windows), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the output files that are filled here; what nobody knows yet is not."""
        return sum(stop - start for _, _, start, stop in self._parts())

    @property
    def num_read_bytes(self) -> int:
        """Bytes that are read from shards for all of that."""
        total = 0
        for segment, file, start, stop in self._parts():
            if segment.tensor >= 0:
                tensor = self._plan.tensors[segment.tensor]
                led = sum(b - a for a, b in self._leads(segment, file, start, stop))
                widths = tensor.source.dtype.itemsize_bytes, tensor.dtype.itemsize_bytes
                total += led // widths[1] * widths[0]
        return total

    def _parts(self) -> Iterator[tuple[_Segment, int, int, int]]:
        """Give what lies in the owned ranges: segment, file, and which part of the file."""
        for file, low, high in self._owned:
            for segment in _overlapping(self._segments[file], low, high):
                start, stop = max(low, segment.start_bytes), min(high, segment.stop_bytes)
                yield segment, file, start, stop

    def bucket(self, index: int) -> DirectBucket:
        """Compute one bucket.

        Args:
            index: Below ``num_buckets``.

        Returns:
            The bucket.
        """
        file, low, high = self._windows[index]
        filled: list[Filled] = []
        literals: list[tuple[int, bytes]] = []
        writes: list[Write] = []
        for segment in _overlapping(self._segments[file], low, high):
            start, stop = max(low, segment.start_bytes), min(high, segment.stop_bytes)
            if segment.tensor < 0:
                content = segment.literal[start - segment.start_bytes : stop - segment.start_bytes]
                literals.append((start - low, content))
                _append(writes, Write(file, start, start - low, stop - start))
                continue
            for first, last in self._leads(segment, file, start, stop):
                filled.append(self._filled(segment, file, (first, last), low))
                _append(writes, Write(file, first, first - low, last - first))
        for item in filled:
            for kept in item.kept[1:]:
                offset = self._maps[kept.file].data_offset_bytes[kept.stored] + kept.start_bytes
                _append(writes, Write(kept.file, offset, kept.at_bytes, kept.num_bytes))
        return DirectBucket(high - low, tuple(filled), tuple(literals), tuple(writes))

    def _leads(self, segment: _Segment, file: int, start: int, stop: int) -> Iterator[Interval]:
        """Give the part of a segment that is read for this place, as offsets in the file."""
        origin = segment.start_bytes
        for low, high in self._led.get((file, segment.stored), ((0, stop - origin),)):
            first, last = max(start, origin + low), min(stop, origin + high)
            if first < last:
                yield first, last

    def _filled(self, segment: _Segment, file: int, part: Interval, low: int) -> Filled:
        width = self._plan.tensors[segment.tensor].dtype.itemsize_bytes
        start, num_bytes, at = part[0] - segment.start_bytes, part[1] - part[0], part[0] - low
        assert start % width == num_bytes % width == 0, "an element lies in two buckets"
        kept = [Kept(file, segment.stored, start, at, num_bytes)]
        for copy in self._copies.get(segment.tensor, ()):
            first, last = max(start, copy.start_bytes), min(start + num_bytes, copy.stop_bytes)
            if first < last:
                kept.append(Kept(copy.file, copy.stored, first, at + first - start, last - first))
        return Filled(segment.tensor, start // width, num_bytes // width, at, tuple(kept))


def _by_turns(queues: Sequence[Iterator[Owned]]) -> Iterator[Owned]:
    """Give windows of a few files in turn, and of the next few when those are through."""
    for start in range(0, len(queues), _FILES_AT_ONCE):
        for turn in itertools.zip_longest(*queues[start : start + _FILES_AT_ONCE]):
            yield from (window for window in turn if window is not None)


def _segments(plan: Plan, maps: Sequence[FileMap], files: set[int]) -> dict[int, list[_Segment]]:
    found: dict[int, list[_Segment]] = {
        file: [_Segment(at, at + len(text), -1, -1, text) for at, text in maps[file].literals]
        for file in files
    }
    for index, tensor in enumerate(plan.tensors):
        num_bytes = tensor.source.num_numel * tensor.dtype.itemsize_bytes
        for file, stored in tensor.targets:
            if file in files and num_bytes:
                offset = maps[file].data_offset_bytes[stored]
                found[file].append(_Segment(offset, offset + num_bytes, index, stored, b""))
    return {file: sorted(segments) for file, segments in found.items()}


def _split_copies(
    plan: Plan, maps: Sequence[FileMap], owned: Sequence[Owned]
) -> tuple[dict[tuple[int, int], list[Interval]], dict[int, list[_Copy]]]:
    """For tensors with several places: what is read for each place, and what is copied to it."""
    led: dict[tuple[int, int], list[Interval]] = {}
    copies: dict[int, list[_Copy]] = {}
    for index, tensor in enumerate(plan.tensors):
        if len(tensor.targets) < 2:
            continue
        num_bytes = tensor.source.num_numel * tensor.dtype.itemsize_bytes
        read: list[Interval] = []
        for file, stored in tensor.targets:
            mine = _owned_part(owned, file, maps[file].data_offset_bytes[stored], num_bytes)
            leads = _without(mine, read)
            led[file, stored] = leads
            copies.setdefault(index, []).extend(
                _Copy(file, stored, *part) for part in _without(mine, leads)
            )
            read.extend(leads)
    return led, copies


def _owned_part(owned: Sequence[Owned], file: int, offset: int, num_bytes: int) -> list[Interval]:
    """Give the intervals of a tensor's bytes, at one place, that lie in the owned ranges."""
    found = []
    for part in owned:
        low = max(part.start_bytes - offset, 0)
        high = min(part.stop_bytes - offset, num_bytes)
        if part.file == file and low < high:
            found.append((low, high))
    return found


def _without(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    left = list(intervals)
    for low, high in taken:
        cut = [((start, min(stop, low)), (max(start, high), stop)) for start, stop in left]
        left = [part for pair in cut for part in pair if part[0] < part[1]]
    return left


def _overlapping(segments: Sequence[_Segment], low: int, high: int) -> Iterator[_Segment]:
    first = max(bisect.bisect_right(segments, low, key=lambda s: s.start_bytes) - 1, 0)
    for index in range(first, len(segments)):
        if segments[index].start_bytes >= high:
            return
        if segments[index].stop_bytes > low:
            yield segments[index]


def _append(writes: list[Write], write: Write) -> None:
    """Add a write; neighbours in both bucket and file become one."""
    if writes:
        file, offset, at, num_bytes = writes[-1]
        follows = write.file == file and write.offset_bytes == offset + num_bytes
        if follows and write.at_bytes == at + num_bytes:
            writes[-1] = Write(file, offset, at, num_bytes + write.num_bytes)
            return
    writes.append(write)
