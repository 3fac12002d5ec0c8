"""Flat fp32 masters of experts without ZeRO, cut into the tensors that they are made of.

A fused optimizer lays the masters of each param group one behind the other, without names, and
model states with experts hold no views that would tell where each begins. The values do: from the
start on, what follows is a saved tensor, rounded. Which tensor it is, where several look alike, is
for :mod:`.stage0` to tell, as with masters that were never flat.

Source: DeepSpeed's ``fp16/fused_optimizer.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dist_consolidate.checkpoint.extents import TensorSpan, contiguous_stride
from dist_consolidate.checkpoint.model import FlatGroup
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModuleEntry
from dist_consolidate.checkpoint.value_cuts import Partial, Tensor, ValueCuts, may_be_master
from dist_consolidate.errors import Problems

_TOLD = "the order of flat fp32 masters (a fused optimizer) is recorded nowhere"


def cut(
    folder: Path | Sequence[Path],
    masters: Sequence[TensorSpan],
    entries: Mapping[str, ModuleEntry],
    problems: Problems,
) -> list[tuple[TensorSpan, ...]]:
    """Cut flat masters.

    Args:
        folder: The tag folder; weights are read from it to compare.
        masters: The flat tensors of one rank's optimizer.
        entries: What that rank may have trained, by name.
        problems: Takes what cannot be cut in one way only.

    Returns:
        The masters of each group, shaped; nothing if a problem was noted.
    """
    flats = [
        FlatGroup(f"{span.file}: fp32 group {index}", False, span.dtype, (span.extent(),))
        for index, span in enumerate(masters)
    ]
    groups = {
        index: Partial(flat.label, {}, frozenset(), (flat,)) for index, flat in enumerate(flats)
    }
    tensors = [
        Tensor(name, None, (entry,)) for name, entry in entries.items() if may_be_master(entry.span)
    ]
    prints = Fingerprints(folder, flats)
    try:
        cuts = ValueCuts(prints, flats, groups, tensors, problems, told=_TOLD, needs_names=False)
        found = cuts.shapes()
    finally:
        prints.close()
    return [_shaped(masters[index], shapes.values()) for index, shapes in found.items()]


def _shaped(flat: TensorSpan, shapes: Iterable[tuple[int, ...]]) -> tuple[TensorSpan, ...]:
    offset, spans = flat.offset_bytes, []
    for shape in shapes:
        stride = contiguous_stride(shape)
        spans.append(dataclasses.replace(flat, offset_bytes=offset, shape=shape, stride=stride))
        offset += math.prod(shape) * flat.dtype.itemsize_bytes
    return tuple(spans)
