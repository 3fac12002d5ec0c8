"""Stage 0 in a pipeline: fp32 masters without names, and whether every layer file is there.

With fp16, each stage's model states hold the fp32 masters of all its parameters, tied ones
included, in the optimizer's order. They belong to the tensors of the layer files that have their
values, rounded. With fp32 the layer files hold all there is, and the optimizer's moments tell how
many parameters of which shape there must be.

Sources: DeepSpeed's ``runtime/fp16/unfused_optimizer.py`` and ``fused_optimizer.py``.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from dist_consolidate.checkpoint.extents import TensorSpan, contiguous_stride
from dist_consolidate.checkpoint.model import Source, own_source
from dist_consolidate.checkpoint.pipeline_values import Values
from dist_consolidate.checkpoint.stage0 import Master, narrow
from dist_consolidate.checkpoint.states import ModelState, ModuleEntry, TensorsState
from dist_consolidate.errors import Problems
from dist_consolidate.units import counted

# A layer that a stage uses through `forward_fn` has no file there.
_UNTIED = (
    "; or it is a part of a tied layer that is not tied itself, on a stage that uses the layer "
    "through a function only: such a stage's values are in no layer file"
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of a layer file that may have a master."""

    layer: int
    name: str
    entry: ModuleEntry


def masters(
    folder: Path | Sequence[Path],
    models: Sequence[ModelState],
    files: Sequence[TensorsState],
    problems: Problems,
    notes: list[str],
) -> list[dict[str, Source]]:
    """Find the layer files' tensors that the stages' masters belong to.

    Args:
        folder: The tag folder; weights are read from it to compare.
        models: The model states of each stage, of one tensor-parallel rank.
        files: Its layer files, in the layers' order.
        problems: Takes masters that fit no tensor, and layer files that must be missing.
        notes: Takes what was inferred, and tensors whose master cannot be told.

    Returns:
        For each stage, sources by name; empty where the layer files are the most precise copy.
    """
    values = Values(folder, [()])
    try:
        if any(model.optimizer for model in models):
            return _Matching(models, files, values, problems, notes).sources()
        _check_count(models, files, values, problems, notes)
        return [{} for _ in models]
    finally:
        values.close()


def _places(models: Sequence[ModelState], files: Sequence[TensorsState]) -> list[_Place]:
    buffers = {name for model in models for name in model.buffer_names or ()}
    return [
        _Place(file.shard.layer or 0, f"{file.shard.layer or 0}.{key}", entry)
        for file in files
        for key, entry in file.entries.items()
        if f"{file.shard.layer or 0}.{key}" not in buffers
        and entry.span.num_numel
        and entry.span.dtype.is_floating
    ]


def _source(span: TensorSpan) -> Source:
    return Source("fp32 partition", span.shape, span.dtype, span=span)


