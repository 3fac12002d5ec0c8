"""Param groups in rank 0's order, on every rank.

DeepSpeed makes one param group for each expert-parallel size, going through a Python set of their
names: where a model has several sizes, every process may have its groups in another order. Group by
group the k-th of one size is the same on all ranks.

Source: DeepSpeed's ``moe/utils.py`` (``split_params_into_different_moe_groups_for_optimizer``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from dist_consolidate.checkpoint.states import OptimState
from dist_consolidate.errors import Problems

_T = TypeVar("_T")


def in_one_order(optims: Sequence[OptimState], problems: Problems) -> list[OptimState]:
    """Put the groups of every rank in rank 0's order.

    Args:
        optims: The optimizer states, in rank order.
        problems: Takes ranks whose groups cannot be those of rank 0.

    Returns:
        The states, reordered where need be.
    """
    return [optims[0], *(_reordered(optims[0], optim, problems) for optim in optims[1:])]


def _reordered(first: OptimState, optim: OptimState, problems: Problems) -> OptimState:
    order = _order(first, optim)
    if order is None:
        problems.add(
            f"{optim.shard.name}: its param groups (expert-parallel sizes {_sizes(optim)}) are not "
            f"those of {first.shard.name} ({_sizes(first)})"
        )
        return optim
    if order == list(range(len(optim.parts))):
        return optim
    facts = optim.experts
    return dataclasses.replace(
        optim,
        parts=_pick(optim.parts, order),
        partition_counts=_pick(optim.partition_counts, order),
        alignment_paddings=_pick_known(optim.alignment_paddings, order),
        param_shapes=_pick_known(optim.param_shapes, order),
        experts=dataclasses.replace(
            facts,
            sizes=_pick_known(facts.sizes, order),
            slices=_pick_known(facts.slices, order),
        ),
    )


def _sizes(optim: OptimState) -> str:
    return ", ".join(map(str, optim.experts.sizes or ())) or "not recorded"


def _order(first: OptimState, optim: OptimState) -> list[int] | None:
    """Give, for each group of rank 0, its index on another rank; ``None`` if there is no such."""
    ours, theirs = _keys(first), _keys(optim)
    if ours is None or theirs is None:
        return _order_by_names(first, optim)
    if sorted(ours) != sorted(theirs):
        return None
    return [theirs.index(key) for key in ours]


def _keys(optim: OptimState) -> list[tuple[int, int]] | None:
    """Name each group by its expert-parallel size, and as the how manieth of that size."""
    sizes = optim.experts.sizes
    if sizes is None or len(sizes) != len(optim.parts):
        return None
    known = [-1 if size is None else size for size in sizes]
    return [(size, known[:index].count(size)) for index, size in enumerate(known)]


def _order_by_names(first: OptimState, optim: OptimState) -> list[int] | None:
    """Tell the groups by their parameters, where no sizes are recorded (elastic checkpoints).

    A group of no experts may have other parameters on each rank, but those have their order.
    """
    ours, theirs = first.experts.slices, optim.experts.slices
    if ours is None or theirs is None or len(ours) != len(theirs):
        return list(range(len(optim.parts)))
    free = list(range(len(theirs)))
    order: list[int] = []
    for index, slices in enumerate(ours):
        same = [other for other in free if slices.keys() & theirs[other].keys()]
        chosen = same[0] if same else index if index in free else None
        if chosen is None:
            return None
        free.remove(chosen)
        order.append(chosen)
    return order


def _pick(items: Sequence[_T], order: Sequence[int]) -> tuple[_T, ...]:
    return tuple(items[index] for index in order if index < len(items))


def _pick_known(items: tuple[_T, ...] | None, order: Sequence[int]) -> tuple[_T, ...] | None:
    if items is None or len(items) != len(order):
        return items
    return _pick(items, order)
