"""Output files: writing at known offsets, from several threads, through one of three ways.

Buffered writes go through the page cache, with write-back started at once. Direct ones (O_DIRECT)
bypass it where offset, length and memory are aligned. Copies are left to the kernel
(copy_file_range), which moves no byte through this process, and on some file systems none at all.

Sources: open(2) for O_DIRECT's alignment; copy_file_range(2) for what it refuses.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from dist_consolidate.doing import Doing
from dist_consolidate.runtime.digests import Digests
from dist_consolidate.runtime.journal import Journal
from dist_consolidate.runtime.stages import Stopwatch
from dist_consolidate.runtime.writeback import start_writeback, wait_for_writeback

ALIGNMENT_BYTES = 4096
# What a file system says that cannot do what was asked: the plain way can.
_UNSUPPORTED = (
    errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM,
    errno.ETXTBSY,
)  # fmt: skip
# The kernel's copies are cut so that write-back starts early.
_COPY_BYTES = 8 << 20


def aligned_bytes(num_bytes: int) -> memoryview:
    """Give page-aligned memory of a size, to be filled; it is freed with the last view of it."""
    try:
        return memoryview(mmap.mmap(-1, max(num_bytes, 1)))[:num_bytes]
    except OSError as error:
        # To be told as memory, not as a file that has no name.
        raise MemoryError(f"{num_bytes:,} bytes cannot be allocated") from error


def address_of(view: memoryview) -> int:
    """Give the address of a writable view's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class OutputFiles:
    """Files that exist with their full size, to be filled by this process and others.

    Attributes:
        num_bytes_written: Bytes that went into them.
        num_synced: Files that :meth:`sync` is done with.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        watch: Stopwatch,
        *,
        digests: Digests | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            paths: The files.
            watch: Where the time goes to.
            digests: Told of what was written.
            journal: Told of it, too; closed with the files.
        """
        self._paths, self._watch = paths, watch
        self._digests, self._journal = digests, journal
        if digests is not None:
            digests.watch_with(watch)
        # Until a file system says that it cannot.
        self._can_bypass = True
        self._descriptors: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self.num_bytes_written = self.num_synced = 0

    def write(
        self,
        file: int,
        data: memoryview,
        offset_bytes: int,
        *,
        bypass: bool = False,
        wait: bool = False,
    ) -> None:
        """Write bytes at an offset.

        Args:
            file: Index of the file.
            data: The bytes.
            offset_bytes: Where they go.
            bypass: Write past the page cache where alignment allows.
            wait: Wait until the disk has them.

        Raises:
            OSError: With the file's name, if the system refuses.
        """
        with self._watch.timing("write", len(data)), _named(self._paths[file], "writing"):
            low = high = len(data)
            if bypass and self._can_bypass:
                low, high = _aligned_part(data, offset_bytes)
            self._plainly(file, data[:low], offset_bytes)
            if low < high and not self._directly(file, data[low:high], offset_bytes + low):
                self._plainly(file, data[low:high], offset_bytes + low)
            self._plainly(file, data[high:], offset_bytes + high)
            if wait:
                wait_for_writeback(self._descriptor(file), offset_bytes, len(data))
        self._count(file, offset_bytes, len(data))
        self.show(file, offset_bytes, data)

    def copy(
        self,
        file: int,
        offset_bytes: int,
        source: int,
        source_bytes: int,
        num_bytes: int,
        *,
        is_shown_later: bool = False,
    ) -> int | None:
        """Let the kernel copy a range from another file.

        Args:
            file: Index of the file.
            offset_bytes: Where the range goes.
            source: Descriptor of the file to copy from.
            source_bytes: Where the range begins there.
            num_bytes: Length.
            is_shown_later: Whether :meth:`show` will get these bytes: they are not read back then.

        Returns:
            What was copied, less than asked for only if the source has ended; ``None`` if the
            kernel cannot do it between these files, and nothing was copied.

        Raises:
            OSError: With the file's name, if the system refuses for another reason.
        """
        done, descriptor = 0, self._descriptor(file)
        path = self._paths[file]
        with self._watch.timing("copy", num_bytes), _named(path, "writing"):
            while done < num_bytes:
                step = min(num_bytes - done, _COPY_BYTES)
                try:
                    with Doing("copying to", path):
                        count = os.copy_file_range(
                            source, descriptor, step, source_bytes + done, offset_bytes + done
                        )
                except OSError as error:
                    if error.errno in _UNSUPPORTED and not done:
                        return None
                    raise
                if not count:
                    break
                start_writeback(descriptor, offset_bytes + done, count)
                done += count
        self._count(file, offset_bytes, done)
        if self._digests is not None and not is_shown_later:
            self._digests.written(file, offset_bytes, offset_bytes + done)
        return done

    def show(self, file: int, offset_bytes: int, data: memoryview) -> None:
        """Hand in what was copied to a range, so that it need not be read back to be digested.

        Args:
            file: Index of the file.
            offset_bytes: Where the range begins.
            data: Its bytes.
        """
        if self._digests is not None:
            self._digests.written(file, offset_bytes, offset_bytes + len(data), data)

    def sync(self) -> None:
        """Wait until everything written here is on disk.

        Raises:
            OSError: With the file's name, if the disk refuses.
        """
        with self._watch.timing("sync", 0):
            for (file, _), descriptor in list(self._descriptors.items()):
                with _named(self._paths[file], "syncing"):
                    os.fsync(descriptor)
                self.num_synced += 1
            if self._journal is not None:
                self._journal.finish()

    def read(self, file: int, room: memoryview, offset_bytes: int) -> None:
        """Read back what an earlier run has written.

        Args:
            file: Index of the file.
            room: Where the bytes go; filled as a whole.
            offset_bytes: Where they begin in the file.

        Raises:
            OSError: With the file's name, if the system refuses.
        """
        done = 0
        with _named(self._paths[file], "reading back"):
            descriptor = self._descriptor(file, os.O_RDONLY)
            while done < len(room):
                count = os.preadv(descriptor, [room[done:]], offset_bytes + done)
                if not count:
                    raise OSError(errno.EIO, "the file was cut short", str(self._paths[file]))
                done += count

    def close(self) -> None:
        """Close the files."""
        if self._journal is not None:
            self._journal.close()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _count(self, file: int, offset_bytes: int, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes_written += num_bytes
        if self._journal is not None and num_bytes:
            self._journal.written(file, offset_bytes, offset_bytes + num_bytes)

    def _plainly(self, file: int, data: memoryview, offset_bytes: int) -> None:
        if len(data):
            descriptor = self._descriptor(file)
            _write_all(descriptor, data, offset_bytes)
            start_writeback(descriptor, offset_bytes, len(data))

    def _directly(self, file: int, data: memoryview, offset_bytes: int) -> bool:
        try:
            _write_all(self._descriptor(file, os.O_WRONLY | os.O_DIRECT), data, offset_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # This file system, or this device, wants another alignment or cannot do it at all.
            self._can_bypass = False
            return False
        return True

    def _descriptor(self, file: int, flags: int = os.O_WRONLY) -> int:
        with self._lock:
            key = (file, flags)
            if key not in self._descriptors:
                self._descriptors[key] = os.open(self._paths[file], flags | os.O_CLOEXEC)
            return self._descriptors[key]


def _aligned_part(data: memoryview, offset_bytes: int) -> tuple[int, int]:
    """Give the part that may bypass the page cache, as places in the data; perhaps empty."""
    low = -offset_bytes % ALIGNMENT_BYTES
    high = (len(data) + offset_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES - offset_bytes
    if low >= high or (address_of(data) + low) % ALIGNMENT_BYTES:
        return len(data), len(data)
    return low, high


def _write_all(descriptor: int, data: memoryview, offset_bytes: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset_bytes + done)


@contextlib.contextmanager
def _named(path: Path, what: str) -> Iterator[None]:
    """Put the file's name into what the operating system says of a descriptor."""
    try:
        with Doing(what, path):
            yield
    except OSError as error:
        error.filename = str(path)
        raise
