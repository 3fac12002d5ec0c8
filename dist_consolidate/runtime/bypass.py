"""Reading and writing past the page cache (O_DIRECT): when it pays, and how to read that way.

O_DIRECT wants offsets, lengths and memory aligned. Storages in a torch file lie at multiples of 64
bytes, so what is read arrives in aligned memory and is copied from there.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.doing import Doing
from dist_consolidate.runtime.outfiles import ALIGNMENT_BYTES, aligned_bytes

# A result so large that trying both ways on its first part costs next to nothing.
WORTH_TRYING_BYTES = 16 * 10**9
_TRIAL_BYTES = 128 * 2**20
# Less at once is not worth a seek of its own.
_MIN_READ_BYTES = 256 << 10


class Way(NamedTuple):
    """How one bucket is read and written.

    Attributes:
        bypass_reads: Read past the page cache.
        bypass_writes: Write past the page cache.
        is_trial: Both are timed until the bytes are on disk.
    """

    bypass_reads: bool
    bypass_writes: bool
    is_trial: bool = False


class IoChoice:
    """Decides how to read and write: as told, or as the first buckets turn out.

    In a trial, buckets take turns: one past the page cache, one through it and waited for. Reads
    and writes are decided on their own, because shards that were just written are in the cache.
    """

    def __init__(self, mode: str, num_bytes: int) -> None:
        """Decide what can be decided now.

        Args:
            mode: ``auto``, ``buffered`` or ``direct``.
            num_bytes: What this process will write.
        """
        self._lock = threading.Lock()
        self._way: Way | None = Way(mode == "direct", mode == "direct")
        if mode == "auto" and num_bytes >= WORTH_TRYING_BYTES:
            self._way = None
        self._turn = False
        self._spent: dict[tuple[str, bool], tuple[int, float]] = {}

    def next(self) -> Way:
        """Give the way for the next bucket."""
        with self._lock:
            if self._way is not None:
                return self._way
            self._turn = not self._turn
            return Way(self._turn, self._turn, is_trial=True)

    def tell(self, way: Way, num_bytes: int, read_sec: float, write_sec: float) -> None:
        """Take the time that a bucket of a trial took."""
        with self._lock:
            for name, seconds in (("read", read_sec), ("write", write_sec)):
                key = (name, way.bypass_writes)
                total_bytes, total_sec = self._spent.get(key, (0, 0.0))
                self._spent[key] = (total_bytes + num_bytes, total_sec + seconds)
            if min(self._spent.get(("write", turn), (0, 0))[0] for turn in (False, True)) >= (
                _TRIAL_BYTES
            ):
                self._way = Way(self._pays("read"), self._pays("write"))

    def _pays(self, name: str) -> bool:
        rates = {}
        for bypass in (False, True):
            num_bytes, seconds = self._spent[name, bypass]
            rates[bypass] = num_bytes / max(seconds, 1e-9)
        return rates[True] > rates[False]


class BypassReader:
    """Reads ranges of shards past the page cache; one for each thread.

    Attributes:
        works: Whether the file system has taken it so far.
    """

    def __init__(self, reader: ShardReader, num_bytes: int) -> None:
        """Allocate memory.

        Args:
            reader: Has the shards open.
            num_bytes: The longest range.
        """
        self._reader = reader
        self._room = aligned_bytes(num_bytes + 2 * ALIGNMENT_BYTES)
        self.works = True

    def scatter(self, file: str, offset_bytes: int, targets: Sequence[memoryview]) -> bool:
        """Read a range into several places.

        Args:
            file: The shard.
            offset_bytes: Where the range begins.
            targets: Where its bytes go, one place after another.

        Returns:
            Whether it was read; a range that is short, or a file system that cannot do it, is left
            to the plain way.

        Raises:
            CheckpointError: If the shard is gone, changed or cut short meanwhile.
        """
        num_bytes = sum(map(len, targets))
        if not self.works or num_bytes < _MIN_READ_BYTES:
            return False
        low = offset_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        skip = offset_bytes - low
        try:
            found = self._read(file, low, skip + num_bytes)
        except OSError as error:
            if error.errno == errno.EINVAL:
                self.works = False
                return False
            raise self._reader.unreadable(file, low, error) from error
        if found < skip + num_bytes:
            raise self._reader.cut_short(file, low + found, skip + num_bytes - found)
        at = skip
        for target in targets:
            part = self._room[at : at + len(target)]
            numpy.copyto(numpy.frombuffer(target, "u1"), numpy.frombuffer(part, "u1"))
            at += len(target)
        if self._reader.crcs is not None:
            self._reader.crcs.note(file, offset_bytes, targets, num_bytes)
        self._reader.count(num_bytes)
        return True

    def _read(self, file: str, low: int, num_bytes: int) -> int:
        """Read from an aligned offset until there is enough, or the file has ended."""
        length = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        descriptor, done = self._reader.descriptor(file, os.O_DIRECT), 0
        while done < num_bytes:
            with Doing("reading", file):
                count = os.preadv(descriptor, [self._room[done:length]], low + done)
            done += count
            # Only the end of the file gives a length that is not aligned.
            if not count or count % ALIGNMENT_BYTES:
                break
        return done


class Lap:
    """Seconds since the last call."""

    def __init__(self) -> None:
        """Start."""
        self._last = time.perf_counter()

    def __call__(self) -> float:
        """Give the seconds since the last call, or since the start."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before
