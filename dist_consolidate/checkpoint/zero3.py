"""Stage 3: metadata to flat groups and slots.

Every parameter is cut over all ranks: rank ``r`` of ``n`` owns the elements from ``r * p`` on,
``p = ceil(numel / n)``. In a sub-group's flat buffer each parameter therefore begins at the same
offset on every rank; the last ranks' surplus is padding of any content.

Source: DeepSpeed's ``stage3.py`` and ``partition_parameters.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dist_consolidate.checkpoint.extents import TensorSpan, contiguous_stride
from dist_consolidate.checkpoint.model import FlatGroup, FlatSlot, Source
from dist_consolidate.checkpoint.states import ModelState, OptimState, Shapes
from dist_consolidate.checkpoint.zero12 import flat_group, holder_of_shapes, shapes_by_group
from dist_consolidate.errors import Problems, listed


def build(
    model: ModelState, optims: Sequence[OptimState], problems: Problems
) -> tuple[tuple[FlatGroup, ...], dict[str, Source]]:
    """Lay out the sub-groups of stage 3.

    Args:
        model: The model states of rank 0.
        optims: The optimizer states of every rank, in rank order.
        problems: Takes what contradicts the layout.

    Returns:
        The flat groups, and the source of each tensor in them, in flat order.
    """
    groups: list[FlatGroup] = []
    sources: dict[str, Source] = {}
    for index, shapes in enumerate(shapes_by_group(model, optims[0], problems)):
        parts = [optim.parts[index] for optim in optims]
        recorded_in = holder_of_shapes(model, optims[0])
        group, found = sub_group(
            f"sub-group {index}", len(groups), parts, shapes, recorded_in, problems
        )
        sources |= found
        groups.append(group)
    return tuple(groups), sources


def sub_group(
    label: str,
    index: int,
    parts: Sequence[TensorSpan],
    shapes: Shapes,
    recorded_in: str,
    problems: Problems,
) -> tuple[FlatGroup, dict[str, Source]]:
    """Lay out one sub-group.

    Args:
        label: What to call it in a message.
        index: Its index among all flat groups.
        parts: The parts of the ranks that share it out, in their order.
        shapes: Its tensors, in flat order.
        recorded_in: The file that the shapes stand in.
        problems: Takes what contradicts the layout.

    Returns:
        The flat group, and the source of each tensor in it.
    """
    group = flat_group(label, parts, striped=True, problems=problems)
    slots, need_numel = _slots(index, shapes, len(parts))
    _check_parts(group, parts, need_numel, recorded_in, problems)
    return group, {
        name: Source("fp32 partition", shapes[name], group.dtype, slot)
        for name, slot in slots.items()
    }


def _slots(group: int, shapes: Shapes, ranks: int) -> tuple[dict[str, FlatSlot], int]:
    slots, offset = {}, 0
    for name, shape in shapes.items():
        part_numel = -(-math.prod(shape) // ranks)
        slots[name] = FlatSlot(group, offset, part_numel)
        offset += part_numel
    return slots, offset


def _check_parts(
    group: FlatGroup,
    parts: Sequence[TensorSpan],
    need_numel: int,
    recorded_in: str,
    problems: Problems,
) -> None:
    for part in parts:
        if part.num_numel == need_numel:
            continue
        if not part.num_numel:
            problems.add(
                f"{part.file}: {group.label} is empty, expected {need_numel} elements; its "
                "optimizer was offloaded to NVMe, and its values are not there"
            )
        else:
            problems.add(
                f"{part.file}: {group.label} holds {part.num_numel} elements, but its parameters "
                f"need {need_numel} on each rank (param_shapes in {recorded_in})"
            )


def frozen(
    models: Mapping[int, ModelState], ranks: int, first_group: int, problems: Problems
) -> tuple[tuple[FlatGroup, ...], dict[str, Source]]:
    """Lay out the frozen parameters, whose slices lie in every rank's model states.

    Args:
        models: Model states by rank; rank 0 is there.
        ranks: Ranks that share a parameter.
        first_group: Index that the first returned group will have.
        problems: Takes missing or wrong slices.

    Returns:
        One striped flat group per frozen parameter that has elements, and all their sources.
    """
    groups: list[FlatGroup] = []
    sources: dict[str, Source] = {}
    for name, shape in (models[0].frozen_shapes or {}).items():
        needed = ranks if math.prod(shape) else 1
        spans = [
            (state.frozen or {}).get(name)
            for rank, state in sorted(models.items())
            if rank < needed
        ]
        parts = [span for span in spans if span is not None]
        if len(parts) != needed:
            without = [s.shard.name for s in models.values() if name not in (s.frozen or {})]
            problems.add(
                f"frozen parameter {name!r} ({models[0].shard.name} records it): {len(parts)} of "
                f"{ranks} slices are there; none in {listed(without) or 'files that are missing'}"
            )
            continue
        part_numel = -(-math.prod(shape) // ranks)
        if not part_numel:
            dtype = parts[0].dtype
            empty = TensorSpan(parts[0].file, 0, dtype, shape, contiguous_stride(shape))
            sources[name] = Source("frozen", shape, dtype, span=empty)
            continue
        label = f"frozen parameter {name!r}"
        for part in parts:
            if part.num_numel != part_numel:
                problems.add(
                    f"{part.file}: {label} has {part.num_numel} elements here, expected "
                    f"{part_numel} (its values may be offloaded)"
                )
        entry = (models[0].module or {}).get(name)
        if entry is not None and entry.ref.dtype.is_floating and not parts[0].dtype.is_floating:
            problems.add(
                f"{parts[0].file}: {label} was saved quantized ({parts[0].dtype.name}) without its "
                "scales (zero_quantized_nontrainable_weights); its values cannot be recovered"
            )
        group = flat_group(label, parts, striped=True, problems=problems)
        slot = FlatSlot(first_group + len(groups), 0, part_numel)
        sources[name] = Source("frozen", shape, group.dtype, slot)
        groups.append(group)
    return tuple(groups), sources
