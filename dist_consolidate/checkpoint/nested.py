"""Megatron's nested ``module``: dictionaries in dictionaries, for the parts of the model.

Without a pipeline engine, Megatron-DeepSpeed saves ``state_dict_for_save_checkpoint()``, whose
levels are the model's attributes (``language_model``, ``embedding``, ``word_embeddings``, ...), so
that the path of an entry, with dots, is the parameter's name. ``param_shapes`` has those names and
is the test of it. Other models nest otherwise (``{"model": state_dict, "version": 3}``): without
tensor parallelism, names need not be the parameters' (see :mod:`.renamed`).

Source: Megatron-DeepSpeed's ``megatron/model/language_model.py`` and ``training.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.unpickle import TensorRef
from dist_consolidate.errors import UnsupportedLayoutError

_MAX_DEPTH = 32


def is_nested(name: str, value: Any) -> bool:  # noqa: ANN401 - whatever the pickle holds
    """Whether a value of ``module`` is a state dict itself; an extra state may hold anything."""
    extra = name.endswith("_extra_state")
    return isinstance(value, Mapping) and not extra and _holds_tensor(value)


def flattened(module: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """Flatten a nested state dict.

    Args:
        module: What was pickled as ``module``.

    Returns:
        Dotted names and their values; ``None`` if it is not nested, or cannot be flattened.
    """
    nested = any(isinstance(name, str) and is_nested(name, v) for name, v in module.items())
    if not nested:
        return None
    found: dict[Any, Any] = {}
    for name, value in _entries(module, "", 0):
        if name in found:
            return None
        found[name] = value
    return found


def check_names(path: Path, names: Collection[str], known: Collection[str] | None) -> None:
    """Check that the dotted names are the parameters' names.

    Args:
        path: The file.
        names: Those of the flattened ``module``.
        known: Those in ``param_shapes``, where the file has it.

    Raises:
        UnsupportedLayoutError: If a parameter has another name, or nothing tells.
    """
    unknown = sorted(set(known or ()) - set(names))
    if known is None or unknown:
        found = f"names {unknown[0]!r}, which is" if unknown else "is not there, so nothing tells"
        ending = "not among them" if unknown else "the parameters' names"
        raise UnsupportedLayoutError(
            f"{path}: `module` is nested, as Megatron-DeepSpeed writes it, but param_shapes "
            f"{found} {ending}; this version reads nested state dicts only where the dotted path "
            "of each entry is the parameter's name"
        )


def _entries(tree: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if is_nested(name, value) and depth < _MAX_DEPTH:
            yield from _entries(value, f"{name}.", depth + 1)
        else:
            yield name, value


def _holds_tensor(tree: Mapping[Any, Any]) -> bool:
    pending: list[Any] = [tree]
    seen = set()
    while pending:
        value = pending.pop()
        if isinstance(value, TensorRef):
            return True
        if isinstance(value, Mapping) and id(value) not in seen:
            seen.add(id(value))
            pending.extend(value.values())
    return False
