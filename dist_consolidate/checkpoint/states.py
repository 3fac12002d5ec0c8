"""The typed view of what DeepSpeed pickled: by what is there, not by version.

A key that an old release does not write is ``None`` here. Every tensor has become a span of its
file; nothing below refers to the archive any more, so that states can travel between processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.archive import Archive
from dist_consolidate.checkpoint.expert_states import (
    ExpertFacts,
    facts_of_model,
    facts_of_optim,
)
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.layout import ShardFile, parse_name
from dist_consolidate.checkpoint.nested import check_names, flattened, is_nested
from dist_consolidate.checkpoint.plain import plain_mapping
from dist_consolidate.checkpoint.unpickle import ODD_TENSOR, Inert, TensorRef
from dist_consolidate.errors import CheckpointError, UnsupportedLayoutError

Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleEntry:
    """One tensor of ``module``.

    Attributes:
        ref: As pickled: the storage record it looks into is what tied names share.
        span: Where its elements lie (an empty span for an empty tensor).
    """

    ref: TensorRef
    span: TensorSpan


@dataclasses.dataclass(frozen=True, slots=True)
class ModelState:
    """A model states file.

    Attributes:
        shard: The file.
        module: The model's state dict; ``None`` where a pipeline engine left it out.
        odd_entries: Keys of ``module`` that are no tensors, with what they are.
        buffer_names: Persistent buffers, or ``None`` where not recorded.
        param_shapes: One mapping per param group or sub-group, in flat order.
        frozen_shapes: Full shapes of frozen parameters.
        frozen: Frozen parameters: whole (stage 2) or this rank's 1-D slice (stage 3).
        shared_params: Recorded ties, alias to stored name.
        optimizer: Stage 0's fp32 masters, group by group; ``None`` if there is no such optimizer.
        flat_masters: Whether each of these groups is one flat tensor.
        zero_stage: Stage in the configuration, if it was pickled as a dict.
        zenflow: Whether the configuration, if it was pickled as a dict, has ZenFlow on.
        global_steps: Steps taken; with the world sizes, DeepSpeed's own counters.
        dp_world_size: Data-parallel world size (sequence ranks included).
        mp_world_size: Model-parallel world size.
        ds_version: The DeepSpeed release that wrote it.
        parallel_degrees: Pipeline stages and tensor-parallel ranks, where recorded.
        experts: What is recorded about experts.
        moments: Of an optimizer without masters of its own, one moment of each parameter it has
            stepped, in its order: they tell how many parameters there are, and of which shape.
        is_partitioned: Whether ``optimizer`` is one rank's share of a partitioned optimizer, whose
            files lie beside this one.
        universal_info: ``universal_checkpoint_info`` in plain values: the tensor-parallel layout.
    """

    shard: ShardFile
    module: dict[str, ModuleEntry] | None
    odd_entries: dict[str, str]
    buffer_names: frozenset[str] | None
    param_shapes: tuple[Shapes, ...] | None
    frozen_shapes: Shapes | None
    frozen: dict[str, TensorSpan] | None
    shared_params: dict[str, str] | None
    optimizer: tuple[tuple[TensorSpan, ...], ...] | None
    flat_masters: bool
    zero_stage: int | None
    zenflow: bool
    global_steps: int | None
    dp_world_size: int | None
    mp_world_size: int | None
    ds_version: str | None
    parallel_degrees: tuple[int, int] | None = None
    experts: ExpertFacts = ExpertFacts()  # noqa: RUF009 - frozen
    moments: tuple[TensorSpan, ...] = ()
    is_partitioned: bool = False
    universal_info: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TensorsState:
    """A bare state dict: one expert, or one pipeline layer.

    Attributes:
        shard: The file.
        entries: Its tensors.
        odd_entries: Keys that are no tensors, with what they are.
    """

    shard: ShardFile
    entries: dict[str, ModuleEntry]
    odd_entries: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class ParamState:
    """One parameter's file of a universal checkpoint.

    Attributes:
        shard: The file.
        span: Its values.
        bare: Whether the file holds the tensor alone, which then is flat.
    """

    shard: ShardFile
    span: TensorSpan
    bare: bool


@dataclasses.dataclass(frozen=True, slots=True)
class OptimState:
    """An optimizer states file under ZeRO.

    Attributes:
        shard: The file.
        striped: Whether each parameter is cut over all ranks (stage 3), rather than the whole
            flat group (stages 1 and 2).
        zero_stage: As recorded; ``None`` in BF16_Optimizer's files.
        partition_counts: Ranks that share each group; one number for all of them in stage 3.
        parts: This rank's slice of each flat group or sub-group: 1-D spans.
        param_shapes: As in :class:`ModelState`; releases before 0.6 keep it here.
        alignment_paddings: Elements of padding behind each parameter, group by group.
        step: Steps the optimizer has taken, where it says so.
        ds_version: The DeepSpeed release that wrote it.
        experts: What is recorded about experts.
        slices: ``param_slice_mappings``, group by group: where in this rank's part its elements of
            each parameter begin, and how many they are.
        universal_info: As in :class:`ModelState`; AutoTP keeps it here too.
        swap_ids: What names the file of each part that the swapper may have emptied.
    """

    shard: ShardFile
    striped: bool
    zero_stage: int | None
    partition_counts: tuple[int, ...]
    parts: tuple[TensorSpan, ...]
    param_shapes: tuple[Shapes, ...] | None
    alignment_paddings: tuple[tuple[int, ...], ...] | None
    step: int | None
    ds_version: str | None
    experts: ExpertFacts = ExpertFacts()  # noqa: RUF009 - frozen
    slices: tuple[dict[str, tuple[int, int]], ...] | None = None
    universal_info: Mapping[str, Any] | None = None
    swap_ids: tuple[str | None, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks; a group of experts is shared by some of them only."""
        sizes = self.experts.sizes or ()
        sizes += (0,) * (len(self.partition_counts) - len(sizes))
        pairs = zip(self.partition_counts, sizes, strict=False)
        return max((count * (size or 1) for count, size in pairs), default=0)


