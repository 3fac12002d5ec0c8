"""From gathered rows to runs of output bytes: permute, cut off padding, cast.

Everything happens where the rows are, on the device; only finished output bytes are copied to the
host.

Legend: a table has shape ``(rows, row_bytes)``, uint8; a block is some columns of some rows, seen
as elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch

from dist_consolidate.plan.buckets import Piece
from dist_consolidate.runtime.buffers import Slot


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


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A contiguous range of one tensor's output bytes, lying in a staging buffer.

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


class Assembler:
    """Fills staging buffers with output bytes and hands them on when they are full.

    Attributes:
        overflowed: Tensors that hold infinities after a cast to fp16, whose range ends at 65504.
    """

    def __init__(
        self,
        tensors: Sequence[Moved],
        acquire: Callable[[], Slot],
        submit: Callable[[Slot, list[Run]], None],
    ) -> None:
        """Start without a buffer.

        Args:
            tensors: By index in the plan.
            acquire: Gives an empty staging buffer; blocks until there is one.
            submit: Takes a filled one with its runs.
        """
        self._tensors, self._acquire, self._submit = tensors, acquire, submit
        self.overflowed: set[int] = set()
        self._slot: Slot | None = None
        self._runs: list[Run] = []

    def take(self, table: torch.Tensor, position: Sequence[int], pieces: Iterable[Piece]) -> None:
        """Move the pieces of one bucket.

        Args:
            table: The rows as gathered, shape ``(rows, row_bytes)``.
            position: For each row of the bucket, its row in the table.
            pieces: What lies in the rows.
        """
        contiguous = list(position) == list(range(len(position)))
        for piece in pieces:
            moved = self._tensors[piece.tensor]
            if contiguous:
                rows = table[piece.row : piece.row + piece.num_rows]
            else:
                chosen = position[piece.row : piece.row + piece.num_rows]
                rows = table[torch.tensor(chosen, device=table.device)]
            width = moved.source_dtype.itemsize
            columns = rows[:, piece.at_bytes : piece.at_bytes + piece.num_numel * width]
            self._take_block(piece, moved, columns.view(moved.source_dtype))

    def flush(self) -> None:
        """Hand on what is in the current buffer."""
        slot, self._slot = self._slot, None
        runs, self._runs = self._runs, []
        if slot is not None:
            self._submit(slot, runs)

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
            _copy(target, block, done, done + step, moved.output_dtype)
            if moved.output_dtype == torch.float16 != moved.source_dtype:
                self._watch(tensor, target)
            run = Run(tensor, (start + done) * width, slot.used_bytes, num_bytes)
            self._runs.append(run)
            slot.used_bytes += num_bytes
            done += step

    def _watch(self, tensor: int, written: torch.Tensor) -> None:
        aligned = written if written.storage_offset() % 2 == 0 else written.clone()
        if tensor not in self.overflowed and aligned.view(torch.float16).isinf().any():
            self.overflowed.add(tensor)

    def _current(self, width: int) -> Slot:
        if self._slot is not None and self._slot.tensor.numel() - self._slot.used_bytes < width:
            self.flush()
        if self._slot is None:
            self._slot = self._acquire()
            self._slot.used_bytes = 0
        return self._slot


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
