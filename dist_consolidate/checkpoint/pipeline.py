"""Pipeline parallelism: the stages' checkpoints and the layer files, put together.

A pipeline engine leaves ``module`` of the model states empty. Each stage has optimizer states of
its own under its model-parallel index (stage * tensor degree + tensor rank), and every layer with
a state has a file. A tied module that lives on several stages has an fp32 master on each of them;
they are compared before one of them is taken.

Source: DeepSpeed's ``runtime/pipe/engine.py`` and ``runtime/pipe/topology.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from dist_consolidate.checkpoint.census import check_optims
from dist_consolidate.checkpoint.fragments import Fragments
from dist_consolidate.checkpoint.jobs import Job, Runner
from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Checkpoint, FlatGroup, ModuleKey, Source
from dist_consolidate.checkpoint.parallel import Grid
from dist_consolidate.checkpoint.pipeline_names import layer_of, tie_of
from dist_consolidate.checkpoint.pipeline_values import Values
from dist_consolidate.checkpoint.states import ModelState, OptimState, TensorsState
from dist_consolidate.errors import CheckpointError, Problems
from dist_consolidate.units import counted


def check_stages(
    folder: TagFolder,
    grid: Grid,
    models: Sequence[ModelState],
    optims: Sequence[Sequence[OptimState]],
    problems: Problems,
) -> None:
    """Check that all model-parallel indices are of one save, and that there are no more of them.

    Args:
        folder: The shards.
        grid: How the model is spread.
        models: The model states of each index.
        optims: The optimizer states of each index.
        problems: Takes what is surplus, missing or of another save.
    """
    for shard in folder.shards:
        if shard.role in ("model", "optim") and shard.mp_rank >= grid.size:
            problems.add(
                f"{folder.path / shard.name}: is surplus: model-parallel index {shard.mp_rank}, "
                f"but {models[0].shard.name} was saved by a run with {grid.num_stages} pipeline "
                f"stages of {grid.tensor_degree} tensor-parallel ranks; move away what is left over"
            )
    for model in models[1:]:
        for what in ("global_steps", "ds_version", "mp_world_size", "dp_world_size"):
            ours, theirs = getattr(models[0], what), getattr(model, what)
            if ours != theirs:
                problems.add(
                    f"{folder.path / model.shard.name}: {what} is {theirs}, but {ours} in "
                    f"{models[0].shard.name}; the files are of different saves"
                )
    check_optims(folder, list(zip(models, optims, strict=True)), problems)
    stepped = [states[0] for states in optims if states and states[0].step is not None]
    for state in stepped[1:]:
        if state.step != stepped[0].step:
            problems.add(
                f"{folder.path / state.shard.name}: step is {state.step}, but {stepped[0].step} in "
                f"{stepped[0].shard.name}; the files are of different saves"
            )


def read_layers(folder: TagFolder, grid: Grid, run: Runner) -> list[list[TensorsState]]:
    """Read the metadata of all layer files.

    Args:
        folder: The shards.
        grid: How the model is spread.
        run: Reads files.

    Returns:
        For each tensor-parallel rank, its layers' tensors, in the layers' order.

    Raises:
        CheckpointError: If a file is damaged, there twice, or missing beside another rank's.
    """
    shards = sorted(folder.of("layer"), key=lambda s: (s.layer or 0, s.mp_rank))
    problems = Problems()
    found: list[dict[int, TensorsState]] = [{} for _ in range(grid.tensor_degree)]
    for shard, state in zip(shards, run(folder, [Job("tensors", s) for s in shards]), strict=True):
        path, layer = folder.file(shard.name), shard.layer or 0
        if isinstance(state, CheckpointError):
            problems.add(str(state))
        elif shard.mp_rank >= grid.tensor_degree:
            problems.add(
                f"{path}: is surplus: tensor-parallel rank {shard.mp_rank}, but the run had "
                f"{grid.tensor_degree}; move away what is left over"
            )
        elif isinstance(state, TensorsState):
            other = found[shard.mp_rank].setdefault(layer, state)
            if other is not state:
                problems.add(f"{path}: holds layer {layer}, as {other.shard.name} does; keep one")
    _check_ranks(folder, found, problems)
    problems.raise_if_any(f"{folder.path}: the layer files are incomplete or inconsistent")
    return [list(layers.values()) for layers in found]


def _check_ranks(
    folder: TagFolder, found: Sequence[Mapping[int, TensorsState]], problems: Problems
) -> None:
    if problems:
        return  # files that could not be told apart are no missing ones
    for layer in sorted({number for layers in found for number in layers}):
        there = next(layers[layer].shard for layers in found if layer in layers)
        for rank, layers in enumerate(found):
            if layer not in layers:
                name = there.name.replace(f"-model_{there.mp_rank:02d}-", f"-model_{rank:02d}-")
                problems.add(
                    f"{folder.path / name}: is missing (tensor-parallel rank {rank} of "
                    f"{len(found)}); {there.name} is there"
                )


def merge_stages(
    folder: TagFolder, stages: Sequence[Checkpoint], claims: Sequence[tuple[str, str]] = ()
) -> Checkpoint:
    """Put the stages of a pipeline together.

    Args:
        folder: The shards.
        stages: The checkpoint of each stage, whole over its tensor-parallel ranks.
        claims: Ties the user claims, as pairs of alias and source.

    Returns:
        One checkpoint with every tensor of every stage.

    Raises:
        CheckpointError: If stages hold different values under one name.
    """
    values = Values(folder.folders, [stage.groups for stage in stages])
    try:
        merging = _Merging(stages, values)
        merged = merging.checkpoint(folder)
        confirmed = merged.confirmed_ties | merging.confirmed(claims)
        return dataclasses.replace(merged, confirmed_ties=confirmed)
    finally:
        values.close()


class _Merging:
    def __init__(self, stages: Sequence[Checkpoint], values: Values) -> None:
        self.stages, self.values = stages, values
        self.problems = Problems()
        self.notes: list[str] = []
        self.groups: list[FlatGroup] = []
        self.partitions: dict[str, Source] = {}
        self.module: dict[str, ModuleKey] = {}
        # Where each entry of `partitions` and `module` comes from: its stage, and its source there.
        self.origins: dict[str, tuple[int, Source]] = {}
        self.shared: dict[str, list[int]] = {}

    def checkpoint(self, folder: TagFolder) -> Checkpoint:
        for index, stage in enumerate(self.stages):
            self._add_stage(index, stage)
        if self.shared:
            stages = sorted({stage for found in self.shared.values() for stage in found})
            self.notes.append(
                f"{counted(len(self.shared), 'tied tensor lives', 'tied tensors live')} "
                "on several of the pipeline stages "
                f"{', '.join(map(str, stages))}, the first is {next(iter(self.shared))}; their "
                "values were compared and are the same"
            )
        self.problems.raise_if_any(
            f"{folder.path}: pipeline stages hold different values under one name",
            "--pipeline-names layer writes each stage's copy that has a layer file of its own",
        )
        first = self.stages[0]
        return dataclasses.replace(
            first,
            stage=max(stage.stage for stage in self.stages),
            groups=tuple(self.groups),
            partitions=self.partitions,
            frozen={n: s for stage in self.stages for n, s in stage.frozen.items()},
            module=dict(sorted(self.module.items(), key=_module_order)),
            recorded_ties=self._all("recorded_ties"),
            odd_entries=self._all("odd_entries"),
            file_bytes={n: size for s in self.stages for n, size in s.file_bytes.items()},
            confirmed_ties=frozenset().union(*(stage.confirmed_ties for stage in self.stages)),
            notes=tuple(dict.fromkeys(n for s in self.stages for n in s.notes)) + tuple(self.notes),
        )

    def confirmed(self, claims: Sequence[tuple[str, str]]) -> frozenset[tuple[str, str]]:
        """Give the claimed ties whose alias has a copy of its own with the source's values."""
        found = set()
        for alias, name in claims:
            own, held = self.origins.get(alias), self.origins.get(name)
            if own is None or held is None or alias in self.partitions:
                continue
            with contextlib.suppress(CheckpointError):  # a shard that is not seen here
                if own[1].shape == held[1].shape and self.values.agree(*held, *own):
                    found.add((alias, name))
        return frozenset(found)

    def _all(self, what: str) -> dict[str, str]:
        merged: dict[str, str] = {}
        for stage in self.stages:
            for name, value in getattr(stage, what).items():
                merged.setdefault(name, value)
        return merged

    def _add_stage(self, index: int, stage: Checkpoint) -> None:
        shift = len(self.groups)
        for group in stage.groups:
            label = f"pipeline stage {index}, {group.label}"
            self.groups.append(dataclasses.replace(group, label=label))
        for name, source in stage.partitions.items():
            if name in self.partitions:
                self._compare(name, index, source)
            else:
                self.partitions[name] = _shifted(source, shift)
                self.origins[name] = (index, source)
        for name, key in stage.module.items():
            mine = self.module.setdefault(name, self._moved(key, shift))
            if name in self.partitions or mine.source is None or key.source is None:
                continue
            if name not in self.origins:
                self.origins[name] = (index, key.source)
            elif mine.identity != key.identity:
                self._compare(name, index, key.source)

    def _moved(self, key: ModuleKey, shift: int) -> ModuleKey:
        if key.source is None:
            return key
        return dataclasses.replace(key, source=_shifted(key.source, shift))

    def _compare(self, name: str, index: int, source: Source) -> None:
        """Compare a stage's copy of a tensor with the lowest stage's."""
        first, held = self.origins[name]
        same = (source.shape, source.dtype) == (held.shape, held.dtype)
        if same and self.values.agree(index, source, first, held):
            self.shared.setdefault(name, [first]).append(index)
            return
        ours, theirs = self._files(first, held), self._files(index, source)
        kind = "is tied" if tie_of(name) else "is recorded"
        self.problems.add(
            f"{name}: {kind} on pipeline stages {first} and {index}, but its {source.origin} "
            f"differs ({list(held.shape)} {held.dtype.name} in {ours}; {list(source.shape)} "
            f"{source.dtype.name} in {theirs})"
        )

    def _files(self, stage: int, source: Source) -> str:
        return ", ".join(sorted(Fragments(self.stages[stage].groups).files(source)))


def _shifted(source: Source, shift: int) -> Source:
    """Give a source with its flat groups counted from another one on."""
    if not shift:
        return source
    if source.slot is not None:
        slot = dataclasses.replace(source.slot, group=source.slot.group + shift)
        return dataclasses.replace(source, slot=slot)
    # Blocks of one source must go on sharing it.
    parts = {id(block.source): block.source for block in source.blocks}
    moved = {key: _shifted(part, shift) for key, part in parts.items()}
    blocks = (dataclasses.replace(b, source=moved[id(b.source)]) for b in source.blocks)
    return dataclasses.replace(source, blocks=tuple(blocks))


def _module_order(item: tuple[str, ModuleKey]) -> tuple[int, int]:
    """Order keys as ``PipelineModule`` does: tied modules first, then layers by number."""
    layer = layer_of(item[0])
    return (0, 0) if layer is None else (1, layer)
