"""From gathered rows to runs of output bytes: permute, cut off padding, cast.

Everything happens where the rows are, on the device; only finished output bytes are copied to the
host.

Legend: a table has shape ``(rows, row_bytes)``, uint8; a block is some columns of some rows, seen
as elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from dist_consolidate.plan.buckets import Piece
from dist_consolidate.runtime.buffers import Slot, Table
from dist_consolidate.runtime.clock import Clock
from dist_consolidate.runtime.ownership import Run
from dist_consolidate.runtime.staging import Staging
from dist_consolidate.runtime.writer import Filled

# A shorter range of a row is copied to its neighbours: one write for all costs less than its own.
_IN_PLACE_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """What the assembler must know of a tensor.

    Attributes:
        num_numel: Elements.
        source_dtype: Element type on disk.
        output_dtype: Element type in the output.
    """

    num_numel: int
    source_dtype: torch.dtype
    output_dtype: torch.dtype


class RowOrder:
    """Where the rows of a phase's buckets lie in a table.

    Attributes:
        position: For each row of a bucket, its row in the table.
        height: Rows of the table, up to the last one that holds something.
        is_plain: Whether they lie in their order.
    """

    def __init__(self, position: Sequence[int], device: torch.device) -> None:
        """Find out once what every bucket of the phase needs.

        Args:
            position: For each row of the bucket, its row in the table.
            device: Where tables are.
        """
        self.position = tuple(position)
        self.height = max(self.position, default=-1) + 1
        self.is_plain = self.position == tuple(range(len(self.position)))
        self._index = None if self.is_plain else torch.tensor(self.position, device=device)

    def sorted(self, table: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """Give the rows of a table in their order.

        Args:
            table: Shape ``(rows, row_bytes)``.
            room: As many bytes, for rows that lie otherwise.

        Returns:
            The table itself, or a copy in ``room``.
        """
        if self._index is None:
            return table
        out = room[: len(self.position) * table.shape[1]].view(-1, table.shape[1])
        return torch.index_select(table, 0, self._index, out=out)


class Assembler:
    """Makes output bytes of tables, and hands them on to be written.

    Long rows on the CPU that need no cast are written from where they lie in the table. All else is
    gathered in staging buffers, which are handed on when they are full.
    """

    def __init__(
        self,
        tensors: Sequence[Moved],
        staging: Staging,
        submit: Callable[[Filled], None],
        *,
        concerns: Callable[[Piece], bool],
        sorting_bytes: int,
        clock: Clock,
    ) -> None:
        """Start without a buffer.

        Args:
            tensors: By index in the plan.
            staging: Staging buffers.
            submit: Takes what is to be written.
            concerns: Tells whether something of a piece is written here.
            sorting_bytes: The largest table whose rows have to be sorted.
            clock: Told of what is assembled.
        """
        self._tensors, self._staging, self._submit, self._clock = tensors, staging, submit, clock
        self._concerns, device = concerns, staging.device
        self._is_cast = [moved.source_dtype != moved.output_dtype for moved in tensors]
        self._room = torch.empty(sorting_bytes, dtype=torch.uint8, device=device)
        self._infinite = torch.zeros(len(tensors), dtype=torch.bool, device=device)
        self._watches = any(map(may_overflow, tensors))
        self._slot: Slot | None = None
        self._runs: list[Run] = []

    @property
    def overflowed(self) -> frozenset[int]:
        """Tensors that hold infinities after a cast to fp16, whose range ends at 65504."""
        return frozenset(self._infinite.nonzero().flatten().tolist() if self._watches else ())

    def take(
        self,
        table: Table,
        row_bytes: int,
        order: RowOrder,
        pieces: Iterable[Piece],
        give_back: Callable[[], None],
    ) -> None:
        """Move the pieces of one bucket.

        Args:
            table: The rows as gathered.
            row_bytes: Width of each.
            order: Where they lie.
            pieces: What lies in the rows.
            give_back: Called when the table may be used again.
        """
        runs: list[Run] = []
        rows = None
        for piece in filter(self._concerns, pieces):
            moved = self._tensors[piece.tensor]
            width = moved.source_dtype.itemsize
            num_bytes = piece.num_numel * width
            is_long = table.view is not None and num_bytes >= _IN_PLACE_BYTES
            if is_long and not self._is_cast[piece.tensor]:
                runs += _runs_in_place(piece, moved, row_bytes, order)
                continue
            if rows is None:
                rows = order.sorted(table.rows(order.height, row_bytes), self._room)
            block = rows[piece.row : piece.row + piece.num_rows]
            block = block[:, piece.at_bytes : piece.at_bytes + num_bytes]
            self._take_block(piece, moved, block.view(moved.source_dtype))
        if runs:
            assert table.view is not None
            self._submit(Filled(table.view, runs, None, give_back))
        else:
            give_back()

    def flush(self) -> None:
        """Hand on what is in the current buffer."""
        slot, self._slot = self._slot, None
        runs, self._runs = self._runs, []
        if slot is not None:
            self._submit(self._staging.filled(slot, runs))

    def _take_block(self, piece: Piece, moved: Moved, block: torch.Tensor) -> None:
        if piece.num_rows == 1 or piece.step_numel == piece.num_numel:
            total = piece.num_rows * piece.num_numel
            count = min(total, moved.num_numel - piece.start_numel)
            self._stage(piece.tensor, moved, piece.start_numel, count, block)
            return
        for index in range(piece.num_rows):
            start = piece.start_numel + index * piece.step_numel
            count = min(piece.num_numel, moved.num_numel - start)
            if count > 0:
                self._stage(piece.tensor, moved, start, count, block[index : index + 1])

    def _stage(
        self, tensor: int, moved: Moved, start: int, count: int, block: torch.Tensor
    ) -> None:
        """Copy the first ``count`` elements of a block into staging buffers."""
        width, done = moved.output_dtype.itemsize, 0
        while done < count:
            slot = self._current(width)
            room = (slot.tensor.numel() - slot.used_bytes) // width
            step = min(room, count - done)
            num_bytes = step * width
            target = slot.tensor[slot.used_bytes : slot.used_bytes + num_bytes]
            with self._clock.device("assemble", num_bytes):
                _copy(target, block, done, done + step, moved.output_dtype)
            if may_overflow(moved):
                self._watch(tensor, target)
            run = Run(tensor, (start + done) * width, slot.used_bytes, num_bytes)
            self._runs.append(run)
            slot.used_bytes += num_bytes
            done += step

    def _watch(self, tensor: int, written: torch.Tensor) -> None:
        """Note infinities where the tensor is; the host asks for them at the end only."""
        aligned = written if written.storage_offset() % 2 == 0 else written.clone()
        self._infinite[tensor].logical_or_(aligned.view(torch.float16).isinf().any())

    def _current(self, width: int) -> Slot:
        if self._slot is not None and self._slot.tensor.numel() - self._slot.used_bytes < width:
            self.flush()
        if self._slot is None:
            self._slot = self._staging.take()
        return self._slot


def may_overflow(moved: Moved) -> bool:
    """Tell whether a tensor is cast to fp16, whose range ends at 65504."""
    return moved.output_dtype == torch.float16 != moved.source_dtype


def _runs_in_place(piece: Piece, moved: Moved, row_bytes: int, order: RowOrder) -> Iterator[Run]:
    """Give the runs of a piece that is written as it lies in the table."""
    width = moved.output_dtype.itemsize
    for index in range(piece.num_rows):
        start = piece.start_numel + index * piece.step_numel
        count = min(piece.num_numel, moved.num_numel - start)
        if count > 0:
            at_bytes = order.position[piece.row + index] * row_bytes + piece.at_bytes
            yield Run(piece.tensor, start * width, at_bytes, count * width)


def _copy(
    target: torch.Tensor, block: torch.Tensor, low: int, high: int, dtype: torch.dtype
) -> None:
    """Write elements ``[low, high)`` of a block, row by row, into ``target`` (bytes), cast."""
    if block.dtype == dtype or target.storage_offset() % dtype.itemsize:
        # Bytes have no alignment to keep: tensors follow one another without gaps, so one of wide
        # elements may begin anywhere behind one of narrow ones.
        cast = block if block.dtype == dtype else block.to(dtype)
        block, width = cast.view(torch.uint8), dtype.itemsize
        low, high = low * width, high * width
        out = target
    else:
        out = target.view(dtype)
    columns, at = block.shape[1], 0
    while low < high:
        row, column = divmod(low, columns)
        rows = (high - low) // columns if not column else 0
        if rows:
            count = rows * columns
            out[at : at + count].view(rows, columns).copy_(block[row : row + rows])
        else:
            count = min(columns - column, high - low)
            out[at : at + count].copy_(block[row, column : column + count])
        at += count
        low += count
