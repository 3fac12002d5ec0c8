"""AutoEP: DeepSpeed itself makes one fused tensor of a layer's experts and spreads its rows.

A rank holds ``experts.w1`` (and ``w2``, ``w3``) with its own experts along the first dimension; the
expert files hold one expert's matrix each, as ``experts.w1.NUMBER``. In memory a fused tensor is
its experts one behind the other, so that planning looks at each as a tensor of its own, like those
of ``deepspeed.moe`` layers, and puts them together in the end.

Sources: DeepSpeed's ``engine._save_moe_checkpoint`` and ``checkpoint/autoep_affine.py``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.model import Block, Checkpoint, ModuleKey, Source

_FUSED = re.compile(r"(|.*\.)experts\.w[123]")
# Parts of an AutoEP layer that are never another name of its router.
_NO_ROUTERS = frozenset({"experts", "shared_experts"})
# `checkpoint_format` of experts that lie in ZeRO-3 shards.
IN_SHARDS = "zero3_partitioned"
Shapes = dict[str, tuple[int, ...]]


def is_fused(name: str) -> bool:
    """Whether a parameter is all of one rank's experts in one."""
    return _FUSED.fullmatch(name) is not None


def single(
    shapes: Sequence[Shapes] | None, paddings: Sequence[Sequence[int]] | None
) -> tuple[tuple[Shapes, ...] | None, tuple[tuple[int, ...], ...] | None]:
    """Give the layout of flat groups with fused tensors taken apart.

    Args:
        shapes: Shapes by group, as recorded.
        paddings: Elements of padding behind each parameter, by group.

    Returns:
        Both, for single experts as a rank counts them.
    """
    if shapes is None:
        return None, None
    singles: list[Shapes] = []
    gaps: list[tuple[int, ...]] = []
    for index, group in enumerate(shapes):
        behind = list(paddings[index]) if paddings and index < len(paddings) else []
        behind += [0] * (len(group) - len(behind))
        found: Shapes = {}
        after: list[int] = []
        for (name, shape), gap in zip(group.items(), behind, strict=False):
            if is_fused(name) and shape:
                found |= {f"{name}.{number}": shape[1:] for number in range(shape[0])}
                after += [0] * max(shape[0] - 1, 0) + [gap] * min(shape[0], 1)
            else:
                found[name] = shape
                after.append(gap)
        singles.append(found)
        gaps.append(tuple(after))
    return tuple(singles), tuple(gaps) if paddings is not None else None


def apart(span: TensorSpan) -> list[TensorSpan]:
    """Take a fused tensor of one rank's experts apart."""
    rows = (span.rows(number, number + 1) for number in range(span.shape[0]))
    return [dataclasses.replace(r, shape=r.shape[1:], stride=r.stride[1:]) for r in rows]


def odd_placement(layers: Any) -> str | None:  # noqa: ANN401 - as pickled
    """Say what is not as usual about how experts are placed.

    Args:
        layers: ``ds_autoep_layers``.

    Returns:
        What was found, or ``None`` where every rank holds the next so many experts.
    """
    for layer in layers if isinstance(layers, list) else [layers]:
        if not isinstance(layer, Mapping):
            return f"ds_autoep_layers holds a {type(layer).__name__}"
        if layer.get("checkpoint_format") not in (None, "per_expert_files", IN_SHARDS):
            return f"its experts are saved as {layer['checkpoint_format']}"
        placement = layer.get("expert_placement")
        if placement is None:  # before 0.19.8 there is one placement only
            continue
        ranks = placement.get("ranks") if isinstance(placement, Mapping) else None
        if not isinstance(ranks, list) or not all(isinstance(rank, Mapping) for rank in ranks):
            return "its expert_placement is of another form"
        held = [rank.get("experts") for rank in sorted(ranks, key=lambda r: int(r.get("rank", -1)))]
        each = (layer.get("num_experts") or 0) // max(len(ranks), 1)
        if held != [list(range(r * each, (r + 1) * each)) for r in range(len(ranks))]:
            return f"its experts are placed unevenly or several times ({held})"
    return None


def router_aliases(names: Iterable[str], layer: str) -> dict[str, str]:
    """Tell which keys of an AutoEP layer are its router's, under a second name.

    The layer is a class of DeepSpeed's own, which registers the router a second time under the name
    that the model gave it; nothing else of it has the router's keys.

    Source: DeepSpeed's ``module_inject/auto_ep_layer.py`` (``alias_target``).

    Args:
        names: The keys of the model.
        layer: Name of the layer, with the dot that follows it.

    Returns:
        The router's key, by the other one.
    """
    children: dict[str, dict[str, str]] = {}
    for name in names:
        if name.startswith(layer):
            child, _, rest = name.removeprefix(layer).partition(".")
            children.setdefault(child, {})[rest] = name
    router = children.pop("router", {})
    return {
        name: router[rest]
        for child, held in children.items()
        if child not in _NO_ROUTERS and held.keys() == router.keys()
        for rest, name in held.items()
    }


def fuse(checkpoint: Checkpoint, names: Mapping[str, Sequence[str]]) -> Checkpoint:
    """Put the experts together that DeepSpeed had fused.

    Args:
        checkpoint: With every expert as a tensor of its own.
        names: For each fused tensor the names of its experts, in order.

    Returns:
        The checkpoint with fused tensors in their place.
    """
    part_of = {part: fused for fused, parts in names.items() for part in parts}
    notes = checkpoint.notes
    if names:
        notes += (
            f"{len(names)} fused tensors of experts (AutoEP) are named as DeepSpeed's own layers "
            "name them, not as the model they were made from",
        )
    return dataclasses.replace(
        checkpoint,
        partitions=_fused_sources(checkpoint.partitions, names, part_of),
        frozen=_fused_sources(checkpoint.frozen, names, part_of),
        module=_fused_keys(checkpoint.module, names, part_of),
        notes=notes,
    )


def _fused_sources(
    sources: Mapping[str, Source], names: Mapping[str, Sequence[str]], part_of: Mapping[str, str]
) -> dict[str, Source]:
    fused: dict[str, Source] = {}
    for name, source in sources.items():
        whole = part_of.get(name)
        if whole is None:
            fused[name] = source
        elif whole not in fused and all(part in sources for part in names[whole]):
            fused[whole] = _joined([sources[part] for part in names[whole]])
    return fused


def _fused_keys(
    module: Mapping[str, ModuleKey], names: Mapping[str, Sequence[str]], part_of: Mapping[str, str]
) -> dict[str, ModuleKey]:
    keys: dict[str, ModuleKey] = {}
    for name, key in module.items():
        whole = part_of.get(name)
        if whole is None:
            keys[name] = key
        elif whole not in keys:
            own = [source for part in names[whole] if (source := module[part].source)]
            source = _joined(own) if len(own) == len(names[whole]) else None
            shape = (len(names[whole]), *key.shape)
            keys[whole] = ModuleKey(shape, (whole, *key.identity), source, is_buffer=False)
    return keys


def _joined(parts: Sequence[Source]) -> Source:
    """Lay tensors of one shape one behind the other along a new first dimension."""
    first = parts[0]
    blocks = tuple(
        Block(part, 1, part.num_numel, 0, part.num_numel, index * part.num_numel, part.num_numel)
        for index, part in enumerate(parts)
    )
    return Source(first.origin, (len(parts), *first.shape), first.dtype, blocks=blocks)
