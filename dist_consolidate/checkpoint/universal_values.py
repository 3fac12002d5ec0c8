"""Whether a universal checkpoint's tensors are those of its model states.

A file holds numbers and no name, so that one put in another's place shows only by its shape and
its values. Without tensor parallelism the copied model states give both. With it they have the
shards of each rank: the full tensor must be as large as they are together along one dimension, and
its first row begins with that of the first shard, however the ranks' pieces were put together.

Source: DeepSpeed's ``ds_to_universal.py`` (``merge_tp_slices``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dist_consolidate.checkpoint.model import Block, Source, own_source
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState
from dist_consolidate.checkpoint.testimony import spread

_MAX_WHOLE, _END_NUMEL = 16, 512
_AVERAGE = "parameter_to_average_patterns"

Shape = tuple[int, ...]


def can_be_merged(full: Shape, shards: Sequence[Shape], num_rows: int | None = None) -> bool:
    """Tell whether a tensor can have been put together of the ranks' shards.

    Args:
        full: Its shape.
        shards: Theirs.
        num_rows: Rows that are left of a padded vocabulary.

    Returns:
        True for one rank's copy of equal ones, and for shards that lie along one dimension. Where
        fused parts were seen in a shape of their own, the number of elements must be right.
    """
    if any(len(shard) != len(full) for shard in shards):
        return math.prod(full) == sum(map(math.prod, shards))
    if all(shard == full for shard in shards):
        return True
    return any(
        _is_sum(full[dim], sum(shard[dim] for shard in shards), None if dim else num_rows)
        and all((*s[:dim], *s[dim + 1 :]) == (*full[:dim], *full[dim + 1 :]) for s in shards)
        for dim in range(len(full))
    )


def _is_sum(size: int, total: int, num_rows: int | None) -> bool:
    return size == total or (size == num_rows and size < total)


def differing(
    prints: Fingerprints,
    model: ModelState,
    sources: Mapping[str, Source],
    info: Mapping[str, Any] | None = None,
) -> list[str]:
    """Name the tensors whose values are not those of the model states, rounded.

    Args:
        prints: Compares.
        model: The model states of rank 0, with whole tensors or its shards.
        sources: The universal checkpoint's tensors.
        info: ``universal_checkpoint_info``, where there is tensor parallelism.

    Returns:
        Those of the tensors; a few are compared whole, the others at their ends.
    """
    module = model.module or {}
    held = {name: own_source(module[name].span) for name in sources if name in module}
    held = {name: own for name, own in held.items() if own.num_numel}
    whole = set(spread([n for n, own in held.items() if own.shape == sources[n].shape], _MAX_WHOLE))
    averaged = [re.compile(pattern) for pattern in (info or {}).get(_AVERAGE) or ()]
    return [
        name
        for name, own in held.items()
        if not any(pattern.match(name) for pattern in averaged)
        and not _agree(prints, sources[name], own, whole=name in whole)
    ]


def _agree(prints: Fingerprints, source: Source, own: Source, *, whole: bool) -> bool:
    if whole:
        return prints.of(source, own.dtype) == prints.of(own, own.dtype)
    if source.shape == own.shape:
        last = own.num_numel - min(own.num_numel, _END_NUMEL)
        pairs = [_same_run(source, own, 0), _same_run(source, own, last)]
    elif len(own.shape) > 1 and len(own.shape) == len(source.shape):
        row = min(own.shape[-1], source.shape[-1], _END_NUMEL)
        pairs = [(_run(source, 0, row), _run(own, 0, row))]
    else:
        pairs = []  # a fused vector's pieces may be of any length
    return all(prints.of(one, own.dtype) == prints.of(other, own.dtype) for one, other in pairs)


def _same_run(source: Source, own: Source, start_numel: int) -> tuple[Source, Source]:
    count = min(own.num_numel - start_numel, _END_NUMEL)
    return _run(source, start_numel, count), _run(own, start_numel, count)


def _run(source: Source, start_numel: int, num_numel: int) -> Source:
    """Give a stretch of a tensor as a flat one."""
    block = Block(source, 1, num_numel, start_numel, 0, 0, 0)
    return Source(source.origin, (num_numel,), source.dtype, blocks=(block,))
