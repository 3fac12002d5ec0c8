"""The optimizer's own states file by file: moments, step and hyperparameters, as pickled.

Sources: ``torch.optim.Optimizer.state_dict`` (parameters are numbered over all param groups),
DeepSpeed's ``stage_1_and_2.py`` (``base_optimizer_state``: such a dictionary, or in elastic
checkpoints a list of states by group), ``stage3.py`` (one parameter per sub-group) and
``fused_optimizer.py``/``unfused_optimizer.py`` (stage 0).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.archive import Archive
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.layout import ShardFile
from dist_consolidate.checkpoint.unpickle import TensorRef
from dist_consolidate.errors import CheckpointError

Number = bool | int | float
Hyperparameters = dict[str, Number | list[Number]]


@dataclasses.dataclass(frozen=True, slots=True)
class ParamState:
    """What an optimizer keeps for one of its parameters.

    Attributes:
        group: Param group it is in; ``None`` where not recorded.
        tensors: State tensors that have a dimension, by key.
        others: What else is kept, by key, and what it is.
        step: Steps taken, where recorded.
        name: Name of the parameter, where recorded.
    """

    group: int | None
    tensors: dict[str, TensorSpan]
    others: dict[str, str]
    step: int | None
    name: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class BaseOptimizer:
    """The state of the optimizer below DeepSpeed's, in one file.

    Attributes:
        shard: The file.
        params: States of its parameters, in order: a flat group or sub-group each, except in
            stage 0.
        param_groups: The plain numbers among each param group's settings.
    """

    shard: ShardFile
    params: tuple[ParamState, ...]
    param_groups: tuple[Hyperparameters, ...]


def read_base_optimizer(folder: Path, shard: ShardFile) -> BaseOptimizer:
    """Read the optimizer's own state from an optimizer states file, or stage 0's model states.

    Args:
        folder: The tag folder.
        shard: The file.

    Returns:
        Its typed view; no moment has been read.

    Raises:
        CheckpointError: If the file is damaged, or holds no such state.
    """
    archive = Archive(folder / shard.name)
    tree = archive.tree if isinstance(archive.tree, Mapping) else {}
    inner = _inner(tree.get("optimizer_state_dict" if shard.role == "optim" else "optimizer"))
    if isinstance(inner, list):
        params = [_param(archive, state, None, None) for state in inner]
        return BaseOptimizer(shard, tuple(params), ())
    groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
    states = inner.get("state") if isinstance(inner, Mapping) else None
    if not isinstance(groups, list) or not isinstance(states, Mapping):
        raise CheckpointError(
            f"{archive.path}: holds no optimizer state (no `state` and `param_groups`); "
            "consolidate without --include optimizer"
        )
    found = []
    for index, group in enumerate(groups):
        numbers = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(numbers, list):
            raise CheckpointError(
                f"{archive.path}: param group {index} of the optimizer is damaged"
            )
        names = group.get("param_names")
        names = names if isinstance(names, list) and len(names) == len(numbers) else ()
        for place, number in enumerate(numbers):
            state = states.get(number, {}) if isinstance(number, int) else {}
            found.append(_param(archive, state, index, names[place] if names else None))
    return BaseOptimizer(shard, tuple(found), tuple(_numbers(group) for group in groups))


def _inner(state: Any) -> Any:  # noqa: ANN401 - whatever the pickle holds
    """Find torch's own state dict inside DeepSpeed's."""
    if not isinstance(state, Mapping):
        return None
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        if key in state:
            return state[key]
    return state


def _param(archive: Archive, state: Any, group: int | None, name: Any) -> ParamState:  # noqa: ANN401
    tensors: dict[str, TensorSpan] = {}
    others: dict[str, str] = {}
    step = None
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if key == "step":
            step = archive.scalar(value) if isinstance(value, TensorRef) else value
        elif isinstance(value, TensorRef) and value.shape:
            tensors[str(key)] = archive.span(value)
        else:
            others[str(key)] = _kind(value)
    step = step if type(step) is int else None
    return ParamState(group, tensors, others, step, name if isinstance(name, str) else None)


def _kind(value: Any) -> str:  # noqa: ANN401
    return "a single number" if isinstance(value, TensorRef) else f"a {type(value).__name__}"


def _numbers(group: Mapping[str, Any]) -> Hyperparameters:
    """Keep a param group's numbers, and its lists of numbers (``betas``)."""
    found: Hyperparameters = {}
    for key, value in group.items():
        if not isinstance(key, str) or key in ("params", "param_names"):
            continue
        if _is_number(value):
            found[key] = value
        elif isinstance(value, list | tuple) and value and all(map(_is_number, value)):
            found[key] = list(value)
    return found


def _is_number(value: Any) -> bool:  # noqa: ANN401
    return type(value) in (bool, int, float) and math.isfinite(value)


def steps_of(optimizers: Sequence[BaseOptimizer]) -> list[int]:
    """Give the distinct steps recorded anywhere in these files, in order."""
    found: set[int] = set()
    for optimizer in optimizers:
        recorded = [param.step for param in optimizer.params]
        settings = [group.get("step") for group in optimizer.param_groups]
        found |= {step for step in (*recorded, *settings) if type(step) is int}
    return sorted(found)
