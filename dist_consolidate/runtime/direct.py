"""Direct work: threads that each read a bucket, cast it where need be, and write it.

Nothing crosses the network and no device is needed. What is not cast is read straight to its place
among the output bytes, one call for each shard and bucket; where a fragment is large and needs no
checksum, the kernel copies it from shard to output and no byte passes through this process.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dist_consolidate.checkpoint.fragments import Fragments
from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.checksums import crc32
from dist_consolidate.crc_pieces import ReadCrcs
from dist_consolidate.dtypes import DType
from dist_consolidate.errors import Caught
from dist_consolidate.filesystems import is_in_memory
from dist_consolidate.plan.direct import DirectBucket, Filled, Share
from dist_consolidate.plan.plan import Plan
from dist_consolidate.plan.ranges import Finished
from dist_consolidate.runtime.bypass import BypassReader, IoChoice, Lap, Way
from dist_consolidate.runtime.cast import Caster, has_infinity, overflows
from dist_consolidate.runtime.collector import collector_paused
from dist_consolidate.runtime.digests import Digests
from dist_consolidate.runtime.journal import Journal
from dist_consolidate.runtime.outfiles import OutputFiles, aligned_bytes
from dist_consolidate.runtime.results import Checksum, MoveResult
from dist_consolidate.runtime.stages import Stopwatch

# A call for a shorter copy costs as much as the copy.
_MIN_KERNEL_COPY_BYTES = 1 << 20
_NOTHING = Finished()


@dataclasses.dataclass(frozen=True, slots=True)
class DirectWork:
    """What one rank is to do.

    Attributes:
        folder: All folders the shards lie in.
        file_bytes: Size of each shard.
        plan: The plan.
        share: This rank's buckets.
        files: Output files, created with their full size.
        checksums: Note a CRC-32 of everything that is written.
        io: ``auto``, ``buffered`` or ``direct``.
        num_threads: Threads; each holds one bucket, and its source where that is cast.
        digests: Told of everything that is written.
        journal: Told of what is written, where an unbroken run is not taken for granted.
        finished: What an earlier run has finished of the files.
        checks_source: Note a CRC-32 of everything that is read.
    """

    folder: Path | Sequence[Path]
    file_bytes: Mapping[str, int]
    plan: Plan
    share: Share
    files: Sequence[Path]
    checksums: bool
    io: str
    num_threads: int
    digests: Digests | None = None
    journal: Journal | None = None
    finished: Finished = _NOTHING
    checks_source: bool = False


class Source(NamedTuple):
    """A range of a shard and where it goes: a place among the output bytes, or the source's."""

    file: str
    offset_bytes: int
    at_bytes: int
    num_bytes: int

    def followed_by(self, other: Source) -> bool:
        """Tell whether the other lies right behind this one, on both sides."""
        return (
            self.file == other.file
            and self.offset_bytes + self.num_bytes == other.offset_bytes
            and self.at_bytes + self.num_bytes == other.at_bytes
        )


class _Cast(NamedTuple):
    """Elements that go from the source's memory to the output's."""

    source_at: int
    target_at: int
    num_numel: int
    pair: tuple[DType, DType]


