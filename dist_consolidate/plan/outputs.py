"""What the result consists of: stored tensors in output files."""

from __future__ import annotations

import dataclasses
import math

from dist_consolidate.dtypes import DType


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """One block of tensor bytes in an output file, and the names that stand for it.

    Attributes:
        names: The name that is written first, then every further name that shares this very
            storage (only a ``.bin`` file can do that; elsewhere there is exactly one name).
        dtype: Element type in the output.
        shape: Shape in the output; the bytes are its row-major elements, little endian.
    """

    names: tuple[str, ...]
    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_numel(self) -> int:
        """Number of elements (1 for a 0-dim tensor)."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return self.num_numel * self.dtype.itemsize_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class OutputFile:
    """One weight file of the result.

    Attributes:
        name: File name inside the output folder.
        tensors: Stored tensors in the order of their bytes.
        dropped: Names left out of this file on request, each with the name that holds its data
            (``--ties drop``).
        state: Empty for weights, else the key of the optimizer's states that it holds.
    """

    name: str
    tensors: tuple[StoredTensor, ...]
    dropped: tuple[tuple[str, str], ...] = ()
    state: str = ""
