"""Stage 0: whose state is whose.

The optimizer numbers its parameters and names none. With fp32 masters the values have told already
which name each master has (see :mod:`dist_consolidate.checkpoint.stage0`), and the states follow
the masters. In fp32 training there are names only if the optimizer was given some (torch 2.6 and
later record them); otherwise a shape that occurs once proves it, and anything else is refused.

Sources: DeepSpeed's ``fused_optimizer.py`` and ``unfused_optimizer.py``.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping

from dist_consolidate.checkpoint.extents import TensorSpan, contiguous_stride
from dist_consolidate.checkpoint.model import Checkpoint, Source
from dist_consolidate.checkpoint.optimizer import BaseOptimizer, ParamState
from dist_consolidate.checkpoint.stage0 import trainable
from dist_consolidate.checkpoint.states import ModelState
from dist_consolidate.errors import CheckpointError, UnsupportedLayoutError, listing

_Found = tuple[dict[str, dict[str, Source]], dict[str, str], dict[str, int]]


def stage0_sources(checkpoint: Checkpoint, model: ModelState, optimizer: BaseOptimizer) -> _Found:
    """Locate the states of every parameter.

    Args:
        checkpoint: The metadata; its partitions are the masters found.
        model: The model states.
        optimizer: Its optimizer's states.

    Returns:
        Sources by key and name, keys that have no value for each weight, and param groups by name.

    Raises:
        CheckpointError: If masters and states do not go together.
        UnsupportedLayoutError: If nothing tells which state belongs to which parameter.
    """
    tensors: dict[str, dict[str, Source]] = {}
    unread: dict[str, str] = {}
    group_of: dict[str, int] = {}
    pairs = _by_master(checkpoint, model, optimizer) if model.optimizer else None
    for name, state, shape, start in pairs or _by_name(model, optimizer):
        unread |= state.others
        if state.group is not None:
            group_of[name] = state.group
        for key, span in state.tensors.items():
            part = _part(span, shape, start)
            if part is None:
                unread[key] = f"has the shape {list(span.shape)}, not that of the weights"
                continue
            source = Source("optimizer state", shape, span.dtype, span=part)
            tensors.setdefault(key, {})[name] = source
    return tensors, {k: v for k, v in unread.items() if k not in tensors}, group_of


# Name, state, shape, and where in a flat state the parameter begins (None: it is its own).
_Pair = tuple[str, ParamState, tuple[int, ...], tuple[int, int] | None]


def _part(
    span: TensorSpan, shape: tuple[int, ...], place: tuple[int, int] | None
) -> TensorSpan | None:
    """Give a parameter's part of a state tensor; ``None`` if the tensor is no twin of it."""
    if place is None:
        return span if span.shape == shape else None
    start, flat_numel = place
    if span.shape != (flat_numel,) or not span.is_contiguous:
        return None
    offset_bytes = span.offset_bytes + start * span.dtype.itemsize_bytes
    return dataclasses.replace(
        span, offset_bytes=offset_bytes, shape=shape, stride=contiguous_stride(shape)
    )


def _by_master(
    checkpoint: Checkpoint, model: ModelState, optimizer: BaseOptimizer
) -> Iterator[_Pair]:
    """Pair states with names through the masters, which the optimizer was given in order."""
    masters = [span for group in model.optimizer or () for span in group]
    if len(masters) != len(optimizer.params):
        raise CheckpointError(
            f"{model.shard.name}: holds {len(masters)} fp32 masters, but its optimizer has "
            f"{len(optimizer.params)} parameters"
        )
    for name, source in checkpoint.partitions.items():
        span = source.span
        for master, state in zip(masters, optimizer.params, strict=True):
            if span is None or not master.num_numel:
                continue
            if not model.flat_masters and master == span:
                yield name, state, source.shape, None
            width = master.dtype.itemsize_bytes
            start = (span.offset_bytes - master.offset_bytes) // width
            if model.flat_masters and 0 <= start < master.num_numel:
                yield name, state, source.shape, (start, master.num_numel)


def _by_name(model: ModelState, optimizer: BaseOptimizer) -> Iterator[_Pair]:
    """Pair states with names by recorded names, or by shapes that occur once."""
    names, entries = trainable(model)
    shapes = {name: entry.span.shape for name, entry in zip(names, entries, strict=True)}
    doubtful = []
    with_state = [state for state in optimizer.params if state.tensors]
    if all(state.name in shapes for state in with_state):
        for state in with_state:
            assert state.name is not None
            yield state.name, state, shapes[state.name], None
        return
    keys = collections.Counter(shapes.values())
    held = collections.Counter(_shape(state, keys) for state in with_state)
    for number, state in enumerate(with_state):
        shape = _shape(state, keys)
        if shape is None or keys[shape] != 1 or held[shape] != 1:
            doubtful.append(f"state {number}: shape {list(shape or ())}")
    if doubtful:
        raise UnsupportedLayoutError(
            listing(
                f"{model.shard.name}: stage 0 in fp32 saves optimizer states without names, and "
                "shapes do not tell which parameter these belong to",
                doubtful[:20],
                "consolidate without --include optimizer",
            )
        )
    by_shape = {shape: name for name, shape in shapes.items()}
    for state in with_state:
        shape = _shape(state, keys)
        assert shape is not None
        yield by_shape[shape], state, shape, None


def _shape(state: ParamState, known: Mapping[tuple[int, ...], int]) -> tuple[int, ...] | None:
    """Give the shape that a parameter must have by its states, if they agree on one."""
    found = {span.shape for span in state.tensors.values()} & set(known)
    return next(iter(found)) if len(found) == 1 else None
