"""The journal of a run: which ranges of the output files are on disk; a later run goes on from it.

Each writing rank has a journal of its own beside the output files, to which it appends. A range is
claimed only after it is safe, in this order:

1. the bytes are written,
2. ``fdatasync`` of the output file returns: the bytes, and the file's length, survive a power loss,
3. the record is appended, and ``fdatasync`` of the journal returns.

Whatever stops the run between two of these, a claimed range holds its bytes; what is on disk but
not claimed is done again. Files are created with their full size, so that a range nobody has
written reads as zeros: a file's length, or that it exists, claims nothing. The folders that the
files stand in are synced before the first claim. Each record ends in a checksum that depends on the
checkpoint and the options as well: a torn last record, and a journal of something else, count for
nothing.

Claims are made by a thread every few seconds or some hundred MB. Write-back is started with each
write already (:mod:`dist_consolidate.runtime.writeback`), so that it seldom waits for long.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from dist_consolidate.doing import Doing
from dist_consolidate.errors import Caught
from dist_consolidate.plan.ranges import Finished, Interval, merged

# So much may be done again after a kill, in bytes and in time.
_CLAIM_BYTES, _CLAIM_SEC = 256 << 20, 5.0
# Fast disks are not to be asked for more than that.
_PAUSE_SEC = 1.0
_LEAVING_SEC = 10.0
_NAME = re.compile(r"journal-(?P<attempt>\d+)-\d+")
_RECORD = re.compile(rb"(\d{1,9}) (\d{1,18}) (\d{1,18}) ([0-9a-f]{8})")


@dataclasses.dataclass(frozen=True, slots=True)
class JournalPlace:
    """Where a run keeps its journals, and what earlier runs had finished; the same on every rank.

    Attributes:
        folder: Holds the journals of all ranks and all attempts.
        attempt: Which attempt this is, counted from 1.
        digest: Of everything that decides what the output's bytes are.
        finished: What earlier attempts have claimed.
    """

    folder: Path
    attempt: int
    digest: str
    finished: Finished


def journal_names(folder: Path) -> list[str]:
    """Name the journals in a folder."""
    return sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name))


def has_claims(folder: Path) -> bool:
    """Tell whether anything is claimed in a folder, which may be gone."""
    try:
        return any((folder / name).stat().st_size for name in journal_names(folder))
    except OSError:
        return False


def read_journals(folder: Path, digest: str, sizes: Sequence[int]) -> JournalPlace:
    """Collect what earlier attempts have claimed.

    Args:
        folder: Holds their journals.
        digest: As they were written with; others' records are ignored.
        sizes: Size of each output file, in bytes.

    Returns:
        The place, with a new attempt.

    Raises:
        OSError: If a journal cannot be read.
    """
    found: list[list[Interval]] = [[] for _ in sizes]
    attempt = 0
    for name in journal_names(folder):
        match = _NAME.fullmatch(name)
        assert match is not None
        attempt = max(attempt, int(match["attempt"]))
        for file, low, high in _records((folder / name).read_bytes(), digest):
            if file < len(sizes) and low < high <= sizes[file]:
                found[file].append((low, high))
    finished = Finished(tuple(map(merged, found)))
    return JournalPlace(folder, attempt + 1, digest, finished)


def _records(content: bytes, digest: str) -> Iterable[tuple[int, int, int]]:
    """Give the records of a journal up to the first one that is torn."""
    seed = zlib.crc32(digest.encode())
    *lines, _ = content.split(b"\n")  # without a newline at its end the last one is torn
    for line in lines:
        match = _RECORD.fullmatch(line)
        if match is None or int(match[4], 16) != zlib.crc32(line[:-9], seed):
            return
        yield int(match[1]), int(match[2]), int(match[3])


def _record(file: int, low: int, high: int, digest: str) -> bytes:
    text = f"{file} {low} {high}".encode()
    return b"%s %08x\n" % (text, zlib.crc32(text, zlib.crc32(digest.encode())))


class Journal:
    """Claims what one rank writes; several threads may tell it."""

    def __init__(self, place: JournalPlace, rank: int, paths: Sequence[Path]) -> None:
        """Make nothing yet.

        Args:
            place: Where it is kept.
            rank: This rank.
            paths: The output files.
        """
        self._place, self._paths = place, paths
        self._path = place.folder / f"journal-{place.attempt:04d}-{rank}"
        self._lock = threading.Lock()
        self._wake, self._over = threading.Event(), threading.Event()
        self._waiting: list[tuple[int, int, int]] = []
        self._waiting_bytes = 0
        self._descriptor: int | None = None
        self._caught = Caught()
        self._thread: threading.Thread | None = None

    def written(self, file: int, low: int, high: int) -> None:
        """Take a range of an output file that has been written.

        Args:
            file: Index of the file.
            low: First byte.
            high: Behind the last byte.

        Raises:
            OSError: If what was written before cannot be made safe.
        """
        self._caught.raise_if_any()
        with self._lock:
            self._waiting.append((file, low, high))
            self._waiting_bytes += high - low
            if self._thread is None and not self._over.is_set():
                self._thread = threading.Thread(
                    target=self._work, name="consolidate-journal", daemon=True
                )
                self._thread.start()
            if self._waiting_bytes >= _CLAIM_BYTES:
                self._wake.set()

    def finish(self) -> None:
        """Claim all that was written; the output files must have been synced.

        Raises:
            OSError: If the disk refuses.
        """
        self._end(None)
        self._caught.raise_if_any()
        self._claim(is_synced=True)

    def close(self) -> None:
        """End without a further claim."""
        self._end(_LEAVING_SEC)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _end(self, timeout_sec: float | None) -> None:
        with self._lock:
            thread = self._thread
            self._over.set()
        self._wake.set()
        if thread is not None:
            thread.join(timeout_sec)

    def _work(self) -> None:
        with self._caught:
            while True:
                self._wake.wait(_CLAIM_SEC)
                self._wake.clear()
                if self._over.is_set():
                    return
                self._claim(is_synced=False)
                self._over.wait(_PAUSE_SEC)

    def _claim(self, *, is_synced: bool) -> None:
        with self._lock:
            waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not waiting:
            return
        by_file: dict[int, list[Interval]] = {}
        for file, low, high in waiting:
            by_file.setdefault(file, []).append((low, high))
        if not is_synced:
            for file in by_file:
                _sync_data(self._paths[file])
        self._append(by_file)

    def _append(self, by_file: dict[int, list[Interval]]) -> None:
        text = b"".join(
            _record(file, low, high, self._place.digest)
            for file, intervals in sorted(by_file.items())
            for low, high in merged(intervals)
        )
        try:
            with Doing("writing", self._path):
                if self._descriptor is None:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                    self._descriptor = os.open(self._path, flags, 0o644)
                    _sync_folder(self._path.parent)
                view = memoryview(text)
                while view:
                    view = view[os.write(self._descriptor, view) :]
                os.fdatasync(self._descriptor)
        except OSError as error:
            error.filename = str(self._path)
            raise


def _sync_data(path: Path) -> None:
    try:
        with Doing("syncing", path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
