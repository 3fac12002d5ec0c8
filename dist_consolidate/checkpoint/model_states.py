"""Model states files and bare state dicts, as :class:`ModelState` and its like."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.archive import Archive
from dist_consolidate.checkpoint.expert_states import facts_of_model
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.layout import ShardFile
from dist_consolidate.checkpoint.nested import Nesting, check_names, flattened
from dist_consolidate.checkpoint.pickled import (
    as_mapping,
    check_name,
    device_of,
    integer,
    is_named,
    open_shard,
    param_shapes_of,
    shape_map,
    spans,
    state_of,
    text_of,
    wrong,
)
from dist_consolidate.checkpoint.plain import plain_mapping
from dist_consolidate.checkpoint.same_run import settings_of
from dist_consolidate.checkpoint.states import (
    ModelState,
    ModuleEntry,
    ParamState,
    TensorsState,
)
from dist_consolidate.checkpoint.unpickle import ODD_TENSOR, Inert, TensorRef
from dist_consolidate.errors import UnsupportedLayoutError


def read_model_state(folder: Path, shard: ShardFile) -> ModelState:
    """Read a model states file's metadata.

    Args:
        folder: The tag folder.
        shard: The file.

    Returns:
        Its typed view; no weight has been read.

    Raises:
        CheckpointError: If the file is damaged or is no model state.
    """
    archive = open_shard(folder, shard)
    tree = state_of(archive)
    if "module" not in tree:
        raise wrong(archive.path, "has no `module`")
    nested = flattened(as_mapping(tree["module"]) or {})
    module, odd = _module(archive, tree["module"] if nested is None else nested)
    shapes = param_shapes_of(archive.path, tree)
    if nested is not None and integer(tree.get("mp_world_size")) not in (None, 1):
        # How shards are merged depends on names.
        known = None if shapes is None else {name for group in shapes for name in group}
        check_names(archive.path, (module or {}).keys(), known)
    names, shared = tree.get("buffer_names"), tree.get("shared_params")
    frozen = as_mapping(tree.get("frozen_param_fragments"))
    frozen_shapes = tree.get("frozen_param_shapes")
    zero = _zero_config(tree.get("ds_config"))
    masters, flat = fp32_masters(archive, tree.get("optimizer"))
    return ModelState(
        shard=shard,
        module=module,
        odd_entries=odd,
        buffer_names=_names(archive.path, names),
        param_shapes=shapes,
        frozen_shapes=None
        if frozen_shapes is None
        else shape_map(archive.path, frozen_shapes, "frozen_param_shapes"),
        frozen=None
        if frozen is None
        else dict(zip(frozen, spans(archive, list(frozen.values()), "frozen"), strict=True)),
        shared_params=_pairs(archive.path, shared),
        optimizer=masters,
        flat_masters=flat,
        zero_stage=integer(zero.get("stage")),
        zenflow=zero.get("zenflow") not in (None, False),
        global_steps=integer(tree.get("global_steps")),
        skipped_steps=integer(tree.get("skipped_steps")),
        dp_world_size=integer(tree.get("dp_world_size")),
        mp_world_size=integer(tree.get("mp_world_size")),
        ds_version=text_of(tree.get("ds_version")),
        parallel_degrees=_degrees(tree.get("checkpoint_parallel_dimensions")),
        experts=facts_of_model(tree),
        moments=_moments(archive, tree.get("optimizer")),
        is_partitioned="single_partition_of_fp32_groups"
        in (as_mapping(tree.get("optimizer")) or {}),
        universal_info=plain_mapping(tree.get("universal_checkpoint_info")),
        settings=settings_of(tree.get("ds_config")),
        is_named=is_named(archive),
        is_nested=nested is not None,
        device=device_of((frozen or {}).values()),
    )


def read_tensors(folder: Path, shard: ShardFile) -> TensorsState:
    """Read the metadata of a bare state dict.

    Args:
        folder: The tag folder.
        shard: The file.

    Returns:
        Its typed view; no weight has been read.

    Raises:
        CheckpointError: If the file is damaged or holds something else.
    """
    archive = open_shard(folder, shard)
    entries, odd = _module(archive, state_of(archive))
    return TensorsState(shard, entries or {}, odd)


def read_param(folder: Path, shard: ShardFile) -> ParamState:
    """Read the metadata of one parameter's file of a universal checkpoint.

    Args:
        folder: The tag folder.
        shard: The file.

    Returns:
        Its typed view; no weight has been read.

    Raises:
        CheckpointError: If the file is damaged or holds something else.
        UnsupportedLayoutError: If the parameter is an expert's.
    """
    archive = Archive(folder / shard.name, shard.name)
    tree = archive.tree
    bare = isinstance(tree, TensorRef)
    if not bare and "is_expert_param" in state_of(archive):
        raise UnsupportedLayoutError(
            f"{archive.path}: is an expert's parameter (MoE) in a universal checkpoint; this "
            "version does not read those"
        )
    tensor = tree if bare else tree.get("param")
    if not isinstance(tensor, TensorRef):
        raise wrong(archive.path, "has no tensor `param`")
    return ParamState(shard, archive.span(tensor), bare)


def _degrees(value: Any) -> tuple[int, int] | None:  # noqa: ANN401
    value = as_mapping(value) or {}
    stages, ranks = integer(value.get("pp_degree")) or 0, integer(value.get("tp_degree")) or 0
    return (stages, ranks) if stages > 0 and ranks > 0 else None


def _module(
    archive: Archive,
    value: Any,  # noqa: ANN401
) -> tuple[dict[str, ModuleEntry] | None, dict[str, str]]:
    if value is None:
        return None, {}
    value = as_mapping(value)
    if value is None:
        raise wrong(archive.path, "`module` is no state dict")
    entries, odd, nesting = {}, {}, Nesting()
    for name, tensor in value.items():
        check_name(archive.path, name, "`module`")
        if isinstance(tensor, TensorRef):
            plain = dataclasses.replace(tensor, attributes=None)
            entries[name] = ModuleEntry(plain, archive.span(tensor))
        elif nesting.has(name, tensor):
            raise UnsupportedLayoutError(
                f"{archive.path}: `module` is nested ({name!r} holds tensors of its own), as "
                "Megatron-DeepSpeed writes it; this version reads flat state dicts only"
            )
        elif isinstance(tensor, Inert):
            odd[name] = _odd_kind(name, tensor)
        else:
            odd[name] = type(tensor).__name__
    return entries, odd


def _odd_kind(name: str, value: Inert) -> str:
    """Say what an entry is; an object of a foreign class may be a tensor of some kind."""
    known = value.foreign_name.startswith(ODD_TENSOR) or name.endswith("_extra_state")
    return value.foreign_name if known else f"{ODD_TENSOR} or object of {value.foreign_name}"


def _names(path: Path, value: Any) -> frozenset[str] | None:  # noqa: ANN401
    if not isinstance(value, list | tuple | set):
        return None
    if not all(isinstance(name, str) for name in value):
        raise wrong(path, "buffer_names holds what are no names")
    return frozenset(value)


def _pairs(path: Path, value: Any) -> dict[str, str] | None:  # noqa: ANN401
    value = as_mapping(value)
    if value is None:
        return None
    if not all(isinstance(name, str) for pair in value.items() for name in pair):
        raise wrong(path, "shared_params holds what are no names")
    return {check_name(path, n, "shared_params"): v for n, v in value.items()}


def fp32_masters(
    archive: Archive,
    optimizer: Any,  # noqa: ANN401
) -> tuple[tuple[tuple[TensorSpan, ...], ...] | None, bool]:
    """Find stage 0's fp32 masters: flat groups (fused) or lists of shaped tensors (unfused).

    Args:
        archive: The file.
        optimizer: Its optimizer's state dict.

    Returns:
        The masters, group by group (``None`` without an optimizer), and whether they are flat.
    """
    optimizer = as_mapping(optimizer)
    if optimizer is None:
        return None, False
    flat = optimizer.get("fp32_groups_flat")
    if flat is not None:
        return tuple((span,) for span in spans(archive, flat, "fp32_groups_flat")), True
    groups = optimizer.get("fp32_groups", ())
    return tuple(tuple(spans(archive, group, "fp32_groups")) for group in groups), False


def _moments(archive: Archive, optimizer: Any) -> tuple[TensorSpan, ...]:  # noqa: ANN401
    """Find one moment of each parameter in a torch optimizer's own state dict."""
    states = as_mapping((as_mapping(optimizer) or {}).get("state")) or {}
    found = []
    for state in states.values():
        tensors = (t for t in (as_mapping(state) or {}).values() if isinstance(t, TensorRef))
        moment = next((t for t in tensors if t.shape), None)
        if moment is not None:
            found.append(archive.span(moment))
    return tuple(found)


def _zero_config(config: Any) -> Mapping[str, Any]:  # noqa: ANN401
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return zero if isinstance(zero, Mapping) else {}
