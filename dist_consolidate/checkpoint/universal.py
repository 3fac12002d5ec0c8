"""Universal checkpoints: one small file per parameter, made by ``ds_to_universal``.

``zero/NAME/fp32.pt`` holds the master: a dictionary with the full tensor under ``param`` (stages 1
and 2, and tensor parallelism, whose parts are merged already), or a bare flat tensor (ZeRO-3),
whose shape stands in the copied model states. These also have everything that is no optimizer's:
buffers, frozen parameters, ties. (Recent releases write files for these too, but cast to float.)

The converter trusts positions that are wrong under ``round_robin_gradients``, and it knows nothing
of ZenFlow's transposed matrices, so that a few tensors are compared with ``module``.

Source: DeepSpeed's ``checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from dist_consolidate.checkpoint import census
from dist_consolidate.checkpoint.assembly import Assembly
from dist_consolidate.checkpoint.extents import contiguous_stride
from dist_consolidate.checkpoint.jobs import Job, Runner
from dist_consolidate.checkpoint.layout import ShardFile, TagFolder, missing_numbers
from dist_consolidate.checkpoint.model import Checkpoint, FlatGroup, ModuleKey, Source, own_source
from dist_consolidate.checkpoint.parallel import find_grid
from dist_consolidate.checkpoint.request import Request
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState, ModuleEntry, ParamState
from dist_consolidate.checkpoint.universal_values import can_be_merged, differing
from dist_consolidate.errors import CheckpointError, Problems, UnsupportedLayoutError, listed
from dist_consolidate.units import counted


def is_universal(folder: TagFolder) -> bool:
    """Whether the masters are a universal checkpoint's; where a run's own are there, they count."""
    return bool(folder.of("universal")) and not folder.of("optim")


def read(folder: TagFolder, run: Runner, request: Request) -> Checkpoint:
    """Read the metadata of a universal checkpoint.

    Args:
        folder: The shards.
        run: Reads files.
        request: What the user asks for.

    Returns:
        The metadata, with every weight located.

    Raises:
        CheckpointError: If files are missing, damaged or contradict each other.
        UnsupportedLayoutError: If it is of a kind that is not read.
    """
    if request.include_optimizer:
        raise UnsupportedLayoutError(
            f"{folder.path}: is a universal checkpoint, whose optimizer states this version does "
            "not read; consolidate without --include optimizer"
        )
    first = census.primary_model(folder, 0)
    others = [s for s in folder.of("model") if not s.dp_rank and s is not first]
    models = []
    problems = Problems()
    for finding in run(folder, [Job("model", shard) for shard in (first, *others)]):
        if isinstance(finding, ModelState):
            models.append(finding)
        elif isinstance(finding, CheckpointError):
            problems.add(str(finding))
    size = find_grid(folder, models[0]).size if models else 0
    for index in missing_numbers(size, {shard.mp_rank for shard in (first, *others)}):
        name = first.name.replace("mp_rank_00", f"mp_rank_{index:02d}")
        problems.add(
            f"{folder.path / name}: is missing; {first.name} is of {size} model-parallel indices"
        )
    problems.raise_if_any(f"{folder.path}: the universal checkpoint cannot be read")
    found = _Universal(folder, models, run, request)
    return dataclasses.replace(found.checkpoint(), tensor_ranks=found.degree)


class _Universal(Assembly):
    """Takes the masters from a universal checkpoint's files, and all else from model states."""

    def __init__(
        self,
        folder: TagFolder,
        models: Sequence[ModelState],
        run: Runner,
        request: Request,
    ) -> None:
        super().__init__(folder, models[0], (), run, request)
        empty = next((model.shard.name for model in models if model.module is None), None)
        if empty is not None:
            raise UnsupportedLayoutError(
                f"{folder.path / empty}: is of a universal checkpoint of a pipeline-parallel run, "
                "whose model states list no tensors; this version does not read those"
            )
        self.models = models
        striped = models[0].shard.dp_rank is not None
        self.stage = 3 if striped else models[0].zero_stage or 1
        ranks = [shard.dp_rank or 0 for shard in folder.of("model") if striped]
        # Every rank has model states; they record how many there were.
        known = models[0].dp_world_size or 1 if striped else 1
        self.ranks = max(max(ranks, default=0) + 1, known)
        self.degree = max(find_grid(folder, models[0]).size, len(models))
        self.notes.append("a universal checkpoint (ds_to_universal) was read")
        self.notes += request.merging.unused()
        if (folder.path / "tmp").is_dir():
            self.notes.append(
                "its folder `tmp` is there: the conversion kept it (--keep_temp_folder), or did "
                "not finish; every parameter was found nevertheless"
            )

    def _partitions(self) -> tuple[tuple[FlatGroup, ...], dict[str, Source]]:
        shapes = self._shapes()
        files = {_name_of(shard): shard for shard in self.folder.of("universal")}
        if files and not shapes:
            self.problems.add(
                f"{self.folder.path}: holds {counted(len(files), 'file', 'files')} of parameters, "
                "but param_shapes lists none as trained; this is not what DeepSpeed writes"
            )
        wanted = {name: files[name] for name in shapes if name in files}
        if self.degree > 1:
            self._check_unmerged(shapes)
        missing = [n for n, shape in shapes.items() if math.prod(shape) and n not in files]
        for name in missing:
            self.problems.add(
                f"{self.folder.path / 'zero' / name / 'fp32.pt'}: is missing; param_shapes of "
                f"{self._lister(name)} lists {name!r} as trained. The conversion did not finish: "
                "run ds_to_universal again, or pass the ZeRO checkpoint it was made from"
            )
        sources: dict[str, Source] = {}
        findings = self.run(self.folder, [Job("param", shard) for shard in wanted.values()])
        for name, finding in zip(wanted, findings, strict=True):
            if isinstance(finding, UnsupportedLayoutError):
                raise finding
            if isinstance(finding, CheckpointError):
                self.problems.add(str(finding))
            elif isinstance(finding, ParamState):
                source = self._source(name, finding, shapes.get(name))
                sources |= {name: source} if source else {}
        told = "the universal checkpoint is incomplete or inconsistent"
        self.problems.raise_if_any(f"{self.folder.path}: {told}")
        self._compare(sources)
        return (), sources

    def _module(self, partitions: Mapping[str, Source]) -> dict[str, ModuleKey]:
        keys = super()._module(partitions)
        if self.degree == 1:
            return keys
        # Of all but buffers, `module` holds one rank's part only.
        return {
            name: key if key.is_buffer else dataclasses.replace(key, source=None)
            for name, key in keys.items()
        }

    def _frozen(self, first_group: int) -> tuple[tuple[FlatGroup, ...], dict[str, Source]]:
        # Under tensor parallelism, model states hold one rank's parts; see _merged_elsewhere.
        return super()._frozen(first_group) if self.degree == 1 else ((), {})

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Give the trained parameters: in full shape, but for tensor parallelism."""
        shapes: dict[str, tuple[int, ...]] = {}
        for model in self.models:
            if model.param_shapes is None:
                raise CheckpointError(
                    f"{self.folder.path / model.shard.name}: has no param_shapes; nothing tells "
                    "which parameters were trained"
                )
            for group in model.param_shapes:
                shapes |= group
        return shapes

    def _check_unmerged(self, shapes: Mapping[str, object]) -> None:
        """Under tensor parallelism, only what was trained is merged.

        Recent converters write a file for every other key of ``module``, too, but that is the
        first tensor rank's part, cast to float.
        """
        self._check_ranks()
        module, ties = self.model.module or {}, self.model.shared_params or {}
        buffers = self.model.buffer_names or frozenset()
        trained = {_place(module[n]) for n in shapes if n in module}
        for name, entry in module.items():
            alias = name in ties or _place(entry) in trained
            if name in buffers or name in shapes or alias or not entry.span.num_numel:
                continue
            self.problems.add(
                f"{self.folder.path / self.model.shard.name}: {name!r} was not trained, and "
                "ds_to_universal merges the tensor-parallel parts of trained parameters only (a "
                f"file zero/{name}/fp32.pt is the first rank's part); pass the ZeRO checkpoint it "
                "was made from"
            )

    def _check_ranks(self) -> None:
        """Tensor-parallel ranks must list the same tensors, and hold the same buffers."""
        prints, first = Fingerprints(self.folder.folders), self.models[0]
        buffers = first.buffer_names or frozenset()
        for model in self.models[1:]:
            ours, theirs = first.module or {}, model.module or {}
            if ours.keys() != theirs.keys():
                self.problems.add(
                    f"{self.folder.path / model.shard.name}: lists other tensors than "
                    f"{first.shard.name}; this version reads universal checkpoints of tensor "
                    "parallelism, where all ranks have the same ones"
                )
                continue
            for name in sorted(buffers & ours.keys()):
                pair = [
                    prints.of(own_source(s), s.dtype) for s in (ours[name].span, theirs[name].span)
                ]
                if pair[0] != pair[1]:
                    self.problems.add(
                        f"{self.folder.path / model.shard.name}: buffer {name!r} differs from that "
                        f"in {first.shard.name}; nothing tells which one is meant"
                    )
        prints.close()

    def _source(self, name: str, state: ParamState, shape: tuple[int, ...] | None) -> Source | None:
        span, path = state.span, self.folder.path / state.shard.name
        if state.bare and shape is not None:
            if span.num_numel != math.prod(shape) or len(span.shape) != 1:
                self.problems.add(
                    f"{path}: holds shape {list(span.shape)}, but param_shapes says {list(shape)}"
                )
                return None
            stride = contiguous_stride(shape)
            span = dataclasses.replace(span, shape=shape, stride=stride)
        elif self.degree == 1 and shape is not None and span.shape != shape:
            self.problems.add(
                f"{path}: holds shape {list(span.shape)}, but param_shapes says {list(shape)}"
            )
            return None
        elif self.degree > 1 and not self._fits(span.shape, shards := self._shards(name)):
            self.problems.add(
                f"{path}: holds shape {list(span.shape)}, but the tensor-parallel ranks' shards of "
                f"{name!r} are {', '.join(str(list(shard)) for shard in shards)}, as param_shapes "
                "of their model states say"
            )
            return None
        return Source("fp32 partition", span.shape, span.dtype, span=span)

    def _lister(self, name: str) -> str:
        """Name the model states that list a parameter."""
        listing = (m for m in self.models if any(name in group for group in m.param_shapes or ()))
        return next(listing).shard.name

    def _fits(self, shape: tuple[int, ...], shards: Sequence[tuple[int, ...]]) -> bool:
        rows = (self.model.universal_info or {}).get("original_vocab_size")
        return can_be_merged(shape, shards, rows)

    def _shards(self, name: str) -> list[tuple[int, ...]]:
        """Give the shapes of a parameter's shards, in rank order."""
        groups = (group for model in self.models for group in model.param_shapes or ())
        return [group[name] for group in groups if name in group]

    def _compare(self, sources: Mapping[str, Source]) -> None:
        """Compare with what `module` holds; ZeRO-3 leaves it empty."""
        if self.stage == 3:
            return
        prints = Fingerprints(self.folder.folders)
        wrong = differing(prints, self.model, sources, self.model.universal_info)
        prints.close()
        if wrong and self.request.trust_masters:
            self.notes.append(
                f"{counted(len(wrong), 'master holds', 'masters hold')} "
                f"other values than {self.model.shard.name}; they were "
                "taken (--trust-masters)"
            )
        elif wrong:
            self.problems.add(
                f"{self.folder.path}: the masters of {len(wrong)} of {len(sources)} parameters do "
                f"not round to the values in {self.model.shard.name}: {listed(wrong)}. Their files "
                "(zero/NAME/fp32.pt) were exchanged or are of another save; or ds_to_universal "
                "mixed parameters of a run with round_robin_gradients, or turned ZenFlow's "
                "matrices: then pass the ZeRO checkpoint it was made from. If the weights were "
                "changed after the last step, and the masters are what you want, pass "
                "--trust-masters"
            )


def _place(entry: ModuleEntry) -> tuple[object, ...]:
    ref = entry.ref
    return (ref.storage.key, ref.offset_numel, ref.shape, ref.stride)


def _name_of(shard: ShardFile) -> str:
    return shard.name.removeprefix("zero/").removesuffix("/fp32.pt")
