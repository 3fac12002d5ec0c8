"""Where bytes lie: ranges of files, and tensors inside storages."""

from __future__ import annotations

import dataclasses
import math

from dist_consolidate.dtypes import DType


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """A byte range of one shard.

    Attributes:
        file: Name of the shard inside its tag folder.
        offset_bytes: First byte, from the start of the file.
        num_bytes: Length.
    """

    file: str
    offset_bytes: int
    num_bytes: int


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give the row-major stride (in elements) of a shape, as torch writes it."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor on disk, possibly strided: element ``i`` lies ``sum(i_d * stride_d)`` elements on.

    Attributes:
        file: Name of the shard inside its tag folder.
        offset_bytes: Address of element 0, from the start of the file.
        dtype: Element type on disk.
        shape: Shape.
        stride: Step between neighbours of each dimension, in elements.
    """

    file: str
    offset_bytes: int
    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        expected = contiguous_stride(self.shape)
        return self.num_numel < 2 or all(
            size == 1 or step == want
            for size, step, want in zip(self.shape, self.stride, expected, strict=True)
        )

    @property
    def reach_numel(self) -> int:
        """Elements from element 0 to the last one, both included (0 for an empty tensor)."""
        if not self.num_numel:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * step for size, step in steps)

    def extent(self) -> Extent:
        """Give the byte range of a contiguous tensor."""
        assert self.is_contiguous
        return Extent(self.file, self.offset_bytes, self.num_numel * self.dtype.itemsize_bytes)

    def rows(self, start: int, stop: int) -> TensorSpan:
        """Give the part ``[start, stop)`` of the first dimension."""
        width = self.dtype.itemsize_bytes
        return TensorSpan(
            self.file,
            self.offset_bytes + start * self.stride[0] * width,
            self.dtype,
            (stop - start, *self.shape[1:]),
            self.stride,
        )
