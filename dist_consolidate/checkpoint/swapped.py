"""ZeRO-3 masters that lay on NVMe: an empty tensor in the shard, and a raw file beside it.

The optimizer swapper empties each large sub-group's tensor and keeps its elements in
``offloaded_tensors/rankNN/DS_ID.tensor.swp``, which saving copies into the tag folder. ``DS_ID``
is pickled as an attribute of the empty tensor. The file holds fp32 elements, and behind them
padding to the alignment of the input and output.

Source: DeepSpeed's ``stage3.py``, ``swap_tensor/optimizer_utils.py`` and
``engine.save_checkpoint`` (one folder per rank since 0.18.0; 0.13.0 to 0.17.6 let all ranks write
into one).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.layout import ShardFile, TagFolder
from dist_consolidate.checkpoint.states import ModelState, OptimState
from dist_consolidate.checkpoint.zero12 import holder_of_shapes, shapes_by_group
from dist_consolidate.dtypes import FLOAT32
from dist_consolidate.errors import Problems, UnsupportedLayoutError

# Padding is to 1024 bytes for each thread of the swapper; this is a thousand threads.
_MAX_PADDING_BYTES = 1 << 20


def fill(
    folder: TagFolder, model: ModelState, optims: Sequence[OptimState], problems: Problems
) -> Sequence[OptimState]:
    """Put the swapped-out parts of ZeRO-3 states in their places.

    Args:
        folder: The shards, those of the swapper among them.
        model: The model states of rank 0.
        optims: The optimizer states of every rank, in rank order.
        problems: Takes each file that is missing or of the wrong size.

    Returns:
        The states, in which no part that needs elements is left empty if no problem was noted.

    Raises:
        UnsupportedLayoutError: If the names do not tell whose file is whose.
    """
    needs = _needs(model, optims)
    gone = {
        optim.shard.name: [i for i, part in enumerate(optim.parts) if _is_swapped(part, needs, i)]
        for optim in optims
    }
    if not any(gone.values()):
        return optims
    if (model.mp_world_size or 1) > 1:
        raise UnsupportedLayoutError(
            f"{folder.path}: its optimizer was offloaded to NVMe under model parallelism, where "
            "the rank in a swap file's folder is another one than in a shard's name; this version "
            "does not read those"
        )
    files, recorded_in = _files(folder, len(optims)), holder_of_shapes(model, optims[0])
    filled = []
    for optim in optims:
        parts = list(optim.parts)
        for index in gone[optim.shard.name]:
            span = _find(folder, optim, index, needs[index], recorded_in, files, problems)
            parts[index] = span or parts[index]
        filled.append(dataclasses.replace(optim, parts=tuple(parts)))
    return filled


def _needs(model: ModelState, optims: Sequence[OptimState]) -> list[int]:
    """Give how many elements each sub-group has on every rank; nothing where that is unclear."""
    ignored = Problems()
    return [
        sum(-(-math.prod(shape) // len(optims)) for shape in shapes.values())
        for shapes in shapes_by_group(model, optims[0], ignored)
    ]


def _is_swapped(part: TensorSpan, needs: Sequence[int], index: int) -> bool:
    return not part.num_numel and index < len(needs) and needs[index] > 0


def _files(folder: TagFolder, num_ranks: int) -> Mapping[tuple[int, str], ShardFile]:
    """Give the swap files by rank and id."""
    found = {}
    for shard in folder.of("swap"):
        if shard.dp_rank is None and num_ranks > 1:
            raise UnsupportedLayoutError(
                f"{folder.path / shard.name}: was written by DeepSpeed 0.13.0 to 0.17.6, whose "
                f"ranks all write their swapped-out masters to the same names; of {num_ranks} "
                "ranks the last one's are left, and those of the others are lost"
            )
        found[shard.dp_rank or 0, _id_of(shard)] = shard
    return found


def _id_of(shard: ShardFile) -> str:
    return shard.name.rpartition("/")[2].removesuffix(".tensor.swp")


def _find(
    folder: TagFolder,
    optim: OptimState,
    index: int,
    need_numel: int,
    recorded_in: str,
    files: Mapping[tuple[int, str], ShardFile],
    problems: Problems,
) -> TensorSpan | None:
    rank, path = optim.shard.dp_rank or 0, folder.path / optim.shard.name
    swap_id = optim.swap_ids[index] if index < len(optim.swap_ids) else None
    what = (
        f"sub-group {index} of rank {rank} ({need_numel} elements by param_shapes in "
        f"{recorded_in}, swapped out to NVMe)"
    )
    if swap_id is None:
        problems.add(
            f"{path}: {what} names no swap file (saved with torch before 2.0, or by a DeepSpeed "
            "before 0.13 that cannot save it); its masters cannot be found"
        )
        return None
    shard = files.get((rank, swap_id))
    if shard is None:
        name = f"offloaded_tensors/rank{rank:02d}/{swap_id}.tensor.swp"
        problems.add(
            f"{folder.path / name}: is missing; it holds {what}. Look for it where rank {rank} "
            "saved"
        )
        return None
    surplus = shard.num_bytes - need_numel * FLOAT32.itemsize_bytes
    if not 0 <= surplus <= _MAX_PADDING_BYTES:
        problems.add(
            f"{folder.path / shard.name}: has {shard.num_bytes} bytes, expected "
            f"{need_numel * FLOAT32.itemsize_bytes} and some padding; it holds {what}"
        )
        return None
    return TensorSpan(shard.name, 0, FLOAT32, (need_numel,), (1,))
