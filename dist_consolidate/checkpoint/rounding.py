"""Comparing an fp32 master with a 16-bit copy of it: the only time that planning reads weights.

Values testify where names do not: stage 0's masters are pickled without names, and a tied name may
have been cloned before it was saved.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from dist_consolidate.checkpoint.fragments import Read, fragments
from dist_consolidate.checkpoint.model import FlatGroup, Source
from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.dtypes import DType

_CHUNK_NUMEL = 1 << 20

# By file, what has been compared: first byte, behind the last one.
Compared = dict[str, set[tuple[int, int]]]
_compared: contextvars.ContextVar[Compared | None] = contextvars.ContextVar(
    "compared", default=None
)


@contextlib.contextmanager
def comparing() -> Iterator[Compared]:
    """Note what is compared inside a block: where values do not fit, they may be damaged.

    Yields:
        The ranges, by file.
    """
    token = _compared.set({})
    try:
        noted = _compared.get()
        assert noted is not None  # it has just been set
        yield noted
    finally:
        _compared.reset(token)


class Fingerprints:
    """Digests of tensors' values, rounded to an element type, chunk by chunk."""

    def __init__(self, folder: Path | Sequence[Path], groups: Sequence[FlatGroup] = ()) -> None:
        """Open nothing yet.

        Args:
            folder: The tag folder, or all folders its shards lie in.
            groups: The flat groups that sources refer to.
        """
        self._reader, self._groups = ShardReader(folder, {}), groups

    def close(self) -> None:
        """Close the shards."""
        self._reader.close()

    def of(self, source: Source, dtype: DType) -> bytes:
        """Digest a tensor.

        Args:
            source: Where its values lie.
            dtype: What they are rounded to first.

        Returns:
            SHA-256 of the rounded elements in row-major order.

        Raises:
            CheckpointError: If a shard cannot be read.
        """
        import torch

        width, state = source.dtype.itemsize_bytes, hashlib.sha256()
        ours, theirs = getattr(torch, source.dtype.name), getattr(torch, dtype.name)
        compared = _compared.get()
        for read in sorted(fragments(source, self._groups), key=lambda part: part.at_bytes):
            if compared is not None:
                file, start, stop = read.place()
                compared.setdefault(file, set()).add((start, stop))
            total = read.stop_numel - read.start_numel
            if read.extent is not None:
                total = read.extent.num_bytes // width
            for start in range(0, total, _CHUNK_NUMEL):
                count = min(_CHUNK_NUMEL, total - start)
                data = bytearray(count * width)
                self._reader.fill(memoryview(data), _part(read, start, count, width))
                rounded = torch.frombuffer(data, dtype=ours).to(theirs)
                if ours != theirs:  # what a NaN is rounded to depends on the device
                    # By bytes: torch fills no float8 tensor under a mask.
                    nan = torch.full((1,), float("nan"), dtype=torch.float32).to(theirs)
                    bits = rounded.view(torch.uint8).view(count, -1)
                    bits[rounded.isnan()] = nan.view(torch.uint8)
                size = count * rounded.element_size()
                state.update(ctypes.string_at(rounded.data_ptr(), size))
        return state.digest()


def _part(read: Read, start: int, count: int, width: int) -> Read:
    if read.extent is None:
        first = read.start_numel + start
        return Read(0, None, read.span, first, first + count)
    extent = read.extent
    offset = extent.offset_bytes + start * width
    return Read(0, type(extent)(extent.file, offset, count * width))
