"""The completeness contract: every key of the model resolves to data, or the plan is refused.

A key resolves to, in this order: its fp32 partition, its frozen fragments, a tie to a key that
holds data, its own full tensor in ``module``. (A tie found by storage record comes before the
tensor in ``module``, because that tensor is then the 16-bit rounding of the holder's master.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase

from dist_consolidate.checkpoint.model import Checkpoint, Source
from dist_consolidate.checkpoint.unpickle import ODD_TENSOR
from dist_consolidate.errors import CheckpointError, UsageError, listing
from dist_consolidate.plan.ties import Tie, TieMap, build_tie_map
from dist_consolidate.units import counted


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """A name that holds data, and those that stand for the same.

    Attributes:
        name: The name that holds the data.
        source: Where the data lies.
        aliases: Names tied to it, in the model's order.
    """

    name: str
    source: Source
    aliases: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Resolution:
    """What becomes of every key.

    Attributes:
        tensors: Data holders in flat order: partitions, frozen, the rest in the model's order.
        ties: All ties that are in force.
        left_out: Keys that are not in the result, each with the reason.
        notes: What was assumed, inferred or not followed.
    """

    tensors: tuple[Resolved, ...]
    ties: dict[str, Tie]
    left_out: dict[str, str]
    notes: tuple[str, ...]


def resolve(
    checkpoint: Checkpoint,
    *,
    user_ties: Sequence[tuple[str, str]] = (),
    allow_missing: Sequence[str] = (),
    exclude_frozen: bool = False,
) -> Resolution:
    """Find the data of every key of the model.

    Args:
        checkpoint: The metadata.
        user_ties: Pairs of alias and source.
        allow_missing: Glob patterns of keys that may be left out if they resolve to nothing.
        exclude_frozen: Leave frozen parameters out.

    Returns:
        The resolution.

    Raises:
        CheckpointError: If keys resolve to nothing, or ties contradict; every such key is named.
        UsageError: If a tie the user asked for cannot be.
    """
    ties = build_tie_map(checkpoint, dict(user_ties))
    _raise_conflicts(checkpoint, ties, dict(user_ties))
    resolver = _Resolver(checkpoint, ties, allow_missing)
    left_out = {**resolver.left_out, **ties.excluded}
    notes = [*checkpoint.notes, *ties.notes, *resolver.notes]
    frozen, note = _frozen_names(checkpoint, resolver.sources) if exclude_frozen else (set(), "")
    notes += [note] if note else []
    tied: dict[str, list[str]] = {}
    for alias, tie in ties.ties.items():
        tied.setdefault(tie.holder, []).append(alias)
    tensors = []
    for name, source in resolver.sources.items():
        aliases = tuple(tied.get(name, ()))
        if name in frozen:
            left_out |= dict.fromkeys((name, *aliases), "frozen (--exclude-frozen)")
        else:
            tensors.append(Resolved(name, source, aliases))
    in_force = {a: tie for a, tie in ties.ties.items() if a not in left_out}
    return Resolution(tuple(tensors), in_force, left_out, tuple(notes))


def _raise_conflicts(checkpoint: Checkpoint, ties: TieMap, user: dict[str, str]) -> None:
    if not ties.conflicts:
        return
    if user:
        raise UsageError(listing("--tie cannot be followed", ties.conflicts))
    advice = "settle each with --tie NAME=SOURCE"
    head = f"{checkpoint.tag}: ties contradict each other"
    raise CheckpointError(listing(head, ties.conflicts, advice))


class _Resolver:
    """Holders of data in flat order, and what is missing."""

    def __init__(self, ckpt: Checkpoint, ties: TieMap, allow_missing: Sequence[str]) -> None:
        self.notes: list[str] = []
        self.left_out = {
            name: f"is no tensor ({kind})"
            for name, kind in ckpt.odd_entries.items()
            if not kind.startswith(ODD_TENSOR)
        }
        self.sources = dict(ckpt.partitions)
        for name, source in ckpt.frozen.items():
            self.sources.setdefault(name, source)
        unlisted = [name for name in self.sources if name not in ckpt.module]
        if unlisted:
            self.notes.append(
                f"{counted(len(unlisted), 'stored parameter is', 'stored parameters are')} not in "
                f"`module`, but kept, the first is {unlisted[0]}"
            )
        missing = []
        lower = 0
        for name, key in ckpt.module.items():
            if name in self.sources or name in ties.ties or name in ties.excluded:
                continue
            if key.source is None:
                missing.append(name)
                continue
            self.sources[name] = key.source
            lower += (
                name not in ckpt.lost
                and not key.is_buffer
                and key.source.dtype.name in ("float16", "bfloat16")
            )
        self._note_lower(ckpt, lower, bool(unlisted))
        reasons = {name: _why_missing(ckpt, name, unlisted) for name in missing}
        for name, kind in ckpt.odd_entries.items():
            if kind.startswith(ODD_TENSOR) and name not in self.sources:
                reasons[name] = f"a {kind}, which is not read"
        self._judge_missing(ckpt, reasons, allow_missing)

    def _note_lower(self, ckpt: Checkpoint, lower: int, renamed: bool) -> None:
        if lower and ckpt.stage:
            why = "frozen, or never given to the optimizer"
            if renamed:
                why = "frozen, never given to the optimizer, or stored under a name of those"
            self.notes.append(
                f"{counted(lower, 'parameter has', 'parameters have')} "
                f"no fp32 master ({why}); their 16-bit values come from `module`"
            )

    def _judge_missing(
        self, ckpt: Checkpoint, missing: dict[str, str], allowed: Sequence[str]
    ) -> None:
        refused: list[str] = []
        for name, loss in ckpt.lost.items():
            if name in missing or not (name in self.sources or name in ckpt.module):
                self.left_out[name] = loss.why
        for name, reason in missing.items():
            if name in self.left_out:
                continue
            if any(fnmatchcase(name, pattern) for pattern in allowed):
                self.left_out[name] = reason
            else:
                refused.append(name)
        if refused:
            raise CheckpointError(
                listing(
                    f"{ckpt.tag}: {len(refused)} of {len(ckpt.module)} keys of the model have no "
                    "data in this checkpoint",
                    refused,
                    f"{'; '.join(dict.fromkeys(missing[name] for name in refused))}. "
                    "Leave them out with --allow-missing GLOB ('*' for all), or name "
                    "the key that holds the same parameter with --tie NAME=SOURCE",
                )
            )


def _why_missing(ckpt: Checkpoint, name: str, unlisted: Sequence[str]) -> str:
    if ckpt.stage != 3 and ckpt.pipeline_stages > 1 and ckpt.module[name].is_buffer:
        return "a buffer of a pipeline's tied module of which no stage saved a layer file"
    if ckpt.stage != 3:
        return "neither the optimizer states nor `module` hold values of it"
    if ckpt.stage == 3 and not ckpt.saves_frozen:
        return "ZeRO-3 of this release saved no frozen values, or they were excluded when saving"
    if unlisted:
        return (
            f"{len(unlisted)} parameters are stored under names that `module` has not, the first "
            f"is {unlisted[0]!r}: if the model's state_dict renames keys, these may be them, and "
            "are written under the stored names; parameters in no param group are in no file of "
            "ZeRO-3"
        )
    return "in no param group when saved: ZeRO-3 keeps such values in no file"


def _frozen_names(ckpt: Checkpoint, sources: dict[str, Source]) -> tuple[set[str], str]:
    """Tell which data holders are frozen, and how sure that is."""
    frozen = {name for name in ckpt.frozen if name not in ckpt.partitions}
    if ckpt.saves_frozen or ckpt.stage == 3:
        return frozen, ""
    if not ckpt.partitions:
        return frozen, "nothing tells frozen parameters from trained ones here; none was left out"
    unknown = {
        name
        for name, source in sources.items()
        if source.origin == "module" and not ckpt.module[name].is_buffer
    }
    note = (
        f"{counted(len(unknown), 'parameter', 'parameters')} "
        "outside the optimizer left out as frozen; this file does "
        "not tell frozen ones from ones never given to the optimizer"
    )
    return frozen | unknown, note if unknown else ""
