"""What is intact of a damaged checkpoint (``--salvage``): dense models under ZeRO, and stage 0.

Shards that are missing or cannot be read stand in the layout with the size that they must have had;
so do records whose CRC-32 is wrong. Then every tensor that reads from such a place loses that copy:
in stages 0 to 2 the copy in ``module`` takes its place, in stage 3 the tensor is left out, even if
most of it is there. No value is ever made up, and no tensor is put together of two copies.

Where a missing part lay in a flat group of stages 1 and 2 follows from the others' sizes: all ranks
have equal parts, but for padding that was cut off the last ones (source: DeepSpeed's
``stage_1_and_2.py``). The values behind it are held against ``module`` as always. Where the sizes
allow several layouts, the whole group counts as damaged.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from dist_consolidate.checkpoint import census, same_run, steps, writers, zero12
from dist_consolidate.checkpoint.damage import Damage, Damages, without
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.jobs import Job, Runner
from dist_consolidate.checkpoint.layout import ShardFile, TagFolder
from dist_consolidate.checkpoint.model import Checkpoint, Loss
from dist_consolidate.checkpoint.parallel import find_grid
from dist_consolidate.checkpoint.request import Request
from dist_consolidate.checkpoint.salvage_assembly import (
    SalvageAssembly,
    check_names,
    cut_part,
    possible_parts,
    refuse,
    was_partitioned,
)
from dist_consolidate.checkpoint.states import ModelState, OptimState
from dist_consolidate.dtypes import FLOAT32
from dist_consolidate.errors import CheckpointError, Problems, UnsupportedLayoutError, listing

# Behind the end of any file.
_END = 1 << 62


def read(folder: TagFolder, run: Runner, request: Request) -> Checkpoint | None:
    """Read what is intact of a tag.

    Args:
        folder: The shards.
        run: Reads files.
        request: What the user asks for.

    Returns:
        The metadata, with ``lost``; ``None`` where nothing is damaged.

    Raises:
        CheckpointError: If nothing names the tensors, or what is there contradicts itself.
        UnsupportedLayoutError: If it is of a kind of which nothing is salvaged.
    """
    _refuse_kinds(folder, request)
    return _Salvage(folder, run, request).checkpoint()


def _refuse_kinds(folder: TagFolder, request: Request) -> None:
    kinds = {
        "expert": "a model with experts",
        "expert-optim": "a model with experts",
        "layer": "a pipeline",
        "universal": "a universal checkpoint",
        "swap": "a checkpoint with masters swapped out to NVMe",
    }
    kind = next((kinds[shard.role] for shard in folder.shards if shard.role in kinds), None)
    if kind is None and any(shard.mp_rank for shard in folder.shards):
        kind = "a model-parallel checkpoint"
    if kind is not None:
        refuse(folder, f"is {kind}")
    if request.include_optimizer:
        refuse(folder, "its optimizer's states were asked for (--include optimizer)")


class _Salvage:
    """Finds out what is damaged, and puts the rest together."""

    def __init__(self, folder: TagFolder, run: Runner, request: Request) -> None:
        self.folder, self.notes = writers.settle(folder)
        self.run, self.request = run, dataclasses.replace(request, salvage=False)
        self.problems = Problems()
        self.damages: list[Damage] = []
        # Unreadable files, and why.
        self.unreadable: dict[str, str] = {}
        self.lost: dict[str, Loss] = {}

    def checkpoint(self) -> Checkpoint | None:
        """Give what is intact; ``None`` where everything is."""
        if sum(not shard.dp_rank for shard in self.folder.of("model")) > 1:
            census.primary_model(self.folder, 0)  # two saves lie on top of each other
        read = self._states()
        models = {s.shard.dp_rank or 0: s for s in read if isinstance(s, ModelState)}
        present = [state for state in read if isinstance(state, OptimState)]
        if not models:
            raise CheckpointError(
                listing(
                    f"{self.folder.path}: no model states are left to name the tensors",
                    [*self.unreadable.values()] or ["*_model_states.pt: is missing"],
                    "Nothing can be salvaged without them.",
                )
            )
        first = models[min(models)]
        self._refuse_models(first, present)
        optims = self._complete(first, present) if present else []
        ranks = len(optims) or first.dp_world_size or 1
        if first.shard.dp_rank is not None:
            self._complete_models(first, models, ranks)
        self._find_damaged_records(first, optims, models)
        is_whole = not self.damages and not self.unreadable and not first.shard.dp_rank
        if is_whole and (optims or not was_partitioned(first)):
            return None
        if not (optims or was_partitioned(first)):
            first = self._without_masters(first)
        if first.zenflow:
            refuse(self.folder, "was trained with ZenFlow, whose masters tell no layout alone")
        trust = self.request.trust_masters
        states: list[ModelState | OptimState] = [first, *present, *models.values()]
        told = same_run.check(self.folder, states, self.problems, trust_masters=trust)
        told += steps.check(self.folder, first, present, self.problems, trust_masters=trust)
        self.problems.raise_if_any(f"{self.folder.path}: what is left contradicts itself")
        damages = Damages(self.damages)
        assembly = SalvageAssembly(
            self.folder, self.run, self.request, damages, first, optims, models, self.lost
        )
        whole = assembly.checkpoint()
        if whole.stage in (1, 2):
            check_names(self.folder, first, [*whole.partitions, *whole.frozen])
        found = without(whole, damages)
        lost = {**self._buffers(first, found), **self.lost, **found.lost}
        notes = (*self.folder.notes, *self.notes, *told, *self._spare_notes(), *found.notes)
        return dataclasses.replace(found, lost=lost, notes=notes)

    def _refuse_models(self, first: ModelState, optims: Sequence[OptimState]) -> None:
        """Refuse what the names of the files did not tell."""
        experts = first.experts.num_experts or first.experts.odd_auto
        if experts or any(state.experts.has_groups for state in optims):
            refuse(self.folder, "is a model with experts")
        if first.module is None:
            refuse(self.folder, "is a pipeline")
        if find_grid(self.folder, first).size > 1:
            refuse(self.folder, "is a model-parallel checkpoint")

    def _without_masters(self, first: ModelState) -> ModelState:
        """Without ZeRO, only values tell which tensor a master is of: all count, or none."""
        damages, groups = Damages(self.damages), first.optimizer or ()
        damaged = next(
            (
                damage
                for span in itertools.chain(*groups)
                if (damage := damages.in_extent(span.extent())) is not None
            ),
            None,
        )
        if damaged is None:
            return first
        buffers = first.buffer_names or frozenset()
        for name, entry in (first.module or {}).items():
            dtype = entry.span.dtype
            if dtype.is_floating and name not in buffers and dtype != FLOAT32:
                why = f"{damaged.why}; written from `module` ({dtype.name})"
                self.lost[name] = Loss("lower precision", why, entry.span.num_numel, 0)
        return dataclasses.replace(first, optimizer=None, moments=())

    def _short(self, text: str) -> str:
        """Name files without their folders: the manifest is the same wherever they lie."""
        for folder in self.folder.folders:
            text = text.replace(f"{folder}/", "")
        return text

    def _name(self, shard: ShardFile) -> str:
        """Name a shard, and the rank that saved it."""
        rank = "" if shard.dp_rank is None else f" (of rank {shard.dp_rank})"
        return f"{shard.name}{rank}"

    def _states(self) -> list[ModelState | OptimState]:
        """Read all states; what cannot be read is noted."""
        found: list[ModelState | OptimState] = []
        jobs = [Job("model", shard) for shard in self.folder.of("model")]
        jobs += [Job("optim", shard) for shard in self.folder.of("optim")]
        for job, finding in zip(jobs, self.run(self.folder, jobs), strict=True):
            if isinstance(finding, UnsupportedLayoutError):
                raise finding
            if isinstance(finding, CheckpointError):
                self.unreadable[job.shard.name] = self._short(str(finding))
            elif isinstance(finding, ModelState | OptimState):
                found.append(finding)
        return found

    def _complete(self, first: ModelState, present: Sequence[OptimState]) -> list[OptimState]:
        """Give every rank's optimizer states, in order, with stand-ins for those that are gone."""
        every = range(max(state.num_ranks for state in present))
        ordered = census.order_by_rank(
            self.folder, present, self.problems, every, first.dp_world_size
        )
        self.problems.raise_if_any(f"{self.folder.path}: what is left contradicts itself")
        template = ordered[0]
        if template.rounds:
            refuse(self.folder, "was written by the stage-1 optimizer of before DeepSpeed 0.4")
        if len(ordered) == template.num_ranks:
            return ordered
        sizes, by_rank = self._sizes(first, ordered), {s.shard.dp_rank or 0: s for s in ordered}
        return [
            by_rank.get(rank) or self._stand_in(template, rank, [size[rank] for size in sizes])
            for rank in range(template.num_ranks)
        ]

    def _stand_in(self, template: OptimState, rank: int, sizes: Sequence[int]) -> OptimState:
        shard = self._lose(template.shard, rank, template.num_ranks)
        parts = tuple(
            TensorSpan(shard.name, 0, part.dtype, (numel,), (1,))
            for part, numel in zip(template.parts, sizes, strict=True)
        )
        return dataclasses.replace(
            template, shard=shard, parts=parts, swap_ids=(), is_named=True, device=None
        )

    def _lose(self, example: ShardFile, rank: int, ranks: int) -> ShardFile:
        """Note that a rank's file is gone, and give what it would be."""
        role = example.role
        found = [s for s in self.folder.of(role) if (s.dp_rank or 0) == rank]
        name = found[0].name if found else census.name_for(example, rank)
        shard = dataclasses.replace(example, name=name, dp_rank=rank)
        why = self.unreadable.get(name)
        why = why or f"{name}: is missing (rank {rank} of {ranks})"
        self.damages.append(Damage(name, 0, _END, why))
        return shard

    def _sizes(self, first: ModelState, ordered: Sequence[OptimState]) -> list[dict[int, int]]:
        """Tell how many elements each rank must have of each group."""
        template, ranks = ordered[0], ordered[0].num_ranks
        sizes = []
        ignored = Problems()  # told when the layout is built
        shapes = zero12.shapes_by_group(first, template, ignored)
        for index, part in enumerate(template.parts):
            held = {s.shard.dp_rank or 0: s.parts[index].num_numel for s in ordered}
            if template.striped:
                sizes.append(dict.fromkeys(range(ranks), part.num_numel))
                continue
            paddings = template.alignment_paddings or ()
            padding = paddings[index] if index < len(paddings) else ()
            need = zero12.slots(0, shapes[index], padding)[1] if index < len(shapes) else 0
            choices = possible_parts(need, ranks, held)
            if len(choices) != 1:
                self._lose_group(ordered, index)
            size = min(choices, default=-(-need // ranks))
            sizes.append({rank: cut_part(size, need, rank) for rank in range(ranks)})
        return sizes

    def _lose_group(self, ordered: Sequence[OptimState], index: int) -> None:
        for state in ordered:
            extent = state.parts[index].extent()
            why = (
                f"{self._name(state.shard)}: where the values of param group {index} belong is "
                "not known without the parts of the ranks that are missing"
            )
            stop = extent.offset_bytes + extent.num_bytes
            self.damages.append(Damage(extent.file, extent.offset_bytes, stop, why))

    def _complete_models(
        self, first: ModelState, models: dict[int, ModelState], ranks: int
    ) -> None:
        """Add stand-ins for model states of ZeRO-3 whose slices of frozen parameters are gone."""
        if not any(math.prod(shape) for shape in (first.frozen_shapes or {}).values()):
            return
        for rank in range(ranks):
            if rank in models:
                continue
            shard = self._lose(first.shard, rank, ranks)
            frozen = {
                name: TensorSpan(shard.name, 0, span.dtype, (span.num_numel,), (1,))
                for name, span in (first.frozen or {}).items()
            }
            models[rank] = dataclasses.replace(first, shard=shard, frozen=frozen, is_named=True)

    def _find_damaged_records(
        self, first: ModelState, optims: Sequence[OptimState], models: Mapping[int, ModelState]
    ) -> None:
        gone = {damage.file for damage in self.damages if damage.stop_bytes == _END}
        jobs = [Job("crc", first.shard, ((0, _END),))]
        others: list[ModelState | OptimState] = [*optims]
        others += [model for model in models.values() if model is not first]
        for state in others:
            held = state.parts if isinstance(state, OptimState) else (state.frozen or {}).values()
            extents = [span.extent() for span in held if span.num_numel]
            spans = tuple((e.offset_bytes, e.offset_bytes + e.num_bytes) for e in extents)
            if spans and state.shard.name not in gone:
                jobs.append(Job("crc", state.shard, spans))
        for job, finding in zip(jobs, self.run(self.folder, jobs), strict=True):
            if isinstance(finding, CheckpointError):
                self.problems.add(str(finding))
            for record in finding if isinstance(finding, tuple) else ():
                why = (
                    f"{self._name(job.shard)}: record {record.name} is not what was saved (CRC-32)"
                )
                place = (record.start_bytes, record.stop_bytes)
                self.damages.append(Damage(job.shard.name, *place, why))

    def _buffers(self, first: ModelState, found: Checkpoint) -> dict[str, Loss]:
        """Name buffers that are not rank 0's, whose file is gone."""
        if not first.shard.dp_rank:
            return {}
        why = f"the model states of rank 0 are gone; these are those of {first.shard.name}"
        keys = {name: key.source for name, key in found.module.items() if key.is_buffer}
        return {
            name: Loss("other copy", why, source.num_numel, source.num_numel)
            for name, source in keys.items()
            if source is not None
        }

    def _spare_notes(self) -> list[str]:
        """Name unreadable files that hold nothing which is needed."""
        needed = {damage.file for damage in self.damages}
        return [
            f"{why} (nothing that is needed was in it, but for the ties that rank 0 records)"
            for name, why in self.unreadable.items()
            if name not in needed
        ]
