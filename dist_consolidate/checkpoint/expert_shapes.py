"""Which parameters lie in which flat group, in releases that record it in different places.

Since 0.19.3 the model states of a model with experts hold ``param_shapes``, as those of other
models do; releases 0.5 keep them in the optimizer states. In between (0.7.4 to 0.19.2) only
``param_slice_mappings`` names the parameters: which elements of each rank's part are whose; before
0.14.5 it names only the first of the experts (see :mod:`.expert_cuts`). The shapes are then those
of ``module`` and the expert files. Under ``round_robin_gradients`` the
mappings are as they would be without it; parameters lie in the order in which they were dealt out
to the ranks. Values must confirm the result (see :mod:`.expert_values`).

Source: DeepSpeed's ``stage_1_and_2.py`` (``_round_robin_reorder``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dist_consolidate.checkpoint import zero12
from dist_consolidate.checkpoint.experts import parse
from dist_consolidate.checkpoint.states import ModelState, OptimState, Shapes
from dist_consolidate.errors import Problems


def names_by_group(
    model: ModelState, optims: Sequence[OptimState], problems: Problems
) -> list[list[str]]:
    """Name the parameters of each group, not yet in their order.

    Args:
        model: The model states of rank 0.
        optims: The optimizer states of every rank.
        problems: Takes what is missing.

    Returns:
        Names by group, of experts as a rank counts them; as many groups as there are.
    """
    if has_shapes(model, optims[0]):
        return [list(group) for group in zero12.shapes_by_group(model, optims[0], problems)]
    if not _have_slices(optims):
        problems.add(
            f"{model.shard.name}: has no param_shapes, and {optims[0].shard.name} no "
            "param_slice_mappings; nothing tells which parameters lie in the flat groups"
        )
        return []
    names: list[dict[str, None]] = [{} for _ in optims[0].parts]
    for optim in optims:
        for index, slices in enumerate(optim.experts.slices or ()):
            names[index].update(dict.fromkeys(slices))
    return [list(group) for group in names]


def shapes_by_group(
    model: ModelState, holders: Sequence[Sequence[OptimState]], problems: Problems
) -> list[Shapes]:
    """Give the shapes in each group, in flat order.

    Args:
        model: The model states of rank 0, with the experts put in.
        holders: For each group the optimizer states of the ranks that share it with rank 0, in the
            order of their parts.
        problems: Takes what is missing or contradicts itself.

    Returns:
        Names (of experts as a rank counts them) and shapes by group, as far as they are recorded.
    """
    first = holders[0][0] if holders else None
    if first is not None and has_shapes(model, first):
        return zero12.shapes_by_group(model, first, problems)
    return [_from_slices(model, index, ranks, problems) for index, ranks in enumerate(holders)]


def has_shapes(model: ModelState, optim: OptimState) -> bool:
    """Tell whether all shapes are recorded.

    Args:
        model: The model states of rank 0.
        optim: The optimizer states of rank 0.

    Returns:
        Whether they are.
    """
    return model.param_shapes is not None or optim.param_shapes is not None


def _have_slices(optims: Sequence[OptimState]) -> bool:
    return all(len(optim.experts.slices or ()) == len(optim.parts) for optim in optims)


def _from_slices(
    model: ModelState, index: int, ranks: Sequence[OptimState], problems: Problems
) -> Shapes:
    """Put the slices of one group's parts together; they must follow one another."""
    numels = _numels(index, ranks, problems)
    last = next(reversed(numels), None)
    if ranks[0].experts.round_robin:
        names = list(numels)
        dealt = (name for turn in range(len(ranks)) for name in names[turn :: len(ranks)])
        numels = {name: numels[name] for name in dealt}
    shapes: Shapes = {}
    for name, numel in numels.items():
        entry = (model.module or {}).get(_as_saved(name))
        if entry is None:
            problems.add(
                f"{model.shard.name}: lacks {name!r}, which has an fp32 partition; this release "
                "leaves dense parameters out of `module` if their name has 'expert' in it, and "
                "records their shape nowhere"
            )
        elif math.prod(entry.span.shape) != numel and not (
            # Releases before 0.14.5 stop anywhere (see :mod:`.expert_cuts`).
            name == last and parse(name) and numel < math.prod(entry.span.shape)
        ):
            problems.add(
                f"{ranks[0].shard.name}: param_slice_mappings counts {numel} elements of {name!r}, "
                f"but its shape is {list(entry.span.shape)}"
            )
        else:
            shapes[name] = entry.span.shape
    return shapes


def _numels(index: int, ranks: Sequence[OptimState], problems: Problems) -> dict[str, int]:
    """Count the recorded elements of each parameter of one group, in the recorded order."""
    numels: dict[str, int] = {}
    for optim in ranks:
        end = 0
        for name, (start, numel) in (optim.experts.slices or ())[index].items():
            if start != end or (name in numels and name != list(numels)[-1]):
                problems.add(
                    f"{optim.shard.name}: param_slice_mappings puts {name!r} at element {start} of "
                    f"param group {index}, expected {end}; this is another order of the ranks, or "
                    "round_robin_gradients"
                )
                return {}
            numels[name] = numels.get(name, 0) + numel
            end = start + numel
    return numels


def _as_saved(name: str) -> str:
    """Give the name under which rank 0's parameter was saved: it has the first experts."""
    parsed = parse(name)
    return str(parsed) if parsed else name
