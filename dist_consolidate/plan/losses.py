"""What a result lacks that was made of a damaged checkpoint (``--salvage``)."""

from __future__ import annotations

from collections.abc import Mapping

from dist_consolidate.checkpoint.model import Loss
from dist_consolidate.plan.plan import Plan

_LEFT_OUT = ("missing", "partial")


def losses(lost: Mapping[str, Loss], plan: Plan) -> dict[str, Loss]:
    """Find out which losses show in the result.

    A tensor that is tied to an intact one loses nothing, and one that the user leaves out is none.

    Args:
        lost: What is damaged, by name in the checkpoint.
        plan: What is written.

    Returns:
        By name in the output, what is missing or written from another copy.
    """
    new_names = {old: new for new, old in plan.renamed.items()}
    named = {new_names.get(name, name): loss for name, loss in lost.items()}
    found = {
        name: loss
        for name, loss in named.items()
        if loss.what in _LEFT_OUT and plan.left_out.get(name) == loss.why
    }
    for tensor in plan.tensors:
        loss = named.get(tensor.name)
        if loss is not None and loss.what not in _LEFT_OUT and tensor.source.origin == "module":
            found[tensor.name] = loss
    found |= {alias: found[t.holder] for alias, t in plan.ties.items() if t.holder in found}
    return dict(sorted(found.items()))
