"""Stage 0: the weights are ``module``; 16-bit training keeps fp32 masters beside them.

The masters are pickled without names. A master belongs to a key of ``module`` that has its shape
and whose 16-bit values are the master's, rounded. Where several keys look alike (norms that are
still all ones), the order of a param group settles it, provided that the masters which are certain
show that the group follows the model; the report says so. What stays ambiguous keeps its 16-bit
values, and the report says that too.

Sources: DeepSpeed's ``unfused_optimizer.py`` (lists of shaped tensors) and ``fused_optimizer.py``
(flat tensors, of which ``module`` holds 16-bit views).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from dist_consolidate.checkpoint.experts import may_be_tied
from dist_consolidate.checkpoint.extents import TensorSpan, contiguous_stride
from dist_consolidate.checkpoint.model import Source, own_source
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState, ModuleEntry
from dist_consolidate.dtypes import DType
from dist_consolidate.errors import Problems
from dist_consolidate.units import counted

# So many masters of a group must be certain, and in the model's order, for that order to count.
_MIN_CERTAIN = 2
# Fewer elements than these may be equal by chance.
_MIN_TELLING = 8


@dataclasses.dataclass(slots=True)
class Master:
    """A master, the group it lies in, and the keys it may belong to (places in the model)."""

    span: TensorSpan
    group: int
    places: list[int]


def masters(
    folder: Path | Sequence[Path],
    model: ModelState,
    problems: Problems,
    notes: list[str],
    copies: dict[str, str] | None = None,
) -> dict[str, Source]:
    """Find the key of ``module`` for every fp32 master.

    Args:
        folder: The tag folder, or all folders its shards lie in; weights are read to compare.
        model: The model states.
        problems: Takes masters that fit no key.
        notes: Takes the keys whose master cannot be told.
        copies: Of a file whose tied tensors were copied: takes keys that are another's second
            name, by their values, with that key.

    Returns:
        Sources by name, in the model's order; empty where ``module`` itself is the most precise
        copy.
    """
    if not model.optimizer or model.module is None:
        return {}
    prints = Fingerprints(folder)
    try:
        return _Matching(model, prints, problems, notes, copies).sources()
    finally:
        prints.close()


class _Matching:
    def __init__(
        self,
        model: ModelState,
        prints: Fingerprints,
        problems: Problems,
        notes: list[str],
        copies: dict[str, str] | None = None,
    ) -> None:
        self.model, self.prints, self.copies = model, prints, copies
        self.problems, self.notes = problems, notes
        self.names, self.entries = trainable(model)
        self.dtypes = {entry.span.dtype.name: entry.span.dtype for entry in self.entries}.values()

    def sources(self) -> dict[str, Source]:
        alike = self._places_by_print()
        found = list(self._masters(alike))
        lost = [(index, master) for index, master in enumerate(found) if not master.places]
        free = set(range(len(self.names))) - {place for m in found for place in m.places}
        absent = [master for _, master in lost if not self._may_be(master, free)]
        self._note_absent(absent)
        for index, master in lost:
            if master not in absent:
                self.problems.add(
                    f"{self.model.shard.name}: fp32 master {index} of shape "
                    f"{list(master.span.shape)} rounds to no tensor of `module`; the file was "
                    "changed or its layout is unknown. Masters of stage 0 have no names, so that "
                    "--trust-masters cannot help: nothing but values tells whose they are"
                )
        found = [master for master in found if master.places]
        doubtful = sum(len(master.places) > 1 for master in found)
        _settle_equal(found, self.prints)
        self._settle_copies(found)
        still = sum(len(master.places) > 1 for master in found)
        for group in {master.group for master in found}:
            narrow([master for master in found if master.group == group])
        by_order = still - sum(len(master.places) > 1 for master in found)
        if by_order:
            self.notes.append(
                f"{by_order} of {doubtful} fp32 masters that fit several keys alike were told "
                "apart by their order in the param group"
            )
        return self._named(found)

    def _settle_copies(self, found: Iterable[Master]) -> None:
        """Settle masters that fit more keys than there are masters: tied keys, saved as copies."""
        if self.copies is None:
            return
        alike: dict[tuple[int, ...], list[Master]] = {}
        for master in found:
            if len(master.places) > 1:
                alike.setdefault(tuple(master.places), []).append(master)
        for places, same in alike.items():
            exact = {self.prints.of(own_source(m.span), m.span.dtype) for m in same}
            names = [self.names[place] for place in places]
            if len(exact) > 1 or not self._is_telling(same[0].span):
                continue
            if len(same) > len(places) or not all(may_be_tied(names[0], n) for n in names):
                continue
            for master, place in zip(same, places, strict=False):
                master.places = [place]
            rest = places[len(same) :]
            self.copies |= {self.names[place]: self.names[places[0]] for place in rest}

    def _is_telling(self, span: TensorSpan) -> bool:
        """Whether no two parameters have these values by chance: all ones, for instance."""
        half = span.num_numel // 2
        if span.num_numel < _MIN_TELLING or not span.is_contiguous:
            return False
        first = dataclasses.replace(span, shape=(half,), stride=(1,))
        end_bytes = (span.num_numel - half) * span.dtype.itemsize_bytes
        last = dataclasses.replace(first, offset_bytes=span.offset_bytes + end_bytes)
        prints = {self.prints.of(own_source(part), part.dtype) for part in (first, last)}
        return len(prints) > 1

    def _may_be(self, master: Master, free: Iterable[int]) -> bool:
        """Whether keys without a master are enough for a parameter, whole or in pieces."""
        sizes = [self.entries[place].span.num_numel for place in free]
        return sum(size for size in sizes if size <= master.span.num_numel) >= master.span.num_numel

    def _note_absent(self, absent: Sequence[Master]) -> None:
        if absent:
            self.notes.append(
                f"{counted(len(absent), 'fp32 master is', 'fp32 masters are')} of parameters that "
                f"`module` does not list, the first of shape {list(absent[0].span.shape)}, as if "
                "they had been frozen after training and left out when saving "
                "(exclude_frozen_parameters); they have no names and are not written"
            )

    def _places_by_print(self) -> dict[tuple[object, ...], list[int]]:
        alike: dict[tuple[object, ...], list[int]] = {}
        for place, entry in enumerate(self.entries):
            source = own_source(entry.span)
            dtype = entry.span.dtype
            key = (entry.span.shape, dtype.name, self.prints.of(source, dtype))
            alike.setdefault(key, []).append(place)
        return alike

    def _masters(self, alike: dict[tuple[object, ...], list[int]]) -> Iterable[Master]:
        for group, spans in enumerate(self.model.optimizer or ()):
            if self.model.flat_masters:
                yield from self._cut(group, spans[0])
                continue
            for span in spans:
                places = self._places(span, alike)
                if places:
                    yield Master(span, group, places)
                elif span.num_numel:
                    # Its parameter may be split into keys, which are views of its storage.
                    yield from self._cut(group, span)

    def _places(self, span: TensorSpan, alike: dict[tuple[object, ...], list[int]]) -> list[int]:
        places: list[int] = []
        for dtype in self.dtypes:
            places += alike.get((span.shape, dtype.name, self._rounded(span, dtype)), ())
        return sorted(places)

    def _rounded(self, span: TensorSpan, dtype: DType) -> bytes:
        return self.prints.of(own_source(span), dtype)

    def _cut(self, group: int, flat: TensorSpan) -> list[Master]:
        """Cut a master where the views of its 16-bit twin begin and end."""
        views: dict[str, list[int]] = {}
        for place, entry in enumerate(self.entries):
            views.setdefault(entry.ref.storage.key, []).append(place)
        twins = [places for places in views.values() if self._is_twin(flat, places)]
        if not twins:
            return [Master(flat, group, [])]
        # Several twins of the same values: each view may belong to any of them.
        return [
            Master(_view(flat, self.entries[place]), group, sorted(p[k] for p in twins))
            for k, place in enumerate(twins[0])
        ]

    def _is_twin(self, flat: TensorSpan, places: list[int]) -> bool:
        entries = [self.entries[place] for place in places]
        if entries[0].ref.storage.num_numel != flat.num_numel:
            return False
        return all(self._agree(_view(flat, entry), entry) for entry in entries)

    def _agree(self, span: TensorSpan, entry: ModuleEntry) -> bool:
        theirs = own_source(entry.span)
        return self._rounded(span, entry.span.dtype) == self.prints.of(theirs, entry.span.dtype)

    def _named(self, found: list[Master]) -> dict[str, Source]:
        settled: dict[int, TensorSpan] = {}
        unclear = {place for m in found if len(m.places) > 1 for place in m.places}
        for master in found:
            if len(master.places) == 1:
                unclear |= settled.keys() & master.places
                settled[master.places[0]] = master.span
        settled = {place: span for place, span in settled.items() if place not in unclear}
        if unclear:
            names = ", ".join(self.names[place] for place in sorted(unclear))
            self.notes.append(
                "fp32 masters are stored without names, and several fit these keys alike, so "
                f"their 16-bit values were taken: {names}"
            )
        return {
            self.names[place]: Source(
                "fp32 partition", self.entries[place].ref.shape, span.dtype, span=span
            )
            for place, span in sorted(settled.items())
        }


def trainable(model: ModelState) -> tuple[list[str], list[ModuleEntry]]:
    """Give the keys that may have a master: one name of each tied group, no buffers.

    Args:
        model: The model states.

    Returns:
        Names in the model's order, and what ``module`` holds under them.
    """
    first: dict[tuple[object, ...], str] = {}
    for name, entry in (model.module or {}).items():
        own = (entry.span.file, entry.ref.storage.key, entry.ref.offset_numel, entry.ref.shape)
        first.setdefault(own, name)
    buffers = model.buffer_names or frozenset()
    entries = {name: (model.module or {})[name] for name in first.values() if name not in buffers}
    kept = [n for n, e in entries.items() if e.span.num_numel and e.span.dtype.is_floating]
    return kept, [entries[name] for name in kept]


def _view(flat: TensorSpan, entry: ModuleEntry) -> TensorSpan:
    offset = flat.offset_bytes + entry.ref.offset_numel * flat.dtype.itemsize_bytes
    shape = entry.ref.shape
    return dataclasses.replace(
        flat, offset_bytes=offset, shape=shape, stride=contiguous_stride(shape)
    )


def narrow(group: list[Master]) -> None:
    """Use the order of a group that follows the model: each master lies between its neighbours.

    Whether it does is seen from the masters that fit one key only; if those are out of order, the
    order says nothing.
    """
    certain = [master.places[0] for master in group if len(master.places) == 1]
    if len(certain) < _MIN_CERTAIN:
        return
    if any(left >= right for left, right in itertools.pairwise(certain)):
        return
    before = -1
    for master in group:
        master.places = [place for place in master.places if place > before] or master.places
        before = master.places[0] if master.places else before
    behind = None
    for master in reversed(group):
        fits = [place for place in master.places if behind is None or place < behind]
        master.places = fits or master.places
        behind = master.places[-1] if master.places else behind


def _settle_equal(found: list[Master], prints: Fingerprints) -> None:
    """Deal out masters that fit the same keys and are equal bit for bit: any order is right."""
    taken = {m.places[0] for m in found if len(m.places) == 1}
    alike: dict[tuple[int, ...], list[Master]] = {}
    for master in found:
        master.places = [
            place for place in master.places if len(master.places) == 1 or place not in taken
        ]
        if len(master.places) > 1:
            alike.setdefault(tuple(master.places), []).append(master)
    for places, same in alike.items():
        exact = {prints.of(own_source(m.span), m.span.dtype) for m in same}
        if len(exact) == 1 and len(same) == len(places):
            for master, place in zip(same, places, strict=True):
                master.places = [place]
