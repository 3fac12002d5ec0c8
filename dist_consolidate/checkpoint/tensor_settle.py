"""Who settles how a tensor's shards go together: the user, the record, or the model's config.

A rule of the user is followed first. Then comes what the checkpoint records, then the full shape
that the model's ``config.json`` gives. Values never settle it: shards that are equal on all ranks
may be replicas, but a split weight that is still all zeros or ones is equal on all ranks too, and
one copy of it would have the wrong shape. Equal shards are therefore only pointed out to the user.
The exception is a scalar, which cannot have been split.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.model_config import find_config, full_shapes, is_unfused
from dist_consolidate.checkpoint.tensor_pieces import DoesNotFit, Shape, places
from dist_consolidate.checkpoint.tensor_recorded import RecordedRules
from dist_consolidate.checkpoint.tensor_rules import Replicated, Rule, Split
from dist_consolidate.checkpoint.tensor_user import UserRule, load_user_rules, rules_from
from dist_consolidate.errors import Caught, CheckpointError, ConsolidateError, Problems
from dist_consolidate.units import counted

# What rules are called that come with the options, rather than in a file of their own.
_GIVEN = "tensor_parallel"


@dataclasses.dataclass(frozen=True, slots=True)
class Merging:
    """What the user says about tensor parallelism.

    Attributes:
        rules_file: A file of rules (see :mod:`dist_consolidate.checkpoint.tensor_user`).
        hf_config: The model's ``config.json``, or the folder that holds it.
        rules: The rules themselves, in place of a file: what stands under ``tensor_parallel``.
    """

    rules_file: Path | None = None
    hf_config: Path | None = None
    rules: Mapping[str, Any] | None = None

    def unused(self) -> list[str]:
        """Give the notes for a checkpoint that is not tensor-parallel."""
        given = (("--tp-rules", self.rules_file), ("--hf-config", self.hf_config))
        reason = "was not read: nothing here is split over tensor-parallel ranks"
        notes = [f"{option} {path} {reason}" for option, path in given if path is not None]
        return notes if self.rules is None else [f"{_GIVEN} {reason}", *notes]


def merging_from(
    rules_file: str | os.PathLike[str] | None,
    hf_config: str | os.PathLike[str] | None,
    rules: Mapping[str, Any] | None = None,
) -> Merging:
    """Make a :class:`Merging` of two paths and rules, any of which may be absent."""
    return Merging(
        None if rules_file is None else Path(rules_file),
        None if hf_config is None else Path(hf_config),
        rules,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Shards:
    """One tensor as the ranks hold it.

    Attributes:
        names: Its name, and those tied to it.
        shapes: Of the shards, in rank order.
        is_buffer: Whether it is a buffer.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    is_buffer: bool


