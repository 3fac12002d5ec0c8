"""Parameters that ``module`` lists under other names than the optimizer knows them by.

A model whose ``state_dict`` renames keys (a hook, an override that takes a prefix off), or splits
one parameter into several keys, is saved with the new names in ``module`` and the parameters' own
in ``param_shapes``: the first are taken from ``module_state_dict``, the second from
``named_parameters`` (source: DeepSpeed's ``engine.py``). In stages 1 and 2 ``module`` holds views
of each group's 16-bit twin, so that a view's offset says which master it was rounded from; where
``state_dict`` copies its tensors, equal values say so, if they single one master out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.model import FlatGroup, Source, own_source
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState, ModuleEntry
from dist_consolidate.checkpoint.witness import compare
from dist_consolidate.dtypes import BY_NAME
from dist_consolidate.errors import CheckpointError

# A storage record: the file, and the record's key in it.
_Storage = tuple[str, str]
# Shape, element type and digest of a tensor.
_Print = tuple[tuple[int, ...], str, bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class Renamed:
    """What is stored, under the names that ``module`` has.

    Attributes:
        partitions: Tensors with an fp32 partition, in flat order.
        frozen: Tensors in the frozen section, in recorded order.
        names: By recorded name, the keys that stand for it.
    """

    partitions: dict[str, Source]
    frozen: dict[str, Source]
    names: dict[str, tuple[str, ...]]

    @property
    def notes(self) -> tuple[str, ...]:
        """What to say of it."""
        if not self.names:
            return ()
        old, new = next(iter(self.names.items()))
        return (
            f"{len(self.names)} parameters have other names in `module` than in the optimizer and "
            f"are written under those of `module`, the first is {old} as {' and '.join(new)}",
        )

    def ties(self, recorded: Mapping[str, str]) -> dict[str, str]:
        """Give recorded ties, with sources under the names that ``module`` has.

        Args:
            recorded: Alias to source.

        Returns:
            The same; a source that was split stays what it was.
        """
        whole = {old: new[0] for old, new in self.names.items() if len(new) == 1}
        sources = {alias: whole.get(source, source) for alias, source in recorded.items()}
        # An alias that kept its name while its source did not is the source now.
        return {alias: source for alias, source in sources.items() if alias != source}


def follow(
    folder: Path | Sequence[Path],
    model: ModelState,
    groups: Sequence[FlatGroup],
    partitions: dict[str, Source],
    frozen: dict[str, Source],
) -> Renamed:
    """Find the keys of ``module`` that show a stored parameter under another name.

    Args:
        folder: The tag folder; a few weights are read where offsets alone do not tell.
        model: The model states of rank 0.
        groups: The flat groups.
        partitions: Where each master lies, by recorded name.
        frozen: Where each frozen parameter lies.

    Returns:
        The same sources; what was not found keeps its name.
    """
    module = model.module or {}
    stored = {*partitions, *frozen}
    if stored <= module.keys():
        return Renamed(partitions, frozen, {})
    finder = _Finder(folder, model, groups, partitions)
    names = finder.pieces()
    moved: dict[str, Source] = {}
    for name, source in partitions.items():
        moved |= names.get(name) or {name: source}
    spans = {entry.span: key for key, entry in reversed(module.items()) if key not in stored}
    still: dict[str, Source] = {}
    for name, source in frozen.items():
        key = None if name in module or source.span is None else spans.get(source.span)
        still[key or name] = source
        if key is not None and source.num_numel:
            names[name] = {key: source}
    return Renamed(moved, still, {name: tuple(found) for name, found in names.items()})


def under_prefix(
    model: ModelState, partitions: dict[str, Source], frozen: dict[str, Source]
) -> Renamed:
    """Follow a nested ``module`` in ZeRO-3: its inner state dict has the parameters' own names.

    Args:
        model: The model states of rank 0.
        partitions: Where each master lies, by recorded name.
        frozen: Where each frozen parameter lies.

    Returns:
        The same sources, under the paths; as they were where the paths are no more than a prefix.
    """
    module, stored = model.module or {}, [*partitions, *frozen]
    if not model.is_nested or not stored or set(stored) <= module.keys():
        return Renamed(partitions, frozen, {})
    ends = [key.removesuffix(stored[0]) for key in module if key.endswith(f".{stored[0]}")]
    fits = [prefix for prefix in ends if all(prefix + name in module for name in stored)]
    if len(fits) != 1:
        return Renamed(partitions, frozen, {})
    return Renamed(
        {fits[0] + name: source for name, source in partitions.items()},
        {fits[0] + name: source for name, source in frozen.items()},
        {name: (fits[0] + name,) for name in stored},
    )


class _Finder:
    """Looks for masters of the keys that have none under their own name."""

    def __init__(
        self,
        folder: Path | Sequence[Path],
        model: ModelState,
        groups: Sequence[FlatGroup],
        partitions: Mapping[str, Source],
    ) -> None:
        self.folder, self.groups, self.partitions = folder, groups, partitions
        module, buffers = model.module or {}, model.buffer_names or frozenset()
        held = {n: s for n, s in partitions.items() if s.num_numel and not s.blocks}
        self.known = {n: module[n] for n in held if n in module}
        self.open = {n: s for n, s in held.items() if n not in module}
        self.by_storage: dict[_Storage, dict[str, ModuleEntry]] = {}
        for key, entry in module.items():
            is_open = key not in partitions and key not in buffers and entry.ref.dtype.is_floating
            if is_open and entry.span.num_numel and entry.span.is_contiguous:
                self.by_storage.setdefault(_storage(entry), {})[key] = entry

    def pieces(self) -> dict[str, dict[str, Source]]:
        """Give, by recorded name, the keys that show it whole, with their places."""
        anchored = self._anchored()
        taken = set(anchored.values())
        found: dict[str, dict[str, Source]] = {}
        for storage, entries in self.by_storage.items():
            if storage in anchored:
                group = anchored[storage]
                found |= {} if group is None else self._inside(group, entries)
                continue
            # No parameter of this group kept its name: where everything fits, values decide.
            fits = []
            for group in {s.slot.group for s in self.open.values() if s.slot is not None} - taken:
                inside = self._inside(group, entries)
                if len(inside) == len(self._open_in(group)) and self._agrees(inside, entries):
                    fits.append(inside)
            found |= fits[0] if len(fits) == 1 else {}
        return found | self._by_value(found)

    def _by_value(self, found: Mapping[str, Mapping[str, Source]]) -> dict[str, dict[str, Source]]:
        """Pair what is left over where a key is a copy that one master alone rounds to."""
        taken = {key for pieces in found.values() for key in pieces}
        prints = Fingerprints(self.folder, self.groups)
        copies: dict[_Print, list[str]] = {}
        masters: dict[_Print, list[str]] = {}
        with contextlib.suppress(CheckpointError):  # a shard that is not seen here
            for key, entry in self._copies(taken).items():
                if not _is_telling(entry.span, prints):
                    continue
                shape, dtype = entry.ref.shape, entry.span.dtype
                digest = prints.of(own_source(entry.span), dtype)
                copies.setdefault((shape, dtype.name, digest), []).append(key)
            kinds = {(kind[0], kind[1]) for kind in copies}
            for name, source in self.open.items():
                for shape, width in kinds if name not in found else ():
                    if shape == source.shape:
                        digest = prints.of(source, BY_NAME[width])
                        masters.setdefault((shape, width, digest), []).append(name)
        prints.close()
        return {
            names[0]: {copies[kind][0]: self.open[names[0]]}
            for kind, names in masters.items()
            if len(names) == 1 and len(copies.get(kind, ())) == 1
        }

    def _copies(self, taken: set[str]) -> dict[str, ModuleEntry]:
        """Give the keys that are still without a master, one of each tensor."""
        views: dict[tuple[object, ...], tuple[str, ModuleEntry]] = {}
        for storage, entries in self.by_storage.items():
            for key, entry in entries.items() if taken.isdisjoint(entries) else ():
                views.setdefault((storage, entry.ref.offset_numel, entry.ref.shape), (key, entry))
        return dict(views.values())

    def _anchored(self) -> dict[_Storage, int | None]:
        """Tell which storage is which group's twin, by the parameters that kept their names."""
        groups: dict[_Storage, set[int | None]] = {}
        for name, entry in self.known.items():
            slot = self.partitions[name].slot
            same = slot is not None and entry.ref.offset_numel == slot.offset_numel
            groups.setdefault(_storage(entry), set()).add(slot.group if same and slot else None)
        return {s: next(iter(g)) if len(g) == 1 else None for s, g in groups.items()}

    def _open_in(self, group: int) -> dict[str, Source]:
        return {n: s for n, s in self.open.items() if s.slot is not None and s.slot.group == group}

    def _inside(
        self, group: int, entries: Mapping[str, ModuleEntry]
    ) -> dict[str, dict[str, Source]]:
        """Cut the places of a group's nameless parameters into keys that fill them."""
        found = {}
        for name, source in self._open_in(group).items():
            assert source.slot is not None
            start, end = source.slot.offset_numel, source.slot.offset_numel + source.num_numel
            pieces: dict[str, Source] = {}
            at = start
            ordered = sorted(entries.items(), key=lambda item: item[1].ref.offset_numel)
            for key, entry in ordered:
                # Of keys that are one tensor the first is taken; the others are its ties.
                if entry.ref.offset_numel != at or at + entry.span.num_numel > end:
                    continue
                slot = dataclasses.replace(source.slot, offset_numel=at)
                pieces[key] = Source(source.origin, entry.ref.shape, source.dtype, slot)
                at += math.prod(entry.ref.shape)
            if at == end:
                found[name] = pieces
        return found

    def _agrees(
        self, found: Mapping[str, Mapping[str, Source]], entries: Mapping[str, ModuleEntry]
    ) -> bool:
        masters = {key: source for pieces in found.values() for key, source in pieces.items()}
        own = {key: own_source(entries[key].span) for key in masters}
        testimony = compare(self.folder, self.groups, masters, own)
        return bool(testimony.num_compared) and not testimony.differing


def _is_telling(span: TensorSpan, prints: Fingerprints) -> bool:
    """Whether values testify: all zeros, or all ones, may be another parameter's as well."""
    numel, width = span.num_numel - 1, span.dtype.itemsize_bytes
    if not numel:
        return False
    head = dataclasses.replace(span, shape=(numel,), stride=(1,))
    tail = dataclasses.replace(head, offset_bytes=span.offset_bytes + width)
    return prints.of(own_source(head), span.dtype) != prints.of(own_source(tail), span.dtype)


def _storage(entry: ModuleEntry) -> _Storage:
    return entry.span.file, entry.ref.storage.key
