"""The typed view of what DeepSpeed pickled: by what is there, not by version.

A key that an old release does not write is ``None`` here. Every tensor has become a span of its
file; nothing below refers to the archive any more, so that states can travel between processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dist_consolidate.checkpoint.expert_states import (
    ExpertFacts,
)
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.layout import ShardFile
from dist_consolidate.checkpoint.same_run import Settings
from dist_consolidate.checkpoint.unpickle import TensorRef

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
        skipped_steps: Of them, those that an overflow kept the optimizer from taking.
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
        settings: What the configuration has for all ranks, where it was pickled as a dict.
        is_named: Whether the file remembers its name, and so whose it is.
        is_nested: Whether ``module`` had state dicts in it; names are the paths, with dots.
        device: Index of the CUDA device that its frozen parameters lay on, where they did.
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
    settings: Settings | None = None
    is_named: bool = True
    is_nested: bool = False
    device: int | None = None
    skipped_steps: int | None = None

    @property
    def steps_taken(self) -> int | None:
        """Steps that the optimizer took, where the counters tell."""
        if self.global_steps is None or self.skipped_steps is None:
            return None
        return self.global_steps - self.skipped_steps


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
        rounds: Of the first stage-1 optimizer, each group's parts, one for each communication
            interval; ``parts`` has the first of them.
        swap_ids: What names the file of each part that the swapper may have emptied.
        settings: As in :class:`ModelState`.
        is_named: As in :class:`ModelState`.
        device: Index of the CUDA device that its parts lay on, where they did.
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
    rounds: tuple[tuple[TensorSpan, ...], ...] = ()
    settings: Settings | None = None
    is_named: bool = True
    device: int | None = None

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks; a group of experts is shared by some of them only."""
        sizes = self.experts.sizes or ()
        sizes += (0,) * (len(self.partition_counts) - len(sizes))
        pairs = list(zip(self.partition_counts, sizes, strict=False))
        # Groups of no experts are shared by all ranks; sizes of experts may not be what they say.
        dense = [count for count, size in pairs if size == 0]
        return max(dense or (count * (size or 1) for count, size in pairs), default=0)
