"""Tensor parallelism: the ranks that share each tensor of one pipeline stage become one.

ZeRO is undone for each rank first (:mod:`dist_consolidate.checkpoint.assembly`); here their
checkpoints are put together: flat groups one behind the other, every split tensor a source of
blocks, every replicated one taken once, after its copies were found equal. How a tensor's shards
go together is settled in :mod:`dist_consolidate.checkpoint.tensor_settle`; what nobody settles is
refused, all such tensors in one message.

Sources: DeepSpeed's ``ds_to_universal.py`` (merging) and ``module_inject/layers.py`` (AutoTP).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Checkpoint, ModuleKey, Source
from dist_consolidate.checkpoint.tensor_join import (
    identity_of,
    in_one_list,
    joined_notes,
    tie_classes,
    united,
    without_lone_masters,
)
from dist_consolidate.checkpoint.tensor_pieces import (
    DoesNotFit,
    Piece,
    alone,
    shared,
    source_of,
)
from dist_consolidate.checkpoint.tensor_rules import Replicated, Rule
from dist_consolidate.checkpoint.tensor_settle import Merging, Settling, Shards
from dist_consolidate.checkpoint.tensor_values import Comparing, Copies
from dist_consolidate.errors import CheckpointError, Problems, listing
from dist_consolidate.units import counted

_ADVICE = (
    "Nothing is guessed here. Give the model's config.json with --hf-config, or a rule for each "
    "with --tp-rules FILE ([[tensor_parallel.rule]] with match and dim, replicated or average)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRank:
    """What one tensor rank of a stage saved.

    Attributes:
        file: Its model states, to name it in messages.
        checkpoint: Its part of the model.
        info: ``universal_checkpoint_info`` of its states, if there is one.
        optim_step: Steps its optimizer has taken, where that is recorded.
    """

    file: str
    checkpoint: Checkpoint
    info: Mapping[str, Any] | None
    optim_step: int | None = None


def merge_tensor_ranks(
    folder: TagFolder, ranks: Sequence[TensorRank], merging: Merging
) -> Checkpoint:
    """Put the tensor ranks of one stage together.

    Args:
        folder: The tag folder; replicas are read from it to compare them.
        ranks: In rank order.
        merging: What the user says about tensor parallelism.

    Returns:
        The metadata of the stage as if it had not been split.

    Raises:
        CheckpointError: If ranks contradict each other, replicas differ, or nobody says how
            tensors go together; all of them are in one message.
        UsageError: If a file the user gave is wrong.
    """
    _check_agreement(folder, ranks)
    return _Merge(folder, ranks, merging).checkpoint()


def _check_agreement(folder: TagFolder, ranks: Sequence[TensorRank]) -> None:
    problems, first = Problems(), ranks[0]
    for rank in ranks[1:]:
        for what in ("stage", "step", "ds_version", "world_size", "saves_frozen"):
            ours, theirs = getattr(first.checkpoint, what), getattr(rank.checkpoint, what)
            if ours != theirs:
                problems.add(
                    f"{folder.path / rank.file}: {what} is {theirs}, but {ours} in {first.file}; "
                    "the files are of different saves"
                )
        steps = (first.optim_step, rank.optim_step)
        if None not in steps and steps[0] != steps[1]:
            problems.add(
                f"{folder.path / rank.file}: the optimizer of its tensor rank has taken {steps[1]} "
                f"steps, but {steps[0]} that of {first.file}; the files are of different saves"
            )
        if rank.info != first.info:
            problems.add(
                f"{folder.path / rank.file}: records another tensor-parallel layout than "
                f"{first.file}; the files are of different saves"
            )
        missing = first.checkpoint.module.keys() ^ rank.checkpoint.module.keys()
        if missing:
            problems.add(
                f"{folder.path / rank.file}: {len(missing)} keys of `module` are there or in "
                f"{first.file}, but not in both; the first is {min(missing)}"
            )
    problems.raise_if_any(f"{folder.path}: the tensor-parallel ranks do not belong together")


class _Merge:
    def __init__(self, folder: TagFolder, ranks: Sequence[TensorRank], merging: Merging) -> None:
        self.folder = folder
        self.files = [rank.file for rank in ranks]
        self.problems = Problems()
        self.notes = joined_notes(self.files, [rank.checkpoint for rank in ranks])
        self.groups, moved = in_one_list([rank.checkpoint for rank in ranks])
        self.checkpoints = without_lone_masters(moved, self.notes)
        file = self.files[0] if ranks[0].info is not None else "no record"
        self.settling = Settling(folder.path, file, ranks[0].info, merging)
        self.classes = tie_classes(self.checkpoints)
        self.rules: dict[tuple[str, ...], Rule | None] = {}
        self.open: dict[str, tuple[str, Sequence[Source]]] = {}
        self.copies: list[Copies] = []
        self.split: list[Sequence[Source]] = []
        self.unchecked: list[str] = []

    def checkpoint(self) -> Checkpoint:
        partitions = self._place("fp32", [c.partitions for c in self.checkpoints])
        frozen = self._place("frozen", [c.frozen for c in self.checkpoints])
        module = self._module({**frozen, **partitions})
        comparing = Comparing(self.folder.folders, self.groups, self.files)
        try:
            self._raise_problems(comparing)
            self._compare(comparing)
        finally:
            comparing.close()
        self.problems.raise_if_any(self._head("do not fit together"))
        return dataclasses.replace(
            self.checkpoints[0],
            groups=self.groups,
            partitions=partitions,
            frozen=frozen,
            module=module,
            notes=(*self.notes, *self.settling.notes(), *self._own_notes()),
            **united(self.checkpoints),
        )

    def _head(self, what: str) -> str:
        return f"{self.folder.path}: the shards of {len(self.files)} tensor-parallel ranks {what}"

    def _place(self, what: str, by_rank: Sequence[Mapping[str, Source]]) -> dict[str, Source]:
        """Merge the tensors of one place, in the first rank's order."""
        merged = {}
        for name in dict.fromkeys(name for sources in by_rank for name in sources):
            found = [sources.get(name) or self._empty(name, r) for r, sources in enumerate(by_rank)]
            shards = [shard for shard in found if shard is not None]
            if len(shards) < len(found):
                rank = found.index(None)
                having = next(r for r, shard in enumerate(found) if shard is not None)
                self.problems.add(
                    f"{name}: has {what} values on other tensor ranks ({self.files[having]}), but "
                    f"not on rank {rank} ({self.files[rank]})"
                )
                continue
            source = self._merged(name, shards, is_buffer=False, compared=True)
            if source is not None:
                merged[name] = source
        return merged

    def _empty(self, name: str, rank: int) -> Source | None:
        """Give a rank's shard of no elements, which is in no param group."""
        key = self.checkpoints[rank].module.get(name)
        found = self.checkpoints[rank].frozen.get(name) or (key.source if key else None)
        return found if found is not None and not found.num_numel else None

    def _module(self, stored: Mapping[str, Source]) -> dict[str, ModuleKey]:
        keys = {}
        for name, key in self.checkpoints[0].module.items():
            own = [c.module[name].source for c in self.checkpoints]
            shards = [source for source in own if source is not None]
            shape, source = key.shape, None
            if len(shards) == len(own):
                compared = name not in stored
                source = self._merged(name, shards, is_buffer=key.is_buffer, compared=compared)
                shape = shape if source is None else source.shape
            elif shards and name not in stored:
                self.problems.add(f"{name}: has values in `module` on some tensor ranks only")
            identity = identity_of(self.checkpoints, name)
            keys[name] = ModuleKey(shape, identity, source, key.is_buffer)
        return keys

    def _merged(
        self, name: str, shards: Sequence[Source], *, is_buffer: bool, compared: bool
    ) -> Source | None:
        """Merge one tensor; what goes wrong is noted and gives ``None``."""
        dtypes = {shard.dtype.name for shard in shards if shard.num_numel}
        if len(dtypes) > 1:
            self.problems.add(f"{name}: is {' and '.join(sorted(dtypes))} on different ranks")
            return None
        rule = self._rule(name, shards, is_buffer=is_buffer)
        if rule is None:
            return None
        try:
            merged = rule.merge([shard.shape for shard in shards])
            source = source_of(merged, shards)
            copies = [_copies(name, rule, pieces, shards) for pieces in shared(merged)]
        except DoesNotFit as error:
            self.problems.add(f"{name}: by {rule.said_by} it {error}")
            return None
        self.settling.check_against_config(name, source.shape, self.problems)
        if compared:
            self.copies += copies
            if not merged.whole and not copies:
                self.split.append(shards)
            if isinstance(rule.layout, Replicated) and rule.layout.take_rank is not None:
                self.unchecked.append(name)
        return source

    def _rule(self, name: str, shards: Sequence[Source], *, is_buffer: bool) -> Rule | None:
        names = self.classes.get(name, (name,))
        if names not in self.rules:
            self.rules[names] = None
            known = Shards(names, tuple(shard.shape for shard in shards), is_buffer)
            try:
                rule = self.rules[names] = self.settling.rule_for(known)
            except CheckpointError as error:
                self.problems.add(str(error))
                return None
            if rule is None:
                listed = ", ".join(str(list(shape)) for shape in known.shapes)
                hint = self.settling.open_hint(known)
                self.open[name] = f"{name}: shards {listed}{hint}", shards
        return self.rules[names]

    def _raise_problems(self, comparing: Comparing) -> None:
        self.problems.raise_if_any(self._head("cannot be merged"))
        if not self.open:
            return
        lines = []
        for line, shards in self.open.values():
            equal = len({shard.shape for shard in shards}) == 1 and comparing.are_equal(shards)
            lines.append(f"{line}{'; equal on all ranks: probably replicated' if equal else ''}")
        what = (
            f"leave {counted(len(lines), 'tensor', 'tensors')} "
            "open: nothing says how they go together"
        )
        advice = f"{_ADVICE}. {self.settling.config_hint()}".strip()
        raise CheckpointError(listing(self._head(what), lines, advice))

    def _compare(self, comparing: Comparing) -> None:
        for copies in self.copies:
            comparing.check(copies, self.problems)
        if comparing.unseen:
            self.notes.append(
                f"{counted(len(comparing.unseen), 'replica was', 'replicas were')} not "
                "compared over tensor ranks, "
                f"because rank 0 does not see all shards; the first is {comparing.unseen[0]}"
            )
        if not self.problems and (same := comparing.first_copy(self.split)) is not None:
            one, other = (self.files[rank] for rank in same)
            self.problems.add(
                f"{other}: holds the same values as {one} in every one of {len(self.split)} split "
                "tensors; one rank's files are a copy of the other's"
            )

    def _own_notes(self) -> list[str]:
        if not self.unchecked:
            return []
        return [
            f"of {counted(len(self.unchecked), 'tensor', 'tensors')} "
            "one rank's copy was taken as a rule of the user "
            f"says, whatever the others hold; the first is {self.unchecked[0]}"
        ]


def _copies(name: str, rule: Rule, pieces: Sequence[Piece], shards: Sequence[Source]) -> Copies:
    average = isinstance(rule.layout, Replicated) and rule.layout.average
    by_rank = {piece.rank: alone(piece, shards[piece.rank]) for piece in pieces}
    return Copies(name, rule.said_by, average, by_rank)