class _Matching:
    def __init__(
        self,
        models: Sequence[ModelState],
        files: Sequence[TensorsState],
        values: Values,
        problems: Problems,
        notes: list[str],
    ) -> None:
        self.models, self.values = models, values
        self.problems, self.notes = problems, notes
        self.places = _places(models, files)
        self.dtypes = {p.entry.span.dtype.name: p.entry.span.dtype for p in self.places}.values()
        self.alike: dict[tuple[object, ...], list[int]] = {}
        for index, place in enumerate(self.places):
            span = place.entry.span
            print_ = values.of(0, own_source(place.entry.span), span.dtype)
            self.alike.setdefault((span.shape, span.dtype.name, print_), []).append(index)
        self.settled: dict[int, tuple[int, TensorSpan]] = {}
        # Stages whose masters of a tensor are the same bits: any of them may own its layer.
        self.equal: dict[int, dict[int, TensorSpan]] = {}

    def sources(self) -> list[dict[str, Source]]:
        found = [
            (stage, master)
            for stage, model in enumerate(self.models)
            for master in self._masters(stage, model)
        ]
        if self.problems:
            return [{} for _ in self.models]
        unclear = self._settle(found)
        if unclear:
            self._settle_by_order(unclear, found)
        self._note_rest(unclear)
        named: list[dict[str, Source]] = [{} for _ in self.models]
        owners = self._owners()
        for index, (stage, span) in sorted(self.settled.items()):
            equal, owner = self.equal.get(index, {}), owners[self.places[index].layer]
            of, held = (owner, equal[owner]) if owner in equal else (stage, span)
            named[of][self.places[index].name] = _source(held)
        return named

    def _owners(self) -> dict[int, int]:
        """Give, for each layer, the lowest stage that has masters of all its tensors."""
        able: dict[int, set[int]] = {}
        for index, (stage, _) in self.settled.items():
            stages = {stage, *self.equal.get(index, ())}
            able.setdefault(self.places[index].layer, stages).intersection_update(stages)
        return {layer: min(stages, default=0) for layer, stages in able.items()}

    def _masters(self, stage: int, model: ModelState) -> Iterator[Master]:
        for group, spans in enumerate(model.optimizer or ()):
            cut = self._cut(spans[0]) if model.flat_masters else list(spans)
            if cut is None:
                self.problems.add(
                    f"{model.shard.name}: fp32 group {group} of {spans[0].num_numel} elements "
                    "cannot be cut into tensors of the layer files; one of them is missing or of "
                    f"another save{_UNTIED}"
                )
            for number, span in enumerate(cut or ()):
                places = self._fitting(span)
                if not places and span.num_numel:
                    self.problems.add(
                        f"{model.shard.name}: fp32 master {number} of group {group}, of shape "
                        f"{list(span.shape)}, rounds to no tensor of any layer file; the file of "
                        f"its layer is missing or of another save{_UNTIED}"
                    )
                if places:
                    yield Master(span, group, places)

    def _fitting(self, span: TensorSpan) -> list[int]:
        found: list[int] = []
        for dtype in self.dtypes:
            found += self.alike.get(
                (span.shape, dtype.name, self.values.of(0, _source(span), dtype)), ()
            )
        return sorted(found)

    def _cut(self, flat: TensorSpan) -> list[TensorSpan] | None:
        """Cut a flat group into tensors of the layer files, one behind the other.

        The model's order is tried first: it is the usual one, and then every element is read once.
        """
        trail: list[tuple[TensorSpan, Iterator[tuple[int, TensorSpan]]]] = []
        options = self._next(flat, 0, -1)
        while True:
            step = next(options, None)
            if step is not None:
                index, span = step
                trail.append((span, options))
                end = sum(span.num_numel for span, _ in trail)
                if end == flat.num_numel:
                    return [span for span, _ in trail]
                options = self._next(flat, end, index)
            elif trail:
                options = trail.pop()[1]
            else:
                return None

    def _next(self, flat: TensorSpan, at: int, last: int) -> Iterator[tuple[int, TensorSpan]]:
        """Give the tensors that a flat group may go on with."""
        order = [*range(last + 1, len(self.places)), *range(last + 1)]
        tried: set[tuple[int, ...]] = set()
        offset = flat.offset_bytes + at * flat.dtype.itemsize_bytes
        for index in order:
            entry = self.places[index].entry
            shape = entry.span.shape
            if shape in tried or entry.span.num_numel > flat.num_numel - at:
                continue
            view = dataclasses.replace(
                flat, offset_bytes=offset, shape=shape, stride=contiguous_stride(shape)
            )
            if index in self._fitting(view):
                tried.add(shape)
                yield index, view

    def _settle(self, found: Sequence[tuple[int, Master]]) -> list[tuple[int, Master]]:
        """Deal out the masters of which it does not matter which tensor gets which."""
        classes: dict[tuple[int, ...], list[tuple[int, Master]]] = collections.defaultdict(list)
        for stage, master in found:
            classes[tuple(master.places)].append((stage, master))
        unclear = []
        for places, members in classes.items():
            stage, first = members[0]
            if self._is_settled(places, [master for _, master in members]):
                self.settled |= dict.fromkeys(places, (stage, first.span))
                equal = {of: master.span for of, master in reversed(members)}
                self.equal |= dict.fromkeys(places, equal)
            elif len(places) == 1 and len({of for of, _ in members}) == len(members):
                self.settled[places[0]] = (stage, first.span)
                listed = " and ".join(str(of) for of, _ in members)
                self.notes.append(
                    f"{self.places[places[0]].name} is tied on pipeline stages {listed}, whose "
                    f"fp32 masters differ by less than the rounding; stage {stage}'s was taken"
                )
            else:
                unclear += members
        return unclear

    def _is_settled(self, places: Sequence[int], members: Sequence[Master]) -> bool:
        """Whether all masters that fit the same tensors are the same, and each tensor has one."""
        if len(places) == len(members) == 1:
            return True
        exact = {self.values.of(0, _source(m.span), m.span.dtype) for m in members}
        if len(exact) > 1:
            return False
        span, place = members[0].span, self.places[places[0]].entry
        if len(members) >= len(places) or self.values.is_telling(0, _source(span)):
            return True
        # More tensors than masters: it does not matter where the master is no more precise.
        return self.values.of(0, own_source(place.span), span.dtype) in exact

    def _settle_by_order(
        self, unclear: Sequence[tuple[int, Master]], found: Sequence[tuple[int, Master]]
    ) -> None:
        """Use the order of the param groups where it follows the layers'."""
        doubtful = {id(master) for _, master in unclear}
        groups: dict[tuple[int, int], list[Master]] = collections.defaultdict(list)
        for stage, master in found:
            lower = any(self.settled.get(place, (stage,))[0] < stage for place in master.places)
            if id(master) in doubtful or (len(master.places) == 1 and not lower):
                groups[stage, master.group].append(master)
        for group in groups.values():
            narrow(group)
        claims = collections.Counter(place for _, master in unclear for place in master.places)
        told = 0
        for stage, master in unclear:
            if len(master.places) == 1 and claims[master.places[0]] == 1:
                self.settled[master.places[0]] = (stage, master.span)
                told += 1
        if told:
            self.notes.append(
                f"{told} of {len(unclear)} fp32 masters that fit several layers' tensors alike "
                "were told apart by their order in the param group"
            )

    def _note_rest(self, unclear: Sequence[tuple[int, Master]]) -> None:
        left = {p for _, m in unclear for p in m.places} - self.settled.keys()
        if left:
            names = ", ".join(self.places[place].name for place in sorted(left))
            self.notes.append(
                "fp32 masters are stored without names, and several fit these keys alike, so "
                f"their 16-bit values were taken: {names}"
            )
        rest = [i for i in range(len(self.places)) if i not in self.settled and i not in left]
        if rest:
            self.notes.append(
                f"{counted(len(rest), 'tensor has', 'tensors have')} no fp32 master (frozen, "
                "never given to the optimizer, or a buffer of a tied layer), the first is "
                f"{self.places[rest[0]].name}; the layer files' values were taken"
            )


