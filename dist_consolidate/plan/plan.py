"""The plan: output files, their tensors, and where each tensor's data comes from.

It is a pure function of metadata and options, the same on every rank, with a digest to prove it,
and it does not depend on how many ranks will carry it out.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

from dist_consolidate.checkpoint.model import Checkpoint, FlatGroup, Source
from dist_consolidate.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from dist_consolidate.errors import CheckpointError, listing
from dist_consolidate.plan.coverage import check_coverage
from dist_consolidate.plan.names import Names, renamed
from dist_consolidate.plan.outputs import OutputFile, StoredTensor
from dist_consolidate.plan.resolve import Resolution, Resolved
from dist_consolidate.plan.ties import Tie

FileNames = Callable[[int], Sequence[str]]

_DTYPES = {"fp32": FLOAT32, "bf16": BFLOAT16, "fp16": FLOAT16}


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor to be moved, and every place its bytes go to.

    Attributes:
        name: The name that holds the data.
        source: Where it comes from.
        dtype: Element type in the output.
        targets: Pairs of output file index and stored tensor index in that file; more than one
            where tied names are written in full.
        state: Empty for weights, else the key of an optimizer's state of this name.
    """

    name: str
    source: Source
    dtype: DType
    targets: tuple[tuple[int, int], ...]
    state: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is written, and from where.

    Attributes:
        files: Output files in the order of their names.
        tensors: What is moved, in flat order.
        groups: Flat groups the sources refer to.
        ties: Ties in force.
        left_out: Keys that are not written, with reasons.
        notes: What the report must say.
        digest: SHA-256 over files, tensors, groups and changed names, hexadecimal.
        renamed: Name in the output to name in the checkpoint, where they differ.
        optimizer: What the manifest says of the optimizer; ``None`` where it was not asked for.
    """

    files: tuple[OutputFile, ...]
    tensors: tuple[PlannedTensor, ...]
    groups: tuple[FlatGroup, ...]
    ties: dict[str, Tie]
    left_out: dict[str, str]
    notes: tuple[str, ...]
    digest: str
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)
    optimizer: dict[str, object] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data in the output."""
        return sum(tensor.num_bytes for file in self.files for tensor in file.tensors)


def output_dtype(source: Source, dtype: str) -> DType:
    """Tell the element type a source is written in (``dtype``: fp32, bf16, fp16 or keep)."""
    return _DTYPES[dtype] if dtype != "keep" and source.dtype.is_floating else source.dtype


def make_plan(
    checkpoint: Checkpoint,
    resolution: Resolution,
    *,
    dtype: str,
    ties: str,
    max_shard_bytes: int | None,
    file_names: FileNames,
    names: Names | None = None,
) -> Plan:
    """Lay out the result.

    Args:
        checkpoint: The metadata.
        resolution: Data holders in flat order.
        dtype: ``fp32``, ``bf16``, ``fp16`` or ``keep``.
        ties: ``copy`` writes every name in full, ``drop`` keeps one, ``alias`` lets names share a
            storage.
        max_shard_bytes: Upper bound of a file's tensor bytes (one larger tensor gets a file of
            its own), or ``None`` for a single file.
        file_names: Gives the names of that many files.
        names: The output's names; by default the checkpoint's.

    Returns:
        The plan.

    Raises:
        CheckpointError: If the sources do not fill every element exactly once, or there is nothing
            to write.
    """
    if not resolution.tensors:
        lost = [f"{name}: {loss.what}: {loss.why}" for name, loss in checkpoint.lost.items()]
        told = f"{checkpoint.tag}: nothing is left to write"
        raise CheckpointError(listing(told, lost) if lost else told)
    check_coverage(checkpoint, resolution)
    names = names or Names({})
    resolution = renamed(resolution, names)
    # Wide elements first, as readers that map a file expect; within a width the flat order stays.
    holders = sorted(
        resolution.tensors, key=lambda t: -output_dtype(t.source, dtype).itemsize_bytes
    )
    units = [_unit(tensor, output_dtype(tensor.source, dtype), ties) for tensor in holders]
    shards = shard_tensors([stored for unit in units for stored in unit], max_shard_bytes)
    places = {
        stored.names[0]: (file, index)
        for file, shard in enumerate(shards)
        for index, stored in enumerate(shard)
    }
    tensors = tuple(
        PlannedTensor(
            tensor.name, tensor.source, unit[0].dtype, tuple(places[s.names[0]] for s in unit)
        )
        for tensor, unit in zip(holders, units, strict=True)
    )
    dropped = {a: t.holder for a, t in resolution.ties.items()} if ties == "drop" else {}
    files = tuple(
        OutputFile(name, tuple(shard), _dropped_here(shard, dropped))
        for name, shard in zip(file_names(len(shards)), shards, strict=True)
    )
    old_names = {new: old for old, new in names.new.items()}
    digest = plan_digest(files, tensors, checkpoint.groups, list(old_names.items()))
    notes = (*resolution.notes, *names.notes)
    return Plan(
        files, tensors, checkpoint.groups, resolution.ties, resolution.left_out, notes, digest,
        old_names,
    )  # fmt: skip


def _unit(tensor: Resolved, dtype: DType, ties: str) -> list[StoredTensor]:
    shape = tensor.source.shape
    if ties == "alias":
        return [StoredTensor((tensor.name, *tensor.aliases), dtype, shape)]
    names = (tensor.name, *tensor.aliases) if ties == "copy" else (tensor.name,)
    return [StoredTensor((name,), dtype, shape) for name in names]


def shard_tensors(
    tensors: Sequence[StoredTensor], max_shard_bytes: int | None
) -> list[list[StoredTensor]]:
    """Deal stored tensors out to files, in order.

    Args:
        tensors: The tensors.
        max_shard_bytes: See :func:`make_plan`.

    Returns:
        The tensors of each file; at least one file.
    """
    shards: list[list[StoredTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if max_shard_bytes is not None and shards[-1] and used + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.num_bytes
    return shards


def _dropped_here(
    shard: Sequence[StoredTensor], dropped: dict[str, str]
) -> tuple[tuple[str, str], ...]:
    here = {name for stored in shard for name in stored.names}
    return tuple((alias, holder) for alias, holder in dropped.items() if holder in here)


def plan_digest(*parts: Sequence[object]) -> str:
    """Digest plain data by its text, each item on a line."""
    state = hashlib.sha256()
    for part in parts:
        for item in part:
            state.update(repr(item).encode())
            state.update(b"\n")
    return state.hexdigest()
