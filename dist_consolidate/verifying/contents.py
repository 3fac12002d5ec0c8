"""What a weight file holds, read by its own header and by nothing that wrote it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dist_consolidate.checkpoint.archive import Archive
from dist_consolidate.checkpoint.unpickle import TensorRef
from dist_consolidate.dtypes import BY_NAME
from dist_consolidate.errors import CheckpointError

_LENGTH_BYTES = 8
# What the safetensors library accepts.
_MAX_HEADER_BYTES = 100_000_000
_BY_CODE = {dtype.safetensors: dtype.name for dtype in BY_NAME.values() if dtype.safetensors}


class Held(NamedTuple):
    """A tensor in a weight file.

    Attributes:
        dtype: torch's name of the element type.
        shape: Shape.
        offset_bytes: Where its row-major bytes begin in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * BY_NAME[self.dtype].itemsize_bytes

    def text(self) -> str:
        """Say what it is."""
        return f"{self.dtype} {list(self.shape)}"


def read_contents(path: Path) -> dict[str, Held]:
    """Read what a weight file says that it holds.

    Args:
        path: A safetensors file, or a torch file.

    Returns:
        The tensors by name.

    Raises:
        ValueError: If the file is damaged; the text says how.
        OSError: If it cannot be read.
    """
    if path.suffix == ".safetensors":
        return _safetensors(path)
    try:
        return _torch(path)
    except CheckpointError as error:
        raise ValueError(str(error).removeprefix(f"{path}: ")) from error


def outside(contents: Mapping[str, Held], num_bytes: int) -> Iterator[tuple[int, int]]:
    """Give the ranges of a file that belong to no tensor, as first byte and length."""
    at = 0
    spans = {(held.offset_bytes, held.num_bytes) for held in contents.values() if held.num_bytes}
    for offset, length in sorted(spans):
        if offset > at:
            yield at, offset - at
        at = max(at, offset + length)
    if at < num_bytes:
        yield at, num_bytes - at


def _safetensors(path: Path) -> dict[str, Held]:
    with path.open("rb") as stream:
        num_bytes = path.stat().st_size
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > min(_MAX_HEADER_BYTES, num_bytes - _LENGTH_BYTES):
            raise ValueError(f"says that its header has {length:,} bytes")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    start = _LENGTH_BYTES + length
    try:
        found = {name: _held(facts, start) for name, facts in header.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its header cannot be made out ({error!r})") from error
    at = start
    for name, held in sorted(found.items(), key=lambda item: (item[1][2], item[1].num_bytes)):
        if held.offset_bytes != at:
            raise ValueError(f"{name} begins at byte {held.offset_bytes}, expected {at}")
        at += held.num_bytes
    if at != num_bytes:
        raise ValueError(f"its tensors end at byte {at}, but the file at {num_bytes}")
    _ask_library(path, found)
    return found


def _ask_library(path: Path, found: Mapping[str, Held]) -> None:
    """Let the safetensors library, where it is installed, say what it finds."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            seen = {n: (_BY_CODE[s.get_dtype()], tuple(s.get_shape())) for n, s in slices.items()}
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"the safetensors library cannot read it ({error})") from error
    if seen != {name: (held.dtype, held.shape) for name, held in found.items()}:
        raise ValueError("the safetensors library finds other tensors in it than its header names")


def _held(facts: Mapping[str, Any], start: int) -> Held:
    low, high = facts["data_offsets"]
    shape = tuple(facts["shape"])
    if not all(type(n) is int and n >= 0 for n in (low, high, *shape)):
        raise ValueError(f"{facts}")
    held = Held(_BY_CODE[facts["dtype"]], shape, start + low)
    if held.num_bytes != high - low:
        raise ValueError(f"{held.text()} in {high - low} bytes")
    return held


def _torch(path: Path) -> dict[str, Held]:
    archive = Archive(path)
    if not isinstance(archive.tree, dict):
        raise ValueError("holds no dictionary of tensors")
    found = {}
    for name, tensor in archive.tree.items():
        if not isinstance(tensor, TensorRef):
            raise ValueError(f"{name} is no tensor")
        span = archive.span(tensor)
        if not span.is_contiguous:
            raise ValueError(f"{name} does not lie in one piece")
        found[str(name)] = Held(span.dtype.name, span.shape, span.offset_bytes)
    return found
