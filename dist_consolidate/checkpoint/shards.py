"""Reading byte ranges and strided tensors out of shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.fragments import Read
from dist_consolidate.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# One preadv may ask for at most 0x7ffff000 bytes on Linux.
_MAX_READ_BYTES = 1 << 30
# Strided tensors are gathered from spans of the file of about this size.
_SPAN_BYTES = 4 << 20


class ShardReader:
    """Reads from the shards of one tag folder; not for use by several threads at once."""

    def __init__(self, folder: Path, file_bytes: Mapping[str, int]) -> None:
        """Open nothing yet.

        Args:
            folder: The tag folder.
            file_bytes: The size of each shard when it was planned with.
        """
        self._folder, self._file_bytes = folder, file_bytes
        self._descriptors: dict[str, int] = {}
        self.num_bytes_read = 0

    def close(self) -> None:
        """Close all shards."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def fill(self, buffer: memoryview, read: Read) -> None:
        """Fetch one read into a buffer.

        Args:
            buffer: Its bytes.
            read: What to fetch, and where in the buffer it goes.

        Raises:
            CheckpointError: If the shard is gone, changed or cut short meanwhile.
        """
        if read.extent is not None:
            extent = read.extent
            target = buffer[read.at_bytes : read.at_bytes + extent.num_bytes]
            self._read(extent.file, extent.offset_bytes, target)
        elif read.span is not None:
            self._fill_strided(buffer[read.at_bytes :], read)

    def _read(self, file: str, offset_bytes: int, target: memoryview) -> None:
        descriptor = self._descriptor(file)
        done = 0
        while done < len(target):
            chunk = target[done : done + _MAX_READ_BYTES]
            try:
                count = os.preadv(descriptor, [chunk], offset_bytes + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self._folder / file}: cannot be read at byte {offset_bytes + done}: "
                    f"{error.strerror or error}"
                ) from error
            if not count:
                raise CheckpointError(
                    f"{self._folder / file}: ended at byte {offset_bytes + done} while being "
                    f"read, expected {len(target) - done} bytes more; it was changed or cut short"
                )
            done += count
        self.num_bytes_read += done

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            path = self._folder / file
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}") from error
            self._descriptors[file] = descriptor
            size = os.fstat(descriptor).st_size
            if size != self._file_bytes.get(file, size):
                raise CheckpointError(
                    f"{path}: has {size} bytes, but had {self._file_bytes[file]} when its "
                    "metadata was read; it was changed meanwhile"
                )
        return self._descriptors[file]

    def _fill_strided(self, target: memoryview, read: Read) -> None:
        import torch

        span = read.span
        assert span is not None
        width, at = span.dtype.itemsize_bytes, 0
        for box in boxes(span, read.start_numel, read.stop_numel, _SPAN_BYTES // width):
            num_bytes = box.num_numel * width
            view = torch.frombuffer(target[at : at + num_bytes], dtype=torch.uint8)
            self._read_box(view.view((*box.shape, width)), box)
            at += num_bytes

    def _read_box(self, out: torch.Tensor, box: TensorSpan) -> None:
        """Read a strided box; ``out`` is its elements' bytes: shape of the box, element width."""
        import torch

        width = box.dtype.itemsize_bytes
        span_bytes = box.reach_numel * width
        if span_bytes <= max(_SPAN_BYTES, 2 * box.num_numel * width):
            data = bytearray(span_bytes)
            self._read(box.file, box.offset_bytes, memoryview(data))
            source = torch.frombuffer(data, dtype=torch.uint8)
            strides = [step * width for step in box.stride]
            out.copy_(source.as_strided((*box.shape, width), (*strides, 1)))
            return
        # Far apart: go along the longest step, so that what is left lies closer together.
        longest = max(
            (d for d, size in enumerate(box.shape) if size > 1), key=lambda d: box.stride[d]
        )
        for index in range(box.shape[longest]):
            shape = (*box.shape[:longest], *box.shape[longest + 1 :])
            stride = (*box.stride[:longest], *box.stride[longest + 1 :])
            offset = box.offset_bytes + index * box.stride[longest] * width
            part = TensorSpan(box.file, offset, box.dtype, shape, stride)
            self._read_box(out.select(longest, index), part)


def boxes(span: TensorSpan, start: int, stop: int, max_numel: int) -> Iterator[TensorSpan]:
    """Cut the row-major elements ``[start, stop)`` of a tensor into boxes.

    Args:
        span: The tensor.
        start: First element, in row-major order.
        stop: Behind the last element.
        max_numel: The most elements in a box.

    Yields:
        Sub-tensors; their elements in order are the ones asked for.
    """
    if start >= stop:
        return
    if stop - start == span.num_numel <= max_numel or not span.shape:
        yield span
        return
    per_row = span.num_numel // span.shape[0]
    inner = TensorSpan(span.file, span.offset_bytes, span.dtype, span.shape[1:], span.stride[1:])
    rows_at_once = max(max_numel // per_row, 1)
    while start < stop:
        row, inside = divmod(start, per_row)
        whole = min((stop - start) // per_row, rows_at_once)
        if inside or not whole or per_row > max_numel:
            end = min(stop - row * per_row, per_row)
            offset = span.rows(row, row + 1).offset_bytes
            moved = TensorSpan(inner.file, offset, inner.dtype, inner.shape, inner.stride)
            yield from boxes(moved, inside, end, max_numel)
            start += end - inside
        else:
            yield span.rows(row, row + whole)
            start += whole * per_row
