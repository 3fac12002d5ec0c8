"""A restricted unpickler: tensors and plain containers are built, everything else stays inert.

No class or function that a pickle names is ever imported or called. Tensors become
:class:`TensorRef`, which say where the data lies without reading it; any other class becomes a
subclass of :class:`Inert` that keeps constructor arguments and state readable, so that zero stage
enums, loss scalers and argparse namespaces can be looked at without DeepSpeed or the training
project being installed.

Source for what torch pickles: ``torch/_utils.py`` (the ``_rebuild_*`` functions) and
``torch/serialization.py`` (persistent ids of storages).
"""

from __future__ import annotations

import collections
import dataclasses
import io
import pickle
import re
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

from dist_consolidate.dtypes import BY_NAME, BY_STORAGE_CLASS, UINT8, DType

# How the name of a stand-in begins that stands for a tensor which cannot be read.
ODD_TENSOR = "tensor"
_SPECIAL_REBUILDS = (
    "_rebuild_sparse_tensor",
    "_rebuild_nested_tensor",
    "_rebuild_meta_tensor_no_storage",
    "_rebuild_qtensor",
    "_rebuild_wrapper_subclass",
    "_rebuild_device_tensor_from_numpy",
    "_rebuild_device_tensor_from_cpu_tensor",
)


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
        _refuse_state(self, state)


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
        _refuse_state(self, state)


class _Ordered(collections.OrderedDict[Any, Any]):
    """An ordered dictionary whose pickled attributes cannot hide its methods."""

    def __setstate__(self, state: object) -> None:
        """Keep ``_metadata``, which torch pickles with a state dict, and nothing else."""
        if isinstance(state, dict) and "_metadata" in state:
            self._metadata = state["_metadata"]


def _refuse_state(_self: object, _state: object) -> None:
    """Refuse to let a pickle rebuild what the unpickler itself is made of."""
    raise pickle.UnpicklingError("the pickle tries to change a tensor or a built-in name")


class Inert:
    """Stand-in for an object of any foreign class; keeps what the pickle says about it.

    Attributes:
        args: Positional arguments it was to be constructed with.
        state: The state it was to be given (usually its ``__dict__``).
        items: Elements appended or set, for subclasses of list and dict.
    """

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


class _Known:
    """A name the unpickler knows: a function, an element type or a storage class.

    A pickle can hold it and call it, but not look into it or change it.
    """

    __slots__ = ("meaning",)

    def __init__(self, meaning: Any) -> None:  # noqa: ANN401
        object.__setattr__(self, "meaning", meaning)

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401
        if not callable(self.meaning):
            raise pickle.UnpicklingError("an element type is called")
        return self.meaning(*args)

    def __eq__(self, other: object) -> bool:
        return bool(self.meaning == (other.meaning if isinstance(other, _Known) else other))

    def __hash__(self) -> int:
        return hash(self.meaning)

    def __setattr__(self, _name: str, value: object) -> None:
        _refuse_state(self, value)

    def __setstate__(self, state: object) -> None:
        _refuse_state(self, state)

    meaning: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: DType | None


def _shape(value: Any) -> tuple[int, ...]:  # noqa: ANN401
    shape = tuple(value)
    if not all(type(size) is int and size >= 0 for size in shape):
        text = reprlib.repr(shape)
        raise pickle.UnpicklingError(f"a tensor has the shape or stride {text}")
    return shape


def _rebuild_tensor(
    storage: Any,  # noqa: ANN401 - a StorageRef, or what stands for a kind that is not known
    offset: int,
    size: Iterable[int],
    stride: Iterable[int],
    _requires_grad: object = False,
    _hooks: object = None,
    metadata: object = None,
    *_rest: object,
) -> Any:  # noqa: ANN401
    shape, steps = _shape(size), _shape(stride)
    flags = metadata if isinstance(metadata, dict) else {}
    if flags.get("conj") or flags.get("neg"):
        return odd_tensor("a conjugated or negated view")
    if isinstance(storage, Inert):
        return odd_tensor(storage.foreign_name)
    if not isinstance(storage, StorageRef) or type(offset) is not int or offset < 0:
        raise pickle.UnpicklingError("a tensor does not look into a storage")
    if len(shape) != len(steps):
        raise pickle.UnpicklingError(f"a tensor has {len(shape)} sizes, {len(steps)} strides")
    return TensorRef(storage, storage.dtype, offset, shape, steps)


def _rebuild_tensor_v3(
    storage: Any,  # noqa: ANN401
    offset: int,
    size: Iterable[int],
    stride: Iterable[int],
    requires_grad: bool,
    hooks: object,
    dtype: Any,  # noqa: ANN401
    metadata: object = None,
    *_rest: object,
) -> Any:  # noqa: ANN401
    if not isinstance(dtype, _Known) or not isinstance(dtype.meaning, DType):
        return odd_tensor("of an element type that is not known")
    built = _rebuild_tensor(storage, offset, size, stride, requires_grad, hooks, metadata)
    if not isinstance(built, TensorRef):
        return built
    return dataclasses.replace(built, dtype=dtype.meaning)


def odd_tensor(kind: str) -> Inert:
    """Stand for a tensor that cannot be read; ``kind`` says why."""
    return _foreign_class(f"{ODD_TENSOR}: {kind}")()


def _rebuild_parameter(data: Any, *_rest: Any) -> Any:  # noqa: ANN401
    return data


