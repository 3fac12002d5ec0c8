"""What an earlier run has finished, where ranks exchange what they read: buckets to be left out.

A bucket is left out by all ranks alike, if every range that its pieces go to is finished; one that
is finished in part is moved again as a whole. Of what is left out, the writing ranks read back what
they would have noted while they wrote it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from dist_consolidate.checksums import crc32
from dist_consolidate.plan.buckets import Phase, Piece
from dist_consolidate.plan.ranges import Finished
from dist_consolidate.runtime.assemble import Moved, may_overflow
from dist_consolidate.runtime.cast import has_infinity
from dist_consolidate.runtime.outfiles import OutputFiles, aligned_bytes
from dist_consolidate.runtime.ownership import Ownership, Place, Run
from dist_consolidate.runtime.results import Checksum
from dist_consolidate.runtime.stages import Stopwatch

_ROOM_BYTES = 8 << 20  # a multiple of every element's width


class Earlier:
    """Tells which buckets an earlier run has finished.

    Attributes:
        buckets: Their phases, by index, and their indices there.
    """

    def __init__(
        self,
        finished: Finished,
        phases: Sequence[Phase],
        tensors: Sequence[Moved],
        places: Sequence[Sequence[Place]],
    ) -> None:
        """Compare what is finished with what is to be done.

        Args:
            finished: What is on disk of the output files.
            phases: All buckets.
            tensors: By index in the plan.
            places: For each tensor, every place its bytes go to.
        """
        self._finished, self._phases = finished, phases
        self._tensors, self._places = tensors, places
        self.buckets = frozenset(
            (index, bucket)
            for index, phase in enumerate(phases)
            for bucket in range(phase.num_buckets if finished else 0)
            if self._is_finished(phase, bucket)
        )

    def _is_finished(self, phase: Phase, bucket: int) -> bool:
        return all(
            self._finished.covers(
                place.file,
                place.offset_bytes + run.start_bytes,
                place.offset_bytes + run.start_bytes + run.num_bytes,
            )
            for run in self._runs(phase, bucket)
            for place in self._places[run.tensor]
        )

    def _runs(self, phase: Phase, bucket: int) -> Iterator[Run]:
        for piece in phase.pieces(bucket):
            yield from _runs_of(piece, self._tensors[piece.tensor])

    def parts(self, ownership: Ownership) -> Iterator[tuple[Place, Run]]:
        """Give what a rank would have written of the buckets that are left out.

        Args:
            ownership: What that rank writes.

        Yields:
            A place, and the run of its tensor's bytes that goes there.
        """
        for index, bucket in sorted(self.buckets):
            for run in self._runs(self._phases[index], bucket):
                for place in self._places[run.tensor]:
                    for part in ownership.parts(place, run):
                        yield place, part


def _runs_of(piece: Piece, moved: Moved) -> Iterator[Run]:
    width = moved.output_dtype.itemsize
    num_rows, num_numel = piece.num_rows, piece.num_numel
    if num_rows == 1 or piece.step_numel == num_numel:
        num_rows, num_numel = 1, num_rows * num_numel
    for index in range(num_rows):
        start = piece.start_numel + index * piece.step_numel
        count = min(num_numel, moved.num_numel - start)
        if count > 0:
            yield Run(piece.tensor, start * width, 0, count * width)


class LookBack:
    """Reads back what an earlier run has finished.

    Attributes:
        is_needed: Whether there is anything to find out; the same on every rank.
        checksums: CRC-32 of each range, once it has run.
        overflowed: Tensors that hold infinities after a cast to fp16.
        num_done: Ranges that are read.
    """

    def __init__(
        self,
        earlier: Earlier,
        ownership: Ownership,
        tensors: Sequence[Moved],
        files: Sequence[Path],
        *,
        checksums: bool,
    ) -> None:
        """Read nothing yet.

        Args:
            earlier: What is left out.
            ownership: What this rank writes.
            tensors: By index in the plan.
            files: Output files.
            checksums: Note a CRC-32 of everything.
        """
        self._earlier, self._ownership, self._tensors = earlier, ownership, tensors
        self._files, self._wants_checksums = files, checksums
        self._watched = frozenset(
            index for index, moved in enumerate(tensors) if may_overflow(moved)
        )
        self.is_needed = bool(earlier.buckets) and (checksums or bool(self._watched))
        self.checksums: list[Checksum] = []
        self.overflowed: set[int] = set()
        self.num_done = 0
        self._stop = threading.Event()

    def stop(self) -> None:
        """End early."""
        self._stop.set()

    def run(self) -> None:
        """Read all of it.

        Raises:
            OSError: If an output file cannot be read.
        """
        output = OutputFiles(self._files, Stopwatch())
        room = aligned_bytes(_ROOM_BYTES)
        try:
            for place, part in self._earlier.parts(self._ownership):
                if self._stop.is_set():
                    return
                if self._wants_checksums or part.tensor in self._watched:
                    self._look(output, room, place, part)
                self.num_done += 1
        finally:
            output.close()

    def _look(self, output: OutputFiles, room: memoryview, place: Place, part: Run) -> None:
        crc, start = 0, place.offset_bytes + part.start_bytes
        for done in range(0, part.num_bytes, len(room)):
            view = room[: min(len(room), part.num_bytes - done)]
            output.read(place.file, view, start + done)
            if self._wants_checksums:
                crc = crc32(view, crc)
            if part.tensor in self._watched and has_infinity(view):
                self.overflowed.add(part.tensor)
        if self._wants_checksums:
            self.checksums.append(
                Checksum(place.file, place.tensor, part.start_bytes, part.num_bytes, crc)
            )
