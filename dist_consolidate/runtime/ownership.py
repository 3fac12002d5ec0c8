"""Which runs of output bytes are whose to write, where ranks exchange what they read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dist_consolidate.plan.buckets import Piece
from dist_consolidate.plan.owners import Owners


class Place(NamedTuple):
    """Where a tensor's bytes go: a file and the offset of its first byte."""

    file: int
    tensor: int
    offset_bytes: int


class Run(NamedTuple):
    """A contiguous range of one tensor's output bytes, lying in a buffer.

    Attributes:
        tensor: Index in the plan.
        start_bytes: Where it begins in the tensor.
        at_bytes: Where it begins in the buffer.
        num_bytes: Length.
    """

    tensor: int
    start_bytes: int
    at_bytes: int
    num_bytes: int


class Ownership:
    """What one rank writes, and which ranks a bucket concerns."""

    def __init__(
        self,
        owners: Owners,
        writers: Sequence[int],
        rank: int,
        places: Sequence[Sequence[Place]],
        widths_bytes: Sequence[int],
    ) -> None:
        """Remember who writes what.

        Args:
            owners: The ranges of the files by rank.
            writers: Ranks that write.
            rank: This rank.
            places: For each tensor of the plan, every place its bytes go to.
            widths_bytes: For each tensor, the width of an output element.
        """
        self._owners, self._rank, self._places = owners, rank, places
        self._widths_bytes = widths_bytes
        self._sole = tuple(writers) if len(writers) == 1 else None

    def writers(self, pieces: Iterator[Piece]) -> tuple[int, ...]:
        """Name the ranks that write something of a bucket.

        Args:
            pieces: What the bucket holds.
        """
        if self._sole is not None:
            return self._sole
        return tuple(sorted({writer for piece in pieces for writer in self._writers(piece)}))

    def concerns(self, piece: Piece) -> bool:
        """Tell whether this rank writes something of a piece."""
        return self._sole is not None or self._rank in self._writers(piece)

    def parts(self, place: Place, run: Run) -> Iterator[Run]:
        """Give what this rank writes of a run at one of its places."""
        if self._sole is not None:
            yield run
            return
        start = place.offset_bytes + run.start_bytes
        for writer, low, high in self._owners.parts(place.file, start, start + run.num_bytes):
            if writer == self._rank:
                skip = low - start
                yield Run(run.tensor, run.start_bytes + skip, run.at_bytes + skip, high - low)

    def _writers(self, piece: Piece) -> set[int]:
        width = self._widths_bytes[piece.tensor]
        # Rows with gaps between them are taken for one range: one writer too many does no harm.
        num_numel = (piece.num_rows - 1) * piece.step_numel + piece.num_numel
        low, high = piece.start_numel * width, (piece.start_numel + num_numel) * width
        return {
            writer
            for place in self._places[piece.tensor]
            for writer, _, _ in self._owners.parts(
                place.file, place.offset_bytes + low, place.offset_bytes + high
            )
        }
