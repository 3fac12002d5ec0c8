"""Expert files: which there must be, whose tensors they hold, and the model with them put in.

DeepSpeed saves each expert of a ``deepspeed.moe`` layer in a file of its own, under its number in
the whole model, while everything that one rank records by name (shapes, buffers, ties) counts only
that rank's own experts from 0. ``module`` of the model states lacks the experts.

Sources: DeepSpeed's ``engine._save_moe_checkpoint`` and ``_get_expert_ckpt_name``.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dist_consolidate.checkpoint.expert_fused import IN_SHARDS, is_fused
from dist_consolidate.checkpoint.layout import ShardFile, TagFolder, missing_numbers
from dist_consolidate.checkpoint.parallel import Grid
from dist_consolidate.checkpoint.states import (
    ModelState,
    ModuleEntry,
    OptimState,
    TensorsState,
)
from dist_consolidate.errors import CheckpointError, Problems, UnsupportedLayoutError, listed

_NAME = re.compile(r"\.?(|.*\.)deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.+)", re.DOTALL)
_FUSED = re.compile(r"\.?(|.*\.)experts\.(w[123])\.(\d+)", re.DOTALL)
# What stands beside an expert's tensors where there are tensor ranks, too.
_FOLDING = "folding"
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertName:
    """A tensor of an expert.

    Attributes:
        layer: Name of the MoE layer, with the dot that follows it.
        number: Which expert: of the whole layer, or of one rank.
        inner: Name inside the expert.
        is_fused: Whether DeepSpeed keeps it in one tensor with the other experts' (AutoEP).
    """

    layer: str
    number: int
    inner: str
    is_fused: bool = False

    def __str__(self) -> str:
        """The name as DeepSpeed writes it."""
        if self.is_fused:
            return f"{self.fused}.{self.number}"
        return f"{self.layer}deepspeed_moe.experts.deepspeed_experts.{self.number}.{self.inner}"

    @property
    def fused(self) -> str:
        """Name of the tensor of all experts."""
        return f"{self.layer}experts.{self.inner}"

    def numbered(self, number: int) -> ExpertName:
        """Give the same tensor of another expert."""
        return dataclasses.replace(self, number=number)


def parse(name: str) -> ExpertName | None:
    """Take a name apart; ``None`` if it is no expert's."""
    match = _NAME.fullmatch(name)
    if match:
        return ExpertName(match[1], int(match[2]), match[3])
    match = _FUSED.fullmatch(name)
    return ExpertName(match[1], int(match[3]), match[2], is_fused=True) if match else None


