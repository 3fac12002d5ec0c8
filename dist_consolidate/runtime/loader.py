"""Reading rows ahead of the transport, in a thread, onto the device."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable
from typing import NamedTuple

import torch

from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.errors import Caught
from dist_consolidate.plan.buckets import Phase
from dist_consolidate.runtime.buffers import HostSlot, host_bytes, use_device


class Load(NamedTuple):
    """The rows of one bucket that this rank reads."""

    phase: Phase
    bucket: int
    rows: tuple[int, ...]


class Loader:
    """Fills device buffers with rows, as far ahead as there are buffers.

    On an accelerator, rows pass through two page-locked host buffers of one row each, and are
    copied on a stream of their own.
    """

    def __init__(
        self,
        reader: ShardReader,
        loads: Iterable[Load],
        *,
        num_slots: int,
        slot_bytes: int,
        device: torch.device,
    ) -> None:
        """Start reading.

        Args:
            reader: Reads from the shards; from now on used by the loader's thread only.
            loads: What to read, in order.
            num_slots: Buffers.
            slot_bytes: Size of each: the rows of the largest bucket.
            device: Where the rows go.
        """
        self._reader, self._device = reader, device
        self._ready: queue.Queue[Row | Exception] = queue.Queue()
        self._free: queue.Queue[Row | None] = queue.Queue()
        for _ in range(num_slots):
            self._free.put(Row(slot_bytes, device))
        self._stopped = False
        self._thread = threading.Thread(
            target=self._work, args=(loads,), name="consolidate-loader", daemon=True
        )
        self._thread.start()

    def next(self) -> Row:
        """Give the next buffer that is filled; blocks until there is one.

        Raises:
            CheckpointError: If reading failed.
        """
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        return item

    def give_back(self, row: Row) -> None:
        """Return a buffer; what the current stream still does with it is waited for."""
        if row.view is None:
            row.released.record(torch.accelerator.current_stream(self._device))
        self._free.put(row)

    def stop(self) -> None:
        """End the thread; what is not read yet stays unread."""
        self._stopped = True
        self._free.put(None)
        self._thread.join()
        self._reader.close()

    def _work(self, loads: Iterable[Load]) -> None:
        with (caught := Caught()):
            use_device(self._device)
            stage = _Stage(self._device)
            for load in loads:
                buffer = self._free.get()
                if buffer is None or self._stopped:
                    return
                self._fill(buffer, load, stage)
                self._ready.put(buffer)
        if caught.error is not None:
            self._ready.put(caught.error)

    def _fill(self, buffer: Row, load: Load, stage: _Stage) -> None:
        width = load.phase.row_bytes
        if buffer.view is None:
            stage.wait_for(buffer.released)
        for index, row in enumerate(load.rows):
            if buffer.view is not None:
                target = buffer.view[index * width : (index + 1) * width]
                for read in load.phase.reads(load.bucket, row):
                    self._reader.fill(target, read)
                continue
            slot = stage.next(width)
            for read in load.phase.reads(load.bucket, row):
                self._reader.fill(slot.view[:width], read)
            with stage.stream():
                part = buffer.tensor[index * width : (index + 1) * width]
                part.copy_(slot.tensor[:width], non_blocking=True)
                slot.done.record(torch.accelerator.current_stream(self._device))
        if buffer.view is None:
            with stage.stream():
                buffer.arrived.record(torch.accelerator.current_stream(self._device))


class Row:
    """A buffer of rows on the device.

    Attributes:
        tensor: uint8, shape ``(slot_bytes,)``.
        view: The same memory for the operating system, on the CPU; else ``None``.
        arrived: Event behind the last copy into it, on an accelerator.
        released: Event behind the last use of what was in it, on an accelerator.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate it."""
        self.view: memoryview | None = None
        if device.type == "cpu":
            self.tensor, self.view = host_bytes(num_bytes, pinned=False)
        else:
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self.arrived, self.released = torch.Event(device), torch.Event(device)

    def wait(self) -> None:
        """Make the current stream wait until the rows have arrived."""
        if self.view is None:
            torch.accelerator.current_stream(self.tensor.device).wait_event(self.arrived)


class _Stage:
    """Two page-locked host buffers and a copy stream, on an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: list[HostSlot] = []
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def next(self, num_bytes: int) -> HostSlot:
        """Give the buffer that was used longest ago, once its copy is through."""
        if len(self._slots) < 2:
            self._slots.append(HostSlot(num_bytes, self._device))
            return self._slots[-1]
        slot = self._slots.pop(0)
        slot.done.synchronize()
        if slot.tensor.numel() < num_bytes:
            slot = HostSlot(num_bytes, self._device)
        self._slots.append(slot)
        return slot

    def wait_for(self, event: torch.Event) -> None:
        """Let the copies that come next wait for an event."""
        if self._stream is not None:
            self._stream.wait_event(event)

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """Give the context in which copies to the device run."""
        return contextlib.nullcontext() if self._stream is None else self._stream
