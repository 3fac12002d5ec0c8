"""What all readers of pickled states need: shards opened, and values of the expected kind."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.archive import Archive
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.layout import ShardFile, parse_name
from dist_consolidate.checkpoint.states import Shapes
from dist_consolidate.checkpoint.unpickle import Inert, TensorRef, is_shape
from dist_consolidate.errors import CheckpointError, UnsupportedLayoutError, has_controls


def check_name(path: Path, name: Any, what: str) -> str:  # noqa: ANN401
    """Check that something can be the name of a tensor.

    Names go on into headers, messages and other people's programs; no module's attribute has a
    control character in it, and half a surrogate cannot be written as text at all.

    Args:
        path: The file.
        name: Whatever the pickle holds there.
        what: What it should name, for the message.

    Returns:
        The name.

    Raises:
        CheckpointError: If it is none.
    """
    if not isinstance(name, str):
        raise wrong(path, f"{what} has the key {reprlib.repr(name)}")
    if has_controls(name) or any("\ud800" <= c <= "\udfff" for c in name):
        raise wrong(path, f"{what} has a name with control characters in it, {name!r}")
    return name


def wrong(path: Path, what: str) -> CheckpointError:
    """Make the error for what a file should not hold."""
    return CheckpointError(f"{path}: {what}; this is not what DeepSpeed writes")


# Counters and sizes have 64 bits.
_MAX_INTEGER = 1 << 63


def integer(value: Any) -> int | None:  # noqa: ANN401 - whatever the pickle holds
    """Read an int, or the value of a pickled enum."""
    if isinstance(value, Inert) and value.args:
        value = value.args[0]
    return value if type(value) is int and abs(value) < _MAX_INTEGER else None


def as_mapping(value: Any) -> Mapping[Any, Any] | None:  # noqa: ANN401
    """Accept a mapping, and what stands for an object of a foreign subclass of dict.

    Args:
        value: Whatever the pickle holds.

    Returns:
        The mapping, or ``None`` if it is none.
    """
    if isinstance(value, Inert) and not value.args and value.state is None:
        pairs = [item for item in value.items if isinstance(item, tuple) and len(item) == 2]
        return dict(pairs) if len(pairs) == len(value.items) else None
    return value if isinstance(value, Mapping) else None


def text_of(value: Any) -> str | None:  # noqa: ANN401
    """Give a text, or ``None`` for anything else."""
    return value if isinstance(value, str) else None


def shape_map(path: Path, value: Any, what: str) -> Shapes:  # noqa: ANN401
    """Read a mapping of names to shapes."""
    value = as_mapping(value)
    if value is None:
        raise wrong(path, f"{what} is no mapping of names to shapes")
    shapes = {}
    for name, shape in value.items():
        good = isinstance(shape, tuple | list) and is_shape(shape)
        if not good or not isinstance(name, str):
            given = f"{reprlib.repr(name)} the shape {reprlib.repr(shape)}"
            raise wrong(path, f"{what} gives {given}")
        shapes[check_name(path, name, what)] = tuple(shape)
    return shapes


def param_shapes_of(path: Path, tree: Mapping[str, Any]) -> tuple[Shapes, ...] | None:
    """Accept a list of mappings, and the single mapping of releases before 0.5.4."""
    value = tree.get("param_shapes")
    if value is None:
        return None
    single = as_mapping(value)
    groups = value if single is None else [single]
    if not isinstance(groups, list | tuple):
        raise wrong(path, f"param_shapes is a {type(value).__name__}")
    return tuple(shape_map(path, group, "param_shapes") for group in groups)


def spans(archive: Archive, value: Any, what: str) -> Iterator[TensorSpan]:  # noqa: ANN401
    """Locate the tensors of a list."""
    if not isinstance(value, list | tuple):
        raise wrong(archive.path, f"{what} is a {type(value).__name__}, expected a list")
    for tensor in value:
        if not isinstance(tensor, TensorRef):
            raise wrong(archive.path, f"{what} holds a {type(tensor).__name__}, not a tensor")
        yield archive.span(tensor)


def open_shard(folder: Path, shard: ShardFile) -> Archive:
    """Open a shard, which must be what its name says: the zip remembers the name it was saved as.

    A file saved through a stream remembers no name.
    """
    archive = Archive(folder / shard.name)
    saved = parse_name(f"{archive.saved_as}.pt")
    if saved is not None and saved.identity != shard.identity:
        raise CheckpointError(
            f"{archive.path}: was saved as {saved.name}; it was renamed, or copied over the right "
            "file: put each file back under the name it was saved as"
        )
    return archive


def is_named(archive: Archive) -> bool:
    """Tell whether a shard remembers the name it was saved as, which then is its own."""
    return parse_name(f"{archive.saved_as}.pt") is not None


def device_of(tensors: Iterable[Any]) -> int | None:
    """Give the CUDA device that the first tensor lay on, where it did."""
    first = next((tensor for tensor in tensors if isinstance(tensor, TensorRef)), None)
    return None if first is None else first.storage.device


def state_of(archive: Archive) -> Mapping[str, Any]:
    """Give a file's dictionary.

    Args:
        archive: The file.

    Returns:
        What it holds.

    Raises:
        CheckpointError: If it is no dictionary.
    """
    if archive.tree == "":
        raise UnsupportedLayoutError(
            f"{archive.path}: is a stub of the Nebula checkpoint engine (an empty text), whose "
            "data are kept elsewhere; load the checkpoint with DeepSpeed and Nebula, and save it "
            "without"
        )
    if not isinstance(archive.tree, Mapping):
        kind = type(archive.tree).__name__
        raise wrong(archive.path, f"holds a {kind}, expected a dictionary of states")
    return archive.tree
