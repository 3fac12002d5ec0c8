"""The page cache: which bytes of a file are no hole, reading them into it, dropping it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_DROP = Path("/proc/sys/vm/drop_caches")


def data_extents(path: Path) -> Iterator[tuple[int, int]]:
    """Give the ranges of a file that are no holes, as start and stop."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        stop = 0
        while True:
            try:
                start = os.lseek(descriptor, stop, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole, or nothing, comes after it
                    return
                raise
            stop = os.lseek(descriptor, start, os.SEEK_HOLE)
            yield start, stop
    finally:
        os.close(descriptor)


def warm(files: Iterable[Path]) -> None:
    """Read what is in the files, holes left out, so that it is in the page cache."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for path in files:
        extents = list(data_extents(path))
        with path.open("rb", buffering=0) as file:
            for start, stop in extents:
                for at in range(start, stop, _CHUNK_BYTES):
                    os.preadv(file.fileno(), [buffer[: min(_CHUNK_BYTES, stop - at)]], at)


def resident_ratio(files: Iterable[Path]) -> float | None:
    """Give how much of the files, holes left out, is in the page cache: 0 to 1."""
    found = total = 0
    for path in files:
        extents = list(data_extents(path))
        if extents:
            pages = _resident_pages(path)
            for start, stop in extents:
                part = pages[start // mmap.PAGESIZE : -(-stop // mmap.PAGESIZE)]
                total += len(part)
                found += sum(page & 1 for page in part)
    return found / total if total else None


def _resident_pages(path: Path) -> bytes:
    """Give one byte for each page of a file; the lowest bit says that it is in memory."""
    num_bytes = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    with path.open("rb") as file:
        # A private mapping is writable to ctypes, which asks for that before it tells an address.
        view = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY)
    with view:
        start = ctypes.c_char.from_buffer(view)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(start))
        failed = libc.mincore(address, ctypes.c_size_t(num_bytes), pages)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return bytes(pages)


def drop() -> None:
    """Drop the whole page cache (needs root), so that the next reads come from the disk."""
    os.sync()
    _DROP.write_text("3")


def why_not_droppable(file_system: str) -> str | None:
    """Say why the cache cannot be dropped, if it cannot."""
    if file_system in ("tmpfs", "ramfs"):
        return f"files on {file_system} are always in memory; choose another --dir"
    if not os.access(_DROP, os.W_OK):
        return f"dropping the page cache needs root (writing to {_DROP} is not allowed)"
    return None
