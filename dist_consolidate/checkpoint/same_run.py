"""Whether files are of one run: DeepSpeed pickles the configuration into each of them.

All ranks of a run train with the same numbers and switches. Texts may differ between them (paths
above all), and so may sections that do not touch the training; neither is compared.

Source: DeepSpeed's ``engine._common_checkpoint_state`` and ``engine._save_zero_checkpoint``, which
both store what ``initialize`` was given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.plain import Limit
from dist_consolidate.errors import Problems

if TYPE_CHECKING:
    from dist_consolidate.checkpoint.states import ModelState, OptimState

Settings = tuple[tuple[str, int | float], ...]

_SECTIONS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16",
    "bf16",
    "bfloat16",
    "optimizer",
    "zero_optimization",
)
_MAX_DEPTH = 8


def settings_of(config: Any) -> Settings | None:  # noqa: ANN401 - whatever the pickle holds
    """Give the numbers and switches of a configuration that all ranks of a run share.

    Args:
        config: ``ds_config`` as pickled.

    Returns:
        Dotted names and values, sorted; ``None`` where it is no dictionary (a path, say).
    """
    if not isinstance(config, Mapping):
        return None
    found = {name: config[name] for name in _SECTIONS if name in config}
    return tuple(sorted(_leaves(found, "", 0, Limit())))


def _leaves(
    value: Any,  # noqa: ANN401
    name: str,
    depth: int,
    limit: Limit,
) -> Iterator[tuple[str, int | float]]:
    limit.take()
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key), depth + 1, limit)
    elif isinstance(value, list | tuple) and depth < _MAX_DEPTH:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}[{index}]", depth + 1, limit)
    elif isinstance(value, int) or (isinstance(value, float) and not math.isnan(value)):
        yield name, value


def check(
    folder: TagFolder,
    states: Sequence[ModelState | OptimState],
    problems: Problems,
    *,
    trust_masters: bool,
) -> list[str]:
    """Check that all files record the same configuration.

    Args:
        folder: The shards.
        states: Their states, those of rank 0's model states first.
        problems: Takes each file with another configuration.
        trust_masters: Take the files together nevertheless.

    Returns:
        What to say of it.
    """
    first = states[0]
    optim = next((s for s in states if s.shard.role == "optim" and s.settings), None)
    differing = []
    for state in states[1:]:
        other, difference = first, _difference(first.settings, state.settings)
        if not difference and optim is not None and state.shard.role == "optim":
            # What a user adds to model states never gets into these: they have the same names, too.
            other, difference = optim, _difference(optim.settings, state.settings, whole=True)
        if difference:
            path = folder.file(state.shard.name)
            differing.append(f"{path}: its ds_config has {difference} of {other.shard.name}")
    if trust_masters:
        what = "; the files were taken together (--trust-masters)"
        return [f"{text}{what}" for text in differing]
    for text in differing:
        problems.add(
            f"{text}; the files are of different runs. If you know that they are of one save, "
            "pass --trust-masters"
        )
    return []


def _difference(ours: Settings | None, theirs: Settings | None, *, whole: bool = False) -> str:
    """Name the first setting that differs, of those that both have or of all; empty if none."""
    if ours is None or theirs is None:
        return ""
    mine, its = dict(ours), dict(theirs)
    names = sorted({*mine, *its}) if whole else [name for name in mine if name in its]
    name = next((name for name in names if mine.get(name) != its.get(name)), None)
    if name is None:
        return ""
    return f"{name} = {its.get(name, 'nothing')}, but {mine.get(name, 'nothing')} is that"
