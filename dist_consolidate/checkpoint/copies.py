"""What one node tells of a shard that another node has under the same name.

Torch's zip files record a CRC-32 of everything in them, so that two of them are compared by their
directories, without a weight being read; other files are digested whole. Model states that each
node saved for itself differ in what is no weight (random states, the record of ties); of those,
facts and tensors are compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.archive import MAX_DIRECTORY_BYTES, ZipRecords, directory_bytes
from dist_consolidate.checkpoint.layout import ShardFile
from dist_consolidate.checkpoint.legacy import is_legacy
from dist_consolidate.checkpoint.model import own_source
from dist_consolidate.checkpoint.model_states import read_model_state
from dist_consolidate.checkpoint.opening import open_plain
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState, ModuleEntry

_CHUNK_BYTES = 4 << 20
_FACTS = ("global_steps", "dp_world_size", "mp_world_size", "param_shapes", "buffer_names")


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPrint:
    """A tensor of ``module``, as far as its file's directory tells.

    Attributes:
        shape: Shape.
        dtype: Element type.
        content: What is equal where its values are; ``None`` where only reading them would tell.
    """

    shape: tuple[int, ...]
    dtype: str
    content: tuple[object, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """One node's copy of a shard.

    Attributes:
        content: Digest of the file, or of its directory with all checksums.
        facts: Of model states: what must be equal in all copies, by name.
        tensors: Of model states: the parameters in ``module``.
        has_ties: Of model states: whether they record ties, as those of the run's first rank do.
    """

    content: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, TensorPrint] = dataclasses.field(default_factory=dict)
    has_ties: bool = False


def is_saved_by_each_node(shard: ShardFile) -> bool:
    """Whether every node saves such a file of its own: model states that name no rank."""
    return shard.role == "model" and shard.dp_rank is None


def read_copy(base: Path, shard: ShardFile) -> Copy:
    """Look at this node's copy of a shard.

    Args:
        base: The folder that it lies in.
        shard: The shard.

    Returns:
        What tells it from other copies.

    Raises:
        CheckpointError: If it is damaged.
        OSError: If it cannot be read.
    """
    content = _content(base / shard.name)
    if not is_saved_by_each_node(shard):
        return Copy(content)
    state = read_model_state(base, shard)
    facts = {name: getattr(state, name) for name in _FACTS}
    return Copy(content, facts, _tensors(base / shard.name, state), bool(state.shared_params))


def _content(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open_plain(path) as stream:
            if directory_bytes(stream) > MAX_DIRECTORY_BYTES:
                raise zipfile.BadZipFile("its directory is too large")
            with zipfile.ZipFile(stream) as archive:
                entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        entries = []
    # torch can be told to compute no CRC; then it is 0.
    if entries and all(entry.CRC or not entry.file_size for entry in entries):
        for entry in entries:
            digest.update(
                repr((entry.filename, entry.CRC, entry.file_size, entry.header_offset)).encode()
            )
        return digest.hexdigest()
    with open_plain(path) as stream:
        while data := stream.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _tensors(path: Path, state: ModelState) -> dict[str, TensorPrint]:
    buffers = state.buffer_names or frozenset()
    records = None if is_legacy(path) else ZipRecords(path)
    found = {}
    for name, entry in (state.module or {}).items():
        if name in buffers:
            continue  # a buffer, such as running statistics, may be another on each rank
        content = None if records is None else _content_of(records, entry)
        found[name] = TensorPrint(entry.span.shape, entry.span.dtype.name, content)
    return found


def _content_of(records: ZipRecords, entry: ModuleEntry) -> tuple[object, ...] | None:
    if not entry.span.num_numel:
        return ()
    record = records.record(f"data/{entry.ref.storage.key}")
    place = (record.file_size, entry.ref.offset_numel, entry.ref.stride)
    return (record.CRC, *place) if record.CRC else None


def difference(ours: Copy, theirs: Copy) -> str:
    """Say in what two copies of model states contradict each other, as far as that is known.

    Args:
        ours: One copy.
        theirs: The other one.

    Returns:
        Words, or nothing.
    """
    for name in _FACTS:
        one, other = ours.facts.get(name), theirs.facts.get(name)
        if one != other:
            plain = isinstance(one, int) and isinstance(other, int)
            return f"{name} is {one} in one and {other} in the other" if plain else name
    if ours.tensors.keys() != theirs.tensors.keys():
        name = min(ours.tensors.keys() ^ theirs.tensors.keys())
        return f"the keys of `module`: only one has {name!r}"
    for name, tensor in ours.tensors.items():
        other = theirs.tensors[name]
        if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            return f"the shape or element type of {name!r}"
    return ""


def to_be_read(ours: Copy, theirs: Copy) -> list[str]:
    """Name the tensors of which only their values tell whether they are equal.

    Args:
        ours: One copy.
        theirs: Another one, with the same tensors.
    """
    names = []
    for name, tensor in ours.tensors.items():
        other = theirs.tensors.get(name)
        if tensor.content is None or other is None or tensor.content != other.content:
            names.append(name)
    return names


def read_values(base: Path, shard: ShardFile, names: Iterable[str]) -> dict[str, bytes]:
    """Digest tensors of this node's copy of model states.

    Args:
        base: The folder that it lies in.
        shard: The shard.
        names: The tensors.

    Returns:
        A digest of each one's values.

    Raises:
        CheckpointError: If it is damaged.
    """
    module, prints = read_model_state(base, shard).module or {}, Fingerprints(base)
    try:
        sources = {name: own_source(module[name].span) for name in names}
        return {name: prints.of(source, source.dtype) for name, source in sources.items()}
    finally:
        prints.close()
