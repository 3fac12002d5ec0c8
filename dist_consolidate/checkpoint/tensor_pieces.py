"""Geometry of tensor parallelism: which elements of a shard are which elements of the full tensor.

A piece is a box of elements that lies in a shard and in the full tensor in the same arrangement,
described by the arguments of ``torch.as_strided`` on either side, as DeepSpeed's affine maps do
(``deepspeed/checkpoint/affine.py``). Concatenation along a dimension, with or without fused
parts, is a list of such pieces.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from dist_consolidate.checkpoint.extents import contiguous_stride
from dist_consolidate.checkpoint.model import Block, Source

Shape = tuple[int, ...]

# Blocks of one tensor; a layout that needs more is refused rather than planned for hours.
_MAX_BLOCKS = 10_000


class DoesNotFit(ValueError):
    """A layout that cannot be that of the shards at hand; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one rank's shard, and where they lie in the full tensor.

    Attributes:
        rank: The tensor rank whose shard holds them.
        shape: Of the box.
        to_numel: Its first element in the full tensor.
        to_steps_numel: Distance between neighbours of each dimension, in the full tensor.
        from_numel: Its first element in the shard.
        from_steps_numel: Distance between neighbours of each dimension, in the shard.
    """

    rank: int
    shape: Shape
    to_numel: int
    to_steps_numel: Shape
    from_numel: int
    from_steps_numel: Shape

    @property
    def place(self) -> tuple[Shape, int, Shape]:
        """What pieces have in common that hold the same elements of the full tensor."""
        return self.shape, self.to_numel, self.to_steps_numel


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """How shards make a tensor.

    Attributes:
        shape: Of the full tensor.
        pieces: Of all ranks; empty ones are left out.
        whole: Whether every shard is the full tensor.
    """

    shape: Shape
    pieces: tuple[Piece, ...]
    whole: bool = False


def replicated(shapes: Sequence[Shape]) -> Merged:
    """Take every shard for the full tensor.

    Args:
        shapes: Of the shards, in rank order.

    Returns:
        One piece for each rank.

    Raises:
        DoesNotFit: If the shapes differ.
    """
    if len(set(shapes)) > 1:
        raise DoesNotFit(f"is replicated, but its shards have the shapes {_listed(shapes)}")
    shape = shapes[0]
    steps = contiguous_stride(shape)
    held = range(len(shapes)) if math.prod(shape) else ()
    pieces = (Piece(rank, shape, 0, steps, 0, steps) for rank in held)
    return Merged(shape, tuple(pieces), whole=True)


def concatenated(
    shapes: Sequence[Shape], dim: int, parts: Sequence[Sequence[int]] | None = None
) -> Merged:
    """Join shards along a dimension.

    Args:
        shapes: Of the shards, in rank order.
        dim: The dimension.
        parts: For fused tensors, each part's width on each rank: every part is joined over the
            ranks, then the parts are. By default the shards are one part.

    Returns:
        Where every element goes.

    Raises:
        DoesNotFit: If the shards cannot be joined so.
    """
    first = shapes[0]
    if dim >= len(first):
        raise DoesNotFit(f"is split in dimension {dim}, but its shards have the shape {first}")
    for shape in shapes:
        if _without(shape, dim) != _without(first, dim):
            raise DoesNotFit(f"is split in dimension {dim}, but its shards are {_listed(shapes)}")
    widths = [[shape[dim] for shape in shapes]] if parts is None else parts
    held = [sum(part[rank] for part in widths) for rank in range(len(shapes))]
    if held != [shape[dim] for shape in shapes]:
        raise DoesNotFit(
            f"has parts that take {held} of dimension {dim} on the ranks, but its shards are "
            f"{_listed(shapes)}"
        )
    full = (*first[:dim], sum(held), *first[dim + 1 :])
    return Merged(full, tuple(_join(shapes, dim, widths, contiguous_stride(full))))


def _join(
    shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]], steps: Shape
) -> Iterator[Piece]:
    at, taken = 0, [0] * len(shapes)
    for part in widths:
        for rank, width in enumerate(part):
            shape = (*shapes[rank][:dim], width, *shapes[rank][dim + 1 :])
            own = contiguous_stride(shapes[rank])
            if math.prod(shape):
                yield Piece(rank, shape, at * steps[dim], steps, taken[rank] * own[dim], own)
            at, taken[rank] = at + width, taken[rank] + width


def cut_rows(merged: Merged, rows: int) -> Merged:
    """Drop padded rows at the end of a vocabulary (of a concatenation or a replica).

    Args:
        merged: The tensor with padding.
        rows: Rows to keep.

    Returns:
        The tensor without padding.

    Raises:
        DoesNotFit: If it has fewer rows.
    """
    if not merged.shape or merged.shape[0] < rows:
        raise DoesNotFit(f"is to keep {rows} rows, but has the shape {list(merged.shape)}")
    if merged.shape[0] == rows:
        return merged
    pieces = []
    for piece in merged.pieces:
        start = piece.to_numel // piece.to_steps_numel[0]
        kept = min(piece.shape[0], rows - start)
        if kept > 0:
            pieces.append(dataclasses.replace(piece, shape=(kept, *piece.shape[1:])))
    return Merged((rows, *merged.shape[1:]), tuple(pieces))


def owned(merged: Merged) -> list[Piece]:
    """Give the pieces to read: of those that hold the same elements, the first rank's."""
    first: dict[tuple[Shape, int, Shape], Piece] = {}
    for piece in merged.pieces:
        first.setdefault(piece.place, piece)
    return list(first.values())


