"""Writing finished bytes at known offsets, in a thread, with credits that bound the memory."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from dist_consolidate.errors import Caught
from dist_consolidate.runtime.assemble import Run
from dist_consolidate.runtime.buffers import Slot, use_device
from dist_consolidate.runtime.results import Checksum
from dist_consolidate.runtime.writeback import start_writeback


class Place(NamedTuple):
    """Where a tensor's bytes go: a file and the offset of its first byte."""

    file: int
    tensor: int
    offset_bytes: int


class Writer:
    """A thread that writes staging buffers into the output files.

    Buffers come back to :meth:`acquire` when their bytes are written; whoever fills them can
    never be further ahead than the buffers there are. A failed write is raised by the next call.
    """

    def __init__(
        self,
        files: Sequence[Path],
        places: Sequence[Sequence[Place]],
        *,
        slots: Sequence[Slot],
        checksums: bool,
        device: torch.device,
    ) -> None:
        """Start the thread.

        Args:
            files: Output files; they exist and have their full size.
            places: For each tensor of the plan, every place its bytes go to.
            slots: Staging buffers.
            checksums: Note a CRC-32 of each run.
            device: Where the buffers are.
        """
        self._files, self._places, self._device = files, places, device
        self._want_checksums = checksums
        self.checksums: list[Checksum] = []
        self.num_bytes_written = 0
        self._descriptors: dict[int, int] = {}
        self._free: queue.Queue[Slot] = queue.Queue()
        for slot in slots:
            self._free.put(slot)
        self._todo: queue.Queue[tuple[Slot, list[Run]] | None] = queue.Queue()
        self._caught = Caught()
        self._thread = threading.Thread(target=self._work, name="consolidate-writer", daemon=True)
        self._thread.start()

    def acquire(self) -> Slot:
        """Give an empty buffer; blocks until there is one.

        Raises:
            OSError: If an earlier write failed.
        """
        slot = self._free.get()
        self._caught.raise_if_any()
        return slot

    def submit(self, slot: Slot, runs: list[Run]) -> None:
        """Take a filled buffer; on an accelerator its copy to the host is started here.

        Args:
            slot: From :meth:`acquire`.
            runs: What lies in it.
        """
        if slot.done is not None:
            used = slice(0, slot.used_bytes)
            slot.host[used].copy_(slot.tensor[used], non_blocking=True)
            slot.done.record(torch.accelerator.current_stream(slot.tensor.device))
        self._todo.put((slot, runs))

    def finish(self) -> None:
        """Wait until everything is written and on disk.

        Raises:
            OSError: If a write failed.
        """
        self._todo.put(None)
        self._thread.join()
        self._caught.raise_if_any()
        for file, descriptor in self._descriptors.items():
            with _named(self._files[file]):
                os.fsync(descriptor)

    def close(self) -> None:
        """Stop the thread, without caring for what is not written yet, and close the files."""
        if self._thread.is_alive():
            self._caught.error = self._caught.error or InterruptedError("the run was given up")
            self._todo.put(None)
            self._thread.join()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _work(self) -> None:
        use_device(self._device)
        while (item := self._todo.get()) is not None:
            slot, runs = item
            # After a failure buffers still go back, so that nobody waits for one in vain.
            with self._caught:
                if self._caught.error is None:
                    slot.wait()
                    self._write(slot.view, runs)
            self._free.put(slot)

    def _write(self, view: memoryview, runs: Sequence[Run]) -> None:
        """Write all runs; neighbours in both buffer and file become one write."""
        file = at = offset = length = 0
        for run in runs:
            data = view[run.at_bytes : run.at_bytes + run.num_bytes]
            places = self._places[run.tensor]
            crc = zlib.crc32(data) if self._want_checksums else 0
            for place in places:
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
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self._files[file], os.O_WRONLY | os.O_CLOEXEC)
        done = 0
        with _named(self._files[file]):
            while done < len(data):
                done += os.pwrite(self._descriptors[file], data[done:], offset_bytes + done)
        start_writeback(self._descriptors[file], offset_bytes, done)
        self.num_bytes_written += done


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the file's name into what the operating system says of a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
