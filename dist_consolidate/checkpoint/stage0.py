"""Stage 0: the weights are ``module``; 16-bit training keeps fp32 masters beside them.

The masters are pickled without names. Each is matched to the key of ``module`` that has its shape
and whose 16-bit values are the master's, rounded; nothing is assigned on the strength of an order
alone. This is the one layout for which planning reads weights.

Sources: DeepSpeed's ``unfused_optimizer.py`` (lists of shaped tensors) and ``fused_optimizer.py``
(flat tensors, of which ``module`` holds 16-bit views).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from dist_consolidate.checkpoint.extents import TensorSpan, contiguous_stride
from dist_consolidate.checkpoint.model import Source
from dist_consolidate.checkpoint.states import ModelState, ModuleEntry
from dist_consolidate.errors import Problems

_CHUNK_NUMEL = 1 << 20


def masters(folder: Path, model: ModelState, problems: Problems) -> dict[str, Source]:
    """Find the key of ``module`` for every fp32 master.

    Args:
        folder: The tag folder; weights are read from it to compare.
        model: The model states.
        problems: Takes masters that fit no key.

    Returns:
        Sources by name; empty where ``module`` itself is the most precise copy.
    """
    if not model.optimizer or model.module is None:
        return {}
    buffers = model.buffer_names or frozenset()
    free = {
        name: entry
        for name, entry in _first_names(model.module).items()
        if name not in buffers and entry.span.num_numel and entry.span.dtype.is_floating
    }
    spans = _cut_flat(model, free) if model.flat_masters else sum(model.optimizer, ())
    found: dict[str, Source] = {}
    for index, span in enumerate(spans):
        name = _match(folder, span, free)
        if name is None:
            problems.add(
                f"{model.shard.name}: fp32 master {index} of shape {list(span.shape)} rounds to "
                "no tensor of `module`; the file was changed or its layout is unknown"
            )
            continue
        found[name] = Source("fp32 partition", free.pop(name).ref.shape, span.dtype, span=span)
    return found


def _first_names(module: dict[str, ModuleEntry]) -> dict[str, ModuleEntry]:
    """Keep one name of each group of tied ones: the one that comes first."""
    first: dict[tuple[object, ...], str] = {}
    for name, entry in module.items():
        first.setdefault((entry.ref.storage.key, entry.ref.offset_numel, entry.ref.shape), name)
    return {name: module[name] for name in first.values()}


def _cut_flat(model: ModelState, free: dict[str, ModuleEntry]) -> list[TensorSpan]:
    """Cut flat masters where ``module``'s views of the 16-bit flat buffers begin and end."""
    views: dict[str, list[ModuleEntry]] = {}
    for entry in free.values():
        views.setdefault(entry.ref.storage.key, []).append(entry)
    spans: list[TensorSpan] = []
    for (flat,) in (group for group in model.optimizer or () if len(group) == 1):
        same = [v for v in views.values() if v[0].ref.storage.num_numel == flat.num_numel]
        for entry in same[0] if same else []:
            offset = flat.offset_bytes + entry.ref.offset_numel * flat.dtype.itemsize_bytes
            shape = entry.ref.shape
            stride = contiguous_stride(shape)
            spans.append(dataclasses.replace(flat, offset_bytes=offset, shape=shape, stride=stride))
        if same:
            del views[same[0][0].ref.storage.key]
        else:
            spans.append(flat)
    return spans


def _match(folder: Path, span: TensorSpan, free: dict[str, ModuleEntry]) -> str | None:
    for name, entry in free.items():
        if entry.ref.shape == span.shape and _rounds_to(folder, span, entry.span):
            return name
    return None


def _rounds_to(folder: Path, master: TensorSpan, rounded: TensorSpan) -> bool:
    """Compare a master, rounded, with the 16-bit copy, chunk by chunk."""
    import torch

    if not (master.is_contiguous and rounded.is_contiguous):
        return False
    total = math.prod(master.shape)
    with (folder / master.file).open("rb") as one, (folder / rounded.file).open("rb") as two:
        for start in range(0, total, _CHUNK_NUMEL):
            count = min(_CHUNK_NUMEL, total - start)
            chunks = []
            for stream, span in ((one, master), (two, rounded)):
                width = span.dtype.itemsize_bytes
                stream.seek(span.offset_bytes + start * width)
                data = bytearray(stream.read(count * width))
                chunks.append(torch.frombuffer(data, dtype=getattr(torch, span.dtype.name)))
            ours, theirs = chunks[0].to(chunks[1].dtype), chunks[1]
            if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
                return False
    return True
