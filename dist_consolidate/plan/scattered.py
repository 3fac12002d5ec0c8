"""Buckets where ranks see different shards: what none sees whole is moved in parts that one sees.

Flat partitions are read part by part anyway. Other tensors are sorted by the ranks that can read
them; one that is put together of several nodes' shards is cut into its blocks, and these where
their source goes on in another shard. Every part then lies in one file, and whoever sees that file
reads it.

Legend: elements of a block are counted run after run; addresses are bytes from the start of a
phase's space.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

from dist_consolidate.checkpoint.fragments import Fragments, Read
from dist_consolidate.checkpoint.model import Block, Source
from dist_consolidate.errors import CheckpointError
from dist_consolidate.plan.buckets import (
    ALIGNMENT_BYTES,
    Phase,
    Piece,
    lane_phases,
    make_phases,
    space_phase,
)
from dist_consolidate.plan.plan import Plan


def phases_for(plan: Plan, bucket_bytes: int, visible: Sequence[frozenset[str]]) -> list[Phase]:
    """Cut a plan into phases, each row of which some rank can read.

    Args:
        plan: The plan.
        bucket_bytes: What one bucket moves, all rows together.
        visible: For each rank, the shards it sees.

    Returns:
        Phases; together their pieces fill every tensor exactly once.

    Raises:
        CheckpointError: If no rank sees a shard that is needed.
    """
    num_ranks = len(visible)
    if len(set(visible)) == 1:
        return make_phases(plan, bucket_bytes, num_ranks)
    fragments = Fragments(plan.groups)
    whole: dict[tuple[int, ...], list[int]] = {}
    parts: dict[tuple[int, ...], list[_Part]] = {}
    for index, tensor in enumerate(plan.tensors):
        if tensor.source.slot is not None or not tensor.source.num_numel:
            continue
        if able := _able(fragments.files(tensor.source), visible):
            whole.setdefault(able, []).append(index)
            continue
        for block in _single_file_blocks(tensor.source, fragments):
            files = fragments.files(block.source)
            able = _able(_files_of(block, fragments), visible)
            if not able:
                raise CheckpointError(f"no rank sees {', '.join(sorted(files))}")
            parts.setdefault(able, []).append(_Part(index, block))
    # One row for each rank that reads, so that a table is no larger than a bucket.
    row_bytes = bucket_bytes // num_ranks
    phases = lane_phases(plan, bucket_bytes, num_ranks)
    phases += [
        space_phase(plan, chosen, fragments, len(able), row_bytes)
        for able, chosen in sorted(whole.items())
    ]
    phases += [
        PartPhase(chosen, fragments, len(able), row_bytes)
        for able, chosen in sorted(parts.items(), key=lambda item: item[0])
    ]
    return [phase for phase in phases if phase.num_buckets]


def _able(files: frozenset[str], visible: Sequence[frozenset[str]]) -> tuple[int, ...]:
    return tuple(rank for rank, sees in enumerate(visible) if files <= sees)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A block of a tensor, read from one file."""

    tensor: int
    block: Block

    @property
    def width_bytes(self) -> int:
        return self.block.source.dtype.itemsize_bytes

    @property
    def num_bytes(self) -> int:
        return self.block.num_runs * self.block.run_numel * self.width_bytes

    def runs(self, start_numel: int, stop_numel: int) -> Iterator[tuple[int, int, int, int]]:
        """Give the runs in a range of the block's elements.

        Args:
            start_numel: The first element.
            stop_numel: Behind the last one.

        Yields:
            Elements between the range's start and the run's; the first element in the source; the
            first one in the tensor; their number.
        """
        block, at = self.block, start_numel
        while at < stop_numel:
            run, inside = divmod(at, block.run_numel)
            count = min(block.run_numel - inside, stop_numel - at)
            origin = block.from_numel + run * block.from_step_numel + inside
            yield (
                at - start_numel,
                origin,
                block.to_numel + run * block.to_step_numel + inside,
                count,
            )
            at += count


