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
from collections.abc import Iterable, Mapping, Sequence

from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Checkpoint, ModuleKey, Source
from dist_consolidate.checkpoint.pipeline_values import Values
from dist_consolidate.checkpoint.states import ModuleEntry, TensorsState
from dist_consolidate.errors import CheckpointError, Problems

_TIED = "tied_modules."
_MAX_DIGITS = 10  # no pipeline has so many layers


def layer_of(name: str) -> int | None:
    """Give the number of the ordinary layer that a tensor's name begins with."""
    number, dot, _ = name.partition(".")
    is_number = number.isascii() and number.isdigit() and len(number) < _MAX_DIGITS
    return int(number) if dot and is_number else None


def tie_of(name: str) -> tuple[str, str] | None:
    """Split the name of a tied module's tensor into the tie and the module's own name for it."""
    if not name.startswith(_TIED):
        return None
    tie, _, key = name.removeprefix(_TIED).partition(".")
    return tie, key


def entry_source(entry: ModuleEntry) -> Source:
    """Give a layer file's tensor as a source."""
    return Source("module", entry.span.shape, entry.span.dtype, span=entry.span)


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
    values = Values(folder.path, [stage.groups for stage in stages])
    try:
        return _Naming(folder, stages, buffers, files, naming, values).checkpoints()
    finally:
        values.close()


