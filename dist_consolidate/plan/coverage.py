"""The coverage check: every element is filled exactly once, and padding goes nowhere."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dist_consolidate.checkpoint.model import Checkpoint, FlatGroup, Source
from dist_consolidate.errors import Problems
from dist_consolidate.plan.resolve import Resolution


def check_coverage(checkpoint: Checkpoint, resolution: Resolution) -> None:
    """Check the arithmetic of every source against the sizes on disk.

    Args:
        checkpoint: The metadata.
        resolution: Data holders.

    Raises:
        CheckpointError: If elements are missing, filled twice, or the shapes contradict each
            other; all problems are in one message.
    """
    problems = Problems()
    by_group: dict[int, list[tuple[str, Source]]] = {}
    for tensor in resolution.tensors:
        source = tensor.source
        if source.slot is not None:
            by_group.setdefault(source.slot.group, []).append((tensor.name, source))
        elif source.span is None or source.span.shape != source.shape:
            problems.add(f"{tensor.name}: its values are nowhere, or of another shape")
        _check_shape(checkpoint, tensor.name, source, problems)
    for index, members in by_group.items():
        _check_group(checkpoint.groups[index], members, problems)
    problems.raise_if_any(f"{checkpoint.tag}: tensors and data do not fit each other")


def _check_shape(checkpoint: Checkpoint, name: str, source: Source, problems: Problems) -> None:
    key = checkpoint.module.get(name)
    if key is not None and key.source is not None and key.shape != source.shape:
        problems.add(
            f"{name}: `module` holds shape {list(key.shape)}, but the recorded shape is "
            f"{list(source.shape)}"
        )


def _check_group(
    group: FlatGroup, members: Iterable[tuple[str, Source]], problems: Problems
) -> None:
    width = group.dtype.itemsize_bytes
    held = [part.num_bytes // width for part in group.parts]
    limit = min(held) if group.striped else sum(held)
    end = 0
    for name, source in sorted(members, key=lambda member: _offset(member[1])):
        assert source.slot is not None
        numel = math.prod(source.shape)
        if source.slot.offset_numel < end and numel:
            problems.add(f"{name}: overlaps the tensor before it in {group.label}")
        taken = source.slot.part_numel if group.striped else numel
        if group.striped and taken * len(held) < numel:
            problems.add(f"{name}: {len(held)} parts of {taken} do not make {numel} elements")
        end = max(end, source.slot.offset_numel + taken)
        if end > limit and numel:
            problems.add(
                f"{name}: ends at element {end} of {group.label}, but only {limit} are there"
            )


def _offset(source: Source) -> int:
    return source.slot.offset_numel if source.slot else 0
