"""Casting elements in host memory; torch is imported only where NumPy cannot do the same.

Rounding is that of torch, bit for bit: to the nearest, ties to even. A NaN stays a NaN; which one,
differs between torch's own ways to cast as well (0xFFFF here, as with AVX2).

Source: ``c10/util/BFloat16.h`` and ``aten/src/ATen/cpu/vec`` in PyTorch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy

from dist_consolidate.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Elements at once: what one round works on stays in a core's cache.
_BLOCK_NUMEL = 1 << 16
# Below this, importing torch (seconds) takes longer than the slower casts of NumPy.
_WORTH_TORCH_BYTES = 8 * 10**9
_BFLOAT16_NAN = 0xFFFF


class Caster:
    """Casts between element types; one for each thread, because it has working memory."""

    def __init__(self, num_bytes: int) -> None:
        """Choose how.

        Args:
            num_bytes: How much this process is about to cast, in source bytes.
        """
        self._use_torch = "torch" in sys.modules or num_bytes >= _WORTH_TORCH_BYTES
        self._work = numpy.empty(_BLOCK_NUMEL, numpy.uint32)

    def cast(
        self, source: memoryview, source_dtype: DType, target: memoryview, target_dtype: DType
    ) -> None:
        """Cast elements.

        Args:
            source: Their bytes.
            source_dtype: Their type.
            target: Room for as many of the other type.
            target_dtype: The other type.
        """
        pair = (source_dtype, target_dtype)
        if not len(source):
            return
        if pair == (BFLOAT16, FLOAT32):
            self._widen(source, target)
        elif pair == (FLOAT32, BFLOAT16) and not self._use_torch:
            self._narrow(source, target)
        else:
            _tensor(target, target_dtype).copy_(_tensor(source, source_dtype))

    def _widen(self, source: memoryview, target: memoryview) -> None:
        halves = numpy.frombuffer(source, numpy.uint16)
        words = numpy.frombuffer(target, numpy.uint32)
        for at in range(0, len(halves), _BLOCK_NUMEL):
            block = words[at : at + _BLOCK_NUMEL]
            numpy.copyto(block, halves[at : at + _BLOCK_NUMEL])
            numpy.left_shift(block, 16, out=block)

    def _narrow(self, source: memoryview, target: memoryview) -> None:
        floats = numpy.frombuffer(source, numpy.float32)
        words = floats.view(numpy.uint32)
        halves = numpy.frombuffer(target, numpy.uint16)
        for at in range(0, len(words), _BLOCK_NUMEL):
            block = words[at : at + _BLOCK_NUMEL]
            rounded = self._work[: len(block)]
            # Half a unit of the last place that stays, less one bit where that place is even.
            numpy.right_shift(block, 16, out=rounded)
            numpy.bitwise_and(rounded, 1, out=rounded)
            numpy.add(rounded, 0x7FFF, out=rounded)
            numpy.add(rounded, block, out=rounded)
            numpy.right_shift(rounded, 16, out=rounded)
            out = halves[at : at + _BLOCK_NUMEL]
            numpy.copyto(out, rounded, casting="unsafe")
            # The maximum of anything with a NaN is NaN; looking for where is worth it only then.
            values = floats[at : at + _BLOCK_NUMEL]
            if numpy.isnan(values.max()):
                out[numpy.isnan(values)] = _BFLOAT16_NAN


def has_infinity(halves: memoryview) -> bool:
    """Tell whether any of some float16 elements is infinite."""
    values: NDArray[Any] = numpy.frombuffer(halves, numpy.uint16)
    return bool(((values & 0x7FFF) == 0x7C00).any())


def overflows(source_dtype: DType, target_dtype: DType) -> bool:
    """Tell whether a cast can make infinities of finite values that people train with."""
    return target_dtype == FLOAT16 != source_dtype


def _tensor(data: memoryview, dtype: DType) -> torch.Tensor:
    import torch

    return torch.frombuffer(data, dtype=getattr(torch, dtype.name))
