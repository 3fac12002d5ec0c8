"""Optimizer states per parameter: more flat groups, in which every tensor has its old slot.

DeepSpeed optimizes flat buffers, so that a moment is a flat buffer like the fp32 partition beside
it, cut over the ranks at the same places. On disk its parts may be longer than those of the
partition, whose padding was cut off: what must agree is where each rank's part begins.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.jobs import Job, Runner
from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Block, Checkpoint, FlatGroup, OptimizerStates, Source
from dist_consolidate.checkpoint.optimizer import BaseOptimizer, steps_of
from dist_consolidate.checkpoint.stage0_moments import stage0_sources
from dist_consolidate.checkpoint.states import ModelState, OptimState
from dist_consolidate.checkpoint.zero12 import flat_group
from dist_consolidate.errors import CheckpointError, Problems, UnsupportedLayoutError


def with_moments(
    checkpoint: Checkpoint,
    folder: TagFolder,
    model: ModelState,
    optims: Sequence[OptimState],
    run: Runner,
) -> Checkpoint:
    """Locate the optimizer's states as well.

    Args:
        checkpoint: The metadata without them.
        folder: The shards.
        model: The model states of rank 0.
        optims: The optimizer states, in rank order; none in stage 0.
        run: Reads files.

    Returns:
        The metadata with ``optimizer`` set, and the flat groups it needs.

    Raises:
        CheckpointError: If the states do not fit the fp32 partitions.
        UnsupportedLayoutError: If nothing tells which state belongs to which parameter.
    """
    if model.zenflow:
        raise UnsupportedLayoutError(
            f"{folder.path}: was trained with ZenFlow, which keeps optimizer states of its own "
            "beside the usual ones; consolidate without --include optimizer"
        )
    shards = [optim.shard for optim in optims] or [model.shard]
    problems, optimizers = Problems(), []
    for finding in run(folder, [Job("optimizer", shard) for shard in shards]):
        if isinstance(finding, BaseOptimizer):
            optimizers.append(finding)
        else:
            problems.add(str(finding))
    problems.raise_if_any(f"{folder.path}: the optimizer states cannot be read")
    if not optims:
        tensors, unread, group_of = stage0_sources(checkpoint, model, optimizers[0])
        groups: tuple[FlatGroup, ...] = ()
    else:
        layout = _Moments(checkpoint, optims, optimizers, problems)
        tensors = layout.sources()
        problems.raise_if_any(f"{folder.path}: the optimizer states do not fit the fp32 partitions")
        groups, unread, group_of = tuple(layout.groups), layout.unread, layout.group_of()
    if not any(tensors.values()):
        raise CheckpointError(
            f"{folder.path}: holds no optimizer state with a value for each weight; consolidate "
            "without --include optimizer"
        )
    states = OptimizerStates(
        tensors=tensors,
        unread=unread,
        steps=tuple(steps_of(optimizers)),
        param_groups=tuple(dict(group) for group in optimizers[0].param_groups),
        group_of=group_of,
    )
    return dataclasses.replace(checkpoint, groups=(*checkpoint.groups, *groups), optimizer=states)


class _Moments:
    """Lays out the flat groups of every state key.

    Attributes:
        groups: The groups; they follow those of the checkpoint.
        unread: Keys that have no value for each weight, and what they are.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        optims: Sequence[OptimState],
        optimizers: Sequence[BaseOptimizer],
        problems: Problems,
    ) -> None:
        self.ckpt, self.optims, self.optimizers = checkpoint, optims, optimizers
        self.problems = problems
        self.groups: list[FlatGroup] = []
        self.unread: dict[str, str] = {}
        # By key, the index of the group that holds the moments of a flat group.
        self.twins: dict[str, dict[int, int]] = {}

    def sources(self) -> dict[str, dict[str, Source]]:
        """Give the sources by key and name; problems are noted."""
        num_groups = min(len(self.optims[0].parts), len(self.ckpt.groups))
        for optimizer in self.optimizers:
            if len(optimizer.params) != num_groups:
                self.problems.add(
                    f"{optimizer.shard.name}: its optimizer has {len(optimizer.params)} "
                    f"parameters, expected one for each of {num_groups} flat groups"
                )
                return {}
        for index in range(num_groups):
            if not self._is_partition(index):
                raise UnsupportedLayoutError(
                    f"{self.ckpt.tag}: the weights do not lie as the optimizer holds them, so that "
                    "its states cannot be told apart; consolidate without --include optimizer"
                )
            self._lay_out(index)
        self.unread = {k: v for k, v in self.unread.items() if k not in self.twins}
        return {key: self._named(twins) for key, twins in sorted(self.twins.items())}

    def _is_partition(self, index: int) -> bool:
        """Whether a flat group of the weights is the very buffer that the optimizer works on."""
        group, parts = self.ckpt.groups[index], [optim.parts[index] for optim in self.optims]
        width = group.dtype.itemsize_bytes
        ours = [(part.file, part.offset_bytes, part.num_bytes) for part in group.parts]
        return ours == [(p.file, p.offset_bytes, p.num_numel * width) for p in parts]

    def group_of(self) -> dict[str, int]:
        """Give each tensor's param group, where recorded."""
        found = {}
        for name, source in self.ckpt.partitions.items():
            for index in _slot_groups(source):
                group = self.optimizers[0].params[index].group
                if group is not None:
                    found[name] = group
        return found

    def _lay_out(self, index: int) -> None:
        states = [optimizer.params[index] for optimizer in self.optimizers]
        for state in states:
            self.unread |= state.others
        keys = dict.fromkeys(key for state in states for key in state.tensors)
        for key in keys:
            self._join(index, key, [state.tensors.get(key) for state in states])

    def _join(self, index: int, key: str, found: Sequence[TensorSpan | None]) -> None:
        """Make a group of the ranks' tensors of one key, if they are that partition's twins."""
        needed = self._needed(index)
        if not any(needed):
            return
        parts = [optim.parts[index] for optim in self.optims]
        empty = [dataclasses.replace(part, shape=(0,), stride=(1,)) for part in parts]
        spans = [span or nothing for span, nothing in zip(found, empty, strict=True)]
        fits = self._fits(index, spans, needed)
        if not any(fit for fit, need in zip(fits, needed, strict=True) if need):
            self.unread[key] = f"has the shape {list(spans[0].shape)}, not that of the weights"
            return
        for span, fit, need, optim in zip(spans, fits, needed, self.optims, strict=True):
            if need and not fit:
                self.problems.add(
                    f"{optim.shard.name}: {key} of flat group {index} has the shape "
                    f"{list(span.shape)}, which does not go with its fp32 partition of "
                    f"{optim.parts[index].num_numel} elements"
                )
        label = f"{key} of flat group {index}"
        # What only padding is left of may be of any shape; it is never read.
        flat = [
            span if need else nothing
            for span, nothing, need in zip(spans, empty, needed, strict=True)
        ]
        self.twins.setdefault(key, {})[index] = len(self.ckpt.groups) + len(self.groups)
        striped = self.ckpt.groups[index].striped
        self.groups.append(flat_group(label, flat, striped=striped, problems=self.problems))

    def _needed(self, index: int) -> list[bool]:
        """Tell which ranks hold elements of tensors, rather than padding only."""
        parts = [optim.parts[index].num_numel for optim in self.optims]
        if self.ckpt.groups[index].striped:
            return [bool(numel) for numel in parts]
        end = self._end_numel(index)
        return [start < end for start in _starts(parts)]

    def _fits(self, index: int, spans: Sequence[TensorSpan], needed: Sequence[bool]) -> list[bool]:
        """Tell which ranks' tensors lie element by element beside the fp32 partition.

        They are as long as the partition; only the last one that is needed may be as long as parts
        are in memory, where the partition's padding was cut off. So every part begins where its
        twin does. DeepSpeed pads a group to a multiple of twice the ranks, releases before 0.5.2
        to one of the ranks.
        """
        flat = [len(span.shape) == 1 and span.is_contiguous for span in spans]
        held = [optim.parts[index].num_numel for optim in self.optims]
        fits = [f and s.num_numel == h for f, s, h in zip(flat, spans, held, strict=True)]
        if self.ckpt.groups[index].striped:
            return fits
        last = max(rank for rank, need in enumerate(needed) if need)
        end, num_ranks = self._end_numel(index), len(held)
        in_memory = (-(-end // num_ranks), 2 * -(-end // (2 * num_ranks)))
        fits[last] |= flat[last] and spans[last].num_numel in in_memory
        return fits

    def _end_numel(self, index: int) -> int:
        ends = [
            source.slot.offset_numel + source.num_numel
            for outer in self.ckpt.partitions.values()
            for source in _simple(outer)
            if source.slot is not None and source.slot.group == index
        ]
        return max(ends, default=0)

    def _named(self, twins: Mapping[int, int]) -> dict[str, Source]:
        found = {}
        for name, source in self.ckpt.partitions.items():
            inside = all(simple.slot is not None for simple in _simple(source))
            if inside and _slot_groups(source) <= twins.keys() and source.num_numel:
                found[name] = self._moved(source, twins)
        return found

    def _moved(self, source: Source, twins: Mapping[int, int]) -> Source:
        """Give a source that lies in the twins as another does in its flat groups."""
        first = twins[min(_slot_groups(source))] - len(self.ckpt.groups)
        slot = source.slot
        if slot is not None:
            slot = dataclasses.replace(slot, group=twins[slot.group])
        blocks: tuple[Block, ...] = tuple(
            dataclasses.replace(block, source=self._moved(block.source, twins))
            for block in source.blocks
        )
        return dataclasses.replace(
            source,
            origin="optimizer state",
            dtype=self.groups[first].dtype,
            slot=slot,
            blocks=blocks,
        )


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][:-1]


def _simple(source: Source) -> list[Source]:
    return [block.source for block in source.blocks] if source.blocks else [source]


def _slot_groups(source: Source) -> set[int]:
    """Give the flat groups a source lies in."""
    return {simple.slot.group for simple in _simple(source) if simple.slot is not None}
