"""Reading rows ahead of the transport, in threads, onto the device."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from dist_consolidate.checkpoint.extents import Extent
from dist_consolidate.checkpoint.fragments import Read
from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.errors import Caught
from dist_consolidate.plan.buckets import Phase
from dist_consolidate.runtime.budget import CHUNK_BYTES
from dist_consolidate.runtime.buffers import HostSlot, Pool, Table, use_device
from dist_consolidate.runtime.clock import Clock


class Load(NamedTuple):
    """The rows of one bucket that this rank reads, and where in a table they begin."""

    phase: Phase
    bucket: int
    rows: tuple[int, ...]
    at_bytes: int


class Chunk(NamedTuple):
    """Reads that lie close together in a table, within ``[low_bytes, high_bytes)``.

    Their own places count from ``low_bytes``. What lies between them is padding.
    """

    low_bytes: int
    high_bytes: int
    reads: list[Read]


def chunks(load: Load, max_bytes: int) -> Iterator[Chunk]:
    """Cut a load: large reads are split, neighbouring small ones taken together.

    Args:
        load: What to read.
        max_bytes: The longest range that a chunk may cover, at least one element.

    Yields:
        Chunks in order; together they are the load.
    """
    reads: list[Read] = []
    low = high = 0
    for index, row in enumerate(load.rows):
        base = load.at_bytes + index * load.phase.row_bytes
        # Blocks of a tensor come one after another, whatever places in it they fill.
        places = sorted(load.phase.reads(load.bucket, row), key=lambda read: read.at_bytes)
        for whole in places:
            for read, num_bytes in _split(whole, max_bytes):
                start = base + read.at_bytes
                if reads and start + num_bytes - low > max_bytes:
                    yield Chunk(low, high, reads)
                    reads = []
                low, high = start if not reads else low, start + num_bytes
                reads.append(dataclasses.replace(read, at_bytes=start - low))
    if reads:
        yield Chunk(low, high, reads)


def _split(read: Read, max_bytes: int) -> Iterator[tuple[Read, int]]:
    """Cut a read into ones of at most ``max_bytes``; give each with its length in bytes."""
    if read.extent is not None:
        file, offset, total = dataclasses.astuple(read.extent)
        for start in range(0, total, max_bytes):
            length = min(max_bytes, total - start)
            yield Read(read.at_bytes + start, Extent(file, offset + start, length)), length
        return
    assert read.span is not None
    width = read.span.dtype.itemsize_bytes
    step = max(max_bytes // width, 1)
    for first in range(read.start_numel, read.stop_numel, step):
        stop = min(first + step, read.stop_numel)
        at = read.at_bytes + (first - read.start_numel) * width
        yield Read(at, None, read.span, first, stop), (stop - first) * width


class _Loading:
    """A table that is being filled by one or several threads."""

    def __init__(self, table: Table, num_chunks: int) -> None:
        self.table, self.left = table, num_chunks
        self.done, self.error = threading.Event(), Caught()


class Loader:
    """Fills tables with rows in order, as far ahead as there are tables.

    Several threads read, each with descriptors of its own. On an accelerator what they read passes
    through page-locked buffers and is copied on a stream of its own.
    """

    def __init__(
        self,
        make_reader: Callable[[], ShardReader],
        loads: Iterable[Load],
        tables: Pool[Table],
        *,
        num_threads: int,
        device: torch.device,
        clock: Clock,
    ) -> None:
        """Start reading.

        Args:
            make_reader: Gives each thread its own reader of the shards.
            loads: What to read, in order.
            tables: Where the rows go; whoever has used one gives it back.
            num_threads: Threads.
            device: Where the tables are.
            clock: Told of what is read and copied.
        """
        self._tables, self._device, self._clock = tables, device, clock
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._lock, self._enqueue = threading.Lock(), threading.Lock()
        self._ready: queue.SimpleQueue[_Loading | Exception] = queue.SimpleQueue()
        self._tasks = self._begin(loads)
        self._stopped = False
        self._readers = [make_reader() for _ in range(num_threads)]
        self._threads = [
            threading.Thread(
                target=self._work, args=(reader,), name="consolidate-reader", daemon=True
            )
            for reader in self._readers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_bytes_read(self) -> int:
        """Bytes read by all threads so far."""
        return sum(reader.num_bytes_read for reader in self._readers)

    def next(self) -> Table:
        """Give the next table that is filled; blocks until there is one.

        Raises:
            CheckpointError: If reading failed.
        """
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        item.done.wait()
        item.error.raise_if_any()
        return item.table

    def stop(self) -> None:
        """End the threads; what is not read yet stays unread."""
        self._stopped = True
        self._tables.close()
        for thread in self._threads:
            thread.join()
        for reader in self._readers:
            reader.close()

    def _begin(self, loads: Iterable[Load]) -> Iterator[tuple[_Loading, Chunk]]:
        """Give chunk after chunk; a new load begins when there is a table for it."""
        for load in loads:
            parts = list(chunks(load, CHUNK_BYTES))
            table = self._tables.take()
            if table is None:
                return
            if self._stream is not None:
                self._stream.wait_event(table.released)
            loading = _Loading(table, len(parts))
            if not parts:
                self._finish(loading)
            self._ready.put(loading)
            for part in parts:
                yield loading, part

    def _next_task(self) -> tuple[_Loading, Chunk] | None:
        with self._lock:
            return None if self._stopped else next(self._tasks, None)

    def _work(self, reader: ShardReader) -> None:
        with (caught := Caught()):
            use_device(self._device)
            bounce = None if self._stream is None else _Bounce(self._device)
            while (task := self._next_task()) is not None:
                loading, chunk = task
                with loading.error:
                    self._fill(loading.table, chunk, reader, bounce)
                with self._enqueue:
                    loading.left -= 1
                    if not loading.left:
                        self._finish(loading)
        if caught.error is not None:
            self._ready.put(caught.error)

    def _finish(self, loading: _Loading) -> None:
        """Say that a table is full, or that its copies are all on their way."""
        if self._stream is not None:
            loading.table.arrived.record(self._stream)
        loading.done.set()

    def _fill(
        self, table: Table, chunk: Chunk, reader: ShardReader, bounce: _Bounce | None
    ) -> None:
        num_bytes = chunk.high_bytes - chunk.low_bytes
        if bounce is None:
            assert table.view is not None
            self._read(reader, chunk, table.view[chunk.low_bytes : chunk.high_bytes])
            return
        slot = bounce.next()
        self._read(reader, chunk, slot.view[:num_bytes])
        target = table.tensor[chunk.low_bytes : chunk.high_bytes]
        # One thread at a time, so that the events stand around this copy alone.
        with self._enqueue, self._copying(), self._clock.device("h2d", num_bytes):
            target.copy_(slot.tensor[:num_bytes], non_blocking=True)
            slot.done.record(torch.accelerator.current_stream(self._device))

    def _read(self, reader: ShardReader, chunk: Chunk, target: memoryview) -> None:
        with self._clock.host("read", len(target)):
            for read in chunk.reads:
                reader.fill(target, read)

    def _copying(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else self._stream


class _Bounce:
    """Two page-locked buffers of one thread: one is read into while the other is copied from."""

    def __init__(self, device: torch.device) -> None:
        self._slots = [HostSlot(CHUNK_BYTES, device) for _ in range(2)]

    def next(self) -> HostSlot:
        """Give the buffer that was used longest ago, once its copy is through."""
        self._slots.reverse()
        self._slots[0].done.synchronize()
        return self._slots[0]
