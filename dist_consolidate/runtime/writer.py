"""Writing finished bytes at known offsets, in threads, with credits that bound the memory."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from dist_consolidate.errors import Caught
from dist_consolidate.runtime.buffers import use_device
from dist_consolidate.runtime.clock import Clock
from dist_consolidate.runtime.writeback import start_writeback


class Place(NamedTuple):
    """Where a tensor's bytes go: a file and the offset of its first byte."""

    file: int
    tensor: int
    offset_bytes: int


class Checksum(NamedTuple):
    """CRC-32 of a range of a stored tensor that this process wrote."""

    file: int
    tensor: int
    start_bytes: int
    num_bytes: int
    crc: int


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


class Filled(NamedTuple):
    """Output bytes in host memory, or on their way there.

    Attributes:
        view: The memory.
        runs: What lies in it.
        arrived: Event behind the copy to the host; ``None`` where there is none.
        give_back: Called when the memory may be used again.
    """

    view: memoryview
    runs: Sequence[Run]
    arrived: torch.Event | None
    give_back: Callable[[], None]


class Writer:
    """Threads that write buffers into the output files.

    Each buffer is given back when its bytes are written; whoever fills them can never be further
    ahead than the buffers there are. A failed write is raised by the next call.
    """

    def __init__(
        self,
        files: Sequence[Path],
        places: Sequence[Sequence[Place]],
        *,
        checksums: bool,
        num_threads: int,
        device: torch.device,
        clock: Clock,
    ) -> None:
        """Start the threads.

        Args:
            files: Output files; they exist and have their full size.
            places: For each tensor of the plan, every place its bytes go to.
            checksums: Note a CRC-32 of each run.
            num_threads: Threads.
            device: What the events of the buffers belong to.
            clock: Told of what is written.
        """
        self._files, self._places, self._device, self._clock = files, places, device, clock
        self._want_checksums = checksums
        self.checksums: list[Checksum] = []
        self.num_bytes_written = 0
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()
        self._todo: queue.SimpleQueue[Filled | None] = queue.SimpleQueue()
        self._caught = Caught()
        self._threads = [
            threading.Thread(target=self._work, name="consolidate-writer", daemon=True)
            for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, filled: Filled) -> None:
        """Take a buffer; it is given back whatever happens.

        Args:
            filled: What to write.

        Raises:
            OSError: If an earlier write failed.
        """
        self._todo.put(filled)
        self._caught.raise_if_any()

    def finish(self) -> None:
        """Wait until everything is written and on disk.

        Raises:
            OSError: If a write failed.
        """
        self._join()
        self._caught.raise_if_any()
        for file, descriptor in self._descriptors.items():
            with _named(self._files[file]), self._clock.host("sync", 0):
                os.fsync(descriptor)

    def close(self) -> None:
        """Stop the threads, without caring for what is not written yet, and close the files."""
        if self._threads:
            self._caught.error = self._caught.error or InterruptedError("the run was given up")
            self._join()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _join(self) -> None:
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        use_device(self._device)
        while (filled := self._todo.get()) is not None:
            # After a failure buffers still go back, so that nobody waits for one in vain.
            with self._caught:
                if self._caught.error is None:
                    if filled.arrived is not None:
                        filled.arrived.synchronize()
                    self._write(filled.view, filled.runs)
            filled.give_back()

    def _write(self, view: memoryview, runs: Sequence[Run]) -> None:
        """Write all runs; neighbours in both buffer and file become one write."""
        file = at = offset = length = 0
        for run in runs:
            crc = 0
            if self._want_checksums:
                crc = zlib.crc32(view[run.at_bytes : run.at_bytes + run.num_bytes])
            for place in self._places[run.tensor]:
                if self._want_checksums:
                    self.checksums.append(
                        Checksum(place.file, place.tensor, run.start_bytes, run.num_bytes, crc)
                    )
                where = place.offset_bytes + run.start_bytes
                follows = place.file == file and where == offset + length
                if length and follows and run.at_bytes == at + length:
                    length += run.num_bytes
                    continue
                self._pwrite(file, view[at : at + length], offset)
                file, at, offset, length = place.file, run.at_bytes, where, run.num_bytes
        self._pwrite(file, view[at : at + length], offset)

    def _pwrite(self, file: int, data: memoryview, offset_bytes: int) -> None:
        if not len(data):
            return
        descriptor = self._descriptor(file)
        done = 0
        with _named(self._files[file]), self._clock.host("write", len(data)):
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], offset_bytes + done)
        start_writeback(descriptor, offset_bytes, done)
        with self._lock:
            self.num_bytes_written += done

    def _descriptor(self, file: int) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self._files[file], os.O_WRONLY | os.O_CLOEXEC)
            return self._descriptors[file]


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the file's name into what the operating system says of a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
