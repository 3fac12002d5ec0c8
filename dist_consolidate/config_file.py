"""Options in TOML files: reading them, and writing down what is in force."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.tensor_user import read_toml, rules_from
from dist_consolidate.errors import UsageError
from dist_consolidate.options import Options, make_options

_PATHS = ("tp_rules", "hf_config", "search_dir")
# Two ways to say one thing: whichever is said last holds.
_RULES = ("tp_rules", "tensor_parallel")
_TABLE = "tensor_parallel"


def load_config(path: Path) -> dict[str, Any]:
    """Read options from a TOML file.

    Args:
        path: The file; its keys are the option names, with underscores or hyphens. Paths in it
            start from the folder it lies in.

    Returns:
        Option names with underscores, and their values.

    Raises:
        UsageError: If it cannot be read, is no TOML, or has an unknown key.
    """
    values: dict[str, Any] = {}
    for spelling, value in read_toml(path, "--config").items():
        name = spelling.replace("-", "_")
        if name in values:
            raise UsageError(f"--config {path}: {name} is there in two spellings")
        # Each value on its own: what goes together is known once the command line is added.
        beside = {"format": "bin"} if name == "ties" else {}
        try:
            make_options({**beside, name: value})
        except UsageError as error:
            raise UsageError(f"--config {path}: {error}") from error
        if name == _TABLE:
            rules_from(value, f"--config {path}")
        values[name] = _from_folder(path.parent, value) if name in _PATHS else value
    if all(name in values for name in _RULES):
        raise UsageError(
            f"--config {path}: has both tp_rules and [[tensor_parallel.rule]]; keep one of them"
        )
    return values


def _from_folder(folder: Path, value: Any) -> Any:  # noqa: ANN401 - a path or a list of them
    if isinstance(value, str):
        return os.path.join(folder, value)  # noqa: PTH118 - a trailing slash means something
    return [_from_folder(folder, item) for item in value]


@dataclasses.dataclass(frozen=True, slots=True)
class InForce:
    """The options of a run and where each came from.

    Attributes:
        options: The options.
        origins: For each one that is not a default: its file, or ``command line``.
    """

    options: Options
    origins: Mapping[str, str]


def combine(files: Sequence[Path], given: Mapping[str, Any]) -> InForce:
    """Put configuration files and the command line together; what comes later holds.

    A list is replaced as a whole.

    Args:
        files: Configuration files in the order they were named.
        given: What stands on the command line.

    Returns:
        What is in force.

    Raises:
        UsageError: If a file or a value is wrong, or values do not go together.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    layers = [(str(path), load_config(path)) for path in files]
    for origin, layer in (*layers, ("command line", given)):
        if any(name in layer for name in _RULES):
            for name in _RULES:
                values.pop(name, None)
                origins.pop(name, None)
        values.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    return InForce(make_options(values), origins)


def as_toml(in_force: InForce) -> str:
    """Write what is in force as TOML that ``--config`` reads back.

    Args:
        in_force: The options.

    Returns:
        The file's text; a comment behind each value says where it came from. Paths are absolute.

    Raises:
        UsageError: If a value holds what TOML cannot (bytes that are no text).
    """
    text = "\n".join(_lines(in_force)) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"--print-config: TOML cannot hold {error.object!r}") from error
    return text


def _lines(in_force: InForce) -> Iterator[str]:
    options, tables = in_force.options, []
    for field in dataclasses.fields(Options):
        name, value = field.name, getattr(options, field.name)
        origin = in_force.origins.get(name, "default")
        if value is None:
            # TOML knows no null; an option that stays away has its default.
            yield f"# {name} is not set  # {origin}"
        elif name == _TABLE:
            tables = list(_tables(value["rule"], origin))
        else:
            if name in _PATHS:
                value = _absolute(value)
            yield f"{name} = {_toml(value)}  # {_one_line(origin)}"
    yield from tables


def _tables(rules: Sequence[Mapping[str, Any]], origin: str) -> Iterator[str]:
    for rule in rules:
        yield ""
        yield f"[[{_TABLE}.rule]]  # {_one_line(origin)}"
        yield from (f"{key} = {_toml(value)}" for key, value in rule.items())


def _absolute(value: Any) -> Any:  # noqa: ANN401 - a path or a list of them
    if isinstance(value, str):
        return os.path.join(os.getcwd(), value)  # noqa: PTH109, PTH118 - "." and "/" stay
    return [_absolute(item) for item in value]


def _one_line(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", "?")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for one character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value)