@dataclasses.dataclass(slots=True)
class _Tied:
    """A tied module: its partitions by stage, its buffers, and the layer files that hold it."""

    masters: dict[int, dict[str, Source]]
    buffers: set[str]
    files: list[tuple[TensorsState, frozenset[int]]]


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
        tied = self._tied()
        for number, file in self.files.items():
            if not any(file is other for one in tied.values() for other, _ in one.files):
                self._place(self._owner(number), file, f"{number}.", f"{number}.")
        for tie, module in tied.items():
            if self.naming == "module" or not module.files:
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

    def _tied(self) -> dict[str, _Tied]:
        """Collect the tied modules, and find their files."""
        tied: dict[str, _Tied] = {}
        for stage in range(len(self.stages)):
            for name, source in self.stages[stage].partitions.items():
                if (parts := tie_of(name)) is not None:
                    module = tied.setdefault(parts[0], _Tied({}, set(), []))
                    module.masters.setdefault(stage, {})[parts[1]] = source
        for name in itertools.chain(*self.buffers):
            if (parts := tie_of(name)) is not None and parts[0] in tied:
                tied[parts[0]].buffers.add(parts[1])
        for layer, file in self.files.items():
            if layer in self.owners:
                continue
            found = {tie: self._stages_of(module, file) for tie, module in tied.items()}
            fitting = [tie for tie, stages in found.items() if stages]
            if len(fitting) > 1:
                self.problems.add(
                    f"{self.folder.path / file.shard.name}: holds the values of the tied modules "
                    f"{' and '.join(fitting)} alike; which of them it is cannot be told"
                )
            elif fitting:
                tied[fitting[0]].files.append((file, found[fitting[0]]))
        return tied

    def _stages_of(self, module: _Tied, file: TensorsState) -> frozenset[int]:
        """Give the stages whose copy of a tied module a file holds, rounded."""
        if not module.buffers <= file.entries.keys():
            return frozenset()
        return frozenset(
            s for s, masters in module.masters.items() if self._holds(file, s, masters)
        )

    def _holds(self, file: TensorsState, stage: int, masters: Mapping[str, Source]) -> bool:
        for key, source in masters.items():
            entry = file.entries.get(key)
            if entry is None or entry.span.shape != source.shape:
                return False
        return all(
            self.values.agree(stage, source, stage, entry_source(file.entries[key]))
            for key, source in masters.items()
        )

    def _place(self, stage: int, file: TensorsState, prefix: str, recorded: str) -> None:
        """Enter a file's tensors under their names, each as its own copy."""
        for key, entry in file.entries.items():
            is_buffer = recorded + key in self.buffers[stage]
            self.modules[stage][prefix + key] = _module_key(entry, is_buffer)
        for key, kind in file.odd_entries.items():
            self.odd[stage][prefix + key] = kind

    def _keep_names(self, tie: str, module: _Tied) -> None:
        """Enter a tied module once, under ``PipelineModule``'s names."""
        prefix = f"{_TIED}{tie}."
        for stage, masters in module.masters.items():
            for file, _ in module.files[:1]:
                self._place(stage, file, prefix, prefix)
            for key in masters:
                self._enter_name(stage, prefix + key)
            self._enter_lost(stage, prefix, module)
        for file, _ in module.files[1:]:
            first = module.files[0][0]
            for key in self._own_copies(file, first, module):
                self.problems.add(
                    f"{prefix}{key}: {file.shard.name} holds other values of it than "
                    f"{first.shard.name}; --pipeline-names layer writes both"
                )

    def _own_copies(self, file: TensorsState, first: TensorsState, module: _Tied) -> list[str]:
        """List what a further file of a tied module holds otherwise than the first."""
        masters = {key for keys in module.masters.values() for key in keys}
        return [
            key
            for key, entry in file.entries.items()
            if key not in masters and not self._same(entry, first.entries.get(key))
        ]

    def _same(self, entry: ModuleEntry, other: ModuleEntry | None) -> bool:
        if other is None or (entry.span.shape, entry.span.dtype) != (
            other.span.shape,
            other.span.dtype,
        ):
            return False
        return self.values.agree(0, entry_source(entry), 0, entry_source(other))

    def _rename(self, tie: str, module: _Tied) -> None:
        """Enter a tied module under the number of each layer that has a file."""
        files = self._files_by_stage(module)
        for stage, masters in module.masters.items():
            mine = files.get(stage)
            if not mine:
                self._name_without_file(stage, tie, masters)
                continue
            first = mine[0]
            holder = f"{first.shard.layer or 0}."
            keys = {*masters, *first.entries}
            names = {f"{_TIED}{tie}.{key}": holder + key for key in keys}
            self._rename_in(stage, names)
            self._place(stage, first, holder, f"{_TIED}{tie}.")
            for file in mine[1:]:
                prefix = f"{file.shard.layer or 0}."
                self._place(stage, file, prefix, f"{_TIED}{tie}.")
                own = set(self._own_copies(file, first, module))
                for key in file.entries.keys() - own:
                    name = prefix + key
                    placed = self.modules[stage][name]
                    identity = (*placed.identity, "tied")
                    placed = dataclasses.replace(placed, identity=identity, source=None)
                    self.modules[stage][name] = placed
                    self.ties[stage][name] = holder + key

    def _files_by_stage(self, module: _Tied) -> dict[int, list[TensorsState]]:
        """Give the files of each stage's copy; stages whose masters are equal share theirs.

        Where masters differ by less than the rounding, a file fits several of them; the layers
        around it tell whose it can be.
        """
        alike: dict[int, int] = {}
        for stage in module.masters:
            alike[stage] = next(
                (s for s in alike if alike[s] == s and self._are_equal(module, s, stage)), stage
            )
        files: dict[int, list[TensorsState]] = {}
        for file, stages in module.files:
            layer = file.shard.layer or 0
            low = self._owner(layer)
            high = next((s for n, s in self.owners.items() if n > layer), len(self.stages) - 1)
            fitting = [s for s in sorted(stages) if low <= s <= high] or sorted(stages)
            for stage in module.masters:
                if alike[stage] == alike[fitting[0]]:
                    files.setdefault(stage, []).append(file)
        return files

    def _are_equal(self, module: _Tied, stage: int, other: int) -> bool:
        ours, theirs = module.masters[stage], module.masters[other]
        return ours.keys() == theirs.keys() and all(
            (source.shape, source.dtype) == (theirs[key].shape, theirs[key].dtype)
            and self.values.agree(stage, source, other, theirs[key])
            for key, source in ours.items()
        )

    def _rename_in(self, stage: int, names: Mapping[str, str]) -> None:
        self.partitions[stage] = {names.get(n, n): s for n, s in self.partitions[stage].items()}
        self.ties[stage] = {names.get(a, a): names.get(n, n) for a, n in self.ties[stage].items()}

    def _name_without_file(self, stage: int, tie: str, masters: Iterable[str]) -> None:
        """Keep the name of a tied module whose copy in a stage has no file, so no number."""
        self.notes.append(
            f"no layer file holds pipeline stage {stage}'s copy of the tied module {tie}, so it "
            "keeps its name"
        )
        for key in masters:
            self._enter_name(stage, f"{_TIED}{tie}.{key}")

    def _enter_name(self, stage: int, name: str) -> None:
        """Enter a name that has a partition but no tensor in a layer file."""
        shape = self.stages[stage].partitions[name].shape
        placeholder = ModuleKey(shape, ("pipeline", stage, name), None, False)
        self.modules[stage].setdefault(name, placeholder)

    def _enter_lost(self, stage: int, prefix: str, module: _Tied) -> None:
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
    return ModuleKey(entry.ref.shape, identity + kind, entry_source(entry), is_buffer)
