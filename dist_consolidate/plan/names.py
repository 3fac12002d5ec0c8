"""New names for the result: prefixes taken off, patterns replaced, and never two of one name.

Only the output's names change. What the user says of keys (``--tie``, ``--allow-missing``) and what
the notes say of them are names in the checkpoint.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from dist_consolidate.errors import UsageError, listing
from dist_consolidate.plan.resolve import Resolution


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """The output's names.

    Attributes:
        new: Name in the checkpoint to name in the output, of every key that gets another one.
        notes: What the report must say of it.
    """

    new: dict[str, str]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> str:
        """Give a key's name in the output."""
        return self.new.get(name, name)


def output_names(
    resolution: Resolution, strip_prefix: Sequence[str], rename: Sequence[tuple[str, str]]
) -> Names:
    """Name every key of the checkpoint for the output.

    Args:
        resolution: What becomes of every key; those left out are named, too, for the report.
        strip_prefix: Prefixes to take off, one after another, each once.
        rename: Pairs of pattern and replacement for :func:`re.sub`, applied in order after that.

    Returns:
        The names.

    Raises:
        UsageError: If a name becomes empty, or two keys would get one name; all of them are
            listed.
    """
    names = [*(t.name for t in resolution.tensors), *resolution.ties, *resolution.left_out]
    new = {name: name for name in names}
    notes = []
    for flag, text, change in _steps(strip_prefix, rename):
        hits = 0
        for name, current in new.items():
            new[name], found = change(current)
            hits += found
        if not hits:
            notes.append(f"{flag} {text} fits no name of the checkpoint")
    changed = {old: name for old, name in new.items() if name != old}
    if changed:
        notes.append(
            f"{len(changed)} of {len(new)} names were changed as asked; consolidation.json has "
            "both, and the notes speak of the names in the checkpoint"
        )
    _refuse_bad(new)
    return Names(changed, tuple(notes))


_Change = Callable[[str], tuple[str, bool]]


def _steps(
    strip_prefix: Sequence[str], rename: Sequence[tuple[str, str]]
) -> Iterable[tuple[str, str, _Change]]:
    """Give every change in order: its option as written, and what it makes of a name."""
    for prefix in strip_prefix:
        yield "--strip-prefix", prefix, _stripper(prefix)
    for pattern, replacement in rename:
        yield "--rename", f"{pattern}={replacement}", _replacer(pattern, replacement)


def _stripper(prefix: str) -> _Change:
    return lambda name: (name.removeprefix(prefix), name.startswith(prefix))


def _replacer(pattern: str, replacement: str) -> _Change:
    compiled = re.compile(pattern)

    def change(name: str) -> tuple[str, bool]:
        text, count = compiled.subn(replacement, name)
        return text, bool(count)

    return change


def _refuse_bad(new: Mapping[str, str]) -> None:
    by_new: dict[str, list[str]] = {}
    for old, name in new.items():
        by_new.setdefault(name, []).append(old)
    wrong = [
        f"{' and '.join(old)} would get the name {name}"
        for name, old in by_new.items()
        if len(old) > 1
    ]
    wrong += [f"{old} would get an empty name" for old in by_new.get("", ())]
    if wrong:
        raise UsageError(
            listing(
                "--strip-prefix and --rename leave names that cannot be written",
                wrong,
                "Make the patterns narrower (^ and $ anchor them).",
            )
        )


def renamed(resolution: Resolution, names: Names) -> Resolution:
    """Give a resolution whose keys have the output's names.

    Args:
        resolution: The resolution, in the checkpoint's names.
        names: The names.

    Returns:
        The same data under new names; its notes speak of the checkpoint's.
    """
    if not names.new:
        return resolution
    return dataclasses.replace(
        resolution,
        tensors=tuple(
            dataclasses.replace(t, name=names[t.name], aliases=tuple(names[a] for a in t.aliases))
            for t in resolution.tensors
        ),
        ties={
            names[alias]: dataclasses.replace(tie, holder=names[tie.holder])
            for alias, tie in resolution.ties.items()
        },
        left_out={names[name]: reason for name, reason in resolution.left_out.items()},
    )
