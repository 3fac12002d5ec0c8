"""The user's rules for tensor parallelism: a TOML file (``--tp-rules``), or a table of one."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.tensor_rules import Layout, Replicated, Split
from dist_consolidate.errors import UsageError

_MAX_BYTES = 16 << 20
_KINDS = ("dim", "replicated", "average")
_KEYS = {"match", *_KINDS, "sub_params", "vocab_size", "take_rank"}
_HELP = (
    "a rule has `match` (a glob of tensor names) and one of `dim = N` (with `sub_params = COUNT` "
    "or `[sizes]` for fused tensors), `replicated = true` or `average = true`; `vocab_size = N` "
    "cuts padded rows, `take_rank = N` takes one copy of a replicated tensor"
)


@dataclasses.dataclass(frozen=True, slots=True)
class UserRule:
    """One rule of the file.

    Attributes:
        number: Its place in the file, from 1.
        match: Glob of tensor names.
        layout: What the shards are to each other.
    """

    number: int
    match: str
    layout: Layout

    def matches(self, name: str) -> bool:
        """Whether it speaks of a tensor."""
        return fnmatchcase(name, self.match)


def load_user_rules(path: Path) -> tuple[UserRule, ...]:
    """Read the file.

    Args:
        path: A TOML file of ``[[tensor_parallel.rule]]`` tables.

    Returns:
        The rules, in the file's order; the first that matches a tensor holds.

    Raises:
        UsageError: If it cannot be read or a rule is wrong; the rule is named.
    """
    tree = read_toml(path, "--tp-rules")
    if set(tree) != {"tensor_parallel"}:
        raise UsageError(
            f"--tp-rules {path}: must hold [[tensor_parallel.rule]] tables and nothing else; "
            f"{_HELP}"
        )
    return rules_from(tree["tensor_parallel"], f"--tp-rules {path}")


def read_toml(path: Path, option: str) -> dict[str, Any]:
    """Read a file that the user names.

    Args:
        path: The file.
        option: The option that names it, for messages.

    Returns:
        What is in it.

    Raises:
        UsageError: If it cannot be read or is no TOML.
    """
    try:
        return tomllib.loads(read_limited(path, option))
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} {path}: is no valid TOML: {error}") from error


def read_limited(path: Path, option: str) -> str:
    """Read a text that the user names; what never ends is none.

    Args:
        path: The file, or what stands for one.
        option: The option that names it, for messages.

    Returns:
        The text.

    Raises:
        UsageError: If it is too long.
        OSError: If it cannot be read.
        ValueError: If it is no UTF-8.
    """
    with path.open("rb") as stream:
        data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{option} {path}: is too large (more than {_MAX_BYTES} bytes)")
    return data.decode("utf-8")


def rules_from(section: object, where: str) -> tuple[UserRule, ...]:
    """Take the rules from a table that was read already.

    Args:
        section: What stands under ``tensor_parallel``.
        where: Where it stands, for messages.

    Returns:
        The rules, as :func:`load_user_rules`.

    Raises:
        UsageError: As :func:`load_user_rules`.
    """
    section = section if isinstance(section, Mapping) else {}
    rules = section.get("rule")
    if set(section) != {"rule"} or not rules:
        raise UsageError(
            f"{where}: must hold [[tensor_parallel.rule]] tables and nothing else; {_HELP}"
        )
    if not isinstance(rules, list | tuple) or not all(isinstance(r, Mapping) for r in rules):
        raise UsageError(f"{where}: `rule` must be [[tensor_parallel.rule]] tables")
    return tuple(_rule(where, number, rule) for number, rule in enumerate(rules, 1))


def _rule(given: str, number: int, entry: Mapping[str, Any]) -> UserRule:
    match = entry.get("match")
    where = f"{given}: rule {number} ({match!r})"
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        raise UsageError(f"{where}: has the unknown key {', '.join(unknown)}; {_HELP}")
    if not isinstance(match, str) or not match:
        raise UsageError(f"{where}: has no `match`; {_HELP}")
    for name in ("dim", "vocab_size", "take_rank"):
        value = entry.get(name)
        if value is not None and (type(value) is not int or value < 0):
            raise UsageError(f"{where}: {name} = {value!r} must be a number, 0 or more")
    for name in ("replicated", "average"):
        if name in entry and entry[name] is not True:
            raise UsageError(f"{where}: {name} = {entry[name]!r}: can only be true; {_HELP}")
    if sum(kind in entry for kind in _KINDS) != 1:
        raise UsageError(f"{where}: must have exactly one of {', '.join(_KINDS)}; {_HELP}")
    misplaced = "take_rank" if "dim" in entry else "sub_params"
    if misplaced in entry:
        raise UsageError(f"{where}: {misplaced} does not go with what it says; {_HELP}")
    return UserRule(number, match, _layout(where, entry))


def _layout(where: str, entry: Mapping[str, Any]) -> Layout:
    rows = entry.get("vocab_size")
    if "dim" not in entry:
        return Replicated("average" in entry, entry.get("take_rank"), rows)
    parts = entry.get("sub_params", 1)
    if type(parts) is int and parts > 0:
        return Split(entry["dim"], num_parts=parts, num_rows=rows)
    if isinstance(parts, list) and parts and all(type(p) is int and p > 0 for p in parts):
        return Split(entry["dim"], part_sizes=tuple(parts), num_rows=rows)
    raise UsageError(
        f"{where}: sub_params = {parts!r} must be a count or a list of full sizes, 1 or more"
    )
