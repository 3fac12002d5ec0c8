"""Fragments: which byte ranges make up which elements of a tensor."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from dist_consolidate.checkpoint.extents import Extent, TensorSpan
from dist_consolidate.checkpoint.model import Block, FlatGroup, Source


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """Bytes to fetch into a buffer.

    Attributes:
        at_bytes: Where in the buffer they go.
        extent: The byte range, where the data is contiguous.
        span: Otherwise a strided tensor, of which the row-major elements
            ``[start_numel, stop_numel)`` are wanted.
        start_numel: See ``span``.
        stop_numel: See ``span``.
    """

    at_bytes: int
    extent: Extent | None = None
    span: TensorSpan | None = None
    start_numel: int = 0
    stop_numel: int = 0

    def place(self) -> tuple[str, int, int]:
        """Give the file, the first byte and behind the last byte that are touched at most."""
        if self.extent is not None:
            start = self.extent.offset_bytes
            return self.extent.file, start, start + self.extent.num_bytes
        assert self.span is not None
        start = self.span.offset_bytes
        reach_bytes = self.span.reach_numel * self.span.dtype.itemsize_bytes
        return self.span.file, start, start + reach_bytes


class Fragments:
    """Finds the fragments of any elements of any tensor."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        """Remember the flat groups of the checkpoint."""
        self._groups = groups
        # Where each part begins in the concatenation of stages 1 and 2; filled when needed.
        self._origins: dict[int, list[int]] = {}

    def reads(self, source: Source, start_numel: int, stop_numel: int) -> Iterator[Read]:
        """Give what to read to have a range of a tensor's elements.

        Args:
            source: Where the tensor lies.
            start_numel: The first element, in row-major order.
            stop_numel: Behind the last element.

        Yields:
            Reads, in order; ``at_bytes`` counts from the first element's first byte. Together they
            fill the range exactly.
        """
        if start_numel >= stop_numel:
            return
        width = source.dtype.itemsize_bytes
        if source.blocks:
            for block in source.blocks:
                yield from self._block_reads(block, start_numel, stop_numel)
            return
        if source.span is not None:
            yield span_read(source.span, start_numel * width, stop_numel * width, 0)
            return
        assert source.slot is not None
        slot, group = source.slot, self._groups[source.slot.group]
        if not group.striped:
            origin = slot.offset_numel * width
            low, high = origin + start_numel * width, origin + stop_numel * width
            yield from concatenated_reads(group.parts, self._starts(slot.group), low, high, 0)
            return
        taken, at = slot.part_numel, start_numel
        while at < stop_numel:
            index, inside = divmod(at, taken)
            count, part = min(taken - inside, stop_numel - at), group.parts[index]
            offset = part.offset_bytes + (slot.offset_numel + inside) * width
            extent = Extent(part.file, offset, count * width)
            yield Read((at - start_numel) * width, extent)
            at += count

    def _block_reads(self, block: Block, start_numel: int, stop_numel: int) -> Iterator[Read]:
        """Give the reads of one block's runs, one run after another as they lie in its source."""
        width = block.source.dtype.itemsize_bytes
        first = 0
        if block.to_step_numel:
            missed = start_numel - block.to_numel - block.run_numel
            first = max(missed // block.to_step_numel + 1, 0)
        for run in range(first, block.num_runs):
            begin = block.to_numel + run * block.to_step_numel
            if begin >= stop_numel:
                return
            low, high = max(begin, start_numel), min(begin + block.run_numel, stop_numel)
            origin = block.from_numel + run * block.from_step_numel - begin
            for read in self.reads(block.source, origin + low, origin + high):
                at_bytes = read.at_bytes + (low - start_numel) * width
                yield dataclasses.replace(read, at_bytes=at_bytes)

    def files(self, source: Source) -> frozenset[str]:
        """Name the shards that a tensor may be read from."""
        if source.blocks:
            parts = {id(block.source): block.source for block in source.blocks}
            return frozenset().union(*map(self.files, parts.values()))
        if source.span is not None:
            return frozenset((source.span.file,))
        assert source.slot is not None
        return frozenset(part.file for part in self._groups[source.slot.group].parts)

    def _starts(self, group: int) -> list[int]:
        if group not in self._origins:
            self._origins[group] = part_starts_bytes(self._groups[group].parts)
        return self._origins[group]


def part_starts_bytes(parts: Sequence[Extent]) -> list[int]:
    """Give where each part begins if they are put one behind the other."""
    return [0, *itertools.accumulate(part.num_bytes for part in parts)][:-1]


def concatenated_reads(
    parts: Sequence[Extent], starts_bytes: Sequence[int], low: int, high: int, at_bytes: int
) -> Iterator[Read]:
    """Give the reads for a range of parts put one behind the other.

    Args:
        parts: The parts.
        starts_bytes: Where each begins.
        low: First byte.
        high: Behind the last byte.
        at_bytes: Where the first byte goes.

    Yields:
        One read for each part that the range touches.
    """
    first = max(bisect.bisect_right(starts_bytes, low) - 1, 0)
    for index in range(first, len(parts)):
        origin, part = starts_bytes[index], parts[index]
        if origin >= high:
            return
        start, stop = max(low, origin), min(high, origin + part.num_bytes)
        if start < stop:
            extent = Extent(part.file, part.offset_bytes + start - origin, stop - start)
            yield Read(at_bytes + start - low, extent)


def span_read(span: TensorSpan, start_bytes: int, stop_bytes: int, at_bytes: int) -> Read:
    """Give the read for a range of a whole tensor's row-major bytes (of whole elements)."""
    if span.is_contiguous:
        extent = Extent(span.file, span.offset_bytes + start_bytes, stop_bytes - start_bytes)
        return Read(at_bytes, extent)
    width = span.dtype.itemsize_bytes
    return Read(at_bytes, None, span, start_bytes // width, stop_bytes // width)


def fragments(source: Source, groups: Sequence[FlatGroup]) -> Iterator[Read]:
    """Give what to read to have a tensor whole (see :meth:`Fragments.reads`)."""
    return Fragments(groups).reads(source, 0, source.num_numel)
