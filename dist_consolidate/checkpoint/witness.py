"""Values of ``module`` as a witness of the layout, in stages 1 and 2.

There ``module`` holds every weight, rounded from the fp32 masters in the step before the save. A
layout that puts other values under a name than ``module`` has is wrong, or the files are of
different saves. A few elements of a few tensors of each group tell; nothing else is read.

Source: DeepSpeed's ``stage_1_and_2.py`` (the 16-bit groups are copied from the masters after each
step).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_consolidate.checkpoint.fragments import Fragments
from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import FlatGroup, Source
from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.dtypes import BFLOAT16, FLOAT16, FLOAT32
from dist_consolidate.errors import CheckpointError, listed

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TENSORS_PER_GROUP = 12
_ELEMENTS_PER_TENSOR = 512
# A NaN has many bit patterns; this one stands for all.
_NAN = 0x7FFF


@dataclasses.dataclass(frozen=True, slots=True)
class Testimony:
    """What the values say.

    Attributes:
        num_compared: Tensors that were looked at.
        differing: Those whose elements are mostly others in ``module``.
    """

    num_compared: int
    differing: tuple[str, ...]


def hear(
    folder: TagFolder,
    groups: Sequence[FlatGroup],
    partitions: Mapping[str, Source],
    module: Mapping[str, Source],
    *,
    trust_masters: bool,
) -> tuple[str, ...]:
    """Compare a few masters with the weights that training rounded from them.

    Args:
        folder: The tag folder.
        groups: Flat groups.
        partitions: Where each master lies.
        module: The tensors of the model states, or of a pipeline's layer files.
        trust_masters: Take the masters although they differ.

    Returns:
        What to say of it: nothing if they agree.

    Raises:
        CheckpointError: If they differ.
    """
    found = compare(folder.folders, groups, partitions, module)
    if not found.differing:
        return ()
    first = found.differing[0]
    span, held = module[first].span, sorted(Fragments(groups).files(partitions[first]))
    what = (
        f"{len(found.differing)} of {found.num_compared} fp32 masters that were looked at hold "
        f"other values than `module` of {span.file if span else 'the model states'}, the first is "
        f"{first!r} (of {listed(held)})"
    )
    if trust_masters:
        return (f"{what}; the masters were taken (--trust-masters)",)
    raise CheckpointError(
        f"{folder.path}: {what}. The files are of different saves, the layout is not what is "
        "recorded, or the weights were changed after the last step (an average, a quantization); "
        "if so, and the masters are what you want, pass --trust-masters"
    )


def compare(
    folder: Path | Sequence[Path],
    groups: Sequence[FlatGroup],
    partitions: Mapping[str, Source],
    module: Mapping[str, Source],
) -> Testimony:
    """Compare fp32 masters, rounded, with the weights in ``module``.

    Args:
        folder: The tag folder; a few kilobytes are read from its shards.
        groups: Flat groups.
        partitions: Where each master lies.
        module: The tensors that were rounded from them.

    Returns:
        The testimony; tensors whose shards cannot be read here are not in it.
    """
    reader, fragments = ShardReader(folder, {}), Fragments(groups)
    num_compared, differing = 0, []
    try:
        for name in _sample(partitions, module):
            source, theirs = partitions[name], module[name]
            count = min(source.num_numel, _ELEMENTS_PER_TENSOR)
            with contextlib.suppress(CheckpointError):  # a shard that is not seen here
                ours = _rounded(_read(reader, fragments, source, count), theirs.dtype.name)
                held = _canonical(_read(reader, fragments, theirs, count), theirs.dtype.name)
                num_compared += 1
                if 2 * int((ours != held).sum()) > count:
                    differing.append(name)
    finally:
        reader.close()
    return Testimony(num_compared, tuple(differing))


def _sample(partitions: Mapping[str, Source], module: Mapping[str, Source]) -> Iterator[str]:
    """Choose a few tensors of each group, spread over it, the first and the last among them."""
    by_group: dict[int, list[str]] = {}
    for name, source in partitions.items():
        entry = module.get(name)
        if source.slot is None or entry is None or source.dtype != FLOAT32:
            continue
        comparable = entry.dtype in (FLOAT32, BFLOAT16, FLOAT16)
        if comparable and entry.shape == source.shape and source.num_numel:
            by_group.setdefault(source.slot.group, []).append(name)
    for names in by_group.values():
        count = min(len(names), _TENSORS_PER_GROUP)
        places = {round(i * (len(names) - 1) / max(count - 1, 1)) for i in range(count)}
        yield from (names[place] for place in sorted(places))


def _read(reader: ShardReader, fragments: Fragments, source: Source, count: int) -> bytearray:
    data = bytearray(count * source.dtype.itemsize_bytes)
    for read in fragments.reads(source, 0, count):
        reader.fill(memoryview(data), read)
    return data


def _rounded(data: bytearray, dtype: str) -> NDArray[Any]:
    """Round float32 elements to nearest, ties to even, and give their bits."""
    import numpy

    words = numpy.frombuffer(data, numpy.uint32)
    if dtype == "float32":
        return _canonical(data, dtype)
    if dtype == "float16":
        with numpy.errstate(over="ignore"):
            halves = words.view(numpy.float32).astype(numpy.float16)
        return _canonical(bytearray(halves.tobytes()), dtype)
    wide = words.astype(numpy.uint64)
    halves = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(numpy.uint16)
    halves[numpy.isnan(words.view(numpy.float32))] = _NAN
    return halves


def _canonical(data: bytearray, dtype: str) -> NDArray[Any]:
    """Give the bits of elements, with one pattern for every NaN."""
    import numpy

    width, exponent = {
        "float32": (numpy.uint32, 0x7F800000),
        "float16": (numpy.uint16, 0x7C00),
    }.get(dtype, (numpy.uint16, 0x7F80))
    bits = numpy.frombuffer(data, width).copy()
    magnitude = bits & ((1 << (bits.itemsize * 8 - 1)) - 1)
    bits[magnitude > exponent] = _NAN
    return bits
