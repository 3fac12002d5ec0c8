"""Digests of tensors, computed beside the writing.

A digest goes through a tensor's bytes from front to back, but they are written in any order, by
several threads and ranks. What is written next in line is digested from memory. What comes early,
was copied by the kernel, or was there before this run, is read back from the file when its turn
comes: it has just been written, so that no disk is asked for it as a rule. What other ranks write
of a tensor is read when all ranks are done, by the one that owns the tensor's first byte.

Source: xxHash's XXH3, 128 bits wide, without seed (https://xxhash.com); a digest is the text that
``xxhash.xxh3_128(bytes of the tensor in the file).hexdigest()`` gives.
"""

from __future__ import annotations

import bisect
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from dist_consolidate.doing import Doing
from dist_consolidate.errors import ConsolidateError
from dist_consolidate.runtime.stages import Stopwatch
from dist_consolidate.runtime.threads import in_threads

# What is read back at once, by each thread that does: it stays in the core's own cache.
_BLOCK_BYTES = 1 << 20
_FINISHING_THREADS = 4
# Who waits for another thread reads back after all when nothing at all is digested for so long.
_PATIENCE_SEC = 5.0
# What a tensor without elements has.
EMPTY_DIGEST = xxhash.xxh3_128(b"").hexdigest()


class Stored(NamedTuple):
    """Where the bytes of a stored tensor lie in its file, which are to be digested."""

    file: int
    tensor: int
    start_bytes: int
    num_bytes: int


class Digest(NamedTuple):
    """The digest of a stored tensor: its file, its index there, and the digest as text."""

    file: int
    tensor: int
    text: str


class _Progress:
    """How far a tensor has been digested; guarded by the lock of :class:`Digests`."""

    __slots__ = ("at_bytes", "busy", "early", "place", "state", "text")

    def __init__(self, place: Stored) -> None:
        self.place, self.at_bytes, self.busy = place, 0, False
        # Intervals that were written before what stands in front of them, in order.
        self.early: list[tuple[int, int]] = []
        self.state: xxhash.xxh3_128 | None = None
        self.text = EMPTY_DIGEST

    def add_early(self, low: int, high: int) -> None:
        """Note an interval; neighbours become one."""
        index = bisect.bisect_left(self.early, (low, high))
        if index and self.early[index - 1][1] >= low:
            index -= 1
            low, high = self.early[index][0], max(high, self.early[index][1])
        stop = index
        while stop < len(self.early) and self.early[stop][0] <= high:
            high = max(high, self.early[stop][1])
            stop += 1
        self.early[index:stop] = [(low, high)]

    def update(self, data: memoryview) -> None:
        """Digest what comes next (one thread at a time, without the lock)."""
        if self.state is None and len(data) == self.place.num_bytes:
            self.text = xxhash.xxh3_128_hexdigest(data)
            return
        if self.state is None:
            self.state = xxhash.xxh3_128()
        self.state.update(data)
        if self.at_bytes + len(data) == self.place.num_bytes:
            self.text, self.state = self.state.hexdigest(), None


