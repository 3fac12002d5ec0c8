"""What a file records beside its tensors, reduced to plain values that can travel between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_consolidate.checkpoint.unpickle import Inert

_MAX_DEPTH = 16
# Containers that share their items unfold without end; a record of every tensor has fewer.
_MAX_VALUES = 1_000_000


class Limit:
    """How many values may still be looked at."""

    def __init__(self, count: int = _MAX_VALUES) -> None:
        """Begin with all of them.

        Args:
            count: How many.
        """
        self._left = count

    def take(self) -> None:
        """Look at one.

        Raises:
            ValueError: If there were too many.
        """
        self._left -= 1
        if self._left < 0:
            raise ValueError("containers inside containers unfold to too many values")


def plain(value: Any) -> Any:  # noqa: ANN401 - whatever the pickle holds
    """Copy mappings, lists, texts and numbers; anything else becomes ``None``.

    An object of a foreign class (DeepSpeed's ``SubparamShape``) becomes the mapping of its fields.

    Args:
        value: What was unpickled; beyond any record's depth nothing is copied.

    Returns:
        Plain values only.

    Raises:
        ValueError: If it unfolds to more values than any record has.
    """
    return _plain(value, 0, Limit())


def _plain(value: Any, depth: int, limit: Limit) -> Any:  # noqa: ANN401
    limit.take()
    if depth > _MAX_DEPTH:
        return None
    if isinstance(value, Inert):
        value = value.state if isinstance(value.state, Mapping) else _items(value)
    if isinstance(value, Mapping):
        return {
            key: _plain(item, depth + 1, limit)
            for key, item in value.items()
            if isinstance(key, str | int)
        }
    if isinstance(value, list | set | frozenset):
        return [_plain(item, depth + 1, limit) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item, depth + 1, limit) for item in value)
    return value if value is None or isinstance(value, str | int | float) else None


def plain_mapping(value: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """Copy a mapping as :func:`plain` does; ``None`` if it is none."""
    found = plain(value)
    return found if isinstance(found, dict) else None


def _items(value: Inert) -> dict[Any, Any] | None:
    """Give the items of an object of a foreign subclass of dict."""
    pairs = [item for item in value.items if isinstance(item, tuple) and len(item) == 2]
    return dict(pairs) if pairs and len(pairs) == len(value.items) else None