class DirectMove:
    """Carries out one rank's direct work."""

    def __init__(self, work: DirectWork) -> None:
        """Open nothing yet."""
        self._work, self._watch = work, Stopwatch()
        self._crcs = ReadCrcs() if work.checks_source else None
        self._reader = ShardReader(work.folder, work.file_bytes, self._crcs)
        self._output = OutputFiles(
            work.files, self._watch, digests=work.digests, journal=work.journal
        )
        self._choice = IoChoice(work.io, work.share.num_bytes)
        self._next = iter(range(work.share.num_buckets))
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._caught = Caught()
        self._num_done = 0
        self.may_copy_by_kernel = (
            work.io == "auto"
            and not work.checksums
            and not any(is_in_memory(path) for path in work.files[:1])
        )

    def progress(self) -> int:
        """Give a number that grows while the work gets on."""
        return self._num_done + self._output.num_synced

    def stop(self) -> None:
        """Ask the threads to end after what they have begun."""
        self._stop.set()
        if self._work.digests is not None:
            self._work.digests.let_go()

    def run(self) -> MoveResult:
        """Read and write everything, and wait until it is on disk.

        Returns:
            What was done.

        Raises:
            ConsolidateError: If a shard cannot be read.
            OSError: If an output file cannot be written.
        """
        with collector_paused():
            return self._run()

    def _run(self) -> MoveResult:
        workers = [_Worker(self) for _ in range(self._num_threads())]
        threads = [
            threading.Thread(target=worker.run, name=f"consolidate-{index}", daemon=True)
            for index, worker in enumerate(workers)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self._caught.raise_if_any()
            if not self._stop.is_set():
                self._output.sync()
        finally:
            self.stop()
            for thread in threads:
                # A signal may have come between the starts; whoever starts now finds it stopped.
                if thread.is_alive():
                    thread.join()
            self._reader.close()
            self._output.close()
        return self._result(workers)

    def _num_threads(self) -> int:
        return max(min(self._work.num_threads, self._work.share.num_buckets), 1)

    def _result(self, workers: Sequence[_Worker]) -> MoveResult:
        return MoveResult(
            self._reader.num_bytes_read,
            self._output.num_bytes_written,
            tuple(check for worker in workers for check in worker.checksums),
            frozenset().union(*(worker.overflowed for worker in workers)),
            self._watch.totals(),
            read_crcs=self._crcs.ranges() if self._crcs else {},
        )

    def take(self) -> int | None:
        """Give the next bucket to whichever thread asks; ``None`` if there is nothing to do."""
        with self._lock:
            self._num_done += 1
            return None if self._stop.is_set() else next(self._next, None)

    def fail(self, error: Exception) -> None:
        """Keep the first error, and end all threads."""
        with self._lock:
            self._caught.error = self._caught.error or error
        self.stop()


class _Worker:
    """One thread: its memory, and what it found."""

    def __init__(self, move: DirectMove) -> None:
        self._move, work = move, move._work
        self._plan, self._fragments = work.plan, Fragments(work.plan.groups)
        self._reader, self._output, self._watch = move._reader, move._output, move._watch
        self._out = aligned_bytes(work.share.max_bucket_bytes)
        self._raw = aligned_bytes(int(work.share.max_bucket_bytes * widest_cast(work.plan)))
        self._caster = Caster(work.share.num_bytes) if len(self._raw) else None
        self._bypass: BypassReader | None = None
        self._by_kernel = move.may_copy_by_kernel
        self.checksums: list[Checksum] = []
        self.overflowed: set[int] = set()
        # File, first byte and the byte behind the last one, of what was there already.
        self.skipped: list[tuple[int, int, int]] = []

    def run(self) -> None:
        with (caught := Caught()):
            while (index := self._move.take()) is not None:
                bucket = self._move._work.share.bucket(index)
                if self._is_finished(bucket):
                    self._look_back(bucket)
                else:
                    self._do(bucket)
        if caught.error is not None:
            self._move.fail(caught.error)

    def _is_finished(self, bucket: DirectBucket) -> bool:
        finished = self._move._work.finished
        return bool(finished) and all(
            finished.covers(write.file, write.offset_bytes, write.offset_bytes + write.num_bytes)
            for write in bucket.writes
        )

    def _look_back(self, bucket: DirectBucket) -> None:
        """Find out of a bucket that an earlier run has finished what is told of the others."""
        self.skipped += [
            (write.file, write.offset_bytes, write.offset_bytes + write.num_bytes)
            for write in bucket.writes
        ]
        tensors = (self._plan.tensors[item.tensor] for item in bucket.elements)
        if not self._move._work.checksums and not any(
            overflows(tensor.source.dtype, tensor.dtype) for tensor in tensors
        ):
            return
        for write in bucket.writes:
            room = self._out[write.at_bytes : write.at_bytes + write.num_bytes]
            self._output.read(write.file, room, write.offset_bytes)
        self._watch_infinities(bucket.elements)
        if self._move._work.checksums:
            self._note_checksums(bucket.elements)

    def _do(self, bucket: DirectBucket) -> None:
        way, lap = self._move._choice.next(), Lap()
        sources, raw_sources, casts = self._sources(bucket)
        copied = self._copy_by_kernel(bucket, sources) if self._kernel_may(way) else []
        done = set(copied)
        self._read(self._out, (s for s in sources if s not in done), way)
        self._read(self._raw, raw_sources, way)
        read_sec = lap()
        for cast in casts:
            self._cast(cast)
        self._watch_infinities(bucket.elements)
        for at, content in bucket.literals:
            self._out[at : at + len(content)] = content
        if self._move._work.checksums:
            self._note_checksums(bucket.elements)
        lap()
        self._write(bucket, copied, way)
        if way.is_trial:
            self._move._choice.tell(way, bucket.num_bytes, read_sec, lap())

    def _kernel_may(self, way: Way) -> bool:
        return self._by_kernel and not (way.is_trial or way.bypass_reads or way.bypass_writes)

    def _sources(self, bucket: DirectBucket) -> tuple[list[Source], list[Source], list[_Cast]]:
        """Find what to read: to the output's memory as it is, or to the source's to be cast."""
        plain: list[Source] = []
        raw: list[Source] = []
        casts: list[_Cast] = []
        raw_at = 0
        for item in bucket.elements:
            tensor = self._plan.tensors[item.tensor]
            dtype, stop = tensor.source.dtype, item.start_numel + item.num_numel
            is_cast = dtype != tensor.dtype
            at, room, found = (
                (raw_at, self._raw, raw) if is_cast else (item.at_bytes, self._out, plain)
            )
            for read in self._fragments.reads(tensor.source, item.start_numel, stop):
                if read.extent is None:
                    self._reader.fill(room[at:], read)
                    continue
                extent = read.extent
                where = (at + read.at_bytes, extent.num_bytes)
                found.append(Source(extent.file, extent.offset_bytes, *where))
            if is_cast:
                casts.append(_Cast(raw_at, item.at_bytes, item.num_numel, (dtype, tensor.dtype)))
                raw_at += item.num_numel * dtype.itemsize_bytes
        return list(_joined(sorted(plain))), list(_joined(sorted(raw))), list(_joined_casts(casts))

    def _copy_by_kernel(self, bucket: DirectBucket, sources: Sequence[Source]) -> list[Source]:
        """Let the kernel copy what is large; give what it has copied."""
        copied = []
        for source in sources:
            places = _overlaps(bucket, source)
            # Several places are filled from memory, so that the shard is read once.
            if source.num_bytes < _MIN_KERNEL_COPY_BYTES or len(places) > 1 or not self._by_kernel:
                continue
            if self._copied(source, places[0]):
                if not self._move._work.checks_source:  # else it was read, and is counted
                    self._reader.count(source.num_bytes)
                copied.append(source)
        return copied

    def _copied(self, source: Source, part: tuple[int, int, int, int]) -> bool:
        file, offset, at, num_bytes = part
        descriptor = self._reader.descriptor(source.file)
        start = source.offset_bytes + at - source.at_bytes
        checks = self._move._work.checks_source
        count = self._output.copy(file, offset, descriptor, start, num_bytes, is_shown_later=checks)
        if count is None:
            self._by_kernel = False
            return False
        if count < num_bytes:
            raise self._reader.cut_short(source.file, start + count, num_bytes - count)
        if checks:
            for done, block in self._reader.read_again(source.file, start, num_bytes):
                self._output.show(file, offset + done, block)
        return True

    def _read(self, room: memoryview, sources: Iterable[Source], way: Way) -> None:
        for file, offset, targets in _calls(room, sources):
            num_bytes = sum(map(len, targets))
            with self._watch.timing("read", num_bytes):
                if not (way.bypass_reads and self._past_cache(file, offset, targets)):
                    self._reader.scatter(file, offset, targets)

    def _past_cache(self, file: str, offset: int, targets: Sequence[memoryview]) -> bool:
        if self._bypass is None:
            self._bypass = BypassReader(self._reader, max(len(self._out), len(self._raw)))
        return self._bypass.scatter(file, offset, targets)

    def _cast(self, cast: _Cast) -> None:
        assert self._caster is not None
        source_dtype, target_dtype = cast.pair
        source_bytes = cast.num_numel * source_dtype.itemsize_bytes
        target_bytes = cast.num_numel * target_dtype.itemsize_bytes
        source = self._raw[cast.source_at : cast.source_at + source_bytes]
        target = self._out[cast.target_at : cast.target_at + target_bytes]
        with self._watch.timing("assemble", source_bytes):
            self._caster.cast(source, source_dtype, target, target_dtype)

    def _watch_infinities(self, elements: Sequence[Filled]) -> None:
        for item in elements:
            tensor = self._plan.tensors[item.tensor]
            if item.tensor in self.overflowed or not overflows(tensor.source.dtype, tensor.dtype):
                continue
            num_bytes = item.num_numel * tensor.dtype.itemsize_bytes
            if has_infinity(self._out[item.at_bytes : item.at_bytes + num_bytes]):
                self.overflowed.add(item.tensor)

    def _note_checksums(self, elements: Sequence[Filled]) -> None:
        for item in elements:
            known: dict[tuple[int, int], int] = {}
            for kept in item.kept:
                part = (kept.at_bytes, kept.num_bytes)
                if part not in known:
                    known[part] = crc32(self._out[part[0] : part[0] + part[1]])
                self.checksums.append(
                    Checksum(kept.file, kept.stored, kept.start_bytes, kept.num_bytes, known[part])
                )

    def _write(self, bucket: DirectBucket, copied: Sequence[Source], way: Way) -> None:
        options = {"bypass": way.bypass_writes, "wait": way.is_trial}
        for write in bucket.writes:
            for low, high in _left(write.at_bytes, write.at_bytes + write.num_bytes, copied):
                offset = write.offset_bytes + low - write.at_bytes
                self._output.write(write.file, self._out[low:high], offset, **options)


def widest_cast(plan: Plan) -> float:
    """Tell how many source bytes are held for an output byte at most; 0 where nothing is cast."""
    ratios = (
        tensor.source.dtype.itemsize_bytes / tensor.dtype.itemsize_bytes
        for tensor in plan.tensors
        if tensor.source.dtype != tensor.dtype
    )
    return max(ratios, default=0)


def _joined(sources: Iterable[Source]) -> Iterator[Source]:
    """Put neighbours together."""
    last: Source | None = None
    for source in sources:
        if last is not None and last.followed_by(source):
            last = last._replace(num_bytes=last.num_bytes + source.num_bytes)
            continue
        if last is not None:
            yield last
        last = source
    if last is not None:
        yield last


def _joined_casts(casts: Iterable[_Cast]) -> Iterator[_Cast]:
    last: _Cast | None = None
    for cast in casts:
        if last is not None and cast.pair == last.pair:
            ends = [
                at + last.num_numel * dtype.itemsize_bytes
                for at, dtype in zip((last.source_at, last.target_at), last.pair, strict=True)
            ]
            if ends == [cast.source_at, cast.target_at]:
                last = last._replace(num_numel=last.num_numel + cast.num_numel)
                continue
        if last is not None:
            yield last
        last = cast
    if last is not None:
        yield last


def _calls(
    room: memoryview, sources: Iterable[Source]
) -> Iterator[tuple[str, int, list[memoryview]]]:
    """Put what lies next to each other in a shard into one call with many places."""
    file, start, end = "", 0, -1
    places: list[memoryview] = []
    for source in sources:
        if places and (source.file, source.offset_bytes) != (file, end):
            yield file, start, places
            places = []
        if not places:
            file, start = source.file, source.offset_bytes
        places.append(room[source.at_bytes : source.at_bytes + source.num_bytes])
        end = source.offset_bytes + source.num_bytes
    if places:
        yield file, start, places


def _overlaps(bucket: DirectBucket, source: Source) -> list[tuple[int, int, int, int]]:
    """Give where a source's bytes go: file, offset, place in the bucket, length."""
    found = []
    for write in bucket.writes:
        low = max(write.at_bytes, source.at_bytes)
        high = min(write.at_bytes + write.num_bytes, source.at_bytes + source.num_bytes)
        if low < high:
            found.append((write.file, write.offset_bytes + low - write.at_bytes, low, high - low))
    return found


def _left(low: int, high: int, copied: Sequence[Source]) -> Iterator[tuple[int, int]]:
    """Give what of ``[low, high)`` is not copied yet."""
    for source in sorted(copied, key=lambda s: s.at_bytes):
        start, stop = source.at_bytes, source.at_bytes + source.num_bytes
        if stop <= low or start >= high:
            continue
        if low < start:
            yield low, start
        low = max(low, stop)
    if low < high:
        yield low, high
