"""Stage 0 with experts: each expert-parallel rank keeps the fp32 masters of its own experts.

Without ZeRO the optimizer of expert-parallel rank ``E`` is saved in ``expp_rank_E_*``: masters of
everything dense and of that rank's experts, without names. They are matched by value, as without
experts (see :mod:`.stage0`), each file against the experts that its rank can have held. Under ZeRO
these files hold nothing, and nobody looks for them.

Source: DeepSpeed's ``engine._save_moe_checkpoint``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from dist_consolidate.checkpoint import expert_flat, stage0
from dist_consolidate.checkpoint.expert_fused import apart
from dist_consolidate.checkpoint.expert_groups import note_alike
from dist_consolidate.checkpoint.expert_states import group_sizes
from dist_consolidate.checkpoint.experts import Experts, parse
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.layout import ShardFile, TagFolder, missing_numbers
from dist_consolidate.checkpoint.model import Source
from dist_consolidate.checkpoint.model_states import fp32_masters
from dist_consolidate.checkpoint.pickled import as_mapping, open_shard, state_of
from dist_consolidate.checkpoint.states import ModelState
from dist_consolidate.errors import Problems
from dist_consolidate.units import counted


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertOptimState:
    """The optimizer states of one expert-parallel rank, without ZeRO.

    Attributes:
        shard: The file.
        masters: Its fp32 masters, group by group; ``None`` if there are none.
        is_flat: Whether each of these groups is one flat tensor.
        sizes: See :class:`.expert_states.ExpertFacts`.
    """

    shard: ShardFile
    masters: tuple[tuple[TensorSpan, ...], ...] | None
    is_flat: bool
    sizes: tuple[int | None, ...] | None


def read_expert_optim(folder: Path, shard: ShardFile) -> ExpertOptimState:
    """Read the metadata of one expert-parallel rank's optimizer.

    Args:
        folder: The tag folder.
        shard: The file.

    Returns:
        Its typed view; no weight has been read.

    Raises:
        CheckpointError: If the file is damaged or holds something else.
    """
    archive = open_shard(folder, shard)
    optimizer = as_mapping(state_of(archive).get("optimizer")) or {}
    masters, is_flat = fp32_masters(archive, optimizer)
    sizes = group_sizes(optimizer.get("optimizer_state_dict", optimizer))
    return ExpertOptimState(shard, masters or None, is_flat, sizes)


def masters(
    folder: TagFolder,
    model: ModelState,
    experts: Experts,
    states: Mapping[int, ExpertOptimState],
    problems: Problems,
    notes: list[str],
    copies: dict[str, str],
) -> dict[str, Source]:
    """Find the tensor of every fp32 master.

    Args:
        folder: The tag folder; weights are read from it to compare.
        model: The model states, with the experts put in.
        experts: The experts.
        states: The optimizer states by expert-parallel rank.
        problems: Takes missing files, and masters that fit no tensor.
        notes: Takes the tensors whose master cannot be told.
        copies: Takes tensors that are others' second names, by their values, with the others'.

    Returns:
        Sources by name; empty where the saved weights are the most precise copy.
    """
    entries = (model.module or {}).values()
    is_wide = not any(e.span.dtype.name in ("float16", "bfloat16") for e in entries)
    sizes = {s for state in states.values() for s in state.sizes or () if s}
    _check_files(folder, model, states, max(sizes, default=1), is_wide, problems)
    found: dict[str, Source] = {}
    for rank, state in sorted(states.items()):
        if state.masters is None:
            continue
        part = _part(model, experts, state, rank, sizes, is_first=not found)
        if state.is_flat:
            part = _cut(folder, part, state, problems, notes)
        told: dict[str, str] = {}
        for name, source in stage0.masters(folder.folders, part, problems, notes, told).items():
            found.setdefault(name, source)
        copies |= told
    note_alike(copies, notes)
    if found:
        _note_rest(experts, found.keys() | copies, notes)
    return found


def _check_files(
    folder: TagFolder,
    model: ModelState,
    states: Mapping[int, ExpertOptimState],
    size: int,
    is_wide: bool,
    problems: Problems,
) -> None:
    """16-bit training needs the optimizer of every expert-parallel rank."""
    if is_wide or (states and all(state.masters is None for state in states.values())):
        return
    present = {shard.dp_rank for shard in folder.of("expert-optim")}
    for rank in missing_numbers(size, states):
        name = f"expp_rank_{rank}_mp_rank_{model.shard.mp_rank:02d}_optim_states.pt"
        if rank not in present:
            problems.add(
                f"{folder.path / name}: is missing (expert-parallel rank {rank} of {size}); it "
                "holds the fp32 masters of that rank's experts"
            )


def _part(
    model: ModelState,
    experts: Experts,
    state: ExpertOptimState,
    rank: int,
    sizes: Collection[int],
    *,
    is_first: bool,
) -> ModelState:
    """Give the model states as one rank had them: the first with all that is dense."""
    held = _held(model, experts, rank, sizes)
    module = model.module or {}
    names = [n for n in module if n in held or (is_first and n not in experts.entries)]
    kinds = state.sizes or ()
    groups = state.masters or ()
    marked = len(kinds) == len(groups)
    if experts.fused and marked and not state.is_flat:
        groups = tuple(
            tuple(one for span in group for one in apart(span)) if kind != 0 else group
            for group, kind in zip(groups, kinds, strict=True)
        )
    return dataclasses.replace(
        model,
        module={name: module[name] for name in names},
        optimizer=tuple(
            group
            for index, group in enumerate(groups)
            if is_first or not marked or kinds[index] != 0
        ),
        flat_masters=False,
    )


def _cut(
    folder: TagFolder,
    part: ModelState,
    state: ExpertOptimState,
    problems: Problems,
    notes: list[str],
) -> ModelState:
    """Cut flat masters into shaped ones; where they cannot be, no masters are left."""
    names, entries = stage0.trainable(part)
    flat = [span for group in part.optimizer or () for span in group]
    known = dict(zip(names, entries, strict=True))
    cut = expert_flat.cut(folder.folders, flat, known, problems)
    notes.append(
        f"{state.shard.name}: {counted(len(cut), 'flat fp32 master', 'flat fp32 masters')} of a "
        f"fused optimizer, whose order is recorded nowhere, hold {sum(map(len, cut))} tensors; "
        "where each begins was found by value"
    )
    return dataclasses.replace(part, optimizer=tuple(cut))


def _held(model: ModelState, experts: Experts, rank: int, sizes: Collection[int]) -> set[str]:
    """Name what a rank of the largest expert-parallel group may have held.

    Nothing tells which layer has which expert-parallel size; every size of the model counts.
    """
    recorded, most = model.experts.data_first, max(sizes, default=1)
    orders: Sequence[bool] = [False, True] if recorded is None else [recorded]
    held = set()
    for text in experts.entries:
        name = parse(text)
        assert name is not None
        total = experts.num_by_layer[name.layer]
        for size in sizes or (1,):
            each = max(total // size, 1)
            ranks = {rank * size // most if data_first else rank % size for data_first in orders}
            if name.number // each in ranks:
                held.add(text)
    return held


def _note_rest(experts: Experts, found: Collection[str], notes: list[str]) -> None:
    rest = [
        name
        for name, entry in experts.entries.items()
        if name not in found and entry.span.dtype.is_floating and entry.span.num_numel
    ]
    if rest:
        notes.append(
            f"{counted(len(rest), 'tensor of experts has', 'tensors of experts have')} "
            "no fp32 master that is surely theirs (frozen, "
            f"buffers, or alike); their expert files' values were taken, the first is {rest[0]}"
        )
