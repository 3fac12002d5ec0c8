"""Writing finished bytes at known offsets, in threads, with credits that bound the memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from dist_consolidate.checksums import crc32
from dist_consolidate.errors import Caught
from dist_consolidate.runtime.buffers import use_device
from dist_consolidate.runtime.clock import Clock
from dist_consolidate.runtime.outfiles import OutputFiles
from dist_consolidate.runtime.ownership import Ownership, Place, Run
from dist_consolidate.runtime.results import Checksum


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
        ownership: Ownership,
        checksums: bool,
        num_threads: int,
        device: torch.device,
        clock: Clock,
    ) -> None:
        """Start the threads.

        Args:
            files: Output files; they exist and have their full size.
            places: For each tensor of the plan, every place its bytes go to.
            ownership: What of the files this rank writes; the rest of a run is left out.
            checksums: Note a CRC-32 of each run.
            num_threads: Threads.
            device: What the events of the buffers belong to.
            clock: Told of what is written.
        """
        self._files, self._places, self._device = OutputFiles(files, clock.watch), places, device
        self._ownership, self._want_checksums = ownership, checksums
        self.checksums: list[Checksum] = []
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
        self._files.sync()

    def close(self) -> None:
        """Stop the threads, without caring for what is not written yet, and close the files."""
        if self._threads:
            self._caught.error = self._caught.error or InterruptedError("the run was given up")
            self._join()
        self._files.close()

    @property
    def num_bytes_written(self) -> int:
        """Bytes that went into the files."""
        return self._files.num_bytes_written

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
            for place in self._places[run.tensor]:
                for part in self._ownership.parts(place, run):
                    if self._want_checksums:
                        self._note_checksum(view, place, part)
                    where = place.offset_bytes + part.start_bytes
                    follows = place.file == file and where == offset + length
                    if length and follows and part.at_bytes == at + length:
                        length += part.num_bytes
                        continue
                    self._files.write(file, view[at : at + length], offset)
                    file, at, offset, length = place.file, part.at_bytes, where, part.num_bytes
        self._files.write(file, view[at : at + length], offset)

    def _note_checksum(self, view: memoryview, place: Place, part: Run) -> None:
        crc = crc32(view[part.at_bytes : part.at_bytes + part.num_bytes])
        self.checksums.append(
            Checksum(place.file, place.tensor, part.start_bytes, part.num_bytes, crc)
        )