def _wrong(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}; this is not what DeepSpeed writes")


def _integer(value: Any) -> int | None:  # noqa: ANN401 - whatever the pickle holds
    """Read an int, or the value of a pickled enum."""
    if isinstance(value, Inert) and value.args:
        value = value.args[0]
    return value if type(value) is int else None


def as_mapping(value: Any) -> Mapping[Any, Any] | None:  # noqa: ANN401
    """Accept a mapping, and what stands for an object of a foreign subclass of dict.

    Args:
        value: Whatever the pickle holds.

    Returns:
        The mapping, or ``None`` if it is none.
    """
    if isinstance(value, Inert) and not value.args and value.state is None:
        pairs = [item for item in value.items if isinstance(item, tuple) and len(item) == 2]
        return dict(pairs) if len(pairs) == len(value.items) else None
    return value if isinstance(value, Mapping) else None


def _text(value: Any) -> str | None:  # noqa: ANN401
    return value if isinstance(value, str) else None


def _shape_map(path: Path, value: Any, what: str) -> Shapes:  # noqa: ANN401
    value = as_mapping(value)
    if value is None:
        raise _wrong(path, f"{what} is no mapping of names to shapes")
    shapes = {}
    for name, shape in value.items():
        good = isinstance(shape, tuple | list) and all(type(s) is int and s >= 0 for s in shape)
        if not good or not isinstance(name, str):
            raise _wrong(path, f"{what} gives {name!r} the shape {shape!r}")
        shapes[name] = tuple(shape)
    return shapes


def _param_shapes(path: Path, tree: Mapping[str, Any]) -> tuple[Shapes, ...] | None:
    """Accept a list of mappings, and the single mapping of releases before 0.5.4."""
    value = tree.get("param_shapes")
    if value is None:
        return None
    single = as_mapping(value)
    groups = value if single is None else [single]
    if not isinstance(groups, list | tuple):
        raise _wrong(path, f"param_shapes is a {type(value).__name__}")
    return tuple(_shape_map(path, group, "param_shapes") for group in groups)


def _spans(archive: Archive, value: Any, what: str) -> Iterator[TensorSpan]:  # noqa: ANN401
    if not isinstance(value, list | tuple):
        raise _wrong(archive.path, f"{what} is a {type(value).__name__}, expected a list")
    for tensor in value:
        if not isinstance(tensor, TensorRef):
            raise _wrong(archive.path, f"{what} holds a {type(tensor).__name__}, not a tensor")
        yield archive.span(tensor)


def open_shard(folder: Path, shard: ShardFile) -> Archive:
    """Open a shard, which must be what its name says: the zip remembers the name it was saved as.

    A file saved through a stream remembers no name.
    """
    archive = Archive(folder / shard.name)
    saved = parse_name(f"{archive.saved_as}.pt")
    if saved is not None and saved.identity != shard.identity:
        raise CheckpointError(
            f"{archive.path}: was saved as {saved.name}; it was renamed, or copied over the right "
            "file: put each file back under the name it was saved as"
        )
    return archive


