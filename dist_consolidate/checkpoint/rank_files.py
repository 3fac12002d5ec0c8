"""Whose file it is, under ZeRO-3, where the file does not remember its name.

A file that was saved through a stream (DeepSpeed 0.6, fast writers), or in torch's format of before
1.6, may be copied or renamed without a trace, and so may a swap file, which holds nothing but
numbers. Every rank has a slice of each parameter there, and no other copy of the weights to hold it
against. What remains: two ranks never hold the same slices, and where files name the CUDA devices
that their tensors lay on, the ranks of a node have theirs in order.

Source: DeepSpeed's launcher, which gives rank ``r`` of a node the device of local rank ``r``.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist_consolidate.checkpoint.extents import Extent, TensorSpan
from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import FlatGroup, Source, own_source
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState, OptimState
from dist_consolidate.dtypes import DType
from dist_consolidate.errors import Caught, CheckpointError, Problems

_MAX_GROUPS, _HEAD_NUMEL, _MAX_LISTED = 4, 1024, 16


def check(
    folder: TagFolder,
    groups: Sequence[FlatGroup],
    states: Sequence[OptimState | ModelState],
    problems: Problems,
    *,
    trust_masters: bool,
) -> None:
    """Check that files which may be anybody's are those of their ranks.

    Args:
        folder: The tag folder; a little is read from files that do not remember their names.
        groups: Striped flat groups, all of the same kind: one part for each rank.
        states: The states that belong to them, in rank order.
        problems: Takes copies, and files that look exchanged.
        trust_masters: Take files that look exchanged.
    """
    known = {state.shard.name for state in states if state.is_named}
    unknown = [g for g in groups if any(part.file not in known for part in g.parts)]
    if len(states) < 2 or not unknown:
        return
    with (caught := Caught()):
        _check_copies(folder, unknown, problems)
    if caught.error is not None and not isinstance(caught.error, CheckpointError):
        raise caught.error  # a shard that is not seen here is told elsewhere
    if not trust_masters:
        _check_devices(folder, [s for s in states if not s.is_named], problems)


def _check_copies(folder: TagFolder, groups: Sequence[FlatGroup], problems: Problems) -> None:
    largest = sorted(groups, key=lambda g: -g.parts[0].num_bytes)[:_MAX_GROUPS]
    prints = Fingerprints(folder.folders)
    try:
        heads: dict[tuple[bytes, ...], int] = {}
        for rank in range(len(groups[0].parts)):
            head = [_head(group, rank, prints) for group in largest]
            if all(telling is None for telling in head):
                continue
            other = heads.setdefault(tuple(telling or b"" for telling in head), rank)
            if other != rank and _are_equal(groups, rank, other, prints):
                ours, theirs = groups[0].parts[rank].file, groups[0].parts[other].file
                problems.add(
                    f"{folder.file(ours)}: holds the same values as {theirs}, but every rank has "
                    "slices of its own; one was copied over the other"
                )
    finally:
        prints.close()


def _head(group: FlatGroup, rank: int, prints: Fingerprints) -> bytes | None:
    """Digest the first elements of a rank's part; ``None`` where they are all alike."""
    part, width = group.parts[rank], group.dtype.itemsize_bytes
    numel = min(part.num_bytes // width, _HEAD_NUMEL)
    if numel < 2:
        return None
    first, behind = (
        prints.of(_run(part, group.dtype, at, numel - 1), group.dtype) for at in (0, 1)
    )
    return first if first != behind else None


def _run(part: Extent, dtype: DType, start_numel: int, num_numel: int) -> Source:
    offset = part.offset_bytes + start_numel * dtype.itemsize_bytes
    return own_source(TensorSpan(part.file, offset, dtype, (num_numel,), (1,)))


def _are_equal(groups: Sequence[FlatGroup], rank: int, other: int, prints: Fingerprints) -> bool:
    for group in groups:
        ours, theirs = group.parts[rank], group.parts[other]
        if ours.num_bytes != theirs.num_bytes:
            return False
        numel = ours.num_bytes // group.dtype.itemsize_bytes
        pair = [prints.of(_run(p, group.dtype, 0, numel), group.dtype) for p in (ours, theirs)]
        if pair[0] != pair[1]:
            return False
    return True


def _check_devices(
    folder: TagFolder, states: Sequence[OptimState | ModelState], problems: Problems
) -> None:
    """Note files whose devices are in another order than their ranks."""
    devices = [state.device for state in states if state.device is not None]
    if len(devices) < len(states) or not devices:
        return
    # Each node begins anew, at the lowest one; with one device in sight of each rank, every rank.
    begins = [i for i in range(len(devices)) if not i or devices[i] <= devices[i - 1]]
    odd = next((i for i in begins if devices[i] != min(devices)), None)
    if odd is None:
        return
    listed = ", ".join(f"{s.shard.name} {s.device}" for s in states[:_MAX_LISTED])
    problems.add(
        f"{folder.file(states[odd].shard.name)}: was saved from the CUDA device {devices[odd]}, "
        f"but the ranks of a node have their devices in order ({listed}"
        f"{', ...' if len(states) > _MAX_LISTED else ''}); the files look exchanged, and they do "
        "not remember their names. If the run had its ranks on devices in such an order, pass "
        "--trust-masters"
    )
