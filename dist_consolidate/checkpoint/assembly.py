"""One model-parallel index: from states to a checkpoint with every weight located."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from dist_consolidate.checkpoint import (
    census,
    expert_fused,
    expert_groups,
    expert_masters,
    expert_zero3,
    rank_files,
    renamed,
    sixteen_bit,
    stage0,
    swapped,
    testimony,
    witness,
    zero3,
    zero12,
)
from dist_consolidate.checkpoint.expert_masters import ExpertOptimState
from dist_consolidate.checkpoint.experts import Experts
from dist_consolidate.checkpoint.jobs import Job, Runner
from dist_consolidate.checkpoint.layout import TagFolder, missing_numbers
from dist_consolidate.checkpoint.model import (
    Checkpoint,
    FlatGroup,
    FlatSlot,
    ModuleKey,
    Source,
    own_source,
)
from dist_consolidate.checkpoint.request import Request
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState, ModuleEntry, OptimState
from dist_consolidate.errors import CheckpointError, Problems, UnsupportedLayoutError


class Assembly:
    """Puts the checkpoint of one model-parallel index together from complete states."""

    def __init__(
        self,
        folder: TagFolder,
        model: ModelState,
        optims: Sequence[OptimState],
        run: Runner,
        request: Request,
        experts: Experts | None = None,
    ) -> None:
        """Set up.

        Args:
            folder: The tag folder, with this index's shards only.
            model: Model states of its rank 0.
            optims: Its optimizer states, in rank order.
            run: Reads files.
            request: What the user asks for.
            experts: The experts, which are in the model states' ``module`` already.
        """
        self.experts = experts
        self.folder, self.model, self.optims, self.run = folder, model, optims, run
        self.request = request
        self.problems = Problems()
        self.notes: list[str] = []
        self.stage = _stage(model, optims)
        self.ranks = len(optims) or 1
        self.value_ties: dict[str, str] = {}

    def checkpoint(self) -> Checkpoint:
        """Locate every weight.

        Returns:
            The metadata of this index.

        Raises:
            CheckpointError: If the states contradict each other.
            UnsupportedLayoutError: If they are of a kind that is not read.
        """
        if self.model.is_nested:
            self.notes.append(
                "`module` is nested; each entry is written under its path, the parts joined by dots"
            )
        groups, partitions = self._partitions()
        more_groups, frozen = self._frozen(len(groups))
        self.problems.raise_if_any(f"{self.folder.path}: the recorded layout does not fit the data")
        all_groups = (*groups, *more_groups)
        ties = self.model.shared_params or {}
        if self.stage in (1, 2) and self.experts is None and not self.model.zenflow:
            known = renamed.follow(self.folder.folders, self.model, all_groups, partitions, frozen)
            partitions, frozen, ties = known.partitions, known.frozen, known.ties(ties)
            self.notes += known.notes
        elif self.stage == 3 and self.model.is_nested:
            known = renamed.under_prefix(self.model, partitions, frozen)
            partitions, frozen, ties = known.partitions, known.frozen, known.ties(ties)
            self.notes += known.notes
        # ZenFlow's masters may lag the weights; what it needs is compared in `testimony`.
        if self.stage in (1, 2) and not self.model.zenflow:
            self._hear_witness(groups, partitions)
        found = Checkpoint(
            tag=self.folder.tag,
            chosen=self.folder.chosen,
            stage=self.stage,
            world_size=self.ranks,
            step=self.model.global_steps,
            ds_version=self.model.ds_version or next((o.ds_version for o in self.optims), None),
            groups=all_groups,
            partitions=partitions,
            frozen=frozen,
            module=self._module(partitions),
            saves_frozen=self.model.frozen_shapes is not None,
            recorded_ties=ties,
            confirmed_ties=self._confirmed_ties(all_groups, {**frozen, **partitions}),
            odd_entries=self.model.odd_entries,
            file_bytes={shard.name: shard.num_bytes for shard in self.folder.shards},
            notes=tuple(self.notes),
            value_ties=self.value_ties,
        )
        if self.model.experts.shards:
            found = expert_zero3.with_keys(found, self.model.experts.shards)
        return found if self.experts is None else expert_fused.fuse(found, self.experts.fused)

    def _partitions(self) -> tuple[tuple[FlatGroup, ...], dict[str, Source]]:
        if self.stage == 3 and self.model.zenflow:
            raise UnsupportedLayoutError(
                f"{self.folder.path / self.model.shard.name}: was trained with ZenFlow under "
                "ZeRO-3, where nothing in the files tells whether matrices lie transposed; this "
                "version does not read those"
            )
        if self.stage == 3:
            optims = swapped.fill(self.folder, self.model, self.optims, self.problems)
            if self.model.experts.shards:
                return self._zero3_experts(optims)
            groups, sources = zero3.build(self.model, optims, self.problems)
            self._check_owners(groups, self.optims)
            return groups, sources
        if self.optims and self.experts is not None:
            folders, problems = self.folder.folders, self.problems
            found = expert_groups.build(
                folders,
                self.model,
                self.optims,
                self.experts,
                problems,
                self.notes,
                trust_masters=self.request.trust_masters,
            )
            self.value_ties = found.alike
            return found.groups, found.sources
        if self.optims:
            return self._zero12()
        return (), self._stage0()

    def _zero3_experts(
        self, optims: Sequence[OptimState]
    ) -> tuple[tuple[FlatGroup, ...], dict[str, Source]]:
        expert_zero3.check_frozen(self.model.frozen_shapes, self.problems)
        needed = set(expert_zero3.leaders(optims)) - {0}
        shards = [shard for shard in self.folder.of("model") if shard.dp_rank in needed]
        findings = self.run(self.folder, [Job("model", shard) for shard in shards])
        models = {0: self.model}
        for shard, finding in zip(shards, findings, strict=True):
            if isinstance(finding, ModelState):
                models[shard.dp_rank or 0] = finding
        built = expert_zero3.Builder(models, optims, self.problems)
        self._check_owners([g for g in built.groups if len(g.parts) == self.ranks], self.optims)
        self.notes.append(built.note())
        return tuple(built.groups), built.sources

    def _zero12(self) -> tuple[tuple[FlatGroup, ...], dict[str, Source]]:
        testified: dict[str, FlatSlot] = {}
        groups, sources = zero12.build(self.model, self.optims, self.problems, testified)
        told = "the recorded layout does not fit the data"
        self.problems.raise_if_any(f"{self.folder.path}: {told}")
        testimony.confirm(
            self.folder.folders,
            self.model,
            groups,
            sources,
            testified,
            self.problems,
            self.notes,
            trust_masters=self.request.trust_masters,
        )
        return groups, sources

    def _stage0(self) -> dict[str, Source]:
        if self.model.param_shapes is not None or (self.model.zero_stage or 0) > 0:
            allowed = self.request.allow_16bit
            self.notes.append(sixteen_bit.accept(self.folder, self.model, allowed))
            self.stage, self.ranks = self.model.zero_stage or 1, self.model.dp_world_size or 1
            return {}
        if self.experts is not None:
            found = self._expert_masters(self.experts)
        elif self.model.module is None:
            return {}  # a pipeline's: its layer files are needed to find them
        else:
            found = stage0.masters(self.folder.folders, self.model, self.problems, self.notes)
        module, buffers = self.model.module or {}, self.model.buffer_names or frozenset()
        weights = [e.span for n, e in module.items() if n not in buffers and e.span.num_numel]
        # Buffers stay fp32 in 16-bit training.
        wide = any(span.dtype.name == "float32" for span in weights)
        if not (found or self.model.optimizer or wide):
            self.notes.append("no fp32 masters were saved; the 16-bit weights are all there is")
        return found

    def _hear_witness(
        self, groups: tuple[FlatGroup, ...], partitions: Mapping[str, Source]
    ) -> None:
        module = {name: own_source(entry.span) for name, entry in (self.model.module or {}).items()}
        trust = self.request.trust_masters
        self.notes += witness.hear(self.folder, groups, partitions, module, trust_masters=trust)

    def _expert_masters(self, experts: Experts) -> dict[str, Source]:
        shards, states = self.folder.of("expert-optim"), {}
        findings = self.run(self.folder, [Job("expert-optim", shard) for shard in shards])
        for shard, finding in zip(shards, findings, strict=True):
            if isinstance(finding, CheckpointError):
                self.problems.add(str(finding))
            elif isinstance(finding, ExpertOptimState):
                states[shard.dp_rank or 0] = finding
        return expert_masters.masters(
            self.folder, self.model, experts, states, self.problems, self.notes, self.value_ties
        )

    def _frozen(self, first_group: int) -> tuple[tuple[FlatGroup, ...], dict[str, Source]]:
        spans, shapes = self.model.frozen or {}, self.model.frozen_shapes or {}
        self._check_frozen(set(spans) ^ set(shapes))
        if self.stage != 3:
            return (), {
                name: Source("frozen", span.shape, span.dtype, span=span)
                for name, span in spans.items()
            }
        models = self._other_models()
        groups, sources = zero3.frozen(models, self.ranks, first_group, self.problems)
        self._check_owners(groups, [models[rank] for rank in sorted(models)])
        return groups, sources

    def _check_owners(
        self, groups: Sequence[FlatGroup], states: Sequence[OptimState | ModelState]
    ) -> None:
        if not self.problems:
            trust = self.request.trust_masters
            rank_files.check(self.folder, groups, states, self.problems, trust_masters=trust)

    def _check_frozen(self, uneven: set[str]) -> None:
        if uneven:
            self.problems.add(
                f"{self.model.shard.name}: {len(uneven)} frozen parameters have a shape without "
                f"values or values without a shape, the first is {min(uneven)!r}"
            )

    def _other_models(self) -> dict[int, ModelState]:
        """Read the other ranks' model states: their frozen slices, or only their step."""
        models = {0: self.model}
        others = [s for s in self.folder.of("model") if s.dp_rank and s.dp_rank < self.ranks]
        has_frozen = any(math.prod(s) for s in (self.model.frozen_shapes or {}).values())
        kind: Literal["model", "step"] = "model" if has_frozen else "step"
        steps: dict[str, int | None] = {}
        # One more of them is read whole: it lists the same tensors as rank 0's.
        jobs = [Job(kind if number else "model", shard) for number, shard in enumerate(others)]
        for shard, finding in zip(others, self.run(self.folder, jobs), strict=True):
            if isinstance(finding, CheckpointError):
                self.problems.add(str(finding))
            elif isinstance(finding, ModelState):
                models |= {shard.dp_rank or 0: finding} if has_frozen else {}
                steps[shard.name] = finding.global_steps
                census.check_tensors(self.folder, self.model, finding, self.problems)
            elif finding is None or isinstance(finding, int):
                steps[shard.name] = finding
        census.check_steps(self.folder, self.model, steps, self.problems)
        self._note_missing({shard.dp_rank for shard in others}, has_frozen)
        return models

    def _note_missing(self, present: set[int | None], needed: bool) -> None:
        for rank in missing_numbers(self.ranks, present, 1):
            name = self.model.shard.name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_")
            if needed:
                self.problems.add(
                    f"{self.folder.path / name}: is missing (rank {rank} of {self.ranks}); it "
                    "holds that rank's slices of the frozen parameters"
                )
            else:
                self.notes.append(f"{name} is missing; it holds nothing that is needed")

    def _confirmed_ties(
        self, groups: tuple[FlatGroup, ...], stored: Mapping[str, Source]
    ) -> frozenset[tuple[str, str]]:
        """Check by value the ties whose alias has a tensor of its own (it may be a clone)."""
        if self.stage == 3:
            return frozenset()
        module, confirmed = self.model.module or {}, set()
        prints = Fingerprints(self.folder.folders, groups)
        for alias, name in {*(self.model.shared_params or {}).items(), *self.request.claims}:
            entry, held = module.get(alias), module.get(name)
            if entry is None or alias in stored or _same_view(entry, held):
                continue
            own = own_source(entry.span)
            source = stored.get(name)
            if source is None and held is not None:
                source = own_source(held.span)
            if source is None or source.shape != own.shape:
                continue
            with contextlib.suppress(CheckpointError):  # a shard that is not seen here
                if prints.of(source, own.dtype) == prints.of(own, own.dtype):
                    confirmed.add((alias, name))
        prints.close()
        return frozenset(confirmed)

    def _module(self, partitions: Mapping[str, Source]) -> dict[str, ModuleKey]:
        module = self.model.module or {}
        buffers = self.model.buffer_names or frozenset()
        # Releases before 0.6 keep the shapes in the optimizer states.
        old = self.model.param_shapes is None
        is_placeholder = _placeholder_test(self.stage, module, partitions, old)
        partitioned = {*partitions, *(self.model.frozen_shapes or ())} if self.stage == 3 else set()
        keys = {}
        for name, entry in module.items():
            is_buffer = name in buffers
            own = is_buffer or not (name in partitioned or is_placeholder(name, entry))
            source = own_source(entry.span)
            identity = (
                entry.span.file,
                entry.ref.storage.key,
                entry.ref.offset_numel,
                entry.ref.shape,
                entry.ref.stride,
                entry.ref.dtype.name,
            )
            keys[name] = ModuleKey(entry.ref.shape, identity, source if own else None, is_buffer)
        return keys


