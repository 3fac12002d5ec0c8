"""Damaged places of shards, and a checkpoint without the tensors' copies that lie in them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from dist_consolidate.checkpoint.extents import Extent, TensorSpan, contiguous_stride
from dist_consolidate.checkpoint.fragments import Fragments, Read
from dist_consolidate.checkpoint.model import (
    Block,
    Checkpoint,
    Loss,
    ModuleKey,
    Source,
)
from dist_consolidate.dtypes import DType


class Damage(NamedTuple):
    """A range of a shard that is not what was saved.

    Attributes:
        file: The shard.
        start_bytes: Its first byte.
        stop_bytes: Behind its last byte.
        why: What happened to it.
    """

    file: str
    start_bytes: int
    stop_bytes: int
    why: str


class Damages:
    """All damaged places."""

    def __init__(self, damages: Iterable[Damage]) -> None:
        """Sort them by file."""
        self._by_file: dict[str, list[Damage]] = defaultdict(list)
        for damage in damages:
            self._by_file[damage.file].append(damage)

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self._by_file)

    def touches(self, file: str) -> bool:
        """Tell whether anything of a file is damaged."""
        return file in self._by_file

    def of(self, read: Read) -> Damage | None:
        """Give a damage in the range that a read takes, if there is one."""
        return self._in(*read.place())

    def in_extent(self, extent: Extent) -> Damage | None:
        """Give a damage in a range of a file, if there is one."""
        start = extent.offset_bytes
        return self._in(extent.file, start, start + extent.num_bytes)

    def _in(self, file: str, low: int, high: int) -> Damage | None:
        return next(
            (d for d in self._by_file.get(file, ()) if d.start_bytes < high and low < d.stop_bytes),
            None,
        )

    def in_source(self, source: Source, fragments: Fragments) -> tuple[Damage | None, int]:
        """Give the first damage of a source, and how many of its elements are intact."""
        if not any(map(self.touches, fragments.files(source))):
            return None, source.num_numel
        first, intact = None, 0
        for read in fragments.reads(source, 0, source.num_numel):
            damage = self.of(read)
            first = first or damage
            intact += 0 if damage else _num_numel(read, source.dtype)
        return first, intact


def _num_numel(read: Read, dtype: DType) -> int:
    if read.extent is not None:
        return read.extent.num_bytes // dtype.itemsize_bytes
    return read.stop_numel - read.start_numel


def without(checkpoint: Checkpoint, damages: Damages) -> Checkpoint:
    """Take damaged copies out of a checkpoint.

    Args:
        checkpoint: The metadata, in which damaged places have the extents that they had.
        damages: The damaged places.

    Returns:
        The metadata of what is intact; ``lost`` says what is not.
    """
    fragments = Fragments(checkpoint.groups)
    found = _Without(checkpoint, damages, fragments)
    partitions = found.intact(checkpoint.partitions)
    frozen = found.intact(checkpoint.frozen)
    stored = {**partitions, **frozen}
    module = {name: found.key(name, key, stored) for name, key in checkpoint.module.items()}
    found.lose_tied(stored)
    return dataclasses.replace(
        checkpoint,
        partitions=partitions,
        frozen=frozen,
        module=module,
        lost={**checkpoint.lost, **found.lost},
    )


class _Without:
    def __init__(self, checkpoint: Checkpoint, damages: Damages, fragments: Fragments) -> None:
        self.checkpoint, self.damages, self.fragments = checkpoint, damages, fragments
        self.lost: dict[str, Loss] = {}

    def intact(self, sources: Mapping[str, Source]) -> dict[str, Source]:
        """Keep the sources that are intact, and note the others."""
        kept = {}
        for name, source in sources.items():
            damage, intact_numel = self.damages.in_source(source, self.fragments)
            if damage is None:
                kept[name] = self._detached(source)
            else:
                self.lost[name] = self._loss(name, source, damage, intact_numel)
        return kept

    def key(self, name: str, key: ModuleKey, stored: Mapping[str, Source]) -> ModuleKey:
        """Take a damaged tensor out of `module`; it is lost where that was the only copy."""
        if key.source is None:
            return key
        damage, intact_numel = self.damages.in_source(key.source, self.fragments)
        if damage is None:
            return key
        if name not in stored and name not in self.lost:
            what: Literal["partial", "missing"] = "partial" if intact_numel else "missing"
            self.lost[name] = Loss(what, damage.why, key.source.num_numel, intact_numel)
        return dataclasses.replace(key, source=None)

    def lose_tied(self, stored: Mapping[str, Source]) -> None:
        """What is one tensor with a lost one, by its storage record or by record, is lost too."""
        module = self.checkpoint.module
        by_identity = {module[n].identity: n for n in reversed(self.lost) if n in module}
        for name, key in module.items():
            if name not in stored and name not in self.lost and key.identity in by_identity:
                self.lost[name] = self.lost[by_identity[key.identity]]
        for alias, source in self.checkpoint.recorded_ties.items():
            if alias in module and alias not in stored and source in self.lost:
                self.lost.setdefault(alias, self.lost[source])

    def _loss(self, name: str, source: Source, damage: Damage, intact_numel: int) -> Loss:
        key = self.checkpoint.module.get(name)
        own = None if key is None else key.source
        if own is None or self.damages.in_source(own, self.fragments)[0] is not None:
            what: Literal["partial", "missing"] = "partial" if intact_numel else "missing"
            return Loss(what, damage.why, source.num_numel, intact_numel)
        why = f"{damage.why}; written from `module` ({own.dtype.name})"
        same = own.dtype == source.dtype
        kind: Literal["other copy", "lower precision"] = "other copy" if same else "lower precision"
        return Loss(kind, why, source.num_numel, intact_numel)

    def _detached(self, source: Source) -> Source:
        """Point at the bytes themselves where a part of the tensor's flat group is damaged.

        Flat groups are moved by their parts, and a damaged one must not be read.
        """
        if source.slot is None or not any(
            self.damages.touches(part.file)
            for part in self.checkpoint.groups[source.slot.group].parts
        ):
            return source
        blocks, at = [], 0
        for read in self.fragments.reads(source, 0, source.num_numel):
            assert read.extent is not None  # flat groups are contiguous
            numel = read.extent.num_bytes // source.dtype.itemsize_bytes
            place = TensorSpan(
                read.extent.file, read.extent.offset_bytes, source.dtype, (numel,), (1,)
            )
            part = Source(source.origin, (numel,), source.dtype, span=place)
            blocks.append(Block(part, 1, numel, 0, 0, at, 0))
            at += numel
        if len(blocks) == 1:
            span = blocks[0].source.span
            assert span is not None
            stride = contiguous_stride(source.shape)
            whole = dataclasses.replace(span, shape=source.shape, stride=stride)
            return dataclasses.replace(source, slot=None, span=whole)
        if not blocks:  # an empty tensor lies nowhere
            file = self.checkpoint.groups[source.slot.group].parts[0].file
            span = TensorSpan(file, 0, source.dtype, source.shape, contiguous_stride(source.shape))
            return dataclasses.replace(source, slot=None, span=span)
        return dataclasses.replace(source, slot=None, blocks=tuple(blocks))
