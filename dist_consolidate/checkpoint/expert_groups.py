"""Experts under stages 1 and 2: one flat group per param group and expert-parallel rank.

Each rank of an expert-parallel group holds other experts; the ranks that hold the same ones share
out their flat buffer. Which ranks those are depends on one setting, and a mistake would mix
experts: the order is taken from the configuration, and what it gives is held against the values in
the expert files, at both ends of every tensor.

Sources: DeepSpeed's ``utils/groups.py`` (``_create_expert_and_data_parallel``) and
``stage_1_and_2.py`` (``_configure_moe_settings``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from dist_consolidate.checkpoint import expert_cuts, expert_fused, expert_shapes
from dist_consolidate.checkpoint.expert_choice import ORDERS, Choice
from dist_consolidate.checkpoint.expert_order import in_one_order
from dist_consolidate.checkpoint.expert_values import END_NUMEL, Comparison, Layout
from dist_consolidate.checkpoint.experts import ExpertName, Experts, parse
from dist_consolidate.checkpoint.model import FlatGroup, FlatSlot, Source
from dist_consolidate.checkpoint.states import ModelState, OptimState, Shapes
from dist_consolidate.checkpoint.value_cuts import Partial
from dist_consolidate.checkpoint.zero12 import check_size, flat_group, holder_of_shapes, slots
from dist_consolidate.errors import Problems
from dist_consolidate.units import counted


def build(
    folder: Path | Sequence[Path],
    model: ModelState,
    optims: Sequence[OptimState],
    experts: Experts,
    problems: Problems,
    notes: list[str],
    *,
    trust_masters: bool = False,
) -> Layout:
    """Lay out the flat groups of a model with experts.

    Args:
        folder: The tag folder; a little of every expert is read from it to compare.
        model: The model states of rank 0, with the experts put in.
        optims: The optimizer states of every rank, in rank order.
        experts: The experts.
        problems: Takes what contradicts the layout.
        notes: Takes what was compared, and what was not recorded.
        trust_masters: Take masters of other values than the expert files and ``module`` have,
            where the layout is recorded.

    Returns:
        The layout; an empty one if a problem was noted.
    """
    nothing = Layout(data_first=False, groups=(), sources={})
    model, optims = _with_single_experts(model, in_one_order(optims, problems))
    kinds = _kinds(model, optims, problems)
    if problems:
        return nothing
    orders = [False, True] if any(1 < size < len(optims) for size in kinds) else [False]
    layouts, failures, num_found = [], {}, {}
    for order in orders:
        found = Problems()
        builder = _Builder(folder, model, optims, experts, kinds, order, found)
        layout = builder.layout()
        if found:
            failures[order] = found
        else:
            layouts.append(layout)
            num_found[order] = builder.num_found
    recorded = optims[0].experts.data_first
    if not layouts or recorded in failures:
        problems.extend(failures[recorded if recorded in failures else orders[0]])
        if layouts and recorded is not None:
            problems.add(
                f"the sizes of the parts do not fit if {ORDERS[recorded]}, as the configuration "
                f"says; they fit if {ORDERS[not recorded]}"
            )
        return nothing
    with Comparison(folder, model) as comparison:
        choice = Choice(model, layouts, optims[0], comparison, problems)
        chosen = choice.layout(trust_masters=trust_masters)
        if chosen is None:
            return nothing
        notes += choice.notes
        if not choice.notes:
            _note_compared(chosen, kinds, len(optims), choice.unseen, notes)
        if num_found[chosen.data_first]:
            notes.append(
                "param_slice_mappings of this release names a part of the experts only; "
                f"{counted(num_found[chosen.data_first], 'tensor', 'tensors')} of the others were "
                "found in the fp32 partitions by value, and fit in one way only"
            )
        _note_rest(chosen, experts, notes)
        alike = comparison.alike(chosen)
    note_alike(alike, notes)
    return dataclasses.replace(chosen, alike=alike)


def _with_single_experts(
    model: ModelState, optims: Sequence[OptimState]
) -> tuple[ModelState, Sequence[OptimState]]:
    """Take AutoEP's fused tensors apart, in the shapes and in the paddings."""
    shapes = model.param_shapes
    if not any(expert_fused.is_fused(name) for group in shapes or () for name in group):
        return model, optims
    apart, gaps = expert_fused.single(shapes, optims[0].alignment_paddings)
    first = dataclasses.replace(optims[0], alignment_paddings=gaps)
    return dataclasses.replace(model, param_shapes=apart), [first, *optims[1:]]


