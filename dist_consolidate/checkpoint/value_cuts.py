"""Cutting flat fp32 buffers by value: which of the saved tensors lie where in them.

Several buffers (one for each rank that holds other experts) are cut at once and alike. Tensors of
one shape that have the same values on every rank are one kind; what is told apart is kinds.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from dist_consolidate.checkpoint.cut_graph import CutGraph, choose
from dist_consolidate.checkpoint.expert_values import ends, is_telling
from dist_consolidate.checkpoint.experts import parse
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.model import FlatGroup, FlatSlot, Source, own_source
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModuleEntry, Shapes
from dist_consolidate.dtypes import DType
from dist_consolidate.errors import Problems, listed

# As in stages 1 and 2 without experts: what is more is no padding.
_MAX_PADDING_PER_RANK_NUMEL = 4
# Digests of a tensor's ends.
_Look = tuple[bytes, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """A param group, of which not all parameters are known.

    Attributes:
        label: What to call it in a message.
        prefix: The parameters that it is known to begin with, in order.
        named: Parameters that are known to be in it, anywhere behind the prefix.
        flats: The flat group of each rank that holds other experts.
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
class Tensor:
    """A parameter that may lie in one of the groups.

    Attributes:
        name: As one rank names it.
        home: The only group that it may lie in, if that is known.
        copies: What is saved of it, for each rank.
    """

    name: str
    home: int | None
    copies: tuple[ModuleEntry, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """Parameters that nothing tells apart: of one shape, and of the same values on every rank."""

    members: tuple[Tensor, ...]

    @property
    def first(self) -> Tensor:
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


def may_be_master(span: TensorSpan) -> bool:
    """Tell whether a saved tensor may be a parameter that has a master.

    Args:
        span: The tensor.

    Returns:
        Whether it may.
    """
    return span.num_numel > 0 and span.dtype.is_floating and span.is_contiguous


def _known(homes: Collection[int | None]) -> list[int | None]:
    """Put what is known first: it has to find its place before anything else takes it."""
    return sorted(homes, key=lambda home: (home is None, home))


def _one_of_each(kind: _Kind) -> list[Tensor]:
    """Put a kind's tensors in order: the first name of every expert before any second one."""
    seen: collections.Counter[object] = collections.Counter()
    turns = []
    for tensor in kind.members:
        name = parse(tensor.name)
        place = (name.layer, name.number) if name is not None else None
        turns.append(seen[place])
        seen[place] += 1
    return [kind.members[i] for i in sorted(range(len(turns)), key=turns.__getitem__)]


class ValueCuts:
    """Cuts param groups that have the same number of flat groups."""

    def __init__(
        self,
        prints: Fingerprints,
        flats: Sequence[FlatGroup],
        groups: Mapping[int, Partial],
        tensors: Sequence[Tensor],
        problems: Problems,
        *,
        told: str,
        needs_names: bool,
    ) -> None:
        """Look at the ends of every tensor.

        Args:
            prints: Reads values.
            flats: The flat groups that ``prints`` knows.
            groups: What is to be cut, by any number.
            tensors: What may lie there.
            problems: Takes groups that cannot be cut, and tensors whose place is not certain.
            told: What is known of the groups, for messages.
            needs_names: Whether each tensor's place must be certain, rather than only where
                tensors begin and end.
        """
        self.prints, self.groups, self.problems = prints, groups, problems
        self.told, self.needs_names = told, needs_names
        self.index_of = {id(flat): index for index, flat in enumerate(flats)}
        self.looks_of: dict[str, list[_Look]] = {}
        self.kinds: list[_Kind] = []
        # Kinds of the same values, which differ in the group that they may lie in only.
        self.alike: list[list[int]] = []
        for members in self._alike(tensors):
            homes = {t.home for t in members}
            split = [_Kind(tuple(t for t in members if t.home == home)) for home in _known(homes)]
            self.alike.append(list(range(len(self.kinds), len(self.kinds) + len(split))))
            self.kinds += split
        # By shape and element type, and then by what the first rank's copy looks like.
        self.by_look: dict[tuple[tuple[int, ...], DType], dict[_Look, list[int]]] = {}
        for number, kind in enumerate(self.kinds):
            looks = self.by_look.setdefault((kind.shape, kind.dtype), {})
            looks.setdefault(self.looks_of[kind.first.name][0], []).append(number)

    def shapes(self) -> dict[int, Shapes]:
        """Cut every group.

        Returns:
            All parameters of each group, in flat order; nothing if a problem was noted.
        """
        graphs: dict[int, CutGraph] = {}
        for index, group in self.groups.items():
            graph = self._graph(index, group)
            if graph is not None:
                graphs[index] = graph
        if len(graphs) < len(self.groups):
            return {}
        labels = listed([group.label for group in self.groups.values()], most=2)
        has_form = not self.needs_names and all(map(self._has_one_form, graphs.values()))
        doubtful = [] if has_form else self._doubtful(graphs)
        if doubtful:
            self.problems.add(
                f"{labels}: {self.told}, and the values do not tell where the fp32 masters of "
                f"{listed(doubtful)} lie: several places fit alike, and hold different masters"
            )
            return {}
        capacity = {number: len(kind.members) for number, kind in enumerate(self.kinds)}
        chosen = choose(list(graphs.values()), capacity)
        if chosen is None:
            self.problems.add(
                f"{labels}: {self.told}, and they cannot be cut into the saved tensors without "
                "using one of them twice; files are of other saves"
            )
            return {}
        free = [_one_of_each(kind) for kind in self.kinds]
        return {
            index: self._named(index, [free[kind].pop(0) for kind in kinds])
            for index, kinds in zip(graphs, chosen, strict=True)
        }

    def _named(self, index: int, tensors: Sequence[Tensor]) -> Shapes:
        group = self.groups[index]
        lacking = group.named - {tensor.name for tensor in tensors}
        if lacking:
            self.problems.add(
                f"{group.label}: holds {listed(sorted(lacking))} by param_slice_mappings, whose "
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
        several = "there are too many ways" if graph is None else "nothing fits"
        self.problems.add(
            f"{group.label}: {self.told}; the fp32 masters behind element {start} of "
            f"{group.num_numel} cannot be cut into the saved tensors by value ({several}); a file "
            "is of another save, or the weights were changed after the last step"
        )
        return None

    def _has_one_form(self, graph: CutGraph) -> bool:
        """Whether all cuts have tensors of the same shapes at the same offsets."""
        forms = ({self.kinds[kind].shape for kind in steps} for steps in graph.steps.values())
        return all(len(form) == 1 for form in forms) and not graph.ends & graph.steps.keys()

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
        places: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
        for index, graph in graphs.items():
            for number, offsets in graph.places().items():
                places[number].update((index, at) for at in offsets)
        names = []
        for numbers in self.alike:
            where = set().union(*(places[number] for number in numbers))
            if not where:
                continue
            kind = self.kinds[numbers[0]]
            members = [tensor for number in numbers for tensor in self.kinds[number].members]
            exact = {self._exact(index, at, kind.shape) for index, at in where}
            fewest = sum(graph.fewest(numbers) for graph in graphs.values())
            # Without a master the copy's own values would be taken.
            has_all = fewest >= len(members) or exact == {self._own(kind)}
            if len(exact) > 1 or not (has_all or self._is_tied(members, fewest)):
                names += [tensor.name for tensor in members]
        return names

    def _is_tied(self, members: Sequence[Tensor], count: int) -> bool:
        """Whether each expert has several of these names for one parameter."""
        places = [parse(tensor.name) for tensor in members]
        each = collections.Counter((p.layer, p.number) for p in places if p is not None)
        is_even = len(set(each.values())) == 1 and len(each) == count
        return is_even and is_telling(self.prints, own_source(members[0].copies[0].span))

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

    def _alike(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Group tensors that are the same on every rank, at the ends and then as a whole."""
        looks: dict[object, list[Tensor]] = collections.defaultdict(list)
        for tensor in tensors:
            sources = [own_source(copy.span) for copy in tensor.copies]
            dtype = tensor.copies[0].span.dtype
            self.looks_of[tensor.name] = [self._look(source, dtype) for source in sources]
            look = (sources[0].shape, dtype.name, *self.looks_of[tensor.name])
            looks[look].append(tensor)
        for alike in looks.values():
            if len(alike) == 1:
                yield alike
                continue
            whole: dict[object, list[Tensor]] = collections.defaultdict(list)
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
