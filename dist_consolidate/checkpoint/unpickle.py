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

from dist_consolidate.checkpoint.opcodes import CutShortError, secured
from dist_consolidate.checkpoint.safe_calls import (
    Budget,
    Known,
    asked,
    make_frozenset,
    make_set,
    ordered_dict,
    plain_dict,
)
from dist_consolidate.checkpoint.stand_ins import Inert, StorageRef, TensorRef
from dist_consolidate.dtypes import BY_NAME, BY_STORAGE_CLASS, UINT8, DType

__all__ = [
    "ODD_TENSOR",
    "Inert",
    "StorageRef",
    "TensorRef",
    "is_shape",
    "load_stream",
    "loads",
    "odd_tensor",
]

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
    if not isinstance(dtype, Known) or not isinstance(dtype.meaning, DType):
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
    if not isinstance(func, Known) or func.meaning not in rebuilds:
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


def _bytes(*args: Any) -> Any:  # noqa: ANN401
    """Make what protocol 2 pickles empty bytes as; a number would be a length."""
    return Inert(*args) if args else b""


def _defaultdict(*_args: Any) -> dict[Any, Any]:  # noqa: ANN401
    return {}


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): ordered_dict,
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
        (_builtins, "set"): make_set,
        (_builtins, "frozenset"): make_frozenset,
        (_builtins, "dict"): plain_dict,
        (_builtins, "bytes"): _bytes,
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
        self._budget = Budget(len(data))
        self.storages: dict[str, StorageRef] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:  # noqa: ANN401
        known = _KNOWN.get((module_name, global_name))
        if known is not None:
            return Known(known, self._budget)
        key = (module_name, global_name)
        if key not in self._foreign:
            full_name = f"{module_name}.{global_name}"
            self._foreign[key] = _foreign_class(full_name)
            if len(self._foreign) > _MAX_CLASSES:
                raise pickle.UnpicklingError("it names too many classes")
        return self._foreign[key]

    def persistent_load(self, pid: Any) -> Any:  # noqa: ANN401
        if isinstance(pid, tuple) and 0 < len(pid) < 4:
            return asked(pid)
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
        kind = kind.meaning if isinstance(kind, Known) else None
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
_FIRST_BYTES, _MAX_STREAM_BYTES = 1 << 16, 64 << 20


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
            more = stream.read(min(len(data), _MAX_STREAM_BYTES - len(data)))
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
