"""Optimizer states files: what DeepSpeed pickled, as :class:`OptimState`."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.archive import Archive
from dist_consolidate.checkpoint.expert_states import facts_of_optim
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.layout import ShardFile
from dist_consolidate.checkpoint.pickled import (
    as_mapping,
    device_of,
    integer,
    is_named,
    open_shard,
    param_shapes_of,
    spans,
    state_of,
    text_of,
    wrong,
)
from dist_consolidate.checkpoint.plain import plain_mapping
from dist_consolidate.checkpoint.same_run import settings_of
from dist_consolidate.checkpoint.states import (
    OptimState,
)
from dist_consolidate.checkpoint.unpickle import Inert, TensorRef


def read_optim_state(folder: Path, shard: ShardFile) -> OptimState:
    """Read an optimizer states file's metadata.

    Args:
        folder: The tag folder.
        shard: The file.

    Returns:
        Its typed view; no weight has been read.

    Raises:
        CheckpointError: If the file is damaged or is no ZeRO optimizer state.
    """
    archive = open_shard(folder, shard)
    tree = state_of(archive)
    state = as_mapping(tree.get("optimizer_state_dict"))
    if state is None:
        raise wrong(archive.path, "has no optimizer_state_dict")
    striped = "fp32_flat_groups" in state
    key = "fp32_flat_groups" if striped else "single_partition_of_fp32_groups"
    rounds = _rounds(archive, state.get("local_sub_partitions_of_fp32_groups"))
    if key not in state and not rounds:
        raise wrong(archive.path, "holds no fp32 partition (a ZeRO optimizer state has one)")
    parts = tuple(group[0] for group in rounds) or tuple(spans(archive, state[key], key))
    counts = state.get("partition_count")
    counts = counts if isinstance(counts, list | tuple) else [counts]
    return OptimState(
        shard=shard,
        striped=striped,
        zero_stage=integer(state.get("zero_stage")),
        partition_counts=tuple(c for c in counts if type(c) is int and integer(c) is not None),
        parts=parts,
        rounds=rounds,
        param_shapes=param_shapes_of(archive.path, tree),
        alignment_paddings=_paddings(archive.path, state.get("param_alignment_paddings")),
        step=_optimizer_step(archive, state),
        ds_version=text_of(tree.get("ds_version")),
        slices=_slices(state.get("param_slice_mappings")),
        experts=facts_of_optim(tree, state),
        universal_info=plain_mapping(state.get("universal_checkpoint_info")),
        settings=settings_of(tree.get("ds_config")),
        is_named=is_named(archive),
        device=device_of(() if rounds else state[key]),
        swap_ids=() if rounds else tuple(map(_swap_id, state[key])),
    )


def _rounds(archive: Archive, value: Any) -> tuple[tuple[TensorSpan, ...], ...]:  # noqa: ANN401
    """Read the first stage-1 optimizer's parts: per group, one for each communication interval.

    Source: DeepSpeed 0.5.8's ``stage1.py``, ``get_data_parallel_sub_partitions``.
    """
    key = "local_sub_partitions_of_fp32_groups"
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise wrong(archive.path, f"{key} is a {type(value).__name__}, expected a list")
    rounds = tuple(tuple(spans(archive, group, key)) for group in value)
    if not rounds or not all(rounds):
        raise wrong(archive.path, f"{key} has a param group without a part")
    return rounds


def _slices(value: Any) -> tuple[dict[str, tuple[int, int]], ...] | None:  # noqa: ANN401
    """Read ``param_slice_mappings``: per group, names to (first element, number of elements)."""
    if not isinstance(value, list | tuple):
        return None
    groups = []
    for group in value:
        found = {}
        for name, address in (as_mapping(group) or {}).items():
            state = address.state if isinstance(address, Inert) else None
            fields = state if isinstance(state, Mapping) else {}
            start, numel = integer(fields.get("start")), integer(fields.get("numel"))
            if not isinstance(name, str) or start is None or numel is None:
                return None
            found[name] = (start, numel)
        groups.append(found)
    return tuple(groups)


def _swap_id(tensor: TensorRef) -> str | None:
    """Read the attribute that names a tensor's swap file."""
    state = tensor.attributes
    # Objects with slots pickle a pair of their dictionary and the slots.
    state = state[0] if isinstance(state, tuple) and state else state
    return text_of(state.get("ds_id")) if isinstance(state, Mapping) else None


def _optimizer_step(archive: Archive, state: Mapping[str, Any]) -> int | None:
    """Find Adam's step: a number, or a tensor of one element, whose few bytes are read."""
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    # A list of states by group is what elastic checkpoints hold.
    holders = list(inner) if isinstance(inner, list) else []
    if isinstance(inner, Mapping):
        states, groups = inner.get("state"), inner.get("param_groups")
        holders += states.values() if isinstance(states, Mapping) else ()
        holders += groups if isinstance(groups, list) else ()
    for holder in holders:
        step = holder.get("step") if isinstance(holder, Mapping) else None
        if isinstance(step, TensorRef):
            return archive.scalar(step)
        if type(step) is int:
            return step
    return None


def _paddings(path: Path, value: Any) -> tuple[tuple[int, ...], ...] | None:  # noqa: ANN401
    if value is None:
        return None
    try:
        paddings = tuple(tuple(group) for group in value)
    except TypeError as error:
        raise wrong(path, f"param_alignment_paddings is {reprlib.repr(value)}") from error
    if not all(type(pad) is int and pad >= 0 for group in paddings for pad in group):
        raise wrong(path, f"param_alignment_paddings is {reprlib.repr(value)}")
    return paddings
