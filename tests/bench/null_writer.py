"""Throws away what is written into the output, so that everything before the disk is timed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SCRATCH_BYTES = 1 << 20


class NullWriter:
    """Stands in for the calls that write at an offset, for files of one output folder.

    The bytes of ``copy_file_range`` are read, as that call would have to, and then dropped.
    Attribute ``discarded_bytes`` says how much was dropped: compare it with what should have been
    written, for a pipeline may come to write in some other way.
    """

    def __init__(self, output_dir: Path) -> None:
        """Remember the folder: the final one, and the hidden one beside it or in it."""
        target = output_dir.resolve()
        self._prefixes = (f"{target}/", f"{target.parent}/.{target.name}.")
        self._lock = threading.Lock()
        self._write, self._write_vector = os.pwrite, os.pwritev
        self._copy = os.copy_file_range
        self.discarded_bytes = 0

    def install(self) -> None:
        """Replace the calls of this process, for good."""
        for name in ("pwrite", "pwritev", "copy_file_range"):
            setattr(os, name, getattr(self, f"_null_{name}"))

    def _is_output(self, descriptor: int) -> bool:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(self._prefixes)

    def _drop(self, num_bytes: int) -> int:
        with self._lock:
            self.discarded_bytes += num_bytes
        return num_bytes

    def _null_pwrite(self, fd: int, data: Any, offset: int, /) -> int:
        if self._is_output(fd):
            return self._drop(memoryview(data).nbytes)
        return self._write(fd, data, offset)

    def _null_pwritev(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0, /) -> int:
        if self._is_output(fd):
            return self._drop(sum(memoryview(buffer).nbytes for buffer in buffers))
        return self._write_vector(fd, buffers, offset, flags)

    def _null_copy_file_range(
        self,
        src: int,
        dst: int,
        count: int,
        offset_src: int | None = None,
        offset_dst: int | None = None,
    ) -> int:
        if not self._is_output(dst):
            return self._copy(src, dst, count, offset_src, offset_dst)
        scratch = bytearray(min(count, _SCRATCH_BYTES))
        if offset_src is None:
            return self._drop(os.readv(src, [scratch]))
        return self._drop(os.preadv(src, [scratch], offset_src))
