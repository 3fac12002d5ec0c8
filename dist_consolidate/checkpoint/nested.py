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

from dist_consolidate.checkpoint.plain import Limit
from dist_consolidate.checkpoint.unpickle import TensorRef
from dist_consolidate.errors import UnsupportedLayoutError

_MAX_DEPTH = 32


class Nesting:
    """Tells which values of one ``module`` are state dicts themselves."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.limit = Limit()
        # Looked through before, without a tensor in it.
        self._plain: set[int] = set()

    def has(self, name: str, value: Any) -> bool:  # noqa: ANN401 - whatever the pickle holds
        """Whether a value of ``module`` is a state dict; an extra state may hold anything.

        Args:
            name: Its key.
            value: The value.

        Returns:
            True if a tensor is in it.

        Raises:
            ValueError: If looking through takes too long.
        """
        extra = name.endswith("_extra_state")
        return isinstance(value, Mapping) and not extra and self._holds_tensor(value)

    def _holds_tensor(self, tree: Mapping[Any, Any]) -> bool:
        pending: list[Any] = [tree]
        seen: set[int] = set()
        while pending:
            value = pending.pop()
            if isinstance(value, TensorRef):
                return True
            if (
                isinstance(value, Mapping)
                and id(value) not in seen
                and id(value) not in self._plain
            ):
                seen.add(id(value))
                pending.extend(value.values())
            self.limit.take()
        self._plain |= seen
        return False


def flattened(module: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """Flatten a nested state dict.

    Args:
        module: What was pickled as ``module``.

    Returns:
        Dotted names and their values; ``None`` if it is not nested, or cannot be flattened.
    """
    nesting = Nesting()
    if not any(isinstance(name, str) and nesting.has(name, v) for name, v in module.items()):
        return None
    found: dict[Any, Any] = {}
    for name, value in _entries(module, "", 0, nesting):
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


def _entries(
    tree: Mapping[Any, Any], prefix: str, depth: int, nesting: Nesting
) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        nesting.limit.take()
        if nesting.has(name, value) and depth < _MAX_DEPTH:
            yield from _entries(value, f"{name}.", depth + 1, nesting)
        else:
            yield name, value
