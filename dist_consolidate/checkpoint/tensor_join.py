"""What several ranks' checkpoints have beside their weights: groups, ties, notes, put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dist_consolidate.checkpoint.model import Checkpoint, FlatGroup, ModuleKey, Source
from dist_consolidate.units import counted


def in_one_list(
    checkpoints: Sequence[Checkpoint],
) -> tuple[tuple[FlatGroup, ...], list[Checkpoint]]:
    """Put the flat groups of several ranks in one list.

    Args:
        checkpoints: One for each rank.

    Returns:
        All groups, and the checkpoints with their slots moved to them.
    """
    groups: list[FlatGroup] = []
    moved = []
    for rank, checkpoint in enumerate(checkpoints):
        places = Places(len(groups))
        groups += (
            dataclasses.replace(group, label=f"{group.label} of tensor rank {rank}")
            for group in checkpoint.groups
        )
        moved.append(
            dataclasses.replace(
                checkpoint,
                partitions=places.all(checkpoint.partitions),
                frozen=places.all(checkpoint.frozen),
                module={name: places.key(key) for name, key in checkpoint.module.items()},
            )
        )
    return tuple(groups), moved


class Places:
    """Moves sources by a number of groups; a source that several blocks share stays one."""

    def __init__(self, by: int) -> None:
        """Move nothing yet.

        Args:
            by: How many groups come before those that the sources refer to.
        """
        self._by, self._moved = by, {}  # type: ignore[var-annotated]

    def all(self, sources: Mapping[str, Source]) -> dict[str, Source]:
        """Move sources by name."""
        return {name: self.source(source) for name, source in sources.items()}

    def key(self, key: ModuleKey) -> ModuleKey:
        """Move a key's own source, if it has one."""
        return (
            key if key.source is None else dataclasses.replace(key, source=self.source(key.source))
        )

    def source(self, source: Source) -> Source:
        """Move a source."""
        if source.slot is None and not source.blocks:
            return source
        if id(source) not in self._moved:
            # The original is kept beside its copy, so that its id is not given away again.
            self._moved[id(source)] = source, self._copy(source)
        return self._moved[id(source)][1]  # type: ignore[no-any-return]

    def _copy(self, source: Source) -> Source:
        slot = source.slot
        if slot is not None:
            slot = dataclasses.replace(slot, group=slot.group + self._by)
        blocks = tuple(
            dataclasses.replace(block, source=self.source(block.source)) for block in source.blocks
        )
        return dataclasses.replace(source, slot=slot, blocks=blocks)


def without_lone_masters(checkpoints: list[Checkpoint], notes: list[str]) -> list[Checkpoint]:
    """Drop stage-0 masters that only some ranks have.

    Stage 0 pickles masters without names and finds them by value; where a rank cannot tell, its
    16-bit values stand, and then they must do so on every rank.

    Args:
        checkpoints: One for each rank.
        notes: Takes what was dropped.

    Returns:
        The checkpoints, with the same partitions in stage 0.
    """
    if checkpoints[0].stage:
        return checkpoints
    common = set(checkpoints[0].partitions).intersection(*(c.partitions for c in checkpoints))
    lone = sorted({name for c in checkpoints for name in c.partitions} - common)
    if lone:
        notes.append(
            f"{counted(len(lone), 'tensor has', 'tensors have')} "
            "an fp32 master that could be told on some tensor ranks "
            f"only, so their 16-bit values were taken; the first is {lone[0]}"
        )
    return [
        dataclasses.replace(c, partitions={n: s for n, s in c.partitions.items() if n in common})
        for c in checkpoints
    ]


def identity_of(checkpoints: Sequence[Checkpoint], name: str) -> tuple[object, ...]:
    """Give what names share that are one tensor on every rank."""
    return tuple(checkpoint.module[name].identity for checkpoint in checkpoints)


def tie_classes(checkpoints: Sequence[Checkpoint]) -> dict[str, tuple[str, ...]]:
    """Give for each key the keys that are the same tensor on every rank, itself among them."""
    alike: dict[object, list[str]] = {}
    for name in checkpoints[0].module:
        alike.setdefault(identity_of(checkpoints, name), []).append(name)
    classes = {name: tuple(names) for names in alike.values() for name in names}
    for alias, source in _confirmed_ties(checkpoints):
        if alias in classes and source in classes and alias not in classes[source]:
            classes[alias] = (*classes[alias], *classes[source])
    return classes


def _confirmed_ties(checkpoints: Sequence[Checkpoint]) -> frozenset[tuple[str, str]]:
    """Give the ties that hold by value on every rank (or by storage record, where they do)."""
    pairs = frozenset().union(*(c.confirmed_ties for c in checkpoints))
    return frozenset(pair for pair in pairs if all(_holds(c, *pair) for c in checkpoints))


def _holds(checkpoint: Checkpoint, alias: str, source: str) -> bool:
    one, other = checkpoint.module.get(alias), checkpoint.module.get(source)
    same = one is not None and other is not None and one.identity == other.identity
    return same or (alias, source) in checkpoint.confirmed_ties


def united(checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """Give the fields that are unions; only the file of global rank 0 has recorded ties."""
    backwards = list(reversed(checkpoints))
    return {
        "recorded_ties": {a: n for c in backwards for a, n in c.recorded_ties.items()},
        "confirmed_ties": _confirmed_ties(checkpoints),
        "odd_entries": {n: k for c in backwards for n, k in c.odd_entries.items()},
        "file_bytes": {n: size for c in checkpoints for n, size in c.file_bytes.items()},
    }


def joined_notes(files: Sequence[str], checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Give every rank's notes; one that all ranks have is said once."""
    notes: list[str] = list(checkpoints[0].notes)
    for file, checkpoint in zip(files[1:], checkpoints[1:], strict=True):
        notes += (f"{file}: {note}" for note in checkpoint.notes if note not in notes)
    return notes
