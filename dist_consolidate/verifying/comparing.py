"""Comparing a tensor of a result with the shards, block by block, in memory that does not grow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_consolidate.checkpoint.fragments import Fragments
from dist_consolidate.checkpoint.model import FlatGroup, Source
from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.dtypes import BY_NAME, DType
from dist_consolidate.errors import CheckpointError
from dist_consolidate.verifying.against_shards import Comparison, Shards
from dist_consolidate.verifying.findings import Difference, Rounded
from dist_consolidate.verifying.ranges import read_range

if TYPE_CHECKING:
    import torch

# Elements at once.
_BLOCK_NUMEL = 1 << 19


class Comparer:
    """Compares tensors; several threads may do so at once.

    Attributes:
        rounded: The 16-bit weights that differ from their rounded masters.
    """

    def __init__(self, output_dir: Path, shards: Shards, count: Callable[[int], None]) -> None:
        """Open nothing yet.

        Args:
            output_dir: The result.
            shards: What it is compared with.
            count: Told of each block's bytes.
        """
        self._dir, self._count = output_dir, count
        sizes = {shard.name: shard.num_bytes for shard in shards.folder.shards}
        self._reader = ShardReader(shards.folder.folders, sizes)
        self._groups: Sequence[FlatGroup] = shards.groups
        self._loaded: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.rounded: list[Rounded] = []

    def close(self) -> None:
        """Close the shards, and let go of the output files."""
        self._reader.close()
        self._loaded.clear()

    def run(self, item: Comparison) -> Difference | None:
        """Compare one tensor.

        Args:
            item: The tensor.

        Returns:
            The first difference, if there is one.

        Raises:
            CheckpointError: If a shard cannot be read.
        """
        fragments = Fragments(self._groups)
        copies = [_Rounding(name, source) for name, source in item.copies]
        total, first, num_wrong, what = item.source.num_numel, -1, 0, ""
        try:
            for start in range(0, total, _BLOCK_NUMEL):
                stop = min(start + _BLOCK_NUMEL, total)
                want = self._source(fragments, item.source, start, stop)
                for copy in copies:
                    copy.take(want, self._source(fragments, copy.source, start, stop), start)
                found = self._found(item, start, stop)
                if found is None:
                    return Difference(item.file, item.label, "the file ends before its end")
                wrong = _unequal(found, want)
                if len(wrong) and not num_wrong:
                    first = start + int(wrong[0])
                    what = _values(found, want, int(wrong[0]))
                num_wrong += len(wrong)
        except OSError as error:
            return Difference(item.file, item.label, f"cannot be read: {error.strerror or error}")
        except _UnreadableError as error:
            return Difference(item.file, item.label, str(error))
        with self._lock:
            self.rounded += [copy.result() for copy in copies if copy.num_unequal]
        if not num_wrong:
            return None
        where = f"element {first} is the first of {num_wrong:,} of {total:,} that differ"
        return Difference(item.file, item.label, f"{where}: {what}")

    def _source(self, fragments: Fragments, source: Source, start: int, stop: int) -> torch.Tensor:
        """Read elements out of the shards."""
        data = bytearray((stop - start) * source.dtype.itemsize_bytes)
        view, num_filled = memoryview(data), 0
        for read in fragments.reads(source, start, stop):
            self._reader.fill(view, read)
            strided = (read.stop_numel - read.start_numel) * source.dtype.itemsize_bytes
            num_filled += strided if read.extent is None else read.extent.num_bytes
        if num_filled != len(data):  # zeros that nobody read must not pass for values
            raise CheckpointError(
                f"elements {start} to {stop} of a tensor of shape {list(source.shape)} have "
                f"{len(data)} bytes, but the shards give {num_filled} for them"
            )
        self._count(len(data))
        return _tensor(data, source.dtype)

    def _found(self, item: Comparison, start: int, stop: int) -> torch.Tensor | None:
        """Read elements out of the result; ``None`` where the file has ended."""
        dtype = BY_NAME[item.held.dtype]
        width, num_bytes = dtype.itemsize_bytes, (stop - start) * dtype.itemsize_bytes
        self._count(num_bytes)
        if item.file.endswith(".bin"):
            return self._from_torch(item, start, stop)
        data = bytearray(num_bytes)
        filled = 0

        def take(block: memoryview) -> None:
            nonlocal filled
            data[filled : filled + len(block)] = block
            filled += len(block)

        offset = item.held.offset_bytes + start * width
        return (
            _tensor(data, dtype)
            if read_range(self._dir / item.file, offset, num_bytes, take)
            else None
        )

    def _from_torch(self, item: Comparison, start: int, stop: int) -> torch.Tensor:
        """Take elements from what ``torch.load`` maps into memory."""
        import torch

        with self._lock:
            if item.file not in self._loaded:
                self._loaded[item.file] = _load(self._dir / item.file)
            tensor = self._loaded[item.file].get(item.name)
        if not isinstance(tensor, torch.Tensor):
            raise _UnreadableError("is not there when torch.load reads the file")
        if (tensor.dtype, tuple(tensor.shape)) != (_torch(item.held.dtype), item.held.shape):
            raise _UnreadableError(f"torch.load makes {tensor.dtype} {list(tensor.shape)} of it")
        return tensor.reshape(-1)[start:stop]


class _UnreadableError(Exception):
    """What a reader of the output says."""


def _load(path: Path) -> dict[str, object]:
    import torch

    try:
        loaded: dict[str, object] = torch.load(
            path, map_location="cpu", weights_only=True, mmap=True
        )
    except Exception as error:  # of any kind: torch.load promises nothing about damaged files
        text = str(error).partition("\n")[0]
        raise _UnreadableError(f"torch.load cannot read the file: {text}") from error
    return loaded


class _Rounding:
    """One 16-bit copy beside the rounded master, block after block."""

    def __init__(self, name: str, source: Source) -> None:
        self._name, self.source = name, source
        self.num_unequal = self._num_beyond = self._steps = 0
        self._index, self._most = 0, -1.0
        self._pair = (0.0, 0.0)

    def take(self, masters: torch.Tensor, weights: torch.Tensor, start: int) -> None:
        import torch

        rounded = masters.to(weights.dtype)
        wrong = _unequal(weights, masters)
        if not len(wrong):
            return
        ours, theirs = rounded[wrong], weights[wrong]
        steps = (_ordinal(ours) - _ordinal(theirs)).abs()
        steps[ours == theirs] = 0  # zeros of either sign
        gaps = (ours.float() - theirs.float()).abs()
        gaps[gaps.isnan()] = torch.inf
        self.num_unequal += len(wrong)
        self._num_beyond += int((steps > 1).sum())
        at = int(gaps.argmax())
        if float(gaps[at]) > self._most:
            self._most, self._index, self._steps = (
                float(gaps[at]),
                start + int(wrong[at]),
                int(steps[at]),
            )
            self._pair = float(ours[at]), float(theirs[at])

    def result(self) -> Rounded:
        """Give what was found."""
        return Rounded(
            self._name, self.source.num_numel, self.num_unequal, self._num_beyond, self._index,
            *self._pair, self._steps,
        )  # fmt: skip


def _ordinal(values: torch.Tensor) -> torch.Tensor:
    """Number the 16-bit floating values in their order."""
    import torch

    bits = values.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def _unequal(found: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Give the elements whose bits differ from those of the wanted values, cast alike.

    Which NaN a cast makes of a NaN depends on the processor, so there any will do.
    """
    import torch

    is_cast = found.dtype != want.dtype
    cast = want.to(found.dtype) if is_cast else want
    ours, theirs = found.contiguous().view(torch.uint8), cast.contiguous().view(torch.uint8)
    if torch.equal(ours, theirs):
        return torch.empty(0, dtype=torch.int64)
    indices = (ours != theirs).view(-1, found.element_size()).any(1).nonzero().flatten()
    if is_cast and len(indices):
        both = found.float()[indices].isnan() & cast.float()[indices].isnan()
        indices = indices[~both]
    return indices


def _values(found: torch.Tensor, want: torch.Tensor, index: int) -> str:
    """Write both values, with their bits where the values look alike."""
    import torch

    cast = want[index : index + 1].to(found.dtype)
    mine = found[index : index + 1].contiguous()
    texts = [repr(mine.item()), repr(cast.item())]
    if texts[0] == texts[1]:
        bits = [bytes(one.view(torch.uint8).tolist())[::-1].hex() for one in (mine, cast)]
        texts = [f"{text} (0x{bit})" for text, bit in zip(texts, bits, strict=True)]
    return f"{texts[0]} in the result, {texts[1]} in the shards"


def _tensor(data: bytearray, dtype: DType) -> torch.Tensor:
    import torch

    return torch.frombuffer(data, dtype=_torch(dtype.name))


def _torch(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
