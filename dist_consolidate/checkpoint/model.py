"""What the planner gets to see: flat groups, sources of tensors, and the facts about ties."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from dist_consolidate.checkpoint.extents import Extent, TensorSpan
from dist_consolidate.dtypes import DType

Origin = Literal["fp32 partition", "frozen", "module", "optimizer state"]


@dataclasses.dataclass(frozen=True, slots=True)
class FlatGroup:
    """A flat buffer that DeepSpeed cut over the ranks.

    Attributes:
        label: What to call it in a message.
        striped: False: the parts follow one another, element ``k`` of the group is element ``k`` of
            their concatenation (stages 1 and 2). True: every part holds a slice of each tensor, all
            at the same offset (stage 3).
        dtype: Element type.
        parts: One byte range per data-parallel rank, in rank order.
    """

    label: str
    striped: bool
    dtype: DType
    parts: tuple[Extent, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FlatSlot:
    """A tensor's place in a flat group.

    Attributes:
        group: Index of the group.
        offset_numel: First element: in the concatenation, or (striped) in every part.
        part_numel: Striped: elements per part, ``ceil(numel / parts)``; otherwise 0.
    """

    group: int
    offset_numel: int
    part_numel: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Evenly spaced runs of one source that fill evenly spaced runs of a tensor.

    Run ``i`` takes the source's elements from ``from_numel + i * from_step_numel`` on to the
    tensor's elements from ``to_numel + i * to_step_numel`` on; both in row-major order.

    Attributes:
        source: A slot or a span, of the tensor's element type.
        num_runs: Runs.
        run_numel: Elements of each run.
        from_numel: First element of the first run, in the source.
        from_step_numel: Distance between runs, in the source.
        to_numel: First element of the first run, in the tensor.
        to_step_numel: Distance between runs, in the tensor.
    """

    source: Source
    num_runs: int
    run_numel: int
    from_numel: int
    from_step_numel: int
    to_numel: int
    to_step_numel: int


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor's values come from: a slot of a flat group, a span of one file, or blocks.

    Attributes:
        origin: Which copy it is.
        shape: Full shape.
        dtype: Element type on disk.
        slot: Set where it lies in a flat group.
        span: Set where it lies in one piece.
        blocks: Set where it is put together of several sources: they fill every element once.
    """

    origin: Origin
    shape: tuple[int, ...]
    dtype: DType
    slot: FlatSlot | None = None
    span: TensorSpan | None = None
    blocks: tuple[Block, ...] = ()

    @property
    def num_numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def own_source(span: TensorSpan) -> Source:
    """Give a tensor's own copy in the model states (or a layer's, or an expert's) as a source.

    Args:
        span: Where it lies.

    Returns:
        The source, of the shape and element type on disk.
    """
    return Source("module", span.shape, span.dtype, span=span)


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleKey:
    """One key of ``module``, as far as planning needs it.

    Attributes:
        shape: As pickled; a ZeRO-3 placeholder has the shape of nothing.
        identity: What tied names share and others do not: storage record, offset, shape, stride
            and element type.
        source: Its own full tensor, or ``None`` for a placeholder.
        is_buffer: Recorded as a persistent buffer.
    """

    shape: tuple[int, ...]
    identity: tuple[object, ...]
    source: Source | None
    is_buffer: bool


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerStates:
    """What the optimizer keeps for each weight, and its settings.

    Attributes:
        tensors: By key (``exp_avg``, ...) and parameter, in flat order.
        unread: Keys that have no value for each weight, and what they are.
        steps: The distinct steps that the optimizer recorded; usually one.
        param_groups: The plain numbers among each param group's settings.
        group_of: Param group of each parameter, where recorded.
    """

    tensors: dict[str, dict[str, Source]]
    unread: dict[str, str]
    steps: tuple[int, ...]
    param_groups: tuple[dict[str, object], ...]
    group_of: dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """What a damaged checkpoint lacks of a tensor (``--salvage``).

    Attributes:
        what: ``missing`` and ``partial`` tensors are not written; ``lower precision`` and ``other
            copy`` are, from what is left.
        why: Which file or record is damaged.
        num_numel: Elements of the most precise copy.
        intact_numel: Of them, those that are intact.
    """

    what: Literal["missing", "partial", "lower precision", "other copy"]
    why: str
    num_numel: int
    intact_numel: int


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """The metadata of one tag, ready for planning; no weight has been read.

    Attributes:
        tag: Name of the tag folder.
        chosen: How the tag was chosen, in words.
        stage: ZeRO stage, 0 to 3.
        world_size: Ranks that share a flat group (1 in stage 0).
        step: DeepSpeed's ``global_steps``.
        ds_version: The release that wrote it.
        groups: Flat groups.
        partitions: Tensors with an fp32 partition, in flat order.
        frozen: Tensors in the frozen section, in recorded order.
        module: Every key of the model, in the model's order.
        saves_frozen: Whether this file has a frozen section; without one, frozen parameters are in
            ``module`` (stage 1, old releases) or were left out on request when saving.
        recorded_ties: ``shared_params``: alias to the name that is stored.
        odd_entries: Keys of ``module`` that are no tensors, and what they are.
        file_bytes: Size of each shard that is read from.
        notes: What was assumed or found, for the report.
        confirmed_ties: Pairs of alias and source, recorded or claimed, where the alias has a copy
            of its own in ``module`` that was found to hold the source's values, rounded.
        optimizer: The optimizer's states, where they were asked for.
        value_ties: Alias to source where nothing but equal values, rounded, tells the tie: the file
            has copies of all tensors and no record.
        pipeline_stages: Stages of the pipeline that wrote it.
        tensor_ranks: Ranks that shared each tensor.
        lost: Tensors whose most precise copy is damaged, where that is let pass.
    """

    tag: str
    chosen: str
    stage: int
    world_size: int
    step: int | None
    ds_version: str | None
    groups: tuple[FlatGroup, ...]
    partitions: dict[str, Source]
    frozen: dict[str, Source]
    module: dict[str, ModuleKey]
    saves_frozen: bool
    recorded_ties: dict[str, str]
    odd_entries: dict[str, str]
    file_bytes: dict[str, int]
    notes: tuple[str, ...]
    confirmed_ties: frozenset[tuple[str, str]] = frozenset()
    optimizer: OptimizerStates | None = None
    value_ties: dict[str, str] = dataclasses.field(default_factory=dict)
    pipeline_stages: int = 1
    tensor_ranks: int = 1
    lost: dict[str, Loss] = dataclasses.field(default_factory=dict)
