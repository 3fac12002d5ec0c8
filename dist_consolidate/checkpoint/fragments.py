"""Fragments: which byte ranges make up which elements of a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from dist_consolidate.checkpoint.extents import Extent, TensorSpan
from dist_consolidate.checkpoint.model import FlatGroup, Source


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


def fragments(source: Source, groups: Sequence[FlatGroup]) -> Iterator[Read]:
    """Give what to read to have a tensor whole.

    Args:
        source: Where it lies.
        groups: The flat groups of the checkpoint.

    Yields:
        Reads; ``at_bytes`` counts from the tensor's first byte. Together they fill it exactly.
    """
    width, total = source.dtype.itemsize_bytes, source.num_numel
    if not total:
        return
    if source.span is not None:
        whole = source.span.extent() if source.span.is_contiguous else None
        yield Read(0, whole, None if whole else source.span, 0, total)
        return
    assert source.slot is not None
    group, slot = groups[source.slot.group], source.slot
    if group.striped:
        taken = slot.part_numel
        for index, part in enumerate(group.parts[: -(-total // taken)]):
            count = min(taken, total - index * taken)
            offset = part.offset_bytes + slot.offset_numel * width
            yield Read(index * taken * width, Extent(part.file, offset, count * width))
        return
    low, high = slot.offset_numel * width, (slot.offset_numel + total) * width
    origin = 0
    for part in group.parts:
        start, stop = max(low, origin), min(high, origin + part.num_bytes)
        if start < stop:
            extent = Extent(part.file, part.offset_bytes + start - origin, stop - start)
            yield Read(start - low, extent)
        origin += part.num_bytes
