"""Records of a torch zip file with their checksums, and what ranges read tell of them.

Source: the zip format (APPNOTE.TXT 4.4.7): the directory holds a CRC-32 of each record. Torch can
be told to compute none (``torch.serialization.set_crc32_options``); it then writes 0.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from dist_consolidate.checkpoint.archive import ZipRecords
from dist_consolidate.checksums import crc32
from dist_consolidate.crc_pieces import CrcRange, joined
from dist_consolidate.doing import Doing
from dist_consolidate.errors import CheckpointError

# A zip file begins with a record.
_ZIP = b"PK\x03\x04"
_BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A record of a shard whose checksum is known.

    Attributes:
        name: Its name, such as ``data/5``.
        start_bytes: Where its bytes begin in the file.
        stop_bytes: Where they end.
        crc: Their CRC-32 when they were saved.
    """

    name: str
    start_bytes: int
    stop_bytes: int
    crc: int

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return self.stop_bytes - self.start_bytes


def read_records(path: Path) -> tuple[Record, ...]:
    """List the records of a shard that have a checksum.

    Args:
        path: The shard.

    Returns:
        The records, by address; none for what is no zip file (torch's format of before 1.6, swap
        files), or was written without checksums.

    Raises:
        CheckpointError: If the file is damaged, or cannot be read.
    """
    try:
        with path.open("rb") as stream:
            if stream.read(len(_ZIP)) != _ZIP:
                return ()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    places = ZipRecords(path).places()
    found = [Record(name, at, at + size, crc) for name, at, size, crc in places if size and crc]
    return tuple(sorted(found, key=lambda record: record.start_bytes))


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """What is known of a record.

    Attributes:
        crc: The CRC-32 of what was read, if that is all of it.
        gaps: Ranges that must be read (again) to know it; empty if ``crc`` is set.
        is_touched: Whether anything of it was read.
    """

    crc: int | None
    gaps: tuple[tuple[int, int], ...] = ()
    is_touched: bool = True

    @property
    def num_gap_bytes(self) -> int:
        """What is left to read."""
        return sum(stop - start for start, stop in self.gaps)


def judge(record: Record, ranges: Sequence[CrcRange]) -> Judged:
    """Put the checksums of ranges together to that of a record.

    Args:
        record: The record.
        ranges: What was read of its file, sorted by where it begins and, of ranges that begin
            alike, the longest first.

    Returns:
        Its checksum, or what is missing for that. Where ranges overlap without one holding the
        other, nothing can be put together, and the whole record is missing.
    """
    start, stop = record.start_bytes, record.stop_bytes
    first = bisect.bisect_left(ranges, start, key=lambda found: found.start_bytes)
    last = bisect.bisect_left(ranges, stop, key=lambda found: found.start_bytes)
    inside = [found for found in ranges[first:last] if found.stop_bytes <= stop]
    if not inside:
        return Judged(None, ((start, stop),), is_touched=False)
    whole = CrcRange(start, start, 0)
    gaps: list[tuple[int, int]] = []
    at = start
    for found in inside:
        if found.stop_bytes <= at:
            continue
        if found.start_bytes < at:
            return Judged(None, ((start, stop),))
        if found.start_bytes > at:
            gaps.append((at, found.start_bytes))
        else:
            whole = joined(whole, found)
        at = found.stop_bytes
    if at < stop:
        gaps.append((at, stop))
    return Judged(None, tuple(gaps)) if gaps else Judged(whole.crc)


def damaged_records(path: Path, spans: Sequence[tuple[int, int]]) -> tuple[Record, ...]:
    """Read records, and find those that are not what was saved.

    Args:
        path: The shard.
        spans: First byte, and behind the last byte; records that one of them touches are read.

    Returns:
        The records that have another checksum, or cannot be read.

    Raises:
        CheckpointError: If the file itself is damaged, or cannot be opened.
    """
    chosen = [
        record
        for record in read_records(path)
        if any(low < record.stop_bytes and record.start_bytes < high for low, high in spans)
    ]
    with Doing("reading", path), path.open("rb", buffering=0) as stream:
        return tuple(record for record in chosen if _crc_in(stream, record) != record.crc)


def _crc_in(stream: BinaryIO, record: Record) -> int | None:
    """Give the checksum of a record as it is now; ``None`` where the disk fails."""
    crc, at = 0, record.start_bytes
    with contextlib.suppress(OSError):
        stream.seek(at)
        while at < record.stop_bytes:
            data = stream.read(min(_BLOCK_BYTES, record.stop_bytes - at))
            if not data:
                return None
            crc, at = crc32(data, crc), at + len(data)
        return crc
    return None
