"""One thread that copies: the least that moving so many bytes can take, without any thought.

    python -m tests.bench.copy_loop NUM_BYTES OUTPUT_DIR SHARD...

Reads the shards' ranges that are no holes, over and over until there are enough bytes, and writes
them one after another into a file whose space is reserved. The clock runs from the first read to
the end of fsync.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench.page_cache import data_extents
from tests.bench.self_proc import memory_bytes, tell

_CHUNK_BYTES = 1 << 20


def chunks(shards: Sequence[Path]) -> Iterator[tuple[int, int, int]]:
    """Give descriptor, offset and length of what to read, without end."""
    extents = [
        (os.open(path, os.O_RDONLY), start, stop)
        for path in shards
        for start, stop in data_extents(path)
    ]
    for descriptor, start, stop in itertools.cycle(extents):
        for at in range(start, stop, _CHUNK_BYTES):
            yield descriptor, at, min(_CHUNK_BYTES, stop - at)


def copy(source: Iterator[tuple[int, int, int]], out: int, num_bytes: int) -> None:
    """Copy that many bytes."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    done = 0
    while done < num_bytes:
        descriptor, at, length = next(source)
        length = min(length, num_bytes - done)
        got = os.preadv(descriptor, [buffer[:length]], at)
        assert got == length, "a short read"
        written = os.pwrite(out, buffer[:length], done)
        assert written == length, "a short write"
        done += length


def main(arguments: Sequence[str]) -> None:
    """Reserve the file, copy, sync, and print the seconds."""
    num_bytes, folder = int(arguments[0]), Path(arguments[1])
    source = chunks([Path(text) for text in arguments[2:]])
    folder.mkdir()
    out = os.open(folder / "copy", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.posix_fallocate(out, 0, num_bytes)
    started = time.perf_counter()
    copy(source, out, num_bytes)
    written = time.perf_counter()
    for descriptor in (out, os.open(folder, os.O_RDONLY)):
        os.fsync(descriptor)
    ended = time.perf_counter()
    stages = [["copy", num_bytes, written - started], ["sync", num_bytes, ended - written]]
    tell(
        {
            "moving_sec": ended - started,
            "num_bytes": num_bytes,
            "peak_bytes": memory_bytes("VmHWM"),
            "ranks": [{"stages": stages}],
        }
    )


if __name__ == "__main__":
    main(sys.argv[1:])