def state_of(archive: Archive) -> Mapping[str, Any]:
    """Give a file's dictionary.

    Args:
        archive: The file.

    Returns:
        What it holds.

    Raises:
        CheckpointError: If it is no dictionary.
    """
    if archive.tree == "":
        raise UnsupportedLayoutError(
            f"{archive.path}: is a stub of the Nebula checkpoint engine (an empty text), whose "
            "data are kept elsewhere; load the checkpoint with DeepSpeed and Nebula, and save it "
            "without"
        )
    if not isinstance(archive.tree, Mapping):
        kind = type(archive.tree).__name__
        raise _wrong(archive.path, f"holds a {kind}, expected a dictionary of states")
    return archive.tree


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
        raise _wrong(archive.path, "has no optimizer_state_dict")
    striped = "fp32_flat_groups" in state
    key = "fp32_flat_groups" if striped else "single_partition_of_fp32_groups"
    if "local_sub_partitions_of_fp32_groups" in state:
        raise UnsupportedLayoutError(
            f"{archive.path}: was written by the stage-1 optimizer of before DeepSpeed 0.4 "
            "(communication intervals), which this version does not read"
        )
    if key not in state:
        raise _wrong(archive.path, "holds no fp32 partition (a ZeRO optimizer state has one)")
    counts = state.get("partition_count")
    counts = counts if isinstance(counts, list | tuple) else [counts]
    return OptimState(
        shard=shard,
        striped=striped,
        zero_stage=_integer(state.get("zero_stage")),
        partition_counts=tuple(c for c in counts if type(c) is int),
        parts=tuple(_spans(archive, state[key], key)),
        param_shapes=_param_shapes(archive.path, tree),
        alignment_paddings=_paddings(archive.path, state.get("param_alignment_paddings")),
        step=_optimizer_step(archive, state),
        ds_version=_text(tree.get("ds_version")),
        slices=_slices(state.get("param_slice_mappings")),
        experts=facts_of_optim(tree, state),
        universal_info=plain_mapping(state.get("universal_checkpoint_info")),
        swap_ids=tuple(map(_swap_id, state[key])),
    )


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
            start, numel = _integer(fields.get("start")), _integer(fields.get("numel"))
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
    return _text(state.get("ds_id")) if isinstance(state, Mapping) else None


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
        raise _wrong(path, f"param_alignment_paddings is {value!r}") from error
    if not all(type(pad) is int and pad >= 0 for group in paddings for pad in group):
        raise _wrong(path, f"param_alignment_paddings is {value!r}")
    return paddings


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
        raise _wrong(archive.path, "has no `module`")
    nested = flattened(as_mapping(tree["module"]) or {})
    module, odd = _module(archive, tree["module"] if nested is None else nested)
    shapes = _param_shapes(archive.path, tree)
    if nested is not None:
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
        else _shape_map(archive.path, frozen_shapes, "frozen_param_shapes"),
        frozen=None
        if frozen is None
        else dict(zip(frozen, _spans(archive, list(frozen.values()), "frozen"), strict=True)),
        shared_params=_pairs(archive.path, shared),
        optimizer=masters,
        flat_masters=flat,
        zero_stage=_integer(zero.get("stage")),
        zenflow=zero.get("zenflow") not in (None, False),
        global_steps=_integer(tree.get("global_steps")),
        dp_world_size=_integer(tree.get("dp_world_size")),
        mp_world_size=_integer(tree.get("mp_world_size")),
        ds_version=_text(tree.get("ds_version")),
        parallel_degrees=_degrees(tree.get("checkpoint_parallel_dimensions")),
        experts=facts_of_model(tree),
        moments=_moments(archive, tree.get("optimizer")),
        is_partitioned="single_partition_of_fp32_groups"
        in (as_mapping(tree.get("optimizer")) or {}),
        universal_info=plain_mapping(tree.get("universal_checkpoint_info")),
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
        raise _wrong(archive.path, "has no tensor `param`")
    return ParamState(shard, archive.span(tensor), bare)


def _degrees(value: Any) -> tuple[int, int] | None:  # noqa: ANN401
    value = as_mapping(value) or {}
    pair = (_integer(value.get("pp_degree")), _integer(value.get("tp_degree")))
    return (pair[0], pair[1]) if pair[0] and pair[1] else None


def _module(
    archive: Archive,
    value: Any,  # noqa: ANN401
) -> tuple[dict[str, ModuleEntry] | None, dict[str, str]]:
    if value is None:
        return None, {}
    value = as_mapping(value)
    if value is None:
        raise _wrong(archive.path, "`module` is no state dict")
    entries, odd = {}, {}
    for name, tensor in value.items():
        if not isinstance(name, str):
            raise _wrong(archive.path, f"`module` has the key {name!r}")
        if isinstance(tensor, TensorRef):
            plain = dataclasses.replace(tensor, attributes=None)
            entries[name] = ModuleEntry(plain, archive.span(tensor))
        elif is_nested(name, tensor):
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
        raise _wrong(path, "buffer_names holds what are no names")
    return frozenset(value)


def _pairs(path: Path, value: Any) -> dict[str, str] | None:  # noqa: ANN401
    value = as_mapping(value)
    if value is None:
        return None
    if not all(isinstance(name, str) for pair in value.items() for name in pair):
        raise _wrong(path, "shared_params holds what are no names")
    return dict(value)


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
        return tuple((span,) for span in _spans(archive, flat, "fp32_groups_flat")), True
    groups = optimizer.get("fp32_groups", ())
    return tuple(tuple(_spans(archive, group, "fp32_groups")) for group in groups), False


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