def _check_count(
    models: Sequence[ModelState],
    files: Sequence[TensorsState],
    values: Values,
    problems: Problems,
    notes: list[str],
) -> None:
    """Check that the layer files hold as many parameters of each shape as the optimizers step.

    Tied tensors have the same moments on every stage, and the same values in every file.
    """
    moments = [span for model in models for span in model.moments]
    if not moments:
        notes.append(
            "nothing in the model states tells how many layers there are; if a layer file were "
            "missing, it would not be noticed"
        )
        return
    needed, held = _distinct(values, moments), collections.Counter[tuple[int, ...]]()
    held = _distinct(values, [place.entry.span for place in _places(models, files)])
    for shape, count in needed.items():
        if held[shape] < count:
            problems.add(
                f"the optimizers of the pipeline stages step {count} parameters of shape "
                f"{list(shape)}, but the layer files hold {held[shape]}; a layer file "
                "(layer_*-model_states.pt) is missing. Look for it where that stage's ranks saved"
            )


def _distinct(values: Values, spans: Sequence[TensorSpan]) -> collections.Counter[tuple[int, ...]]:
    """Count tensors by shape, those of the same values once."""
    seen: set[tuple[tuple[int, ...], bytes]] = set()
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    for span, number in zip(spans, itertools.count()):
        digest = values.glance(_source(span)) if span.num_numel else b""
        key = (span.shape, number.to_bytes(8, "big") if digest is None else digest)
        if key not in seen:
            seen.add(key)
            counts[span.shape] += 1
    return counts
