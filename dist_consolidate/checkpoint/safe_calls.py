"""Names a pickle may call, and keys it may use: neither may cost more than the pickle is long."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from dist_consolidate.checkpoint.stand_ins import (
    Inert,
    Ordered,
    StorageRef,
    TensorRef,
    refuse_state,
)
from dist_consolidate.dtypes import DType


class Budget:
    """What calls may copy: a few bytes can ask for a copy of something long, again and again."""

    def __init__(self, num_pickle_bytes: int) -> None:
        """Allow as much as an honest pickle of that length may need."""
        self.left = 16 * num_pickle_bytes + (1 << 20)

    def take(self, args: Sequence[object]) -> None:
        """Pay for a call.

        Raises:
            UnpicklingError: If nothing is left.
        """
        self.left -= 1 + sum(len(arg) for arg in args if isinstance(arg, _SIZED))
        if self.left < 0:
            raise pickle.UnpicklingError("it asks for too many copies")


_SIZED = (tuple, list, str, bytes, bytearray, dict, set, frozenset)


class Known:
    """A name the unpickler knows: a function, an element type or a storage class.

    A pickle can hold it and call it, but not look into it or change it.
    """

    __slots__ = ("budget", "meaning")

    def __init__(self, meaning: Any, budget: Budget) -> None:  # noqa: ANN401 - anything
        """Wrap it."""
        object.__setattr__(self, "meaning", meaning)
        object.__setattr__(self, "budget", budget)

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401
        """Call what can be called, within the budget."""
        if not callable(self.meaning):
            raise pickle.UnpicklingError("an element type is called")
        self.budget.take(args)
        return self.meaning(*args)

    def __eq__(self, other: object) -> bool:
        """Be equal to what it means."""
        return bool(self.meaning == (other.meaning if isinstance(other, Known) else other))

    def __hash__(self) -> int:
        """Hash as what it means."""
        return hash(self.meaning)

    def __setattr__(self, _name: str, value: object) -> None:
        """Refuse any change."""
        refuse_state(self, value)

    def __setstate__(self, state: object) -> None:
        """Refuse a state from a pickle."""
        refuse_state(self, state)

    meaning: Any
    budget: Budget


_KEY_TYPES = (str, bytes, int, float, type(None), Inert, Known, StorageRef, frozenset, type, DType)
_MAX_KEY_PARTS = 64
# Hashes of integers beyond here, and those of tuples and sets, can be chosen so that all are the
# same, and many of them take minutes. No state that is read has such keys: so many are kept.
_MAX_INTEGER = 1 << 60
_MAX_CHOSEN = 4000


def _is_kept(key: Any, held: Any) -> bool:  # noqa: ANN401 - whatever the pickle holds
    """Refuse a key whose hash would take long; tell whether another one is kept."""
    waiting, num_parts, chosen = [key], 0, type(key) in (tuple, frozenset)
    while waiting:
        part = waiting.pop()
        num_parts += 1
        if type(part) is tuple:
            waiting += part[:_MAX_KEY_PARTS]
        elif isinstance(part, int):
            chosen |= abs(part) >= _MAX_INTEGER
        elif isinstance(part, TensorRef):
            num_parts += 0 if part.attributes is None else _MAX_KEY_PARTS
        elif not isinstance(part, _KEY_TYPES):
            raise pickle.UnpicklingError(f"a dictionary has a {type(part).__name__} as a key")
        if num_parts > _MAX_KEY_PARTS:
            raise pickle.UnpicklingError("a dictionary has a key of too many parts")
    return not chosen or len(held.items if isinstance(held, Inert) else held) < _MAX_CHOSEN


def _fill(target: Any, pairs: Iterable[tuple[Any, Any]]) -> Any:  # noqa: ANN401
    """Set items of a dictionary, or of what stands for one."""
    if not isinstance(target, dict | Inert):
        raise pickle.UnpicklingError(f"items of a {type(target).__name__} are set")
    for key, value in pairs:
        if type(key) is str or _is_kept(key, target):
            target[key] = value
    return target


def _pairs(flat: Any) -> Iterable[tuple[Any, Any]]:  # noqa: ANN401
    if type(flat) is not tuple or len(flat) % 2:
        raise pickle.UnpicklingError("a dictionary has keys without values")
    return zip(flat[::2], flat[1::2], strict=True)


def _filled(target: set[Any], items: Any) -> set[Any]:  # noqa: ANN401
    """Add items to a set, once they are known to be plain."""
    if not isinstance(items, tuple | list | set | frozenset):
        raise pickle.UnpicklingError(f"a set is made of a {type(items).__name__}")
    for item in items:
        if _is_kept(item, target):
            target.add(item)
    return target


def asked(pid: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Do what :mod:`.opcodes` puts in the place of opcodes that hash."""
    if len(pid) == 3:
        return _fill(pid[0], ((pid[1], pid[2]),))
    *target, items = pid
    wrapped = type(items) is tuple and len(items) == 1
    if not target:
        return frozenset(_filled(set(), items[0])) if wrapped else _fill({}, _pairs(items))
    if not wrapped:
        return _fill(target[0], _pairs(items))
    if type(target[0]) is not set:
        raise pickle.UnpicklingError("items are added to what is no set")
    return _filled(target[0], items[0])


def ordered_dict(*args: Any) -> dict[Any, Any]:  # noqa: ANN401
    """Make an ordered dictionary of mappings or pairs."""
    made: dict[Any, Any] = Ordered()
    for arg in args:
        _fill(made, arg.items() if isinstance(arg, dict) else ((k, v) for k, v in arg))
    return made


def plain_dict(*args: Any) -> dict[Any, Any]:  # noqa: ANN401
    """Make a dictionary of mappings or pairs."""
    return dict(ordered_dict(*args))


def make_set(items: Any = ()) -> set[Any]:  # noqa: ANN401
    """Make a set."""
    return _filled(set(), items)


def make_frozenset(items: Any = ()) -> frozenset[Any]:  # noqa: ANN401
    """Make a frozen set."""
    return frozenset(_filled(set(), items))