def shared(merged: Merged) -> list[list[Piece]]:
    """Give the pieces that several ranks hold, which must be equal, together."""
    alike: dict[tuple[Shape, int, Shape], list[Piece]] = {}
    for piece in merged.pieces:
        alike.setdefault(piece.place, []).append(piece)
    return [pieces for pieces in alike.values() if len(pieces) > 1]


def places(merged: Merged) -> frozenset[tuple[object, ...]]:
    """Give what tells where every element comes from, however its pieces were described."""
    return frozenset(
        (piece.rank, piece.to_numel, piece.from_numel, tuple(_joined_dims(piece)))
        for piece in owned(merged)
    )


def source_of(merged: Merged, shards: Sequence[Source]) -> Source:
    """Put a tensor together of its shards.

    Args:
        merged: How.
        shards: Every rank's source, in rank order.

    Returns:
        The full tensor: a shard that is whole as it is, otherwise blocks.
    """
    pieces = owned(merged)
    example = shards[pieces[0].rank] if pieces else shards[0]
    if merged.whole or not pieces:
        return dataclasses.replace(example, shape=merged.shape) if not pieces else example
    blocks = [block for piece in pieces for block in blocks_of(piece, shards[piece.rank])]
    return Source(example.origin, merged.shape, example.dtype, blocks=tuple(blocks))


def alone(piece: Piece, shard: Source) -> Source:
    """Give a piece as a tensor of its own, to compare it with another rank's."""
    compact = dataclasses.replace(piece, to_numel=0, to_steps_numel=contiguous_stride(piece.shape))
    if piece.shape == shard.shape and piece.from_steps_numel == contiguous_stride(shard.shape):
        return shard
    blocks = tuple(blocks_of(compact, shard))
    return Source(shard.origin, piece.shape, shard.dtype, blocks=blocks)


def blocks_of(piece: Piece, shard: Source) -> Iterator[Block]:
    """Cut a piece into evenly spaced runs.

    Args:
        piece: The piece.
        shard: The source of its rank.

    Yields:
        Blocks that fill the piece's elements.

    Raises:
        DoesNotFit: If the piece is so scattered that it would take very many.
    """
    dims = _joined_dims(piece)
    run = 1
    if dims and dims[-1][1:] == (1, 1):
        run = dims.pop()[0]
    longest = max(range(len(dims)), key=lambda index: dims[index][0], default=None)
    count, to_step, from_step = (1, 0, 0) if longest is None else dims.pop(longest)
    if math.prod(size for size, _, _ in dims) > _MAX_BLOCKS:
        raise DoesNotFit(f"has a piece of shape {list(piece.shape)} in too many bits")
    for place in itertools.product(*(range(size) for size, _, _ in dims)):
        to_numel = sum(i * step for i, (_, step, _) in zip(place, dims, strict=True))
        from_numel = sum(i * step for i, (_, _, step) in zip(place, dims, strict=True))
        yield Block(
            source=shard,
            num_runs=count,
            run_numel=run,
            from_numel=piece.from_numel + from_numel,
            from_step_numel=from_step,
            to_numel=piece.to_numel + to_numel,
            to_step_numel=to_step,
        )


def _joined_dims(piece: Piece) -> list[tuple[int, int, int]]:
    """Give size and steps (full tensor, shard) of each dimension; neighbours that go on are one."""
    dims: list[tuple[int, int, int]] = []
    for size, to_step, from_step in zip(
        piece.shape, piece.to_steps_numel, piece.from_steps_numel, strict=True
    ):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (size * to_step, size * from_step):
            dims[-1] = (dims[-1][0] * size, to_step, from_step)
        else:
            dims.append((size, to_step, from_step))
    return dims


def _without(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], *shape[dim + 1 :])


def _listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
