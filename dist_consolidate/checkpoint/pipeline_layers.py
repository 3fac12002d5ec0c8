"""Pipeline layers: the name of every tensor in the layer files, and of what has no file.

A layer file holds a state dict with names of its own. ``PipelineModule`` calls its tensors
``{layer}.{name}``, and ``tied_modules.{tie}.{name}`` where the layer is a ``TiedLayerSpec``. No
layer file tells which; the names of the fp32 partitions do for ordinary layers, and the tied module
whose values a file holds, rounded, is the one that it belongs to.

Source: DeepSpeed's ``runtime/pipe/module.py`` (``_build``, ``save_state_dict``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Checkpoint, ModuleKey, Source, own_source
from dist_consolidate.checkpoint.pipeline_names import TIED, layer_of
from dist_consolidate.checkpoint.pipeline_ties import TiedModule, find_ties
from dist_consolidate.checkpoint.pipeline_values import Values
from dist_consolidate.checkpoint.states import ModuleEntry, TensorsState
from dist_consolidate.errors import CheckpointError, Problems


def with_layers(
    folder: TagFolder,
    stages: Sequence[Checkpoint],
    buffers: Sequence[frozenset[str]],
    files: Sequence[TensorsState],
    naming: str,
) -> list[Checkpoint]:
    """Add what the layer files hold to the stages' checkpoints.

    Args:
        folder: The shards.
        stages: The checkpoint of each stage, of one tensor-parallel rank.
        buffers: The buffer names that each stage records.
        files: That tensor-parallel rank's layer files, in the layers' order.
        naming: Whether tied modules keep ``PipelineModule``'s names, or get those of the layers
            that have a file.

    Returns:
        The checkpoints with all keys in ``module``.

    Raises:
        CheckpointError: If a layer file is missing, or contradicts the fp32 partitions.
    """
    values = Values(folder.folders, [stage.groups for stage in stages])
    try:
        return _Naming(folder, stages, buffers, files, naming, values).checkpoints()
    finally:
        values.close()


class _Naming:
    def __init__(
        self,
        folder: TagFolder,
        stages: Sequence[Checkpoint],
        buffers: Sequence[frozenset[str]],
        files: Sequence[TensorsState],
        naming: str,
        values: Values,
    ) -> None:
        self.folder, self.stages, self.buffers = folder, stages, buffers
        self.naming, self.values = naming, values
        self.files = {file.shard.layer or 0: file for file in files}
        self.problems = Problems()
        self.notes: list[str] = []
        self.partitions = [dict(stage.partitions) for stage in stages]
        self.modules: list[dict[str, ModuleKey]] = [{} for _ in stages]
        self.ties: list[dict[str, str]] = [dict(stage.recorded_ties) for stage in stages]
        self.odd: list[dict[str, str]] = [{} for _ in stages]
        self.owners = self._owners()

    def checkpoints(self) -> list[Checkpoint]:
        self._check_files()
        unnamed = [file for layer, file in self.files.items() if layer not in self.owners]
        tied = find_ties(self.stages, self.buffers, unnamed, self.values, self.problems)
        for number, file in self.files.items():
            if not any(file is other for one in tied.values() for other, _ in one.files):
                self._place(self._owner(number), file, f"{number}.", f"{number}.")
        for tie, module in tied.items():
            if self.naming == "module":
                self._keep_names(tie, module)
            else:
                self._rename(tie, module)
        self._infer_ties()
        self.problems.raise_if_any(
            f"{self.folder.path}: the layer files do not fit the pipeline stages"
        )
        return [self._checkpoint(index) for index in range(len(self.stages))]

    def _owners(self) -> dict[int, int]:
        """Give the stage of each ordinary layer that a recorded name speaks of."""
        owners: dict[int, int] = {}
        for stage in range(len(self.stages)):
            for name in (*self.stages[stage].partitions, *sorted(self.buffers[stage])):
                layer = layer_of(name)
                if layer is not None and owners.setdefault(layer, stage) != stage:
                    self.problems.add(
                        f"{name}: is recorded by pipeline stages {owners[layer]} and {stage}; the "
                        "files are of different runs"
                    )
        return dict(sorted(owners.items()))

    def _owner(self, layer: int) -> int:
        """Give a layer's stage; what no name speaks of belongs to the known layer before it."""
        return next((self.owners[n] for n in reversed(self.owners) if n <= layer), 0)

    def _check_files(self) -> None:
        """Look for a file for every layer that has a name, and tell what has none."""
        for layer in self.owners.keys() - self.files.keys():
            stage = self.owners[layer]
            known = (*self.stages[stage].partitions, *sorted(self.buffers[stage]))
            names = [name for name in known if layer_of(name) == layer]
            path = self.folder.path / self._file_name(layer)
            self.problems.add(
                f"{path}: is missing; it holds the buffers and frozen parameters of layer {layer} "
                f"(of pipeline stage {stage}; {names[0]} is one of its {len(names)} recorded "
                "names). Look for it where that stage's ranks saved"
            )
        numbers = sorted({-1, *self.files, *self.owners})
        gaps = [
            str(low + 1) if high - low == 2 else f"{low + 1} to {high - 1}"
            for low, high in itertools.pairwise(numbers)
            if high - low > 1
        ]
        if gaps:
            self.notes.append(
                f"no file of layer {', '.join(gaps)}: functions, and tied layers used through a "
                "function, have none"
            )

    def _file_name(self, layer: int) -> str:
        other = next(iter(self.files.values())).shard.name if self.files else ""
        behind = other.partition("-")[2] or "model_states.pt"
        return f"layer_{layer:02d}-{behind}"

    def _place(self, stage: int, file: TensorsState, prefix: str, recorded: str) -> None:
        """Enter a file's tensors under their names, each as its own copy."""
        for key, entry in file.entries.items():
            is_buffer = recorded + key in self.buffers[stage]
            self.modules[stage][prefix + key] = _module_key(entry, is_buffer)
        for key, kind in file.odd_entries.items():
            self.odd[stage][prefix + key] = kind

    def _keep_names(self, tie: str, module: TiedModule) -> None:
        """Enter a tied module once, under ``PipelineModule``'s names."""
        prefix = f"{TIED}{tie}."
        for stage, masters in module.masters.items():
            for file, _ in module.files[:1]:
                self._place(stage, file, prefix, prefix)
            for key in masters:
                self._enter_name(stage, prefix + key)
            self._enter_lost(stage, prefix, module)
        for file, _ in module.files[1:]:
            first = module.files[0][0]
            for key in module.own_copies(file, first, self.values):
                self.problems.add(
                    f"{prefix}{key}: {file.shard.name} holds other values of it than "
                    f"{first.shard.name}; --pipeline-names layer writes both"
                )

    def _rename(self, tie: str, module: TiedModule) -> None:
        """Enter a tied module under the number of each layer that has a file."""
        files = module.files_by_stage(self.owners, len(self.stages), self.values)
        for stage, masters in module.masters.items():
            mine = files.get(stage)
            if not mine:
                self._name_without_file(stage, tie, module)
                continue
            first = mine[0]
            holder = f"{first.shard.layer or 0}."
            keys = {*masters, *first.entries}
            names = {f"{TIED}{tie}.{key}": holder + key for key in keys}
            self._rename_in(stage, names)
            self._place(stage, first, holder, f"{TIED}{tie}.")
            for file in mine[1:]:
                prefix = f"{file.shard.layer or 0}."
                self._place(stage, file, prefix, f"{TIED}{tie}.")
                own = set(module.own_copies(file, first, self.values))
                for key in file.entries.keys() - own:
                    name = prefix + key
                    placed = self.modules[stage][name]
                    identity = (*placed.identity, "tied")
                    placed = dataclasses.replace(placed, identity=identity, source=None)
                    self.modules[stage][name] = placed
                    self.ties[stage][name] = holder + key

    def _rename_in(self, stage: int, names: Mapping[str, str]) -> None:
        self.partitions[stage] = {names.get(n, n): s for n, s in self.partitions[stage].items()}
        self.ties[stage] = {names.get(a, a): names.get(n, n) for a, n in self.ties[stage].items()}

    def _name_without_file(self, stage: int, tie: str, module: TiedModule) -> None:
        """Keep the name of a tied module whose copy in a stage has no file, so no number."""
        self.notes.append(
            f"no layer file holds pipeline stage {stage}'s copy of the tied module {tie}, so it "
            "keeps its name"
        )
        for key in module.masters[stage]:
            self._enter_name(stage, f"{TIED}{tie}.{key}")
        self._enter_lost(stage, f"{TIED}{tie}.", module)

    def _enter_name(self, stage: int, name: str) -> None:
        """Enter a name that has a partition but no tensor in a layer file."""
        shape = self.stages[stage].partitions[name].shape
        placeholder = ModuleKey(shape, ("pipeline", stage, name), None, False)
        self.modules[stage].setdefault(name, placeholder)

    def _enter_lost(self, stage: int, prefix: str, module: TiedModule) -> None:
        """Enter buffers that are recorded but lie in no file, so that they are asked for."""
        for key in module.buffers if not module.files else ():
            identity = ("pipeline", stage, prefix + key)
            self.modules[stage][prefix + key] = ModuleKey((), identity, None, True)

    def _infer_ties(self) -> None:
        """Find modules that are two layers, and parameters with two names, by their values.

        Only the first name of a parameter has an fp32 partition, and the layer files hold clones.
        """
        for stage, module in enumerate(self.modules):
            for name, key in module.items():
                known = name in self.partitions[stage] or name in self.ties[stage]
                if known or key.is_buffer or key.source is None:
                    continue
                if key.source.dtype.is_floating and key.source.num_numel > 1:
                    with contextlib.suppress(CheckpointError):  # a shard that is not seen here
                        self._infer_tie(stage, name, key.source)

    def _infer_tie(self, stage: int, name: str, own: Source) -> None:
        for holder, source in self.partitions[stage].items():
            if source.shape != own.shape or not self.values.agree(stage, source, stage, own):
                continue
            if self.values.is_telling(stage, own):
                self.ties[stage][name] = holder
                self.notes.append(
                    f"{name} has no fp32 partition but the values of {holder}, rounded: taken for "
                    "the same parameter"
                )
                return

    def _checkpoint(self, index: int) -> Checkpoint:
        stage = self.stages[index]
        for name in self.partitions[index]:
            if name not in self.modules[index]:
                placeholder = ("pipeline", index, name)
                shape = self.partitions[index][name].shape
                self.modules[index][name] = ModuleKey(shape, placeholder, None, False)
        files = {file.shard.name: file.shard.num_bytes for file in self.files.values()}
        return dataclasses.replace(
            stage,
            partitions=self.partitions[index],
            module=self.modules[index],
            recorded_ties=self.ties[index],
            confirmed_ties=stage.confirmed_ties | self._confirmed(index),
            odd_entries={**stage.odd_entries, **self.odd[index]},
            file_bytes={**stage.file_bytes, **files},
            notes=(*stage.notes, *(self.notes if index == 0 else ())),
        )

    def _confirmed(self, index: int) -> frozenset[tuple[str, str]]:
        """Check the ties by value: a layer file's tensors are clones."""
        module, partitions = self.modules[index], self.partitions[index]
        confirmed = set()
        for alias, name in self.ties[index].items():
            own, source = module.get(alias), partitions.get(name)
            if own is None or own.source is None or alias in partitions:
                continue
            if source is None and name in module:
                source = module[name].source
            if source is None or source.shape != own.shape:
                continue
            with contextlib.suppress(CheckpointError):  # a shard that is not seen here
                if self.values.agree(index, source, index, own.source):
                    confirmed.add((alias, name))
        return frozenset(confirmed)


def _module_key(entry: ModuleEntry, is_buffer: bool) -> ModuleKey:
    identity = (entry.span.file, entry.ref.storage.key, entry.ref.offset_numel)
    kind = (entry.ref.shape, entry.ref.stride, entry.ref.dtype.name)
    return ModuleKey(entry.ref.shape, identity + kind, own_source(entry.span), is_buffer)
