"""Folders whose optimizer states are all gone: what is left is ``module``, in 16 bits.

People delete optimizer states to save space. With them go the fp32 masters, so that such a folder
is refused unless the user says that the rounded weights will do. Under ZeRO-3 the model states
hold no weights at all.
"""

from __future__ import annotations

from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.states import ModelState
from dist_consolidate.errors import CheckpointError


def accept(folder: TagFolder, model: ModelState, allowed: bool) -> str:
    """Decide on a ZeRO checkpoint without optimizer states.

    Args:
        folder: The shards.
        model: The model states of rank 0.
        allowed: Whether the user takes the weights of ``module``.

    Returns:
        What to say of the result.

    Raises:
        CheckpointError: If the user has not said so, or the weights are not there.
    """
    name = f"zero_pp_rank_*_mp_rank_{model.shard.mp_rank:02d}_optim_states.pt"
    gone = (
        f"{folder.path / name}: all optimizer states are missing, and with them every fp32 "
        f"master; {model.shard.name} says the run used ZeRO"
    )
    if model.shard.dp_rank is not None:
        raise CheckpointError(f"{gone}-3, whose weights are in no other file")
    if not allowed:
        raise CheckpointError(
            f"{gone}. Look for them where the ranks saved; or take the weights that it holds in "
            f"{_precision(model)} with --allow-16bit"
        )
    holder = model.shard.name if model.module is not None else "the layer files"
    return (
        "all optimizer states are missing, and with them every fp32 master; the weights are "
        f"those of {holder} in {_precision(model)} (--allow-16bit)"
    )


def _precision(model: ModelState) -> str:
    if model.module is None:
        return "the layer files' own element type"
    buffers = model.buffer_names or frozenset()
    entries = [entry for name, entry in (model.module or {}).items() if name not in buffers]
    found = {e.span.dtype.name for e in entries if e.span.num_numel and e.span.dtype.is_floating}
    return " and ".join(sorted(found)) or "no floating type"
