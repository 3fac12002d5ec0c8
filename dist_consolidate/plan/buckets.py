"""Buckets: what one round of transport moves, all ranks together.

A phase is a table of rows; a bucket is a range of its columns. Each row is read by one rank, and
all rows of a bucket together hold pieces of tensors whose places in the output are known.

* :class:`LanePhase`: a row is one rank's shard, read from front to back. This is the shape of an
  all-gather of flat partitions, and of ZeRO-3, where a column range holds whole tensors.
* :class:`SpacePhase`: one address space in which whole tensors lie one after another, cut into
  buckets and each bucket into equal rows.

Pieces are computed when a bucket is asked for: a checkpoint of a thousand shards has a hundred
million fragments, and no list of them is ever made.

Legend: ``N`` parts of a group, addresses are bytes from the start of a row or space.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from dist_consolidate.checkpoint.extents import Extent
from dist_consolidate.checkpoint.fragments import Fragments, Read, part_starts_bytes
from dist_consolidate.checkpoint.model import FlatGroup, Source
from dist_consolidate.plan.plan import Plan

ALIGNMENT_BYTES = 16  # the widest element; every section begins at a multiple of it


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one tensor inside a bucket: a block of ``num_rows`` by ``num_numel``.

    Row ``i`` of the block holds the tensor's elements from ``start_numel + i * step_numel`` on;
    what reaches beyond the tensor's end is padding and goes nowhere.

    Attributes:
        tensor: Index in the plan.
        row: First row of the bucket.
        num_rows: Rows.
        at_bytes: Where in each row the elements begin.
        num_numel: Elements in each row.
        start_numel: The first element's index in the tensor.
        step_numel: Distance between rows, in elements of the tensor.
    """

    tensor: int
    row: int
    num_rows: int
    at_bytes: int
    num_numel: int
    start_numel: int
    step_numel: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Member:
    """A tensor in a group: its offset and what it takes up there, in elements."""

    offset_numel: int
    taken_numel: int
    tensor: int
    num_numel: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Section:
    """A group at its place in a row.

    In stage 1 and 2 the parts are a concatenation: ``starts_bytes`` is where each begins in it,
    ``need_bytes`` where its last tensor ends.
    """

    base_bytes: int
    num_bytes: int
    group: FlatGroup
    members: tuple[_Member, ...]
    starts_bytes: tuple[int, ...]
    need_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor that lies in no flat group, or in several, at its place in the space."""

    base_bytes: int
    num_bytes: int
    source: Source
    tensor: int


class Phase(abc.ABC):
    """A table of rows, cut into buckets of columns.

    Attributes:
        num_rows: Rows.
        row_bytes: Width of a bucket: bytes of each row in it.
        num_buckets: Buckets.
    """

    def __init__(self, num_rows: int, total_bytes: int, row_bytes: int) -> None:
        """Choose the width: as asked, but never wider than what is there."""
        self.num_rows = num_rows
        share = max(row_bytes // ALIGNMENT_BYTES, 1) * ALIGNMENT_BYTES
        self.row_bytes = min(share, _aligned(total_bytes))
        self.num_buckets = -(-total_bytes // self.row_bytes) if total_bytes else 0

    @abc.abstractmethod
    def reads(self, bucket: int, row: int) -> Iterator[Read]:
        """Give what to fetch for one row of a bucket."""

    @abc.abstractmethod
    def pieces(self, bucket: int) -> Iterator[Piece]:
        """Give the pieces of tensors that the rows of a bucket hold."""

    @abc.abstractmethod
    def row_files(self, row: int) -> frozenset[str]:
        """Name the shards that a row is read from, in whichever bucket."""


class LanePhase(Phase):
    """One row per part of the groups: every part is read from front to back."""

    def __init__(
        self, groups: Sequence[FlatGroup], members: Sequence[Sequence[_Member]], row_bytes: int
    ) -> None:
        """Lay the groups one after another in each row.

        Args:
            groups: Flat groups with equally many parts.
            members: The tensors in each, by offset.
            row_bytes: What one bucket holds of each row.
        """
        self._sections: list[_Section] = []
        base = 0
        for group, inside in zip(groups, members, strict=True):
            width, need = group.dtype.itemsize_bytes, _end_numel(inside)
            longest = max(part.num_bytes for part in group.parts)
            length = min(longest, need * width)
            starts = tuple(part_starts_bytes(group.parts))
            section = _Section(base, length, group, tuple(inside), starts, need * width)
            self._sections.append(section)
            base += _aligned(length)
        self._bases = [section.base_bytes for section in self._sections]
        super().__init__(len(groups[0].parts), base, row_bytes)

    def _overlapping(self, bucket: int) -> Iterator[tuple[_Section, int, int, int]]:
        """Give each section of a bucket with its byte range, and where that lies in the row."""
        low = bucket * self.row_bytes
        yield from _overlaps(self._sections, self._bases, low, low + self.row_bytes)

    def reads(self, bucket: int, row: int) -> Iterator[Read]:
        """Give what to fetch for one row of a bucket (see :class:`Phase`)."""
        for section, start, stop, at in self._overlapping(bucket):
            part = section.group.parts[row]
            stop = min(stop, _useful_bytes(section, row))
            if start < stop:
                yield Read(at, Extent(part.file, part.offset_bytes + start, stop - start))

    def pieces(self, bucket: int) -> Iterator[Piece]:
        """Give the pieces in a bucket (see :class:`Phase`)."""
        for section, start, stop, at in self._overlapping(bucket):
            width = section.group.dtype.itemsize_bytes
            if section.group.striped:
                columns = (start // width, stop // width)
                yield from _striped_pieces(section, columns, at, self.num_rows)
                continue
            for row, origin in enumerate(section.starts_bytes):
                end = min(stop, _useful_bytes(section, row))
                yield from _linear_pieces(section, origin + start, origin + end, row, at)

    def row_files(self, row: int) -> frozenset[str]:
        """Name the shards of one row (see :class:`Phase`)."""
        return frozenset(section.group.parts[row].file for section in self._sections)


class SpacePhase(Phase):
    """Whole tensors that lie one after another; a bucket is cut into equal rows."""

    def __init__(
        self, wholes: Sequence[_Whole], fragments: Fragments, num_rows: int, row_bytes: int
    ) -> None:
        """Cut the space.

        Args:
            wholes: The tensors, by address.
            fragments: Finds what to read of them.
            num_rows: Rows of a bucket.
            row_bytes: What one bucket holds of each row.
        """
        self._wholes, self._fragments = list(wholes), fragments
        self._bases = [whole.base_bytes for whole in self._wholes]
        self._files = frozenset().union(*(fragments.files(w.source) for w in self._wholes))
        last = self._wholes[-1]
        total = last.base_bytes + last.num_bytes
        super().__init__(num_rows, -(-total // num_rows), row_bytes)

    def _overlapping(self, bucket: int, row: int) -> Iterator[tuple[_Whole, int, int, int]]:
        low = (bucket * self.num_rows + row) * self.row_bytes
        yield from _overlaps(self._wholes, self._bases, low, low + self.row_bytes)

    def reads(self, bucket: int, row: int) -> Iterator[Read]:
        """Give what to fetch for one row of a bucket (see :class:`Phase`)."""
        for whole, start, stop, at in self._overlapping(bucket, row):
            width = whole.source.dtype.itemsize_bytes
            for read in self._fragments.reads(whole.source, start // width, stop // width):
                yield dataclasses.replace(read, at_bytes=at + read.at_bytes)

    def pieces(self, bucket: int) -> Iterator[Piece]:
        """Give the pieces in a bucket (see :class:`Phase`)."""
        for row in range(self.num_rows):
            for whole, start, stop, at in self._overlapping(bucket, row):
                width = whole.source.dtype.itemsize_bytes
                count = (stop - start) // width
                yield Piece(whole.tensor, row, 1, at, count, start // width, count)

    def row_files(self, row: int) -> frozenset[str]:
        """Name the shards of the space: any row may need any of them (see :class:`Phase`)."""
        return self._files


def make_phases(plan: Plan, bucket_bytes: int, num_ranks: int) -> list[Phase]:
    """Cut a plan into phases of buckets.

    Args:
        plan: The plan.
        bucket_bytes: What one bucket moves, all rows together.
        num_ranks: Ranks that the rows are dealt out to; where some of them get fewer rows than
            others, or none, their share counts all the same, as it does in their memory.

    Returns:
        Phases in flat order; together their pieces fill every tensor exactly once.
    """
    phases = lane_phases(plan, bucket_bytes, num_ranks)
    rows = max((len(group.parts) for group in plan.groups), default=1)
    share, fragments = _share_bytes(bucket_bytes, rows, num_ranks), Fragments(plan.groups)
    for in_blocks in (False, True):
        chosen = [
            index
            for index, tensor in enumerate(plan.tensors)
            if tensor.source.slot is None and bool(tensor.source.blocks) == in_blocks
        ]
        if any(plan.tensors[index].source.num_numel for index in chosen):
            phases.append(space_phase(plan, chosen, fragments, rows, share))
    return [phase for phase in phases if phase.num_buckets]


def space_phase(
    plan: Plan, tensors: Sequence[int], fragments: Fragments, num_rows: int, row_bytes: int
) -> SpacePhase:
    """Make a phase of tensors that lie in no flat group, or in several.

    Args:
        plan: The plan.
        tensors: Their indices in it; at least one has an element.
        fragments: Finds what to read of them.
        num_rows: Rows of a bucket.
        row_bytes: What one bucket holds of each row.

    Returns:
        The phase.
    """
    return SpacePhase(_wholes(plan, tensors), fragments, num_rows, row_bytes)


def lane_phases(plan: Plan, bucket_bytes: int, num_ranks: int) -> list[Phase]:
    """Cut the flat groups of a plan into phases (see :func:`make_phases`)."""
    members = _members_by_group(plan)
    lane_sets: dict[tuple[str, ...], list[int]] = {}
    for index in sorted(members):
        files = tuple(part.file for part in plan.groups[index].parts)
        lane_sets.setdefault(files, []).append(index)
    phases: list[Phase] = [
        LanePhase(
            [plan.groups[i] for i in chosen],
            [members[i] for i in chosen],
            _share_bytes(bucket_bytes, len(files), num_ranks),
        )
        for files, chosen in lane_sets.items()
    ]
    return phases


def _share_bytes(bucket_bytes: int, num_rows: int, num_ranks: int) -> int:
    return bucket_bytes // (-(-num_rows // num_ranks) * num_ranks)


def _members_by_group(plan: Plan) -> dict[int, list[_Member]]:
    members: dict[int, list[_Member]] = {}
    for index, tensor in enumerate(plan.tensors):
        slot, numel = tensor.source.slot, tensor.source.num_numel
        if slot is not None and numel:
            taken = slot.part_numel if plan.groups[slot.group].striped else numel
            member = _Member(slot.offset_numel, taken, index, numel)
            members.setdefault(slot.group, []).append(member)
    for inside in members.values():
        inside.sort(key=lambda member: member.offset_numel)
    return members


def _wholes(plan: Plan, tensors: Sequence[int]) -> list[_Whole]:
    wholes, base = [], 0
    for index in tensors:
        source = plan.tensors[index].source
        if length := source.num_numel * source.dtype.itemsize_bytes:
            wholes.append(_Whole(base, length, source, index))
            base += _aligned(length)
    return wholes


_Part = TypeVar("_Part", _Section, _Whole)


def _overlaps(
    parts: Sequence[_Part], bases: Sequence[int], low: int, high: int
) -> Iterator[tuple[_Part, int, int, int]]:
    """Give each part of ``[low, high)`` with its own byte range, and where that lies from low."""
    for index in range(max(bisect.bisect_right(bases, low) - 1, 0), len(parts)):
        part, base = parts[index], bases[index]
        if base >= high:
            return
        start, stop = max(low - base, 0), min(high - base, part.num_bytes)
        if start < stop:
            yield part, start, stop, base + start - low


def _striped_pieces(
    section: _Section, columns: tuple[int, int], at_bytes: int, num_parts: int
) -> Iterator[Piece]:
    low, high = columns
    width = section.group.dtype.itemsize_bytes
    for member in _members_between(section.members, low, high):
        start = max(low, member.offset_numel)
        stop = min(high, member.offset_numel + member.taken_numel)
        first = start - member.offset_numel
        rows = min(num_parts, math.ceil((member.num_numel - first) / member.taken_numel))
        if rows > 0 and start < stop:
            at = at_bytes + (start - low) * width
            yield Piece(member.tensor, 0, rows, at, stop - start, first, member.taken_numel)


def _linear_pieces(
    section: _Section, low_bytes: int, high_bytes: int, row: int, at_bytes: int
) -> Iterator[Piece]:
    """Give the pieces of ``[low, high)`` of a concatenation."""
    width = section.group.dtype.itemsize_bytes
    low, high = low_bytes // width, high_bytes // width
    for member in _members_between(section.members, low, high):
        start = max(low, member.offset_numel)
        stop = min(high, member.offset_numel + member.taken_numel)
        if start < stop:
            at = at_bytes + (start - low) * width
            first = start - member.offset_numel
            yield Piece(member.tensor, row, 1, at, stop - start, first, stop - start)


def _members_between(members: Sequence[_Member], low: int, high: int) -> Iterator[_Member]:
    first = max(bisect.bisect_right(members, low, key=lambda m: m.offset_numel) - 1, 0)
    for index in range(first, len(members)):
        if members[index].offset_numel >= high:
            return
        yield members[index]


def _useful_bytes(section: _Section, row: int) -> int:
    """Bytes of a part that belong to tensors: the padding behind the last one is not read."""
    held = section.group.parts[row].num_bytes
    if section.group.striped:
        return min(held, section.num_bytes)
    return max(min(held, section.need_bytes - section.starts_bytes[row]), 0)


def _end_numel(members: Sequence[_Member]) -> int:
    return max((member.offset_numel + member.taken_numel for member in members), default=0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
