"""Stages 1 and 2 (and BF16_Optimizer): metadata to flat groups and slots.

Every rank holds the next slice of each flat group, so that the concatenation in rank order is the
group, whatever padding was cut off which rank; sizes are taken from the files and never computed
from recorded paddings.

Sources: DeepSpeed's ``stage_1_and_2.py`` and ``bf16_optimizer.py``; ``module`` holds views of the
16-bit flat buffers, whose offsets testify to the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dist_consolidate.checkpoint import testimony
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.model import FlatGroup, FlatSlot, Source
from dist_consolidate.checkpoint.states import ModelState, OptimState, Shapes
from dist_consolidate.checkpoint.transposed import column_major
from dist_consolidate.errors import Problems, listed

# DeepSpeed pads a group to a multiple of 2 * ranks (nccl_start_alignment_factor), releases before
# 0.5.2 to a multiple of the ranks. More surplus than twice that is no padding but another layout.
_MAX_PADDING_PER_RANK_NUMEL = 4


def build(
    model: ModelState,
    optims: Sequence[OptimState],
    problems: Problems,
    testified: dict[str, FlatSlot] | None = None,
) -> tuple[tuple[FlatGroup, ...], dict[str, Source]]:
    """Lay out the flat groups of stages 1 and 2.

    Args:
        model: The model states of rank 0.
        optims: The optimizer states of every rank, in rank order.
        problems: Takes what contradicts the layout.
        testified: Takes the places that are known by the views of ``module`` alone,
            for the caller to confirm by value; without it, such places are a problem.

    Returns:
        The flat groups, and the source of each tensor in them, in flat order.
    """
    shapes = shapes_by_group(model, optims[0], problems)
    groups: list[FlatGroup] = []
    sources: dict[str, Source] = {}
    for index, group_shapes in enumerate(shapes):
        parts = _parts(optims, index, problems)
        paddings = optims[0].alignment_paddings
        padding = paddings[index] if paddings and index < len(paddings) else ()
        places, end_numel = slots(len(groups), group_shapes, padding)
        group = flat_group(f"param group {index}", parts, striped=False, problems=problems)
        # A round of the first stage-1 optimizer is shared by all ranks, and its last ones may be
        # padding; how much of it there is depends on an option that is not recorded.
        spare = max(part.num_numel for part in parts) if optims[0].rounds else 0
        recorded_in = holder_of_shapes(model, optims[0])
        check_size(group, end_numel, recorded_in, problems, spare * len(optims))
        witness = testimony.hear(model, group.label, group_shapes, places, problems)
        for name, slot in witness.slots.items():
            shape = group_shapes[name]
            sources[name] = Source("fp32 partition", shape, group.dtype, slot)
            if name in witness.transposed:
                rows, columns = shape
                sources[name] = column_major(group, slot.offset_numel, (rows, columns))
        if testified is not None:
            testified |= witness.alone
        elif witness.alone:
            problems.add(
                f"{group.label}: {len(witness.alone)} parameters lie otherwise in `module` than "
                f"the recorded layout says, the first is {next(iter(witness.alone))!r}"
            )
        groups.append(group)
    return tuple(groups), sources


def shapes_by_group(model: ModelState, optim: OptimState, problems: Problems) -> list[Shapes]:
    """Pair the recorded shapes with the groups; entries that are empty on one side are skipped.

    Args:
        model: The model states of rank 0.
        optim: The optimizer states of rank 0 (releases before 0.6 keep the shapes there).
        problems: Takes a mismatch.

    Returns:
        One mapping of names to shapes per group; as many as there are groups.
    """
    recorded = model.param_shapes if model.param_shapes is not None else optim.param_shapes
    if recorded is None:
        problems.add(f"{model.shard.name}: has no param_shapes; nothing tells the layout")
        return []
    shapes = list(recorded)
    if len(shapes) != len(optim.parts):
        empty = [not any(math.prod(s) for s in group.values()) for group in shapes]
        shapes = [group for group, is_empty in zip(shapes, empty, strict=True) if not is_empty]
    if len(shapes) != len(optim.parts):
        problems.add(
            f"{optim.shard.name}: holds {len(optim.parts)} flat groups, but param_shapes of "
            f"{model.shard.name} describes {len(recorded)}"
        )
        return []
    return shapes


def holder_of_shapes(model: ModelState, optim: OptimState) -> str:
    """Name the file whose recorded shapes :func:`shapes_by_group` gives."""
    in_model = model.param_shapes is not None or optim.param_shapes is None
    return model.shard.name if in_model else optim.shard.name


def flat_group(
    label: str, parts: Sequence[TensorSpan], *, striped: bool, problems: Problems
) -> FlatGroup:
    """Join the ranks' parts of one group, which must be flat and of one element type.

    Args:
        label: What to call the group in a message.
        parts: Every rank's part, in rank order.
        striped: See :class:`FlatGroup`.
        problems: Takes parts that are not flat, or differ in element type.

    Returns:
        The group.
    """
    dtype = next((part.dtype for part in parts if part.num_numel), parts[0].dtype)
    for part in parts:
        if len(part.shape) != 1 or not part.is_contiguous:
            problems.add(f"{part.file}: {label} has shape {list(part.shape)}, expected a flat one")
        elif part.num_numel and part.dtype != dtype:
            problems.add(
                f"{part.file}: {label} is {part.dtype.name}, but {dtype.name} on other ranks"
            )
    flat = [TensorSpan(p.file, p.offset_bytes, dtype, (p.num_numel,), (1,)) for p in parts]
    return FlatGroup(label, striped, dtype, tuple(part.extent() for part in flat))


def slots(group: int, shapes: Shapes, paddings: Sequence[int]) -> tuple[dict[str, FlatSlot], int]:
    """Lay the tensors of a group one behind the other.

    Args:
        group: Index of the group.
        shapes: Its tensors, in flat order.
        paddings: Elements of padding behind each.

    Returns:
        The place of each tensor, and where the last one ends.
    """
    places, offset = {}, 0
    for index, (name, shape) in enumerate(shapes.items()):
        places[name] = FlatSlot(group, offset)
        offset += math.prod(shape)
        # Recorded gaps lie behind each parameter; the last one's gap may be cut off on disk.
        if index + 1 < len(shapes):
            offset += paddings[index] if index < len(paddings) else 0
    return places, offset


def _parts(optims: Sequence[OptimState], index: int, problems: Problems) -> list[TensorSpan]:
    """Give a group's parts in flat order: of every rank, or of every rank in each round."""
    if not optims[0].rounds:
        return [optim.parts[index] for optim in optims]
    count = len(optims[0].rounds[index])
    for optim in optims:
        if len(optim.rounds) <= index or len(optim.rounds[index]) != count:
            problems.add(
                f"{optim.shard.name}: param group {index} has another number of communication "
                f"intervals than in {optims[0].shard.name}, which has {count}"
            )
            return [optim.parts[index] for optim in optims]
    return [optim.rounds[index][round_] for round_ in range(count) for optim in optims]


def check_size(
    group: FlatGroup, need_numel: int, recorded_in: str, problems: Problems, spare_numel: int = 0
) -> None:
    """Check that the ranks hold what the tensors of a group need, and no more than padding beside.

    Args:
        group: The group.
        need_numel: Where its last tensor ends.
        recorded_in: The file that its tensors' shapes stand in.
        problems: Takes a mismatch.
        spare_numel: Further padding that there may be.
    """
    width = group.dtype.itemsize_bytes
    held = [part.num_bytes // width for part in group.parts]
    files = listed([f"{n} in {p.file}" for n, p in zip(held, group.parts, strict=True)])
    if sum(held) < need_numel:
        problems.add(
            f"{group.label}: its parameters need {need_numel} elements (param_shapes in "
            f"{recorded_in}), but the ranks hold {sum(held)} ({files})"
        )
    elif sum(held) > need_numel + _MAX_PADDING_PER_RANK_NUMEL * len(held) + spare_numel:
        problems.add(
            f"{group.label}: the ranks hold {sum(held)} elements ({files}), but its parameters "
            f"need only {need_numel} (param_shapes in {recorded_in}); that is more than padding, "
            "so the recorded shapes do not describe it"
        )
