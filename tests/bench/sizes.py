"""How large the model of the benchmark is."""

from __future__ import annotations

import dataclasses
import math

# As tests.bench.make_checkpoint writes them; that module imports torch.
_VOCAB, _POSITIONS = 50257, 1024
# Layers and width of known models, from which other sizes take the nearest one's width.
_KNOWN = (
    *((2, 64), (4, 256), (6, 512), (12, 768), (24, 1024), (36, 1280), (48, 1600)),
    *((32, 2560), (32, 4096), (40, 5120), (60, 6656), (80, 8192), (96, 12288)),
)
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}


@dataclasses.dataclass(frozen=True)
class Size:
    """Layers and width of a GPT-like model with a tied head."""

    layers: int
    width: int

    @property
    def num_params(self) -> int:
        """Parameters, the tied head counted once."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (_VOCAB + _POSITIONS + 2) * self.width

    @property
    def checkpoint_bytes(self) -> int:
        """Upper bound of the checkpoint on disk: fp32 partitions and 16-bit weights."""
        return 6 * self.num_params

    def result_bytes(self, dtype: str) -> int:
        """Upper bound of a result's size: with the tied head written twice."""
        return (4 if dtype == "fp32" else 2) * (self.num_params + _VOCAB * self.width)


def size_of(text: str) -> Size:
    """Find the layers and width for a number of parameters.

    Args:
        text: Such as ``355M`` or ``2.9B``.

    Raises:
        ValueError: If it is no such number, or too small for a model.
    """
    unit = _UNITS.get(text[-1:].upper())
    try:
        wanted = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError as error:
        raise ValueError(f"--params {text}: must be a number such as 355M or 2.9B") from error
    smallest = Size(1, _KNOWN[0][1]).num_params
    if not smallest <= wanted < 1e13:
        raise ValueError(f"--params {text}: must be at least {smallest / 1e6:.1f}M and below 10T")
    nearest = min(
        (Size(*pair) for pair in _KNOWN), key=lambda s: abs(math.log(s.num_params / wanted))
    )
    fixed, width = Size(0, nearest.width).num_params, nearest.width
    layers = round((wanted - fixed) / (Size(1, width).num_params - fixed))
    return Size(max(layers, 1), width)