class Digests:
    """Digests the tensors whose first bytes one rank writes.

    Attributes:
        num_bytes_done: Bytes that were digested so far.
    """

    def __init__(
        self, paths: Sequence[Path], stored: Iterable[Stored], *, in_order: bool = False
    ) -> None:
        """Open nothing yet.

        Args:
            paths: The output files.
            stored: The tensors this rank digests.
            in_order: Whoever writes a part of a tensor has begun all parts before it first, in
                whichever thread: then the threads wait for each other, which takes less than
                reading back.
        """
        self._paths, self._in_order = paths, in_order
        self._files: dict[int, list[_Progress]] = {}
        for place in sorted(stored):
            if place.num_bytes:
                self._files.setdefault(place.file, []).append(_Progress(place))
        for inside in self._files.values():
            inside.sort(key=lambda tensor: tensor.place.start_bytes)
        self._turn = threading.Condition()
        self._let_go = self._stopped = False
        self._descriptors: dict[int, int] = {}
        self._room = threading.local()
        self._watch = Stopwatch()
        self.num_bytes_done = 0

    def watch_with(self, watch: Stopwatch) -> None:
        """Say who adds up the time it takes."""
        self._watch = watch

    def written(
        self, file: int, start_bytes: int, stop_bytes: int, view: memoryview | None = None
    ) -> None:
        """Hear that a range of an output file has been written; any thread may say so.

        Args:
            file: Index of the file.
            start_bytes: First byte.
            stop_bytes: Behind the last byte.
            view: The bytes, if they are in this process's memory.

        Raises:
            ConsolidateError: If the file has ended where it is read back.
            OSError: If the file cannot be read back.
        """
        waiting = []
        for tensor in self._overlapping(file, start_bytes, stop_bytes):
            origin = tensor.place.start_bytes
            low, high = max(start_bytes, origin), min(stop_bytes, origin + tensor.place.num_bytes)
            part = None if view is None else view[low - start_bytes : high - start_bytes]
            item = (tensor, low - origin, high - origin, part)
            if not self._take(*item):
                waiting.append(item)
        for item in waiting:
            self._wait_for_turn(item[0], item[1])
            self._take(*item, patient=False)

    def let_go(self) -> None:
        """Let no thread wait for another any more: all is written, or one of them has failed."""
        with self._turn:
            self._let_go = True
            self._turn.notify_all()

    def stop(self) -> None:
        """Ask :meth:`finish` to end early: the run has failed."""
        self._stopped = True

    def finish(self) -> tuple[Digest, ...]:
        """Digest what is left, once every rank has written and synced everything.

        Returns:
            The digests, of all tensors that were asked for.

        Raises:
            ConsolidateError: If a file has ended too early.
            OSError: If a file cannot be read; if it was asked to stop.
        """
        everything = [tensor for inside in self._files.values() for tensor in inside]
        left = [tensor for tensor in everything if tensor.at_bytes < tensor.place.num_bytes]
        self.close()  # what other nodes wrote shows in files that are opened after that (NFS)
        try:
            num_threads = min(_FINISHING_THREADS, len(left))
            in_threads(self._complete, left, num_threads, lambda: self._stopped)
        finally:
            self.close()
        if self._stopped:
            raise InterruptedError("the run was given up")
        return tuple(Digest(t.place.file, t.place.tensor, t.text) for t in everything)

    def close(self) -> None:
        """Close the files."""
        with self._turn:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def progress(self) -> int:
        """Give a number that grows while the work gets on."""
        return self.num_bytes_done

    def _overlapping(self, file: int, low: int, high: int) -> Iterator[_Progress]:
        inside = self._files.get(file, ())
        first = bisect.bisect_right(inside, low, key=lambda tensor: tensor.place.start_bytes)
        for index in range(max(first - 1, 0), len(inside)):
            place = inside[index].place
            if place.start_bytes >= high:
                return
            if place.start_bytes + place.num_bytes > low:
                yield inside[index]

    def _take(
        self,
        tensor: _Progress,
        low: int,
        high: int,
        view: memoryview | None,
        patient: bool | None = None,
    ) -> bool:
        """Digest a range if it is the next one; otherwise note it, or say that it has to wait."""
        patient = self._in_order if patient is None else patient
        with self._turn:
            if high <= tensor.at_bytes:
                return True
            if tensor.busy or low > tensor.at_bytes:
                if patient and view is not None and not self._let_go:
                    return False
                tensor.add_early(low, high)
                return True
            tensor.busy = True
        try:
            self._digest(tensor, low, high, view)
            while (early := self._next_early(tensor)) is not None:
                self._digest(tensor, *early, None)
        except BaseException:
            self.let_go()
            raise
        return True

    def _next_early(self, tensor: _Progress) -> tuple[int, int] | None:
        """Give what was written early and is next; without any, others may go on."""
        with self._turn:
            if tensor.early and tensor.early[0][0] <= tensor.at_bytes:
                return tensor.early.pop(0)
            tensor.busy = False
            self._turn.notify_all()
            return None

    def _wait_for_turn(self, tensor: _Progress, low: int) -> None:
        with self._turn:
            while (tensor.busy or low > tensor.at_bytes) and not self._let_go:
                done = self.num_bytes_done
                if not self._turn.wait(_PATIENCE_SEC) and done == self.num_bytes_done:
                    return

    def _digest(self, tensor: _Progress, low: int, high: int, view: memoryview | None) -> None:
        """Digest a range that begins where the digest stands, or before; by one thread."""
        start = tensor.at_bytes
        if high <= start:
            return
        if view is not None:
            with self._watch.timing("digest", high - start):
                self._advance(tensor, view[start - low :])
            return
        while tensor.at_bytes < high and not self._stopped:
            block = self._read(tensor.place, tensor.at_bytes, high)
            self._advance(tensor, block)

    def _advance(self, tensor: _Progress, data: memoryview) -> None:
        tensor.update(data)
        with self._turn:
            tensor.at_bytes += len(data)
            self.num_bytes_done += len(data)

    def _read(self, place: Stored, start: int, stop: int) -> memoryview:
        """Read the next block of a tensor back, into this thread's own memory."""
        if not hasattr(self._room, "view"):
            self._room.view = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
        path, target = self._paths[place.file], self._room.view[: min(stop - start, _BLOCK_BYTES)]
        with self._watch.timing("digest", len(target)), Doing("reading back", path):
            descriptor = self._descriptor(place.file)
            try:
                count = os.preadv(descriptor, [target], place.start_bytes + start)
            except OSError as error:
                error.filename = str(path)
                raise
        if not count:
            at = place.start_bytes + start
            raise ConsolidateError(
                f"{path}: ended at byte {at} when it was read back; somebody else has changed it"
            )
        block: memoryview = target[:count]
        return block

    def _descriptor(self, file: int) -> int:
        with self._turn:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[file]

    def _complete(self, tensor: _Progress) -> None:
        self._digest(tensor, 0, tensor.place.num_bytes, None)
