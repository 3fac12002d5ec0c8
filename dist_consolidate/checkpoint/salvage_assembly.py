"""Putting a damaged checkpoint together (``--salvage``): what differs from an intact one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from dist_consolidate.checkpoint import census
from dist_consolidate.checkpoint.assembly import Assembly
from dist_consolidate.checkpoint.damage import Damages
from dist_consolidate.checkpoint.fragments import Fragments
from dist_consolidate.checkpoint.jobs import Runner
from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import FlatGroup, Loss, Source, own_source
from dist_consolidate.checkpoint.request import Request
from dist_consolidate.checkpoint.states import ModelState, OptimState
from dist_consolidate.errors import CheckpointError, UnsupportedLayoutError

# A group is padded to a multiple of the ranks, of twice as many since 0.5.2.
_ALIGNMENTS, _MAX_PADDING_PER_RANK_NUMEL = (1, 2), 4


def refuse(folder: TagFolder, why: str) -> None:
    """Refuse a kind of which nothing is salvaged."""
    raise UnsupportedLayoutError(
        f"{folder.path}: {why}; --salvage writes the weights of dense models under ZeRO-1, 2 and 3 "
        "and without ZeRO. Consolidate without it to hear all that is wrong"
    )


def check_names(folder: TagFolder, first: ModelState, stored: Iterable[str]) -> None:
    """Refuse where nothing tells which entries of `module` stand for damaged masters."""
    unknown = [name for name in stored if name not in (first.module or {})]
    if unknown:
        refuse(
            folder,
            f"its state_dict renames parameters ({first.shard.name} has no {unknown[0]!r}), "
            "and with damaged masters nothing tells all names",
        )


def was_partitioned(model: ModelState) -> bool:
    """Tell whether the run used ZeRO."""
    return model.param_shapes is not None or (model.zero_stage or 0) > 0


def possible_parts(need_numel: int, ranks: int, held: Mapping[int, int]) -> set[int]:
    """Give the sizes that every rank's part of a flat group may have had.

    Args:
        need_numel: Where the group's last tensor ends.
        ranks: Ranks.
        held: Elements that the ranks have whose files are there; padding may be cut off.

    Returns:
        Elements of a part; several where the files do not tell.
    """
    last = ranks - 1
    choices = {*held.values(), *(-(-need_numel // (a * ranks)) * a for a in _ALIGNMENTS)}
    if held.keys() == {last} and last:
        choices.add(-(-(need_numel - held[last]) // last))
    return {
        size
        for size in choices
        if 0 <= size * ranks - need_numel <= _MAX_PADDING_PER_RANK_NUMEL * ranks
        and all(numel in (size, cut_part(size, need_numel, rank)) for rank, numel in held.items())
    }


def cut_part(size_numel: int, need_numel: int, rank: int) -> int:
    """Give a rank's part with the padding cut off."""
    return min(max(need_numel - rank * size_numel, 0), size_numel)


class SalvageAssembly(Assembly):
    """Puts a checkpoint together in which some places are damaged."""

    def __init__(
        self,
        folder: TagFolder,
        run: Runner,
        request: Request,
        damages: Damages,
        first: ModelState,
        optims: Sequence[OptimState],
        models: dict[int, ModelState],
        lost: dict[str, Loss],
    ) -> None:
        """Set up.

        Args:
            folder: The shards.
            run: Reads files.
            request: What the user asks for.
            damages: The damaged places.
            first: The model states that name the tensors.
            optims: Optimizer states of every rank, some of them stand-ins.
            models: Under ZeRO-3, model states by rank, some of them stand-ins.
            lost: Takes tensors whose masters are all gone.
        """
        super().__init__(folder, first, optims, run, request)
        self._damages, self._models, self._lost = damages, models, lost

    def _stage0(self) -> dict[str, Source]:
        if not was_partitioned(self.model):
            return super()._stage0()
        if self.model.shard.dp_rank is not None:
            raise CheckpointError(
                f"{self.folder.path}: no optimizer states are left that can be read; under ZeRO-3 "
                "the weights are in no other file, and nothing can be salvaged"
            )
        self.stage, self.ranks = self.model.zero_stage or 1, self.model.dp_world_size or 1
        module = self.model.module or {}
        shapes = {n: s for group in self.model.param_shapes or () for n, s in group.items()}
        check_names(self.folder, self.model, shapes)
        for name, shape in shapes.items():
            kind = module[name].span.dtype.name
            why = f"all optimizer states are gone; written from `module` ({kind})"
            what: Literal["other copy", "lower precision"]
            what = "other copy" if kind == "float32" else "lower precision"
            self._lost[name] = Loss(what, why, math.prod(shape), 0)
        return {}

    def _other_models(self) -> dict[int, ModelState]:
        # All of them have been read already.
        steps = {}
        for state in self._models.values():
            if state is not self.model and not self._damages.touches(state.shard.name):
                steps[state.shard.name] = state.global_steps
                census.check_tensors(self.folder, self.model, state, self.problems)
        census.check_steps(self.folder, self.model, steps, self.problems)
        return {0: self.model} | self._models

    def _hear_witness(
        self, groups: tuple[FlatGroup, ...], partitions: Mapping[str, Source]
    ) -> None:
        fragments = Fragments(groups)
        module = self.model.module or {}
        intact = {
            name: source
            for name, source in partitions.items()
            if self._damages.in_source(source, fragments)[0] is None
            and name in module
            and self._damages.in_source(own_source(module[name].span), fragments)[0] is None
        }
        super()._hear_witness(groups, intact)
