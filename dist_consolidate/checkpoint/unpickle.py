"""A restricted unpickler: tensors and plain containers are built, everything else stays inert.

No class or function that a pickle names is ever imported or called. Tensors become
:class:`TensorRef`, which say where the data lies without reading it; any other class becomes a
subclass of :class:`Inert` that keeps constructor arguments and state readable, so that zero stage
enums, loss scalers and argparse namespaces can be looked at without DeepSpeed or the training
project being installed.

What a pickle can make this process do is bounded as well: the machine gets it only after
:mod:`.opcodes` has looked through it, numbers are those of tensors that exist, keys of dictionaries
are plain values, and what is copied or made by calls is counted.

Source for what torch pickles: ``torch/_utils.py`` (the ``_rebuild_*`` functions) and
``torch/serialization.py`` (persistent ids of storages).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import io
import pickle
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from dist_consolidate.checkpoint.opcodes import MAX_PICKLE_BYTES, CutShortError, secured
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


class _Budget:
    """What calls may copy: a few bytes can ask for a copy of something long, again and again."""

    def __init__(self, num_pickle_bytes: int) -> None:
        self.left = 16 * num_pickle_bytes + (1 << 20)

    def take(self, args: Sequence[object]) -> None:
        self.left -= 1 + sum(len(arg) for arg in args if isinstance(arg, _SIZED))
        if self.left < 0:
            raise pickle.UnpicklingError("it asks for too many copies")


_SIZED = (tuple, list, str, bytes, bytearray, dict, set, frozenset)


class _Known:
    """A name the unpickler knows: a function, an element type or a storage class.

    A pickle can hold it and call it, but not look into it or change it.
    """

    __slots__ = ("budget", "meaning")

    def __init__(self, meaning: Any, budget: _Budget) -> None:  # noqa: ANN401
        object.__setattr__(self, "meaning", meaning)
        object.__setattr__(self, "budget", budget)

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401
        if not callable(self.meaning):
            raise pickle.UnpicklingError("an element type is called")
        self.budget.take(args)
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
    budget: _Budget


@dataclasses.dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: DType | None


# What torch allows; numbers beyond 64 bits are no tensor's.
MAX_DIMENSIONS, MAX_NUMEL = 64, (1 << 63) - 1


def is_shape(value: Sequence[Any]) -> bool:
    """Tell whether a sequence can be the shape of a tensor."""
    if len(value) > MAX_DIMENSIONS or any(type(size) is not int for size in value):
        return False
    numel = 1
    for size in value:
        if not 0 <= size <= MAX_NUMEL:
            return False
        numel *= max(size, 1)
    return numel <= MAX_NUMEL


def _size(value: Any) -> tuple[int, ...]:  # noqa: ANN401
    shape = tuple(value)
    if not is_shape(shape):
        raise pickle.UnpicklingError(f"a tensor has the shape {reprlib.repr(shape)}")
    return shape


def _stride(value: Any) -> tuple[int, ...]:  # noqa: ANN401
    steps = tuple(value)
    good = all(type(step) is int and 0 <= step <= MAX_NUMEL for step in steps[:MAX_DIMENSIONS])
    if not good or len(steps) > MAX_DIMENSIONS:
        raise pickle.UnpicklingError(f"a tensor has the stride {reprlib.repr(steps)}")
    return steps


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
    shape, steps = _size(size), _stride(stride)
    flags = metadata if isinstance(metadata, dict) else {}
    if flags.get("conj") or flags.get("neg"):
        return odd_tensor("a conjugated or negated view")
    if isinstance(storage, Inert):
        return odd_tensor(storage.foreign_name)
    whole = type(offset) is int and 0 <= offset <= MAX_NUMEL
    if not isinstance(storage, StorageRef) or not whole:
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


_MAX_NAME_LENGTH = 1000


@functools.lru_cache(maxsize=4096)
def _foreign_class(full_name: str) -> type[Inert]:
    if len(full_name) > _MAX_NAME_LENGTH:
        raise pickle.UnpicklingError(f"a class has a name of {len(full_name)} characters")
    return type("Inert", (Inert,), {"foreign_name": full_name, "__slots__": ()})


def _odd_rebuild(kind: str) -> Callable[..., Inert]:
    def rebuild(*_args: object) -> Inert:
        return odd_tensor(kind)

    return rebuild


def _encode(text: Any, encoding: Any = "utf-8") -> Any:  # noqa: ANN401
    plain = isinstance(text, str) and encoding in ("latin1", "latin-1", "utf-8")
    return text.encode(encoding) if plain else Inert(text, encoding)


def _defaultdict(*_args: Any) -> dict[Any, Any]:  # noqa: ANN401
    return {}


_KEY_TYPES = (str, bytes, float, bool, type(None), Inert, _Known, _StorageType, DType)
# Python spreads integers up to here; larger ones can be chosen so that all fall on one place.
_MAX_KEY = 1 << 60
_MAX_KEY_ITEMS = 64
# The hash of a tuple can be chosen, too; so many that collide take a second.
_MAX_TUPLES = 20_000


def _check_key(key: Any) -> None:  # noqa: ANN401
    """Refuse a key whose hash would take long, or could be the same as that of many others."""
    if type(key) is int and not -_MAX_KEY < key < _MAX_KEY:
        raise pickle.UnpicklingError("a dictionary has a huge number as a key")
    if type(key) is tuple:
        if len(key) > _MAX_KEY_ITEMS or any(isinstance(item, _SIZED_KEYS) for item in key):
            raise pickle.UnpicklingError("a dictionary has a nested or long tuple as a key")
        for item in key:
            _check_key(item)
    elif type(key) is not int and not isinstance(key, _KEY_TYPES) and not isinstance(key, type):
        plain = isinstance(key, TensorRef) and key.attributes is None
        if not plain and not isinstance(key, StorageRef | frozenset):
            raise pickle.UnpicklingError(f"a dictionary has a {type(key).__name__} as a key")


_SIZED_KEYS = (tuple, frozenset)


def _fill(target: Any, pairs: Iterable[tuple[Any, Any]]) -> Any:  # noqa: ANN401
    """Set items of a dictionary, or of what stands for one."""
    if not isinstance(target, dict | Inert):
        raise pickle.UnpicklingError(f"items of a {type(target).__name__} are set")
    for key, value in pairs:
        if type(key) is not str:
            _check_key(key)
            _check_number(key, target)
        target[key] = value
    return target


def _check_number(key: object, held: Any) -> None:  # noqa: ANN401
    if type(key) is tuple and isinstance(held, _SIZED) and len(held) > _MAX_TUPLES:
        raise pickle.UnpicklingError("a dictionary or set has too many tuples as keys")


def _pairs(flat: Any) -> Iterable[tuple[Any, Any]]:  # noqa: ANN401
    if type(flat) is not tuple or len(flat) % 2:
        raise pickle.UnpicklingError("a dictionary has keys without values")
    return zip(flat[::2], flat[1::2], strict=True)


def _checked(items: Any) -> Any:  # noqa: ANN401
    """Give the items of what becomes a set, once they are known to be plain."""
    if not isinstance(items, tuple | list | set | frozenset):
        raise pickle.UnpicklingError(f"a set is made of a {type(items).__name__}")
    for item in items:
        _check_key(item)
        _check_number(item, items)
    return items


def _asked(pid: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Do what :mod:`.opcodes` puts in the place of opcodes that hash."""
    if len(pid) == 3:
        return _fill(pid[0], ((pid[1], pid[2]),))
    *target, items = pid
    wrapped = type(items) is tuple and len(items) == 1
    if not target:
        return frozenset(_checked(items[0])) if wrapped else _fill({}, _pairs(items))
    if not wrapped:
        return _fill(target[0], _pairs(items))
    if type(target[0]) is not set:
        raise pickle.UnpicklingError("items are added to what is no set")
    for item in _checked(items[0]):
        _check_number(item, target[0])
        target[0].add(item)
    return target[0]