def may_be_tied(one: str, other: str) -> bool:
    """Whether two names can stand for one parameter.

    Every expert is a deep copy (source: DeepSpeed's ``moe/experts.py``), so that what it holds can
    be tied inside it only. The dense layer that it was copied from, and its sisters, may well have
    its values, as long as neither is trained.

    Args:
        one: A name.
        other: Another.

    Returns:
        False if they are of an expert and of something else.
    """
    places = [(p.layer, p.number) if p else None for p in map(parse, (one, other))]
    return places[0] == places[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """All experts of a checkpoint.

    Attributes:
        entries: Their tensors, under their numbers in the whole model.
        num_by_layer: How many experts each MoE layer has.
        odd_entries: What is no tensor among them.
    """

    entries: dict[str, ModuleEntry]
    num_by_layer: dict[str, int]
    odd_entries: dict[str, str]

    @property
    def fused(self) -> dict[str, list[str]]:
        """For each fused tensor the names of its experts, in order."""
        numbered: dict[str, dict[int, str]] = {}
        for text in self.entries:
            name = parse(text)
            if name is not None and name.is_fused:
                numbered.setdefault(name.fused, {})[name.number] = text
        return {whole: [parts[n] for n in sorted(parts)] for whole, parts in numbered.items()}


def gather(
    folder: TagFolder, model: ModelState, states: Sequence[TensorsState], problems: Problems
) -> Experts:
    """Check that every expert is there once, and put them together.

    Args:
        folder: The shards; damaged expert files are in it, but not among ``states``.
        model: The model states of rank 0.
        states: The expert files that could be read.
        problems: Takes each missing, surplus and misplaced expert, with its path.

    Returns:
        The experts; complete if no problem was noted.
    """
    _Census(folder, model, problems).check()
    contents = _Contents(folder.path, problems)
    for state in states:
        contents.add(state)
    contents.check()
    return Experts(contents.entries, contents.num_by_layer(), contents.odd)


def refuse_kinds(
    folder: TagFolder, model: ModelState, optims: Sequence[OptimState], grid: Grid
) -> None:
    """Refuse experts that are not read, by what is recorded of them.

    Args:
        folder: The shards.
        model: The model states of rank 0.
        optims: The optimizer states that could be read.
        grid: Pipeline stages and tensor-parallel ranks.

    Raises:
        CheckpointError: If the model states and the optimizer states are of different stages.
        UnsupportedLayoutError: For odd placements, ZeRO-3 without a record, and model parallelism.
    """
    facts = [model.experts, *(optim.experts for optim in optims)]
    odd = next((fact.odd_auto for fact in facts if fact.odd_auto), None)
    if odd:
        raise UnsupportedLayoutError(
            f"{folder.path}: is an AutoEP checkpoint, and {odd}; this version reads AutoEP where "
            "every rank holds the next so many experts"
        )
    striped = [optim for optim in optims if optim.striped]
    known = [optim for optim in striped if optim.experts.zero_groups is not None]
    if model.experts.shards and not striped:
        raise CheckpointError(
            f"{folder.path / model.shard.name}: ds_autoep_layers says that its experts lie in "
            "ZeRO-3 shards, but there are no optimizer states of ZeRO-3; files are of different "
            "saves, or missing"
        )
    if striped and (not model.experts.shards or len(known) < len(striped)):
        raise UnsupportedLayoutError(
            f"{folder.path}: has experts under ZeRO-3, but does not record which ranks hold which "
            "(ds_zero_partition_groups in the optimizer states, and layers of the format "
            f"{IN_SHARDS} in ds_autoep_layers of the model states), as DeepSpeed does for AutoEP; "
            "other experts (MoE) it does not support under ZeRO-3"
        )
    if grid.size > 1:
        raise UnsupportedLayoutError(
            f"{folder.path}: has experts (MoE) beside {grid.num_stages} pipeline stages and "
            f"{grid.tensor_degree} tensor-parallel ranks; this version reads experts under plain "
            "data parallelism only"
        )


def with_experts(model: ModelState, experts: Experts) -> ModelState:
    """Give the model states as if the experts had been in them.

    Args:
        model: The model states of rank 0, whose names count that rank's experts.
        experts: The experts.

    Returns:
        The states: ``module`` holds the experts, and buffers, frozen parameters and ties are named
        for every expert.
    """
    spread = _Spread(experts)
    names = model.buffer_names
    shapes, frozen = model.frozen_shapes, model.frozen
    return dataclasses.replace(
        model,
        module={**(model.module or {}), **experts.entries},
        odd_entries={**model.odd_entries, **experts.odd_entries},
        buffer_names=None if names is None else frozenset(spread.names(dict.fromkeys(names))),
        frozen_shapes=None
        if shapes is None
        else spread.mapping(shapes, {n: e.span.shape for n, e in experts.entries.items()}),
        frozen=None
        if frozen is None
        else spread.mapping(frozen, {n: e.span for n, e in experts.entries.items()}),
        shared_params=None if model.shared_params is None else spread.ties(model.shared_params),
    )


class _Census:
    """Which expert files there are, by number of the layer and of the expert."""

    def __init__(self, folder: TagFolder, model: ModelState, problems: Problems) -> None:
        self.folder, self.model, self.problems = folder, model, problems
        self.shards = folder.of("expert")

    def check(self) -> None:
        """Note what is missing, surplus or there twice."""
        found: dict[int | None, dict[int, ShardFile]] = {}
        for shard in self.shards:
            other = found.setdefault(shard.layer, {}).setdefault(shard.expert or 0, shard)
            if other is not shard:
                self.problems.add(
                    f"{self.folder.path / shard.name}: is the same expert as {other.name}; keep one"
                )
        counts = self._counts(found)
        for layer, count in counts.items():
            for number in missing_numbers(count, found.get(layer, {})):
                path = self.folder.path / self._name(layer, number)
                self.problems.add(f"{path}: is missing (expert {number} of {count}{_of(layer)})")
        for layer, shards in found.items():
            for number, shard in sorted(shards.items()):
                if number >= counts.get(layer, 0):
                    self.problems.add(
                        f"{self.folder.path / shard.name}: is surplus: the model has "
                        f"{counts.get(layer, 0)} experts{_of(layer)}; move away what is left over"
                    )

    def _counts(self, found: Mapping[int | None, Mapping[int, ShardFile]]) -> dict[int | None, int]:
        """Tell how many experts each layer has: as recorded, else by the highest number."""
        recorded = self.model.experts.num_experts
        if recorded is None:
            layers = [layer for layer in found if layer is not None]
            every: list[int | None] = [*range(max(layers, default=-1) + 1)]
            every += [None] if None in found else []
            return {layer: max(found.get(layer, {0: None}), default=0) + 1 for layer in every}
        if None in found:  # before 0.6 a file holds the experts of one number of all layers
            return {None: max(recorded)}
        return dict(enumerate(recorded))

    def _name(self, layer: int | None, number: int) -> str:
        rank = self.model.shard.mp_rank
        head = "" if layer is None else f"layer_{layer}_"
        return f"{head}expert_{number}_mp_rank_{rank:02d}_model_states.pt"


def _of(layer: int | None) -> str:
    return "" if layer is None else f" of MoE layer {layer}"


class _Contents:
    """What the expert files hold; every expert of a layer must hold the same."""

    def __init__(self, path: Path, problems: Problems) -> None:
        self.path, self.problems = path, problems
        self.entries: dict[str, ModuleEntry] = {}
        self.odd: dict[str, str] = {}
        # By layer and expert: the names inside the expert, and which file they came from.
        self.inner: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
        self.files: dict[tuple[str, int], str] = {}
        self.layers: dict[str, collections.Counter[int]] = {}

    def add(self, state: TensorsState) -> None:
        """Take a file in."""
        own = state.shard.expert
        path = self.path / state.shard.name
        if not state.entries and not state.odd_entries:
            self.problems.add(f"{path}: holds nothing, expected the tensors of expert {own}")
        for text in (*state.entries, *state.odd_entries):
            if text == _FOLDING and text in state.odd_entries:
                continue
            name = parse(text)
            if name is None or name.number != own:
                whose = "no expert" if name is None else f"expert {name.number}"
                self.problems.add(
                    f"{path}: holds {text!r}, which is of {whose}, not of expert {own}; the file "
                    "was renamed or is of something else"
                )
                return
            entry = state.entries.get(text)
            if entry is None:
                self.odd[str(name)] = state.odd_entries[text]
                continue
            self.entries[str(name)] = entry
            experts = self.inner.setdefault(name.layer, {})
            experts.setdefault(name.number, {})[name.inner] = entry.span.shape
            self.files[name.layer, name.number] = state.shard.name
            if state.shard.layer is not None:
                self.layers.setdefault(name.layer, collections.Counter())[state.shard.layer] += 1

    def check(self) -> None:
        """Note experts of a layer that differ or lack, and files of another layer."""
        self._check_numbers()
        for layer, experts in self.inner.items():
            numbers = self.layers.get(layer)
            if numbers and len(numbers) > 1:
                found = " and ".join(f"layer_{number}_*" for number in sorted(numbers))
                self.problems.add(
                    f"{self.path}: the experts of {layer.rstrip('.')!r} lie in files {found}, "
                    "expected one number for all of them; files were renamed"
                )
            usual = collections.Counter(tuple(sorted(e.items())) for e in experts.values())
            ((most, _),) = usual.most_common(1)
            for number, inner in experts.items():
                odd = set(most) ^ set(inner.items())
                if odd:
                    self.problems.add(
                        f"{self.path / self.files[layer, number]}: expert {number} has other "
                        f"tensors than the other experts of {layer.rstrip('.')!r}: {min(odd)[0]!r} "
                        "is missing, surplus or of another shape"
                    )

    def _check_numbers(self) -> None:
        """A number in file names stands for one layer, which has its experts without a gap."""
        names: dict[int, list[str]] = {}
        for layer, numbers in self.layers.items():
            for number in numbers:
                names.setdefault(number, []).append(layer.rstrip("."))
        for number, layers in names.items():
            if len(layers) > 1:
                whose = "; ".join(
                    f"of {layer!r} are {listed(self._files_of(layer, number))}" for layer in layers
                )
                self.problems.add(
                    f"{self.path}: the files layer_{number}_* hold experts of {len(layers)} "
                    f"layers, {', '.join(map(repr, layers))}; some are of something else ({whose})"
                )
        for layer, experts in self.inner.items():
            gaps = missing_numbers(max(experts) + 1, experts)
            if gaps:
                self.problems.add(
                    f"{self.path}: experts {', '.join(map(str, gaps))} of {layer.rstrip('.')!r} "
                    "are in no file that could be read"
                )

    def _files_of(self, layer: str, number: int) -> list[str]:
        """Name the files of one number in their names that hold experts of a layer."""
        files = [file for (held, _), file in self.files.items() if held.rstrip(".") == layer]
        return [file for file in files if file.startswith(f"layer_{number}_")]

    def num_by_layer(self) -> dict[str, int]:
        return {layer: max(experts) + 1 for layer, experts in self.inner.items()}


class _Spread:
    """Turns names that count one rank's experts into names of every expert.

    What holds for one expert's tensor (a buffer, frozen, tied inside the expert) holds for the
    tensor of that name in every expert of the layer.
    """

    def __init__(self, experts: Experts) -> None:
        self.experts = experts

    def names(self, names: Mapping[str, object]) -> list[str]:
        """Spread names; those of no expert stay as they are."""
        spread: dict[str, None] = {}
        for text in names:
            name = parse(f"{text}.0" if is_fused(text) else text)
            for number in range(self.experts.num_by_layer.get(name.layer, 0)) if name else ():
                assert name is not None
                spread[str(name.numbered(number))] = None
            if name is None:
                spread[text] = None
        return [n for n in spread if parse(n) is None or n in self.experts.entries]

    def mapping(self, values: Mapping[str, _T], of_experts: Mapping[str, _T]) -> dict[str, _T]:
        """Spread the names of a mapping; the values of experts are those of their files."""
        return {n: of_experts[n] if n in of_experts else values[n] for n in self.names(values)}

    def ties(self, ties: Mapping[str, str]) -> dict[str, str]:
        """Spread ties inside an expert; others are true for what rank 0 holds, and stay."""
        spread = {}
        for alias, source in ties.items():
            one, other = parse(alias), parse(source)
            if one is None or other is None or (one.layer, one.number) != (
                other.layer, other.number
            ):  # fmt: skip
                spread[alias] = source
                continue
            for number in range(self.experts.num_by_layer.get(one.layer, 0)):
                spread[str(one.numbered(number))] = str(other.numbered(number))
        return spread
