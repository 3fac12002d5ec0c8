"""Reading byte ranges and strided tensors out of shards."""

from __future__ import annotations

import collections
import errno
import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.fragments import Read
from dist_consolidate.checkpoint.layout import locate
from dist_consolidate.checkpoint.opening import open_descriptor
from dist_consolidate.crc_pieces import ReadCrcs
from dist_consolidate.doing import Doing
from dist_consolidate.errors import CheckpointError, ResourceError

if TYPE_CHECKING:
    import torch

# One preadv may ask for at most 0x7ffff000 bytes and IOV_MAX places on Linux.
_MAX_READ_BYTES = 1 << 30
_MAX_PLACES = 1024
# What is checksummed is read in steps that stay in the processor's cache until then.
_CRC_STEP_BYTES = 512 << 10
# Strided tensors are gathered from spans of the file of about this size.
_SPAN_BYTES = 4 << 20


class ShardReader:
    """Reads from the shards of one tag folder; several threads may read at once."""

    def __init__(
        self,
        folder: Path | Sequence[Path],
        file_bytes: Mapping[str, int],
        crcs: ReadCrcs | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            folder: The tag folder, or all folders its shards lie in.
            file_bytes: The size of each shard when it was planned with.
            crcs: Takes the checksums of what is read, but for strided tensors.
        """
        self.crcs = crcs
        self._folders = (folder,) if isinstance(folder, Path) else tuple(folder)
        self._file_bytes = file_bytes
        self._descriptors: dict[tuple[str, int], int] = {}
        self._paths: dict[str, Path] = {}
        self._lock = threading.Lock()
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
            assert len(target) == extent.num_bytes  # a slice would silently be shorter
            self.scatter(extent.file, extent.offset_bytes, [target])
        elif read.span is not None:
            self._fill_strided(buffer[read.at_bytes :], read)

    def scatter(
        self, file: str, offset_bytes: int, targets: Sequence[memoryview], *, is_noted: bool = True
    ) -> None:
        """Read a range of a shard into several places, in as few calls as possible.

        Args:
            file: The shard.
            offset_bytes: Where the range begins.
            targets: Where its bytes go, one place after another.
            is_noted: Whether their checksum is taken, if that of anything is.

        Raises:
            CheckpointError: If the shard is gone, changed or cut short meanwhile.
        """
        descriptor = self.descriptor(file)
        path = self._paths[file]
        crcs = self.crcs if is_noted else None
        step_bytes = _MAX_READ_BYTES if crcs is None else _CRC_STEP_BYTES
        waiting, done = collections.deque(targets), 0
        while waiting:
            batch = _batch(waiting, step_bytes)
            try:
                with Doing("reading", path):
                    count = os.preadv(descriptor, batch, offset_bytes + done)
            except OSError as error:
                raise self.unreadable(file, offset_bytes + done, error) from error
            if not count and any(batch):
                raise self.cut_short(file, offset_bytes + done, sum(map(len, waiting)))
            if crcs is not None:
                crcs.note(file, offset_bytes + done, batch, count)
            done += count
            _drop(waiting, count)
        self.count(done)

    def read_again(
        self, file: str, offset_bytes: int, num_bytes: int
    ) -> Iterator[tuple[int, memoryview]]:
        """Read a range for its checksum's sake, such as one that the kernel has copied.

        Args:
            file: The shard.
            offset_bytes: Where the range begins.
            num_bytes: How long it is.

        Yields:
            Bytes behind the range's first one, and what is there; it holds until the next is asked
            for.

        Raises:
            CheckpointError: If the shard is gone, changed or cut short meanwhile.
        """
        room = memoryview(bytearray(min(num_bytes, _CRC_STEP_BYTES)))
        for start in range(0, num_bytes, _CRC_STEP_BYTES):
            length = min(_CRC_STEP_BYTES, num_bytes - start)
            self.scatter(file, offset_bytes + start, [room[:length]])
            yield start, room[:length]

    def unreadable(self, file: str, offset_bytes: int, error: OSError) -> CheckpointError:
        """Make the error for a shard that the system could not read.

        Args:
            file: The shard.
            offset_bytes: Where it was to be read.
            error: What the system said.

        Returns:
            The error.
        """
        return CheckpointError(
            f"{self._path(file)}: cannot be read at byte {offset_bytes}: {error.strerror or error}"
        )

    def cut_short(self, file: str, offset_bytes: int, num_missing_bytes: int) -> CheckpointError:
        """Make the error for a shard that ended too early.

        Args:
            file: The shard.
            offset_bytes: Where it ended.
            num_missing_bytes: What was to be read behind that.

        Returns:
            The error.
        """
        return CheckpointError(
            f"{self._path(file)}: ended at byte {offset_bytes} while being read, expected "
            f"{num_missing_bytes} bytes more; it was changed or cut short"
        )

    def count(self, num_bytes: int) -> None:
        """Count bytes that were read, by whatever call."""
        with self._lock:
            self.num_bytes_read += num_bytes

    def descriptor(self, file: str, flags: int = 0) -> int:
        """Give a shard's file descriptor, which stays this reader's.

        Args:
            file: The shard.
            flags: For open(2), on top of those for reading.

        Raises:
            CheckpointError: If it cannot be opened, or has another size than when planned with.
            ResourceError: If too many are open.
            OSError: If the file system does not know these flags (``EINVAL``).
        """
        with self._lock:
            if (file, flags) not in self._descriptors:
                self._open(file, flags)
            return self._descriptors[file, flags]

    def _path(self, file: str) -> Path:
        return locate(self._folders, file)

    def _open(self, file: str, flags: int) -> None:
        path = self._path(file)
        try:
            with Doing("opening", path):
                descriptor = open_descriptor(path, flags)
        except OSError as error:
            if flags and error.errno == errno.EINVAL:
                raise  # this file system cannot open files that way
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ResourceError(
                    f"{path}: {error.strerror} ({len(self._descriptors)} shards are open); allow "
                    "more with ulimit -n, or let more ranks share the work"
                ) from error
            raise CheckpointError(f"{path}: {error.strerror}") from error
        self._descriptors[file, flags], self._paths[file] = descriptor, path
        size = os.fstat(descriptor).st_size
        if size != self._file_bytes.get(file, size):
            raise CheckpointError(
                f"{path}: has {size} bytes, but had {self._file_bytes[file]} when its "
                "metadata was read; it was changed meanwhile"
            )

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
            # Boxes of one tensor may share bytes, and be many.
            self.scatter(box.file, box.offset_bytes, [memoryview(data)], is_noted=False)
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


def _batch(waiting: collections.deque[memoryview], room: int) -> list[memoryview]:
    """Give the first places, as many as one call may fill, and no more bytes than there is room."""
    batch: list[memoryview] = []
    for place in itertools.islice(waiting, _MAX_PLACES):
        batch.append(place[:room])
        room -= len(batch[-1])
        if not room:
            break
    return batch


def _drop(waiting: collections.deque[memoryview], num_bytes: int) -> None:
    """Take away what has been filled."""
    while waiting and len(waiting[0]) <= num_bytes:
        num_bytes -= len(waiting.popleft())
    if num_bytes:
        waiting[0] = waiting[0][num_bytes:]


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
