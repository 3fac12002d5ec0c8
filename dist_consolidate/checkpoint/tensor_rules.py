"""Rules of tensor parallelism: what a tensor's shards are to each other, and who says so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from dist_consolidate.checkpoint.tensor_pieces import (
    DoesNotFit,
    Merged,
    Piece,
    Shape,
    concatenated,
    cut_rows,
    replicated,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds the whole tensor.

    Attributes:
        average: Copies may have drifted apart, and their mean is meant.
        take_rank: The rank whose copy to take, whatever the others hold; by default all must be
            equal.
        num_rows: Rows to keep of a padded vocabulary.
    """

    average: bool = False
    take_rank: int | None = None
    num_rows: int | None = None

    def merge(self, shapes: Sequence[Shape]) -> Merged:
        """See :meth:`Rule.merge`."""
        merged = replicated(shapes)
        if self.take_rank is not None:
            if self.take_rank >= len(shapes):
                raise DoesNotFit(f"is to be taken from rank {self.take_rank} of {len(shapes)}")
            kept = tuple(p for p in merged.pieces if p.rank == self.take_rank)
            merged = dataclasses.replace(merged, pieces=kept)
        return merged if self.num_rows is None else cut_rows(merged, self.num_rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Every rank holds a slice along one dimension.

    Attributes:
        dim: The dimension.
        num_parts: Equal parts that each shard consists of (2 for gate and up in one matrix).
        part_sizes: Full sizes of such parts, where they differ (query, key and value); each is
            split evenly.
        part_widths: For each part, its width on each rank.
        view: Shape to see the full tensor in first: sizes, of which one may be -1.
        num_rows: Rows to keep of a padded vocabulary.
    """

    dim: int
    num_parts: int = 1
    part_sizes: tuple[int, ...] = ()
    part_widths: tuple[tuple[int, ...], ...] = ()
    view: tuple[int, ...] = ()
    num_rows: int | None = None

    def merge(self, shapes: Sequence[Shape]) -> Merged:
        """See :meth:`Rule.merge`."""
        seen = self._viewed(shapes) if self.view else list(shapes)
        merged = concatenated(seen, self.dim, self._widths(seen))
        if self.view and seen != list(shapes):
            # Only the arrangement of elements is taken over; rows of a vector stay a vector.
            if any(len(shape) != 1 for shape in shapes):
                raise DoesNotFit(f"is recorded as {list(self.view)}, but shards are {list(shapes)}")
            merged = dataclasses.replace(merged, shape=(math.prod(merged.shape),))
        return merged if self.num_rows is None else cut_rows(merged, self.num_rows)

    def _widths(self, shapes: Sequence[Shape]) -> Sequence[Sequence[int]] | None:
        if self.part_widths:
            wrong = [widths for widths in self.part_widths if len(widths) != len(shapes)]
            if wrong:
                raise DoesNotFit(f"has widths for {len(wrong[0])} ranks, not {len(shapes)}")
            return self.part_widths
        if self.part_sizes:
            uneven = [size for size in self.part_sizes if size % len(shapes)]
            if uneven:
                raise DoesNotFit(f"has parts of {uneven} that {len(shapes)} ranks cannot share")
            return [[size // len(shapes)] * len(shapes) for size in self.part_sizes]
        if self.num_parts == 1:
            return None
        if any(self.dim >= len(s) or s[self.dim] % self.num_parts for s in shapes):
            raise DoesNotFit(
                f"has {self.num_parts} equal parts in dimension {self.dim}, but its shards are "
                f"{', '.join(map(str, map(list, shapes)))}"
            )
        return [[shape[self.dim] // self.num_parts for shape in shapes]] * self.num_parts

    def _viewed(self, shapes: Sequence[Shape]) -> list[Shape]:
        """See the shards in the recorded shape; along the dimension each has its own widths."""
        total = sum(math.prod(shape) for shape in shapes)
        full = list(self.view)
        if self.part_widths or self.part_sizes:
            full[self.dim] = sum(map(sum, self.part_widths)) or sum(self.part_sizes)
        elif all(len(shape) > self.dim for shape in shapes):
            full[self.dim] = sum(shape[self.dim] for shape in shapes)
        known = math.prod(size for size in full if size >= 0)
        if -1 in full:
            if known <= 0 or total % known:
                raise DoesNotFit(f"is recorded as {full}, but its shards hold {total} elements")
            full[full.index(-1)] = total // known
        row = math.prod(size for dim, size in enumerate(full) if dim != self.dim)
        if not row or any(math.prod(shape) % row for shape in shapes):
            raise DoesNotFit(f"is recorded as {full}, but its shards are {list(shapes)}")
        return [
            (*full[: self.dim], math.prod(shape) // row, *full[self.dim + 1 :]) for shape in shapes
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Mapped:
    """DeepSpeed's affine map: every element's place is recorded.

    Attributes:
        shape: Of the full tensor.
        shard_shapes: Of the shards, in rank order.
        pieces: Of all ranks.
    """

    shape: Shape
    shard_shapes: tuple[Shape, ...]
    pieces: tuple[Piece, ...]

    def merge(self, shapes: Sequence[Shape]) -> Merged:
        """See :meth:`Rule.merge`."""
        if tuple(shapes) != self.shard_shapes:
            raise DoesNotFit(
                f"has shards of {', '.join(map(str, map(list, shapes)))}, but those recorded are "
                f"{', '.join(map(str, map(list, self.shard_shapes)))}"
            )
        for piece in self.pieces:
            shard_numel = math.prod(shapes[piece.rank])
            inside = _reach(piece.shape, piece.from_numel, piece.from_steps_numel) <= shard_numel
            placed = _reach(piece.shape, piece.to_numel, piece.to_steps_numel)
            if not inside or placed > math.prod(self.shape):
                raise DoesNotFit(f"has a recorded piece of {list(piece.shape)} that lies outside")
        if set(shapes) == {self.shape} and self.pieces == replicated(shapes).pieces:
            return replicated(shapes)
        return Merged(self.shape, self.pieces)


def _reach(shape: Shape, first: int, steps: Shape) -> int:
    return first + 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))


Layout = Replicated | Split | Mapped


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A layout and who says so.

    Attributes:
        layout: What the shards are to each other.
        said_by: Who says so, in words that follow "by".
    """

    layout: Layout
    said_by: str

    def merge(self, shapes: Sequence[Shape]) -> Merged:
        """Apply the layout.

        Args:
            shapes: Of the shards, in rank order.

        Returns:
            Where every element goes.

        Raises:
            DoesNotFit: If these cannot be shards of such a layout.
        """
        return self.layout.merge(shapes)


Lookup = Callable[[str, Sequence[Shape]], Rule | None]