def members(rank: int, size: int, world: int, data_first: bool) -> range:
    """Give the data-parallel ranks that hold the same experts, in the order of their parts.

    Args:
        rank: The expert-parallel rank.
        size: Expert-parallel ranks.
        world: Data-parallel ranks.
        data_first: Whether neighbouring ranks hold the same experts.

    Returns:
        The ranks.
    """
    each = world // size
    return range(rank * each, (rank + 1) * each) if data_first else range(rank, world, size)


def _kinds(model: ModelState, optims: Sequence[OptimState], problems: Problems) -> list[int]:
    """Tell the expert-parallel size of each param group, 0 for one of no experts.

    The number of ranks that share a group says it, which is recorded in any case; names and marks
    of the groups must agree.
    """
    world, first = len(optims), optims[0]
    path = first.shard.name
    names = expert_shapes.names_by_group(model, optims, problems)
    if len(first.partition_counts) != len(first.parts):
        problems.add(
            f"{path}: holds {len(first.parts)} flat groups, but partition_count has "
            f"{len(first.partition_counts)} entries"
        )
    sizes = first.experts.sizes
    sizes = sizes if sizes is not None and len(sizes) == len(first.parts) else None
    kinds = []
    for index, (group, count) in enumerate(zip(names, first.partition_counts, strict=False)):
        of_experts = {parse(name) is not None for name in group}
        is_expert = of_experts == {True}
        said = sizes[index] if sizes is not None else None
        if len(of_experts) > 1 or (group and sizes is not None and (said != 0) != is_expert):
            problems.add(
                f"{path}: param group {index} has experts and other parameters, or is marked "
                "otherwise than its names say"
            )
        elif count < 1 or world % count or (not is_expert and count != world and group):
            problems.add(
                f"{path}: param group {index} is shared out over {count} of {world} ranks, which "
                "is no whole number of expert-parallel ranks"
            )
        elif is_expert and said and said > 1 and count == world:
            problems.add(
                f"{path}: param group {index} is named ep_size_{said}, but all {world} ranks share "
                "it, as if they held the same experts. BF16_Optimizer of releases before 0.14.1 "
                "trains experts so, which mixes those of different ranks; this version does not "
                "read such files"
            )
        elif is_expert and said and said * count != world:
            problems.add(
                f"{path}: param group {index} is named ep_size_{said}, but {count} of {world} "
                "ranks share it"
            )
        kinds.append(world // count if is_expert and count else 0)
    return kinds


class _Builder:
    """Puts the flat groups together for one order of the ranks."""

    def __init__(
        self,
        folder: Path | Sequence[Path],
        model: ModelState,
        optims: Sequence[OptimState],
        experts: Experts,
        kinds: Sequence[int],
        data_first: bool,
        problems: Problems,
    ) -> None:
        self.folder, self.num_found = folder, 0
        self.model, self.optims, self.experts = model, optims, experts
        self.kinds, self.data_first, self.problems = kinds, data_first, problems
        self.groups: list[FlatGroup] = []
        self.sources: dict[str, Source] = {}

    def layout(self) -> Layout:
        """Lay out every group."""
        world = len(self.optims)
        first = [
            list(members(0, size, world, self.data_first)) if size else list(range(world))
            for size in self.kinds
        ]
        shapes = expert_shapes.shapes_by_group(
            self.model, [[self.optims[r] for r in ranks] for ranks in first], self.problems
        )
        shapes = self._completed(shapes)
        if self.problems:
            return Layout(self.data_first, (), {})
        for index, (group, size) in enumerate(zip(shapes, self.kinds, strict=False)):
            if not size:
                self._add(index, f"param group {index}", group, range(world))
            for rank in range(size):
                label = f"param group {index}, expert-parallel rank {rank} of {size}"
                ranks = members(rank, size, world, self.data_first)
                self._add(index, label, self._renamed(group, rank, size), ranks)
        return Layout(self.data_first, tuple(self.groups), self.sources)

    def _completed(self, shapes: list[Shapes]) -> list[Shapes]:
        """Find what is not recorded of the groups of experts (releases before 0.14.5)."""
        first, world = self.optims[0], len(self.optims)
        if expert_shapes.has_shapes(self.model, first):
            return shapes
        groups: dict[int, Partial] = {}
        for index, (group, size) in enumerate(zip(shapes, self.kinds, strict=False)):
            if size < 2:
                continue
            flats = []
            for rank in range(size):
                parts = [
                    self.optims[r].parts[index] for r in members(rank, size, world, self.data_first)
                ]
                label = f"param group {index}, expert-parallel rank {rank} of {size}"
                flats.append(flat_group(label, parts, striped=False, problems=self.problems))
            # The slices show no round robin, and what was dealt out is not known yet.
            is_dealt = first.experts.round_robin and size < world
            prefix = {} if is_dealt else dict(group)
            part = Partial(
                f"param group {index}", prefix, frozenset(group) - set(prefix), tuple(flats)
            )
            if sum(map(math.prod, group.values())) < part.num_numel:
                groups[index] = part
        if not groups or self.problems:
            return shapes
        kinds = zip(shapes, self.kinds, strict=False)
        known = {n: (index, size) for index, (group, size) in enumerate(kinds) for n in group}
        found = expert_cuts.complete(
            self.folder, self.model, self.experts, groups, known, self.problems
        )
        self.num_found = sum(
            (len(group) - len(shapes[index])) * self.kinds[index] for index, group in found.items()
        )
        return [found.get(index, group) for index, group in enumerate(shapes)]

    def _add(self, index: int, label: str, shapes: Shapes, ranks: Sequence[int]) -> None:
        paddings = self.optims[0].alignment_paddings
        padding = paddings[index] if paddings and index < len(paddings) else ()
        places, end_numel = slots(len(self.groups), shapes, padding)
        parts = [self.optims[rank].parts[index] for rank in ranks]
        group = flat_group(label, parts, striped=False, problems=self.problems)
        recorded_in = holder_of_shapes(self.model, self.optims[0])
        check_size(group, end_numel, recorded_in, self.problems)
        for name, slot in places.items():
            self._check(label, name, slot)
            self.sources[name] = Source("fp32 partition", shapes[name], group.dtype, slot)
        self.groups.append(group)

    def _check(self, label: str, name: str, slot: FlatSlot) -> None:
        if name in self.sources:
            self.problems.add(f"{label}: {name!r} has an fp32 partition elsewhere already")
        entry = (self.model.module or {}).get(name)
        if entry is not None and not entry.span.is_contiguous:
            self.problems.add(
                f"{label}: {name!r} lies transposed in {entry.span.file} (stride "
                f"{list(entry.ref.stride)}), and so at element {slot.offset_numel} of the flat "
                "buffer; ZenFlow (0.17.5 to 0.19.6) writes such files, which this version does "
                "not read with experts"
            )

    def _renamed(self, shapes: Shapes, rank: int, size: int) -> Shapes:
        """Number the experts of one rank as the whole model does."""
        renamed = {}
        for text, shape in shapes.items():
            name = parse(text)
            assert name is not None
            renamed[str(self._in_model(name, rank, size))] = shape
        return renamed

    def _in_model(self, name: ExpertName, rank: int, size: int) -> ExpertName:
        total = self.experts.num_by_layer.get(name.layer, 0)
        each = total // size
        if not total or total % size or name.number >= each:
            self.problems.add(
                f"{self.model.shard.name}: names {str(name)!r} on one of {size} expert-parallel "
                f"ranks, but there are files of {total} experts of that layer"
            )
            return name
        return name.numbered(rank * each + name.number)


def _note_compared(
    chosen: Layout, kinds: Sequence[int], world: int, unseen: Sequence[str], notes: list[str]
) -> None:
    held = sum(parse(name) is not None for name in chosen.sources)
    sizes = sorted({size for size in kinds if size})
    if not sizes:
        return
    order = f"; {ORDERS[chosen.data_first]}" if any(1 < s < world for s in sizes) else ""
    text = (
        f"{counted(held, 'tensor of experts comes', 'tensors of experts come')} "
        "from fp32 partitions (expert-parallel size "
        f"{', '.join(map(str, sizes))} of {world} ranks{order}); the first and last {END_NUMEL} "
        "elements of each were found to be those of its expert file"
    )
    if unseen:
        text += f", except {len(unseen)} whose shards rank 0 does not see"
    notes.append(text)


def note_alike(alike: Mapping[str, str], notes: list[str]) -> None:
    """Say which tensors were taken to be others by their values.

    Args:
        alike: The name with the master, by the name without one.
        notes: Takes it.
    """
    for name, holder in alike.items():
        notes.append(
            f"{name} was taken to be {holder}, though no tie is recorded and it was saved as a "
            f"copy: it has no fp32 master, and every element of it is that of {holder}, rounded"
        )


def _note_rest(chosen: Layout, experts: Experts, notes: list[str]) -> None:
    rest = [
        name
        for name, entry in experts.entries.items()
        if name not in chosen.sources and entry.span.num_numel
    ]
    if rest:
        notes.append(
            f"{counted(len(rest), 'tensor of experts has', 'tensors of experts have')} "
            "no fp32 partition (frozen, buffers, tied, or "
            f"never given to the optimizer); unless tied, they come from the expert files as they "
            f"are there, the first is {rest[0]}"
        )
