"""What takes the place of a pickle's objects: tensors that are not read, others that are inert."""

from __future__ import annotations

import collections
import dataclasses
import pickle
from typing import Any

from dist_consolidate.dtypes import DType


@dataclasses.dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage record of the archive.

    Attributes:
        key: Its name.
        dtype: Element type.
        num_numel: Number of elements.
        device: Index of the CUDA device that its tensors lay on, where they did.
    """

    key: str
    dtype: DType
    num_numel: int
    device: int | None = dataclasses.field(default=None, compare=False)

    def __reduce__(self) -> tuple[type[StorageRef], tuple[Any, ...]]:
        """Travel between processes by the constructor, which is the only way to make one."""
        return StorageRef, (self.key, self.dtype, self.num_numel, self.device)

    def __setstate__(self, state: object) -> None:
        """Refuse a state from a pickle."""
        refuse_state(self, state)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRef:
    """A pickled tensor: a view of a storage record.

    Attributes:
        storage: The record it looks into; tensors that share memory share it.
        dtype: Element type.
        offset_numel: First element, in elements of ``dtype`` from the start of the record.
        shape: Shape.
        stride: Stride in elements.
        attributes: Python attributes that were pickled with it (ZeRO-3's ``ds_id``).
    """

    storage: StorageRef
    dtype: DType
    offset_numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    attributes: Any = None

    def __reduce__(self) -> tuple[type[TensorRef], tuple[Any, ...]]:
        """Travel between processes by the constructor, which is the only way to make one."""
        fields = (self.storage, self.dtype, self.offset_numel, self.shape, self.stride)
        return TensorRef, (*fields, self.attributes)

    def __setstate__(self, state: object) -> None:
        """Refuse a state from a pickle."""
        refuse_state(self, state)


class Ordered(collections.OrderedDict[Any, Any]):
    """An ordered dictionary whose pickled attributes cannot hide its methods."""

    def __setstate__(self, state: object) -> None:
        """Keep ``_metadata``, which torch pickles with a state dict, and nothing else."""
        if isinstance(state, dict) and "_metadata" in state:
            self._metadata = state["_metadata"]


def refuse_state(_self: object, _state: object) -> None:
    """Refuse to let a pickle rebuild what the unpickler itself is made of.

    Raises:
        UnpicklingError: Always.
    """
    raise pickle.UnpicklingError("the pickle tries to change a tensor or a built-in name")


class Inert:
    """Stand-in for an object of any foreign class; keeps what the pickle says about it.

    Attributes:
        args: Positional arguments it was to be constructed with.
        state: The state it was to be given (usually its ``__dict__``).
        items: Elements appended or set, for subclasses of list and dict.
    """

    __slots__ = ("args", "items", "state")
    foreign_name = ""

    def __new__(cls, *args: Any, **_kwargs: Any) -> Inert:  # noqa: ANN401 - anything may come
        """Keep the arguments; construct nothing."""
        self = super().__new__(cls)
        self.args, self.state, self.items = args, None, []
        return self

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401
        """Do nothing."""

    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401
        """Keep the state unread."""
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401
        """Keep an item of a dict subclass."""
        self.items.append((key, value))

    def append(self, value: Any) -> None:  # noqa: ANN401
        """Keep an element of a list subclass."""
        self.items.append(value)

    def __call__(self, *args: Any, **_kwargs: Any) -> Inert:  # noqa: ANN401
        """Stand for what a call of it would give."""
        return Inert(self, *args)

    def attribute(self, name: str) -> Any:  # noqa: ANN401
        """Look an attribute up in the kept state; ``None`` if it is not there."""
        return self.state.get(name) if isinstance(self.state, dict) else None