def _make_dict(*args: Any) -> dict[Any, Any]:  # noqa: ANN401
    made: dict[Any, Any] = _Ordered()
    for arg in args:
        _fill(made, arg.items() if isinstance(arg, dict) else ((k, v) for k, v in arg))
    return made


def _plain_dict(*args: Any) -> dict[Any, Any]:  # noqa: ANN401
    return dict(_make_dict(*args))


def _set(items: Any = ()) -> set[Any]:  # noqa: ANN401
    return set(_checked(items))


def _frozenset(items: Any = ()) -> frozenset[Any]:  # noqa: ANN401
    return frozenset(_checked(items))


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _make_dict,
    ("collections", "defaultdict"): _defaultdict,
    ("torch", "Size"): _size,
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
    _KNOWN |= {
        (_builtins, "set"): _set,
        (_builtins, "frozenset"): _frozenset,
        (_builtins, "dict"): _plain_dict,
        (_builtins, "list"): list,
        (_builtins, "tuple"): tuple,
    }
for _class_name, _dtype in BY_STORAGE_CLASS.items():
    _KNOWN["torch", _class_name] = _KNOWN["torch.cuda", _class_name] = _StorageType(_dtype)
for _dtype in BY_NAME.values():
    _KNOWN["torch", _dtype.name] = _dtype