class PartPhase(Phase):
    """Blocks of tensors that lie one after another; a bucket is cut into equal rows."""

    def __init__(
        self, parts: Sequence[_Part], fragments: Fragments, num_rows: int, row_bytes: int
    ) -> None:
        """Cut the space.

        Args:
            parts: The blocks.
            fragments: Finds what to read of them.
            num_rows: Rows of a bucket.
            row_bytes: What one bucket holds of each row.
        """
        self._parts, self._fragments, self._bases = list(parts), fragments, list[int]()
        self._files = frozenset().union(*(_files_of(part.block, fragments) for part in parts))
        base = 0
        for part in parts:
            self._bases.append(base)
            base += -(-part.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        super().__init__(num_rows, -(-base // num_rows), row_bytes)

    def _overlapping(self, bucket: int, row: int) -> Iterator[tuple[_Part, int, int, int]]:
        """Give each part of a row with its range of elements, and where that lies in the row."""
        low = (bucket * self.num_rows + row) * self.row_bytes
        first = max(bisect.bisect_right(self._bases, low) - 1, 0)
        for index in range(first, len(self._parts)):
            base, part = self._bases[index], self._parts[index]
            if base >= low + self.row_bytes:
                return
            start, stop = max(low - base, 0), min(low + self.row_bytes - base, part.num_bytes)
            if start < stop:
                width = part.width_bytes
                yield part, start // width, stop // width, base + start - low

    def reads(self, bucket: int, row: int) -> Iterator[Read]:
        """Give what to fetch for one row of a bucket (see :class:`Phase`)."""
        for part, start, stop, at in self._overlapping(bucket, row):
            for skipped, origin, _, count in part.runs(start, stop):
                for read in self._fragments.reads(part.block.source, origin, origin + count):
                    place = at + skipped * part.width_bytes + read.at_bytes
                    yield dataclasses.replace(read, at_bytes=place)

    def pieces(self, bucket: int) -> Iterator[Piece]:
        """Give the pieces in a bucket (see :class:`Phase`)."""
        for row in range(self.num_rows):
            for part, start, stop, at in self._overlapping(bucket, row):
                for skipped, _, target, count in part.runs(start, stop):
                    place = at + skipped * part.width_bytes
                    yield Piece(part.tensor, row, 1, place, count, target, count)

    def row_files(self, row: int) -> frozenset[str]:
        """Name the shards of the space: any row may need any of them (see :class:`Phase`)."""
        return self._files


def _single_file_blocks(source: Source, fragments: Fragments) -> Iterator[Block]:
    """Cut a tensor into blocks, each of which lies in one file."""
    for block in source.blocks:
        if len(fragments.files(block.source)) == 1:
            yield block
            continue
        width = block.source.dtype.itemsize_bytes
        for read in fragments.reads(block.source, 0, block.source.num_numel):
            assert read.extent is not None, "a part of a flat group is contiguous"
            low = read.at_bytes // width
            yield from _between(block, low, low + read.extent.num_bytes // width)


def _between(block: Block, low: int, high: int) -> Iterator[Block]:
    """Give the part of a block whose elements lie in ``[low, high)`` of its source."""
    whole: list[int] = []
    for run in _touched(block, low, high):
        begin = block.from_numel + run * block.from_step_numel
        start, stop = max(low - begin, 0), min(high - begin, block.run_numel)
        if (start, stop) == (0, block.run_numel):
            whole.append(run)
        elif start < stop:
            yield _cut(block, run, 1, start, stop)
    if whole:
        yield _cut(block, whole[0], len(whole), 0, block.run_numel)


def _touched(block: Block, low: int, high: int) -> range:
    """Give the runs that may lie in a range of the source; they follow one another in it."""
    step = block.from_step_numel
    if step <= 0:
        return range(block.num_runs)
    first = max((low - block.from_numel - block.run_numel) // step, 0)
    return range(first, min(max(-(-(high - block.from_numel) // step), 0), block.num_runs))


def _cut(block: Block, run: int, num_runs: int, start: int, stop: int) -> Block:
    """Give elements ``[start, stop)`` of each of some neighbouring runs."""
    return dataclasses.replace(
        block,
        num_runs=num_runs,
        run_numel=stop - start,
        from_numel=block.from_numel + run * block.from_step_numel + start,
        to_numel=block.to_numel + run * block.to_step_numel + start,
    )


def _files_of(block: Block, fragments: Fragments) -> frozenset[str]:
    """Name the shards that a block is read from, which may be fewer than its source's."""
    files = fragments.files(block.source)
    if len(files) == 1:
        return files
    last = block.from_numel + (block.num_runs - 1) * block.from_step_numel
    ends = (
        (block.from_numel, block.from_numel + 1),
        (last + block.run_numel - 1, last + block.run_numel),
    )
    found = [
        read.extent.file
        for low, high in ends
        for read in fragments.reads(block.source, min(low, high - 1), high)
        if read.extent is not None
    ]
    return frozenset(found)
