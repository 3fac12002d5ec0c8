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

# Elements at once: few enough to stay near the core, and so many that threads seldom meet at
# Python's lock (two threads cast half as much with a quarter of this).
_BLOCK_NUMEL = 1 << 17
_16, _1, _HALF = (numpy.array(value, numpy.uint32) for value in (16, 1, 0x7FFF))
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
            numpy.left_shift(block, _16, block)

    def _narrow(self, source: memoryview, target: memoryview) -> None:
        floats = numpy.frombuffer(source, numpy.float32)
        words = floats.view(numpy.uint32)
        halves = numpy.frombuffer(target, numpy.uint16)
        for at in range(0, len(words), _BLOCK_NUMEL):
            block = words[at : at + _BLOCK_NUMEL]
            rounded = self._work[: len(block)]
            # Half a unit of the last place that stays, less one bit where that place is even.
            numpy.right_shift(block, _16, rounded)
            numpy.bitwise_and(rounded, _1, rounded)
            numpy.add(rounded, _HALF, rounded)
            numpy.add(rounded, block, rounded)
            out = halves[at : at + _BLOCK_NUMEL]
            numpy.right_shift(rounded, _16, out, casting="unsafe")
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