# A checkpoint names a few dozen.
_MAX_CLASSES = 10_000


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._foreign: dict[tuple[str, str], type[Inert]] = {}
        self._budget = _Budget(len(data))
        self.storages: dict[str, StorageRef] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:  # noqa: ANN401
        known = _KNOWN.get((module_name, global_name))
        if known is not None:
            return _Known(known, self._budget)
        key = (module_name, global_name)
        if key not in self._foreign:
            full_name = f"{module_name}.{global_name}"
            self._foreign[key] = _foreign_class(full_name)
            if len(self._foreign) > _MAX_CLASSES:
                raise pickle.UnpicklingError("it names too many classes")
        return self._foreign[key]

    def persistent_load(self, pid: Any) -> Any:  # noqa: ANN401
        if isinstance(pid, tuple) and 0 < len(pid) < 4:
            return _asked(pid)
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
        if type(num_numel) is not int or not 0 <= num_numel <= MAX_NUMEL:
            found = reprlib.repr(num_numel)
            raise pickle.UnpicklingError(f"storage {key!r} claims {found} elements")
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
    return _load(data)[0]


# A file of before torch 1.6 is read in pieces, until its pickle ends.
_FIRST_BYTES = 1 << 16


def load_stream(stream: BinaryIO) -> tuple[Any, dict[str, StorageRef]]:
    """Unpickle from a file that goes on behind the pickle (see :func:`loads`).

    Args:
        stream: The file; afterwards it stands behind the pickle.

    Returns:
        The object, and the storages it refers to, by key.

    Raises:
        ValueError: If there is no well-formed pickle of that kind.
    """
    start, data = stream.tell(), stream.read(_FIRST_BYTES)
    while True:
        try:
            tree, storages, num_bytes = _load(data)
        except CutShortError:
            more = stream.read(min(len(data), MAX_PICKLE_BYTES - len(data)))
            if not more:
                raise
            data += more
        else:
            stream.seek(start + num_bytes)
            return tree, storages


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Do not look for garbage among many new objects again and again: there is none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _load(data: bytes) -> tuple[Any, dict[str, StorageRef], int]:
    try:
        checked, num_bytes = secured(data)
        unpickler = _Unpickler(checked)
        with _without_collection():
            return unpickler.load(), unpickler.storages, num_bytes
    except CutShortError as error:
        raise CutShortError(f"{type(error).__name__}: {error}") from error
    except _BAD_PICKLE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