def _rebuild_from_type(func: Any, _kind: Any, args: Any, state: Any) -> Any:  # noqa: ANN401
    rebuilds = (_rebuild_tensor, _rebuild_tensor_v3, _rebuild_parameter)
    if not isinstance(func, _Known) or func.meaning not in rebuilds:
        return odd_tensor("of a tensor subclass")
    built = func(*args)
    return dataclasses.replace(built, attributes=state) if isinstance(built, TensorRef) else built


def _reconstructor(cls: Any, *_rest: Any) -> Inert:  # noqa: ANN401
    return cls() if isinstance(cls, type) and issubclass(cls, Inert) else Inert(cls)


def _getattr(owner: Any, name: Any, *_default: Any) -> Any:  # noqa: ANN401
    """Stand for an attribute of a foreign class, which is how nested classes are pickled."""
    if isinstance(owner, type) and issubclass(owner, Inert) and isinstance(name, str):
        return _foreign_class(f"{owner.foreign_name}.{name}")
    return Inert(owner, name)


def _foreign_class(full_name: str) -> type[Inert]:
    return type("Inert", (Inert,), {"foreign_name": full_name})


def _odd_rebuild(kind: str) -> Callable[..., Inert]:
    def rebuild(*_args: object) -> Inert:
        return odd_tensor(kind)

    return rebuild


def _encode(text: Any, encoding: Any = "utf-8") -> Any:  # noqa: ANN401
    plain = isinstance(text, str) and encoding in ("latin1", "latin-1", "utf-8")
    return text.encode(encoding) if plain else Inert(text, encoding)


def _defaultdict(*_args: Any) -> dict[Any, Any]:  # noqa: ANN401
    return {}


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Ordered,
    ("collections", "defaultdict"): _defaultdict,
    ("torch", "Size"): _shape,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch.storage", "UntypedStorage"): _StorageType(None),
    ("torch", "UntypedStorage"): _StorageType(None),
    ("_codecs", "encode"): _encode,
    ("builtins", "getattr"): _getattr,
    ("__builtin__", "getattr"): _getattr,
    ("copyreg", "_reconstructor"): _reconstructor,
    ("copy_reg", "_reconstructor"): _reconstructor,
}
for _special in _SPECIAL_REBUILDS:
    _kind_of = _special.removeprefix("_rebuild_").replace("_", " ")
    _KNOWN["torch._utils", _special] = _odd_rebuild(_kind_of)
for _builtins in ("builtins", "__builtin__"):
    for _kind in (set, frozenset, list, dict, tuple):
        _KNOWN[_builtins, _kind.__name__] = _kind
for _class_name, _dtype in BY_STORAGE_CLASS.items():
    _KNOWN["torch", _class_name] = _KNOWN["torch.cuda", _class_name] = _StorageType(_dtype)
for _dtype in BY_NAME.values():
    _KNOWN["torch", _dtype.name] = _dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream, encoding="utf-8")
        self._foreign: dict[tuple[str, str], type[Inert]] = {}
        self.storages: dict[str, StorageRef] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:  # noqa: ANN401
        known = _KNOWN.get((module_name, global_name))
        if known is not None:
            return known if isinstance(known, type) else _Known(known)
        key = (module_name, global_name)
        if key not in self._foreign:
            full_name = f"{module_name}.{global_name}"
            self._foreign[key] = _foreign_class(full_name)
        return self._foreign[key]

    def persistent_load(self, pid: Any) -> Any:  # noqa: ANN401
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
            # Before 1.6 torch stored the class of an nn.Module so, with its source text.
            return pid[1]
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise pickle.UnpicklingError("an object is stored outside the file")
        _, kind, key, location, num_numel = pid[:5]
        if len(pid) > 5 and pid[5] is not None:
            raise pickle.UnpicklingError("a storage is a part of another one")
        known = self.storages.get(key) if isinstance(key, str) else None
        if known is not None:
            return known
        if isinstance(kind, type) and issubclass(kind, Inert):
            return odd_tensor(kind.foreign_name)
        kind = kind.meaning if isinstance(kind, _Known) else None
        if not isinstance(kind, _StorageType) or not isinstance(key, str):
            raise pickle.UnpicklingError("a storage is none")
        if type(num_numel) is not int or num_numel < 0:
            raise pickle.UnpicklingError(f"storage {key} claims {num_numel!r} elements")
        storage = StorageRef(key, kind.dtype or UINT8, num_numel, _device(location))
        self.storages[key] = storage
        return storage


_CUDA = re.compile(r"cuda:(\d{1,4})")


def _device(location: Any) -> int | None:  # noqa: ANN401
    found = _CUDA.fullmatch(location) if isinstance(location, str) else None
    return int(found[1]) if found else None


# What the pickle machine itself raises on damaged or hostile input.
_BAD_PICKLE: tuple[type[Exception], ...] = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def loads(data: bytes) -> Any:  # noqa: ANN401
    """Unpickle without importing or running anything the pickle names.

    Args:
        data: The bytes of an archive's ``data.pkl``.

    Returns:
        Plain containers and scalars, :class:`TensorRef` for tensors, :class:`Inert` for the rest.

    Raises:
        ValueError: If the bytes are no well-formed pickle of that kind.
    """
    return load_stream(io.BytesIO(data))[0]


def load_stream(stream: BinaryIO) -> tuple[Any, dict[str, StorageRef]]:
    """Unpickle from a file that goes on behind the pickle (see :func:`loads`).

    Args:
        stream: The file; afterwards it stands behind the pickle.

    Returns:
        The object, and the storages it refers to, by key.

    Raises:
        ValueError: If there is no well-formed pickle of that kind.
    """
    unpickler = _Unpickler(stream)
    try:
        return unpickler.load(), unpickler.storages
    except _BAD_PICKLE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
