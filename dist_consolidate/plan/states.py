"""The optimizer's states in the plan: files of their own, with the names and shapes of the weights.

They are moved as the weights are, in the element type they have on disk. A state belongs to the
name that holds the weight; tied names have none of their own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from dist_consolidate.checkpoint.model import Checkpoint, OptimizerStates, Source
from dist_consolidate.plan.coverage import check_coverage
from dist_consolidate.plan.names import Names
from dist_consolidate.plan.outputs import OutputFile, StoredTensor
from dist_consolidate.plan.plan import Plan, PlannedTensor, plan_digest, shard_tensors
from dist_consolidate.plan.resolve import Resolution, Resolved

StateNames = Callable[[int, str], Sequence[str]]

# A key becomes a file's name.
_KEY = re.compile(r"[A-Za-z0-9_]{1,64}")
_SHOWN = 5


def with_states(
    plan: Plan,
    checkpoint: Checkpoint,
    resolution: Resolution,
    names: Names,
    *,
    max_shard_bytes: int | None,
    file_names: StateNames,
) -> Plan:
    """Add the optimizer's states to a plan.

    Args:
        plan: The plan of the weights.
        checkpoint: The metadata, with the optimizer's states.
        resolution: Data holders, by their names in the checkpoint.
        names: The output's names.
        max_shard_bytes: As for the weights, for each state's files.
        file_names: Gives the names of that many files of a state.

    Returns:
        The plan, with further files and tensors.

    Raises:
        CheckpointError: If the states do not fill every element exactly once.
    """
    states = checkpoint.optimizer
    assert states is not None, "the optimizer's states were not read"
    kept = {tensor.name for tensor in resolution.tensors}
    unread = dict(states.unread)
    files, tensors = list(plan.files), list(plan.tensors)
    by_key: dict[str, dict[str, Source]] = {}
    for key, sources in states.tensors.items():
        if not _KEY.fullmatch(key):
            unread[key] = "its key cannot be a file's name"
            continue
        by_key[key] = {name: source for name, source in sources.items() if name in kept}
    for key, sources in by_key.items():
        if not sources:
            continue
        holders = tuple(Resolved(name, source, ()) for name, source in sources.items())
        check_coverage(checkpoint, Resolution(holders, {}, {}, ()))
        _add(files, tensors, key, [(names[t.name], t.source) for t in holders],
             max_shard_bytes, file_names)  # fmt: skip
    without = {names[name]: why for name, why in _without(checkpoint, resolution, by_key).items()}
    facts = _facts(states, unread, without, names)
    added = (files[len(plan.files) :], tensors[len(plan.tensors) :])
    return dataclasses.replace(
        plan,
        files=tuple(files),
        tensors=tuple(tensors),
        notes=(*plan.notes, *_notes(by_key, unread, without)),
        optimizer=facts,
        digest=plan_digest([plan.digest], *added, [facts]),
    )


def _add(
    files: list[OutputFile],
    tensors: list[PlannedTensor],
    key: str,
    sources: Sequence[tuple[str, Source]],
    max_shard_bytes: int | None,
    file_names: StateNames,
) -> None:
    """Lay out the files of one state behind all others."""
    ordered = sorted(sources, key=lambda pair: -pair[1].dtype.itemsize_bytes)
    by_name = dict(ordered)
    stored = [StoredTensor((name,), source.dtype, source.shape) for name, source in ordered]
    shards = shard_tensors(stored, max_shard_bytes)
    for file_name, shard in zip(file_names(len(shards), key), shards, strict=True):
        for index, tensor in enumerate(shard):
            source = by_name[tensor.names[0]]
            place = ((len(files), index),)
            tensors.append(PlannedTensor(tensor.names[0], source, source.dtype, place, key))
        files.append(OutputFile(file_name, tuple(shard), state=key))


def _without(
    checkpoint: Checkpoint, resolution: Resolution, by_key: Mapping[str, Mapping[str, Source]]
) -> dict[str, str]:
    """Name the written weights that have no state at all, with reasons."""
    having = {name for sources in by_key.values() for name in sources}
    reasons = {}
    for tensor in resolution.tensors:
        if tensor.name in having:
            continue
        key = checkpoint.module.get(tensor.name)
        if key is not None and key.is_buffer:
            reasons[tensor.name] = "a buffer"
        elif tensor.source.origin == "frozen":
            reasons[tensor.name] = "frozen"
        elif not tensor.source.num_numel:
            reasons[tensor.name] = "has no elements"
        elif tensor.source.origin == "module":
            reasons[tensor.name] = "frozen, outside the optimizer, or not told apart"
        else:
            reasons[tensor.name] = "the optimizer saved no state for it"
    return reasons


def _notes(
    by_key: Mapping[str, Mapping[str, Source]],
    unread: Mapping[str, str],
    without: Mapping[str, str],
) -> list[str]:
    notes = [
        f"optimizer state {key!r} was left out: {what}" for key, what in sorted(unread.items())
    ]
    having = dict.fromkeys(name for sources in by_key.values() for name in sources)
    for key, sources in by_key.items():
        lacking = [name for name in having if name not in sources]
        if lacking:
            notes.append(f"optimizer state {key!r} is not there for {_some(lacking)}")
    if without:
        notes.append(f"no optimizer state: {_some(list(without))} (see consolidation.json)")
    return notes


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _facts(
    states: OptimizerStates,
    unread: Mapping[str, str],
    without: Mapping[str, str],
    names: Names,
) -> dict[str, object]:
    """Say in the manifest what cannot be said in a tensor file."""
    groups: list[dict[str, object]] = [dict(group) for group in states.param_groups]
    for name, index in states.group_of.items():
        if index < len(groups):
            members = groups[index].setdefault("tensors", [])
            assert isinstance(members, list), "a list of tensors is no number"
            members.append(names[name])
    steps: list[int] | None = list(states.steps) or None
    return {
        "step": steps[0] if steps and len(steps) == 1 else steps,
        "param_groups": groups,
        "left_out": dict(unread),
        "without_state": dict(without),
    }