def _same_view(one: ModuleEntry, other: ModuleEntry | None) -> bool:
    """Whether two entries are one tensor already, by storage record; no value need be read."""
    return other is not None and _view(one) == _view(other)


def _view(entry: ModuleEntry) -> tuple[object, ...]:
    ref = entry.ref
    return (entry.span.file, ref.storage.key, ref.offset_numel, ref.shape, ref.stride)


def _stage(model: ModelState, optims: Sequence[OptimState]) -> int:
    """Tell the stage; the configuration knows 1 from 2 where old files all say 2."""
    if not optims:
        return 0
    if optims[0].striped:
        return 3
    return model.zero_stage if model.zero_stage in (1, 2) else optims[0].zero_stage or 1


def _placeholder_test(
    stage: int, module: Mapping[str, ModuleEntry], partitions: Mapping[str, Source], old: bool
) -> Callable[[str, ModuleEntry], bool]:
    """Say how a ZeRO-3 placeholder looks in this file: shape [0], or [1] before DeepSpeed 0.6.

    A file whose partitioned parameters of more than one element show up as [1] is of the old
    kind, and no [1] in it can be taken for data.
    """
    if stage != 3:
        return lambda _name, _entry: False
    old = old or any(
        source.shape != (1,) and module[name].ref.shape == (1,)
        for name, source in partitions.items()
        if name in module
    )
    shapes = {(0,), (1,)} if old else {(0,)}

    def is_placeholder(name: str, entry: ModuleEntry) -> bool:
        # An empty tensor that is no parameter: quantized parameters are in the frozen section.
        other = name.endswith("_extra_state") or not entry.ref.dtype.is_floating
        return entry.ref.shape in shapes and not other

    return is_placeholder
