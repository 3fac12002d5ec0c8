"""The tie map: the names that stand for one parameter, and the one that holds the data.

Three testimonies are heard. DeepSpeed's record (``shared_params``) is incomplete in every release
and empty in many. The pickled ``module`` keeps the identity of storage records, even of ZeRO-3's
empty placeholders: two names with the same record, offset, shape, stride and element type are one
tensor. And the user may say so. A name with data of its own is never overwritten by a record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from dist_consolidate.checkpoint.model import Checkpoint

Found = Literal["recorded", "storage record", "same values", "--tie"]


@dataclasses.dataclass(frozen=True, slots=True)
class Tie:
    """One name that stands for another's data.

    Attributes:
        holder: The name that holds the data.
        found: Which testimony it rests on.
    """

    holder: str
    found: Found


@dataclasses.dataclass(frozen=True, slots=True)
class TieMap:
    """All ties of a checkpoint.

    Attributes:
        ties: By alias, in the model's order.
        excluded: Aliases of parameters that were left out when saving, with the reason.
        notes: Records that were not followed, and why.
        conflicts: Names for which the testimonies disagree; to be settled by the user.
    """

    ties: dict[str, Tie]
    excluded: dict[str, str]
    notes: tuple[str, ...]
    conflicts: tuple[str, ...]


def build_tie_map(checkpoint: Checkpoint, user_ties: Mapping[str, str]) -> TieMap:
    """Hear all testimonies.

    Args:
        checkpoint: The metadata.
        user_ties: What ``--tie`` says, alias to source.

    Returns:
        The tie map; what could not be settled is in its ``conflicts``.
    """
    return _TieBuilder(checkpoint, user_ties).build()


class _TieBuilder:
    def __init__(self, checkpoint: Checkpoint, user_ties: Mapping[str, str]) -> None:
        self.ckpt, self.user = checkpoint, user_ties
        self.stored = {**checkpoint.partitions, **checkpoint.frozen}
        self.notes: list[str] = []
        self.conflicts: list[str] = []
        self.ties: dict[str, Tie] = {}
        self.excluded: dict[str, str] = {}

    def build(self) -> TieMap:
        for alias, source in self.ckpt.value_ties.items():
            if alias not in self.user and alias not in self.stored and source in self.stored:
                self.ties[alias] = Tie(source, "same values")
        records = self._follow_records()
        parent = _Components(self.ckpt.module)
        holders: dict[str, set[str]] = {}
        open_names: list[str] = []
        for members in self._by_identity():
            named = [name for name in members if name in self.user]
            others = [name for name in members if name not in self.user]
            holder = self._holder(others)
            if named and holder not in self.stored:
                # What the user says of one of them holds for all that are the same tensor.
                holder = named[0]
            if holder is None:
                parent.join(others)
                open_names += others
            else:
                self._tie_all(others, holder)
        self._link_open(open_names, records, parent, holders)
        for name in open_names:
            self._settle(name, holders.get(parent.root(name), set()), records)
        self._apply_user_ties()
        self._note_contradicted(records)
        order = {name: self.ties[name] for name in self.ckpt.module if name in self.ties}
        return TieMap(
            {**order, **self.ties}, self.excluded, tuple(self.notes), tuple(self.conflicts)
        )

    def _follow_records(self) -> dict[str, str]:
        """Drop the records that must not be followed, each with a note."""
        kept = {}
        for alias, source in self.ckpt.recorded_ties.items():
            key = self.ckpt.module.get(alias)
            if alias in self.user:
                if self.user[alias] != source:
                    self._ignore(alias, source, f"--tie says {self.user[alias]}")
                continue
            if alias in self.stored:
                self._ignore(alias, source, f"{alias} has data of its own")
            elif key is None:
                self._ignore(alias, source, f"the model has no {alias}")
            elif (alias, source) in self.ckpt.confirmed_ties:
                self.ties[alias] = Tie(source, "recorded")
            elif source not in self.stored and source not in self.ckpt.module:
                self._source_is_gone(alias, source)
            elif key.source is None:
                kept[alias] = source
            elif source not in self.ckpt.module or (
                key.identity != self.ckpt.module[source].identity
            ):
                self._ignore(alias, source, f"{alias} has a tensor of its own in `module`")
        return kept

    def _ignore(self, alias: str, source: str, reason: str) -> None:
        self.notes.append(f"recorded tie {alias} -> {source} was not followed: {reason}")

    def _source_is_gone(self, alias: str, source: str) -> None:
        if self.ckpt.saves_frozen:
            self._ignore(alias, source, f"{source} is nowhere in the checkpoint")
        else:
            self.excluded[alias] = (
                f"tied to {source}, which was left out when saving (exclude_frozen_parameters)"
            )

    def _by_identity(self) -> list[list[str]]:
        classes: dict[tuple[object, ...], list[str]] = {}
        for name, key in self.ckpt.module.items():
            if name not in self.excluded and name not in self.ties:
                classes.setdefault(key.identity, []).append(name)
        return list(classes.values())

    def _holder(self, members: list[str]) -> str | None:
        """Pick the member whose data the others share; ``None`` for placeholders without any."""
        stored = [name for name in members if name in self.stored]
        if stored:
            if len(stored) > 1 and len(members) > len(stored):
                others = ", ".join(name for name in members if name not in self.stored)
                self.conflicts.append(
                    f"{others}: shares its storage record with {' and '.join(stored)}, which hold "
                    "data of their own"
                )
            return stored[0]
        own = [name for name in members if self.ckpt.module[name].source is not None]
        buffers = [name for name in own if self.ckpt.module[name].is_buffer]
        return next(iter(buffers or own), None)

    def _tie_all(self, members: Iterable[str], holder: str) -> None:
        for name in members:
            if name != holder and name not in self.stored:
                recorded = self.ckpt.recorded_ties.get(name) == holder
                self.ties[name] = Tie(holder, "recorded" if recorded else "storage record")

    def _link_open(
        self,
        open_names: list[str],
        records: Mapping[str, str],
        parent: _Components,
        holders: dict[str, set[str]],
    ) -> None:
        """Connect placeholders through records: to each other first, then to what holds data."""
        is_open = set(open_names)
        for alias, source in records.items():
            if alias in is_open and source in is_open:
                parent.join([alias, source])
        for alias, source in records.items():
            if alias in is_open and source not in is_open:
                holder = self.ties[source].holder if source in self.ties else source
                holders.setdefault(parent.root(alias), set()).add(holder)

    def _settle(self, name: str, candidates: set[str], records: Mapping[str, str]) -> None:
        if len(candidates) == 1:
            found: Found = "recorded" if name in records else "storage record"
            self.ties[name] = Tie(next(iter(candidates)), found)
        elif candidates:
            listed = " and ".join(sorted(candidates))
            self.conflicts.append(f"{name}: is tied to {listed} at once; say which with --tie")

    def _apply_user_ties(self) -> None:
        for alias, source in self.user.items():
            seen = {alias}
            holder = source
            while holder in self.user and holder not in seen:
                seen.add(holder)
                holder = self.user[holder]
            holder = self.ties[holder].holder if holder in self.ties else holder
            if holder in seen:
                self.conflicts.append(f"{alias}: --tie {alias}={source} leads back to itself")
            elif not self._check_user_tie(alias, holder):
                self.ties[alias] = Tie(holder, "--tie")
        # Whoever was tied to a name that the user tied elsewhere follows it there.
        for alias, tie in list(self.ties.items()):
            if tie.holder in self.user and tie.holder in self.ties:
                self.ties[alias] = dataclasses.replace(tie, holder=self.ties[tie.holder].holder)

    def _note_contradicted(self, records: Mapping[str, str]) -> None:
        for alias, source in records.items():
            tie = self.ties.get(alias)
            holder = self.ties[source].holder if source in self.ties else source
            if tie is not None and tie.holder != holder:
                self._ignore(alias, source, f"{alias} is the same tensor as {tie.holder}")

    def _twins(self, alias: str) -> set[str]:
        """Names with stored data that share a name's storage record."""
        key = self.ckpt.module.get(alias)
        if key is None:
            return set()
        return {n for n in self.stored if n in self.ckpt.module} & {
            name for name, other in self.ckpt.module.items() if other.identity == key.identity
        }

    def _is_same(self, alias: str, holder: str) -> bool:
        """Whether a tensor of its own is found to be the holder's, by storage or by value."""
        own, held = self.ckpt.module[alias], self.ckpt.module.get(holder)
        shares = held is not None and own.identity == held.identity
        named = self.user.get(alias, holder)
        return shares or bool({(alias, holder), (alias, named)} & self.ckpt.confirmed_ties)

    def _check_user_tie(self, alias: str, holder: str) -> bool:
        """Note what forbids a tie the user asked for; true if anything does."""
        key, source = self.ckpt.module.get(alias), self.stored.get(holder)
        held = self.ckpt.module.get(holder)
        if source is None and held is not None:
            source = held.source
        if key is None and alias not in self.stored:
            self.conflicts.append(f"{alias}: named by --tie, but the model has no such key")
        elif alias in self.stored:
            self.conflicts.append(f"{alias}: has data of its own, which --tie must not replace")
        elif source is None:
            self.conflicts.append(f"{alias}: --tie names {holder}, which holds no data")
        elif self._twins(alias) - {holder}:
            self.conflicts.append(
                f"{alias}: is the same tensor as {min(self._twins(alias))} by storage record, not "
                f"as {holder}, which --tie names"
            )
        elif key is not None and key.source is not None and key.shape != source.shape:
            self.conflicts.append(
                f"{alias}: has shape {list(key.shape)}, but {holder}, which --tie names, has "
                f"{list(source.shape)}"
            )
        elif key is not None and key.source is not None and not self._is_same(alias, holder):
            self.conflicts.append(
                f"{alias}: has a tensor of its own in `module`, whose values are not those of "
                f"{holder}, which --tie names"
            )
        else:
            return False
        return True


class _Components:
    """Union-find over names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._parent = {name: name for name in names}

    def root(self, name: str) -> str:
        while self._parent[name] != name:
            self._parent[name] = self._parent[self._parent[name]]
            name = self._parent[name]
        return name

    def join(self, names: Iterable[str]) -> None:
        roots = [self.root(name) for name in names]
        for root in roots[1:]:
            self._parent[root] = self.root(roots[0])
