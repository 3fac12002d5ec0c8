"""AutoEP under ZeRO-3: experts lie in the ZeRO shards, cut over the ranks that hold the same ones.

There are no expert files, and ``module`` lacks the experts. Each rank's optimizer states say which
ranks share out each of its sub-groups, and its model states which experts it holds, under which
shapes. Each set of ranks is a flat group of its own; the fused tensors of all sets, one behind the
other in the experts' order, are the whole one.

Sources: DeepSpeed's ``stage3.py`` (``_zero3_partition_group_metadata``) and
``checkpoint/autoep_zero3_metadata.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from dist_consolidate.checkpoint import zero3
from dist_consolidate.checkpoint.expert_fused import is_fused, router_aliases
from dist_consolidate.checkpoint.expert_states import ExpertShard
from dist_consolidate.checkpoint.model import Block, Checkpoint, FlatGroup, ModuleKey, Source
from dist_consolidate.checkpoint.states import ModelState, OptimState, Shapes
from dist_consolidate.checkpoint.zero12 import shapes_by_group
from dist_consolidate.errors import Problems, listed
from dist_consolidate.units import counted

Ranks = tuple[int, ...]


def leaders(optims: Sequence[OptimState]) -> list[int]:
    """Give the first rank of every set of ranks that share out a sub-group.

    Args:
        optims: The optimizer states of every rank, in rank order.

    Returns:
        Ranks; the model states of each are needed, and rank 0 is the first.
    """
    every = [ranks for optim in optims for ranks in optim.experts.zero_groups or ()]
    return sorted({0, *(min(ranks) for ranks in every if ranks)} & set(range(len(optims))))


class Builder:
    """Lays out the sub-groups.

    Attributes:
        groups: The flat groups.
        sources: The source of each tensor; of experts those of all ranks together.
    """

    def __init__(
        self, models: Mapping[int, ModelState], optims: Sequence[OptimState], problems: Problems
    ) -> None:
        """Lay everything out.

        Args:
            models: The model states of the leaders (see :func:`leaders`), by rank.
            optims: The optimizer states of every rank, in rank order.
            problems: Takes what contradicts the layout.
        """
        self.models, self.optims, self.problems = models, optims, problems
        self.groups: list[FlatGroup] = []
        self.sources: dict[str, Source] = {}
        self._pieces: dict[str, list[tuple[ExpertShard, Source]]] = {}
        self._shapes = {
            rank: shapes_by_group(model, optims[rank], problems) for rank, model in models.items()
        }
        for index in range(len(optims[0].parts)):
            for ranks in self._sets(index):
                if not problems:
                    self._add(index, ranks)
        for name, pieces in self._pieces.items():
            self._join(name, pieces)

    def _sets(self, index: int) -> list[Ranks]:
        """Give the sets of ranks that share out a sub-group, each with its first rank first."""
        sets: dict[Ranks, set[int]] = {}
        for rank, optim in enumerate(self.optims):
            groups = optim.experts.zero_groups or ()
            if len(groups) != len(self.optims[0].parts) or len(optim.parts) != len(groups):
                self.problems.add(
                    f"{optim.shard.name}: ds_zero_partition_groups has {len(groups)} sub-groups, "
                    f"expected {len(self.optims[0].parts)}, as many as flat buffers on rank 0"
                )
                return []
            sets.setdefault(groups[index], set()).add(rank)
        for ranks, holders in sets.items():
            if holders != set(ranks) or list(ranks) != sorted(holders):
                self.problems.add(
                    f"sub-group {index}: is shared out over ranks {list(ranks)}, say the optimizer "
                    f"states of ranks {sorted(holders)}; files are of different saves"
                )
                return []
            if min(ranks) not in self.models:
                self.problems.add(
                    f"the model states of rank {min(ranks)} are missing or damaged; they tell "
                    f"which experts ranks {list(ranks)} hold"
                )
                return []
        return sorted(sets)

    def _add(self, index: int, ranks: Ranks) -> None:
        leader = ranks[0]
        model, shapes = self.models[leader], self._shapes[leader][index]
        label = f"sub-group {index} of ranks {', '.join(map(str, ranks))}"
        of_experts = {is_fused(name) for name in shapes}
        if len(of_experts) > 1 or (of_experts == {False} and len(ranks) < len(self.optims)):
            self.problems.add(
                f"{label}: holds {listed(list(shapes))}, of which not all are experts, but is not "
                f"shared out over all {len(self.optims)} ranks alone (param_shapes in "
                f"{model.shard.name})"
            )
            return
        parts = [self.optims[rank].parts[index] for rank in ranks]
        group, sources = zero3.sub_group(
            label, len(self.groups), parts, shapes, model.shard.name, self.problems
        )
        self.groups.append(group)
        if of_experts != {True}:
            self.sources |= sources
            return
        for name, source in sources.items():
            shard = _shard_of(name, model.experts.shards)
            if shard is None or source.shape[:1] != (shard.stop - shard.start,):
                self.problems.add(
                    f"{model.shard.name}: ds_autoep_layers does not say which experts are in "
                    f"{name!r} of shape {list(source.shape)}"
                )
                continue
            self._pieces.setdefault(name, []).append((shard, source))

    def _join(self, name: str, pieces: Sequence[tuple[ExpertShard, Source]]) -> None:
        """Lay the experts of all ranks one behind the other; every one must be there once."""
        ordered = sorted(pieces, key=lambda piece: piece[0].start)
        first, total = ordered[0][1], ordered[0][0].num_experts
        held = [(shard.start, shard.stop) for shard, _ in ordered]
        ends = [0, *(stop for _, stop in held)]
        if [start for start, _ in held] != ends[:-1] or ends[-1] != total:
            self.problems.add(
                f"{name!r}: the ranks hold the experts {held}, expected each of {total} once"
            )
            return
        if {(s.dtype, s.shape[1:]) for _, s in ordered} != {(first.dtype, first.shape[1:])}:
            self.problems.add(f"{name!r}: has experts of several shapes or element types")
            return
        shape = (total, *first.shape[1:])
        if len(ordered) == 1:
            self.sources[name] = first
            return
        row = math.prod(shape[1:])
        blocks = tuple(
            Block(source, 1, source.num_numel, 0, source.num_numel, shard.start * row, 0)
            for shard, source in ordered
        )
        self.sources[name] = Source(first.origin, shape, first.dtype, blocks=blocks)

    def note(self) -> str:
        """Say what was put together."""
        return (
            f"{counted(len(self._pieces), 'fused tensor', 'fused tensors')} of experts (AutoEP) "
            "were put together from the ZeRO-3 shards of the ranks that hold them; they are named "
            "as DeepSpeed's own layers name them, not as the model they were made from"
        )


def _shard_of(name: str, shards: Sequence[ExpertShard]) -> ExpertShard | None:
    prefix = name.rpartition(".")[0]
    found = [shard for shard in shards if shard.prefix == prefix]
    return found[0] if len(found) == 1 else None


def check_frozen(shapes: Shapes | None, problems: Problems) -> None:
    """Refuse frozen experts, whose slices are shared out otherwise than other frozen ones.

    Args:
        shapes: ``frozen_param_shapes``.
        problems: Takes them.
    """
    names = [name for name in shapes or () if is_fused(name)]
    if names:
        problems.add(
            f"{listed(names)}: are frozen experts under ZeRO-3 (AutoEP), which this version does "
            "not read"
        )


def with_keys(checkpoint: Checkpoint, shards: Sequence[ExpertShard]) -> Checkpoint:
    """Add what ``module`` does not list, or lists without a value.

    Args:
        checkpoint: The checkpoint.
        shards: Where rank 0's experts are, layer by layer.

    Returns:
        It, with a key for every tensor of experts, and with the second names of routers tied.
    """
    missing = {
        name: ModuleKey((0,), (name,), None, is_buffer=False)
        for name in checkpoint.partitions
        if is_fused(name) and name not in checkpoint.module
    }
    ties = dict(checkpoint.recorded_ties)
    data = {*checkpoint.partitions, *checkpoint.frozen}
    for shard in shards:
        known = router_aliases(checkpoint.module, shard.prefix.removesuffix("experts"))
        ties |= {a: name for a, name in known.items() if name in data and a not in data}
    added = len(ties) - len(checkpoint.recorded_ties)
    notes = checkpoint.notes
    if added:
        notes += (
            f"{counted(added, 'key of an AutoEP layer is', 'keys of AutoEP layers are')} the "
            "router's under a second name, which DeepSpeed gives it",
        )
    module = {**checkpoint.module, **missing}
    return dataclasses.replace(checkpoint, module=module, recorded_ties=ties, notes=notes)