class Settling:
    """Finds the rule for each tensor; remembers which rules of the user were of use."""

    def __init__(
        self, folder: Path, file: str, info: Mapping[str, Any] | None, merging: Merging
    ) -> None:
        """Read the record and the user's rules.

        Args:
            folder: The tag folder.
            file: Where the record stands, for messages.
            info: ``universal_checkpoint_info``.
            merging: What the user says.

        Raises:
            CheckpointError: If the record is damaged.
            UsageError: If the user's files are wrong.
        """
        self.recorded = RecordedRules(file, info)
        self._file = merging.rules_file or _GIVEN
        self._user: tuple[UserRule, ...] = ()
        if merging.rules_file is not None:
            self._user = load_user_rules(merging.rules_file)
        elif merging.rules is not None:
            self._user = rules_from(merging.rules, _GIVEN)
        self._used: set[int] = set()
        self._overruled: dict[str, str] = {}
        self._given, self._folder = merging.hf_config, folder
        self._config: Path | None = None
        self._full: dict[str, Shape] | None = None
        self._config_error = ""
        self._by_config: list[str] = []

    def rule_for(self, shards: Shards) -> Rule | None:
        """Find the rule for a tensor.

        Args:
            shards: The tensor.

        Returns:
            The rule; ``None`` if nobody settles it.

        Raises:
            CheckpointError: If the record of it cannot be followed, and the user gives no rule.
        """
        user = self._by_user(shards)
        if user is None:
            return self._by_record(shards) or self._by_shape(shards)
        recorded: Rule | None = None
        with contextlib.suppress(CheckpointError):  # the user settles what the record leaves open
            recorded = self._by_record(shards)
        if recorded is not None and not _agree(user, recorded, shards.shapes):
            self._overruled[shards.names[0]] = recorded.said_by
        return user

    def open_hint(self, shards: Shards) -> str:
        """Say what is known of a tensor that nobody settles."""
        for name in shards.names:
            if self._full is not None and name in self._full:
                full = self._full[name]
                fused = "" if is_unfused(name) else "; it may be fused of several matrices"
                return f"; {self._config} says {list(full)}{fused}"
        return ""

    def config_hint(self) -> str:
        """Say why no config helped."""
        return self._config_error

    def check_against_config(self, name: str, shape: Shape, problems: Problems) -> None:
        """Compare a merged shape with the config, where the user gave one."""
        if self._given is not None and self._full_shapes().get(name, shape) != shape:
            problems.add(
                f"{name}: its shards make {list(shape)}, but {self._config} says "
                f"{list(self._full_shapes()[name])}"
            )

    def notes(self) -> list[str]:
        """Say what was assumed, what the user overruled, and which rules matched nothing."""
        notes = [
            f"{self._file}: rule {rule.number} ({rule.match}) matches no tensor that an earlier "
            "rule does not match"
            for rule in self._user
            if rule.number not in self._used
        ]
        if self._overruled:
            first, said_by = next(iter(self._overruled.items()))
            notes.append(
                f"{self._file} contradicts the recorded layout of "
                f"{counted(len(self._overruled), 'tensor', 'tensors')}, and was followed; the "
                f"first is {first} (recorded by {said_by})"
            )
        if self._by_config:
            notes.append(
                f"{counted(len(self._by_config), 'tensor was', 'tensors were')} "
                "merged by the full shapes of "
                f"{self._config}, the first is {self._by_config[0]}"
            )
        return notes

    def _by_user(self, shards: Shards) -> Rule | None:
        for rule in self._user:
            if any(rule.matches(name) for name in shards.names):
                self._used.add(rule.number)
                return Rule(rule.layout, f"rule {rule.number} of {self._file}")
        return None

    def _by_record(self, shards: Shards) -> Rule | None:
        for name in shards.names:
            refusal = self.recorded.refusal(name)
            if refusal is not None:
                raise CheckpointError(f"{refusal}; give it with --tp-rules FILE")
        for name in shards.names:
            rule = self.recorded.explicit(name, shards.shapes)
            if rule is not None:
                return rule
        if not any(shards.shapes):
            return Rule(Replicated(), "its shape: a scalar is never split")
        return self.recorded.default(shards.names[0], is_buffer=shards.is_buffer)

    def _by_shape(self, shards: Shards) -> Rule | None:
        full = self._full_shapes()
        for name in shards.names:
            if name not in full:
                continue
            rule = self._fit(name, shards.shapes, full[name])
            if rule is not None:
                self._by_config.append(name)
                return rule
        return None

    def _fit(self, name: str, shapes: Sequence[Shape], full: Shape) -> Rule | None:
        said_by = f"the full shape in {self._config}"
        if all(shape == full for shape in shapes):
            return Rule(Replicated(), said_by)
        if not is_unfused(name) or any(len(shape) != len(full) for shape in shapes):
            return None
        fitting = [
            dim
            for dim in range(len(full))
            if sum(shape[dim] for shape in shapes) == full[dim]
            and all((*s[:dim], *s[dim + 1 :]) == (*full[:dim], *full[dim + 1 :]) for s in shapes)
        ]
        return Rule(Split(fitting[0]), said_by) if len(fitting) == 1 else None

    def _full_shapes(self) -> dict[str, Shape]:
        if self._full is None:
            self._full = {}
            self._config = self._given or find_config(self._folder)
            if self._config is not None:
                with (caught := Caught()):
                    self._full = full_shapes(self._config)
                self._note_config_error(caught.error)
        return self._full

    def _note_config_error(self, error: Exception | None) -> None:
        # A config that was only found lying there may be of no use; one that was given must be.
        if error is not None and (self._given or not isinstance(error, ConsolidateError)):
            raise error
        self._config_error = "" if error is None else str(error)


def _agree(user: Rule, recorded: Rule, shapes: Sequence[Shape]) -> bool:
    """Tell whether two rules put every element in the same place."""
    if user.layout == recorded.layout:
        return True
    try:
        ours, theirs = user.merge(shapes), recorded.merge(shapes)
    except DoesNotFit:
        return False  # what the user says is checked when it is followed
    return ours.shape == theirs.shape and places(ours) == places(theirs)
