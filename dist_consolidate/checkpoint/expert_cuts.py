"""Flat groups of experts whose parameters are recorded in part only: the rest is found by value.

Releases 0.7.4 to 0.14.4 compute ``param_slice_mappings`` of experts as if all ranks shared them:
only the first of as many parts as there are expert-parallel ranks is named. Behind it the fp32
masters lie one behind the other, without names. They are held, rounded, against the expert files
of every expert-parallel rank at once, which fixes what lies where. What comes out is taken only if
every other cut would give each tensor the same bits.

Source: DeepSpeed 0.12.6's ``stage_1_and_2.py`` (``_link_all_hp_params``).
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dist_consolidate.checkpoint.cut_graph import CutGraph, choose
from dist_consolidate.checkpoint.expert_values import ends, is_telling
from dist_consolidate.checkpoint.experts import Experts, parse
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.layout import is_seen
from dist_consolidate.checkpoint.model import FlatGroup, FlatSlot, Source, own_source
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState, ModuleEntry, Shapes
from dist_consolidate.dtypes import DType
from dist_consolidate.errors import Problems, listed

# As in stages 1 and 2 without experts: what is more is no padding.
_MAX_PADDING_PER_RANK_NUMEL = 4
# Digests of a tensor's ends.
_Look = tuple[bytes, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """A param group of experts, of which not all parameters are known.

    Attributes:
        label: What to call it in a message.
        prefix: The parameters that it is known to begin with, in order.
        named: Parameters that are known to be in it, anywhere behind the prefix.
        flats: The flat group of each expert-parallel rank.
    """

    label: str
    prefix: Shapes
    named: frozenset[str]
    flats: tuple[FlatGroup, ...]

    @property
    def num_numel(self) -> int:
        """Elements that each rank's flat group holds, padding included."""
        return min(
            sum(part.num_bytes for part in flat.parts) // flat.dtype.itemsize_bytes
            for flat in self.flats
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """A parameter that may lie there, as one rank names it, and its copy for each rank."""

    name: str
    home: int | None
    copies: tuple[ModuleEntry, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """Parameters that nothing tells apart: of one shape, and of the same values on every rank."""

    members: tuple[_Tensor, ...]

    @property
    def first(self) -> _Tensor:
        """One of them."""
        return self.members[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Their shape."""
        return self.first.copies[0].span.shape

    @property
    def dtype(self) -> DType:
        """Element type of the copies."""
        return self.first.copies[0].span.dtype


def complete(
    folder: Path | Sequence[Path],
    model: ModelState,
    experts: Experts,
    groups: Mapping[int, Partial],
    known: Mapping[str, tuple[int, int]],
    problems: Problems,
) -> dict[int, Shapes]:
    """Find the parameters of param groups that are recorded in part.

    Args:
        folder: The tag folder; the ends of tensors are read from it to compare.
        model: The model states of rank 0, with the experts put in.
        experts: The experts.
        groups: What is known of each, by the index of the param group.
        known: Of every parameter that is recorded its param group, and how many expert-parallel
            ranks that has.
        problems: Takes groups that cannot be cut, and tensors whose place is not certain.

    Returns:
        All parameters of each group, in flat order, as a rank names them.
    """
    files = {part.file for g in groups.values() for flat in g.flats for part in flat.parts}
    files |= {entry.span.file for entry in experts.entries.values()}
    unseen = sorted(file for file in files if not is_seen(folder, file))
    if unseen:
        problems.add(
            "param_slice_mappings names a part of the experts only, so that values must tell the "
            f"rest, but rank 0 does not see {listed(unseen)}; run it where all shards are seen"
        )
        return {}
    flats = tuple(flat for group in groups.values() for flat in group.flats)
    prints = Fingerprints(folder, flats)
    try:
        found: dict[int, Shapes] = {}
        for size in sorted({len(group.flats) for group in groups.values()}):
            mine = {index: group for index, group in groups.items() if len(group.flats) == size}
            tensors = list(_tensors(model, experts, size, known, mine))
            found |= _Cuts(prints, flats, mine, tensors, problems).shapes()
        return found
    finally:
        prints.close()


def _tensors(
    model: ModelState,
    experts: Experts,
    size: int,
    known: Mapping[str, tuple[int, int]],
    groups: Mapping[int, Partial],
) -> Iterator[_Tensor]:
    """Give the tensors of experts that may be parameters of these groups."""
    layers = {p.layer: of for text, (_, of) in known.items() if (p := parse(text)) is not None}
    for text in experts.entries:
        name = parse(text)
        assert name is not None
        each, rest = divmod(experts.num_by_layer[name.layer], size)
        # A layer is shared out in one way only.
        if rest or name.number >= each or layers.get(name.layer, size) != size:
            continue
        home = known[text][0] if text in known else None
        if home is not None and (home not in groups or text not in groups[home].named):
            continue
        numbers = (rank * each + name.number for rank in range(size))
        copies = [experts.entries.get(str(name.numbered(number))) for number in numbers]
        whole = [copy for copy in copies if copy is not None]
        spans = [copy.span for copy in whole]
        if len(whole) == size and all(_may_be_master(span) for span in spans):
            yield _Tensor(text, home, tuple(whole))


def _may_be_master(span: TensorSpan) -> bool:
    return span.num_numel > 0 and span.dtype.is_floating and span.is_contiguous


def _one_of_each(kind: _Kind) -> list[_Tensor]:
    """Put a kind's tensors in order: the first name of every expert before any second one."""
    seen: collections.Counter[object] = collections.Counter()
    turns = []
    for tensor in kind.members:
        name = parse(tensor.name)
        place = (name.layer, name.number) if name is not None else None
        turns.append(seen[place])
        seen[place] += 1
    return [kind.members[i] for i in sorted(range(len(turns)), key=turns.__getitem__)]


class _Cuts:
    def __init__(
        self,
        prints: Fingerprints,
        flats: Sequence[FlatGroup],
        groups: Mapping[int, Partial],
        tensors: Sequence[_Tensor],
        problems: Problems,
    ) -> None:
        self.prints, self.groups, self.problems = prints, groups, problems
        self.index_of = {id(flat): index for index, flat in enumerate(flats)}
        self.looks_of: dict[str, list[_Look]] = {}
        self.kinds = [_Kind(tuple(members)) for members in self._alike(tensors)]
        # By shape and element type, and then by what the first rank's copy looks like.
        self.by_look: dict[tuple[tuple[int, ...], DType], dict[_Look, list[int]]] = {}
        for number, kind in enumerate(self.kinds):
            looks = self.by_look.setdefault((kind.shape, kind.dtype), {})
            looks.setdefault(self.looks_of[kind.first.name][0], []).append(number)

    def shapes(self) -> dict[int, Shapes]:
        """Cut every group."""
        graphs: dict[int, CutGraph] = {}
        for index, group in self.groups.items():
            graph = self._graph(index, group)
            if graph is not None:
                graphs[index] = graph
        if len(graphs) < len(self.groups):
            return {}
        doubtful = self._doubtful(graphs)
        if doubtful:
            self.problems.add(
                f"{', '.join(g.label for g in self.groups.values())}: param_slice_mappings names a "
                f"part of the experts only, and the values do not tell where the fp32 masters of "
                f"{listed(doubtful)} lie: several places fit alike, and hold different masters"
            )
            return {}
        capacity = {number: len(kind.members) for number, kind in enumerate(self.kinds)}
        chosen = choose(list(graphs.values()), capacity)
        if chosen is None:
            self.problems.add(
                f"{', '.join(g.label for g in self.groups.values())}: cannot be cut into tensors "
                "of the expert files without using one of them twice; files are of other saves"
            )
            return {}
        free = [_one_of_each(kind) for kind in self.kinds]
        return {
            index: self._named(index, [free[kind].pop(0) for kind in kinds])
            for index, kinds in zip(graphs, chosen, strict=True)
        }

    def _named(self, index: int, tensors: Sequence[_Tensor]) -> Shapes:
        group = self.groups[index]
        lacking = group.named - {tensor.name for tensor in tensors}
        if lacking:
            self.problems.add(
                f"{group.label}: param_slice_mappings names {listed(sorted(lacking))}, whose "
                "values are not in the fp32 partitions; files are of other saves"
            )
        return group.prefix | {t.name: t.copies[0].span.shape for t in tensors}

    def _graph(self, index: int, group: Partial) -> CutGraph | None:
        start = sum(math.prod(shape) for shape in group.prefix.values())
        try:
            graph = CutGraph(
                start,
                lambda at: self._fitting(index, group, at),
                lambda at: self._is_padding(group, at),
            )
        except ValueError:
            graph = None
        if graph:
            return graph
        several = "in too many ways" if graph is None else "nor is it padding"
        self.problems.add(
            f"{group.label}: param_slice_mappings names {start} of {group.num_numel} elements, and "
            f"the rest cannot be cut into tensors of the expert files by value ({several}); "
            "an expert file is of another save, or the weights were changed after the last step"
        )
        return None

    def _is_padding(self, group: Partial, at: int) -> bool:
        rest = group.num_numel - at
        if rest > _MAX_PADDING_PER_RANK_NUMEL * len(group.flats[0].parts):
            return False
        for flat in group.flats:
            numel = sum(part.num_bytes for part in flat.parts) // flat.dtype.itemsize_bytes - at
            zeros = hashlib.sha256(bytes(numel * flat.dtype.itemsize_bytes)).digest()
            if numel and self.prints.of(self._slot(flat, at, (numel,)), flat.dtype) != zeros:
                return False
        return True

    def _fitting(self, index: int, group: Partial, at: int) -> dict[int, int]:
        """Give the kinds whose values lie at an offset, on every rank."""
        found: dict[int, int] = {}
        for (shape, dtype), looks in self.by_look.items():
            numel = math.prod(shape)
            if at + numel > group.num_numel:
                continue
            first = self._look(self._slot(group.flats[0], at, shape), dtype)
            able = [n for n in looks.get(first, ()) if self.kinds[n].first.home in (None, index)]
            for rank, flat in enumerate(group.flats[1:], 1):
                seen = self._look(self._slot(flat, at, shape), dtype) if able else ()
                able = [n for n in able if self.looks_of[self.kinds[n].first.name][rank] == seen]
            if len(able) > 1:
                able = [n for n in able if self._holds(group, at, self.kinds[n])]
            found |= dict.fromkeys(able, at + numel)
        return found

    def _holds(self, group: Partial, at: int, kind: _Kind) -> bool:
        """Whether every element of a kind's copies is that of the masters, rounded."""
        return all(
            self.prints.of(self._slot(flat, at, kind.shape), kind.dtype)
            == self.prints.of(own_source(copy.span), kind.dtype)
            for flat, copy in zip(group.flats, kind.first.copies, strict=True)
        )

    def _doubtful(self, graphs: Mapping[int, CutGraph]) -> list[str]:
        """Name the tensors whose bits depend on which cut is the right one."""
        places: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        for index, graph in graphs.items():
            for number, offsets in graph.places().items():
                places[number] += [(index, at) for at in offsets]
        names = []
        for number, where in places.items():
            kind = self.kinds[number]
            exact = {self._exact(index, at, kind.shape) for index, at in where}
            fewest = sum(graph.fewest(number) for graph in graphs.values())
            # Without a master the copy's own values would be taken.
            has_all = fewest >= len(kind.members) or exact == {self._own(kind)}
            if len(exact) > 1 or not (has_all or self._is_tied(kind, fewest)):
                names += [tensor.name for tensor in kind.members]
        return names

    def _is_tied(self, kind: _Kind, count: int) -> bool:
        """Whether each expert has several of these names for one matrix (a tied weight)."""
        places = [parse(tensor.name) for tensor in kind.members]
        each = collections.Counter((p.layer, p.number) for p in places if p is not None)
        is_even = len(set(each.values())) == 1 and len(each) == count
        copy = own_source(kind.first.copies[0].span)
        is_matrix = len(kind.shape) > 1 and copy.num_numel > 1
        return is_even and is_matrix and is_telling(self.prints, copy)

    def _exact(self, index: int, at: int, shape: tuple[int, ...]) -> tuple[bytes, ...]:
        flats = self.groups[index].flats
        return tuple(self.prints.of(self._slot(f, at, shape), f.dtype) for f in flats)

    def _own(self, kind: _Kind) -> tuple[bytes, ...]:
        """Digest the copies, widened to the masters' element type."""
        flats = next(iter(self.groups.values())).flats
        return tuple(
            self.prints.of(own_source(copy.span), flat.dtype)
            for copy, flat in zip(kind.first.copies, flats, strict=True)
        )

    def _alike(self, tensors: Sequence[_Tensor]) -> Iterator[list[_Tensor]]:
        """Group tensors that are the same on every rank, at the ends and then as a whole."""
        looks: dict[object, list[_Tensor]] = collections.defaultdict(list)
        for tensor in tensors:
            sources = [own_source(copy.span) for copy in tensor.copies]
            dtype = tensor.copies[0].span.dtype
            self.looks_of[tensor.name] = [self._look(source, dtype) for source in sources]
            look = (tensor.home, sources[0].shape, dtype.name, *self.looks_of[tensor.name])
            looks[look].append(tensor)
        for alike in looks.values():
            if len(alike) == 1:
                yield alike
                continue
            whole: dict[object, list[_Tensor]] = collections.defaultdict(list)
            for tensor in alike:
                spans = [copy.span for copy in tensor.copies]
                digests = tuple(self.prints.of(own_source(span), span.dtype) for span in spans)
                whole[digests].append(tensor)
            yield from whole.values()

    def _look(self, source: Source, dtype: DType) -> _Look:
        return tuple(self.prints.of(piece, dtype) for piece in ends(source))

    def _slot(self, flat: FlatGroup, at: int, shape: tuple[int, ...]) -> Source:
        slot = FlatSlot(self.index_of[id(flat)], at)
        return Source("fp32 partition", shape, flat.dtype, slot)
