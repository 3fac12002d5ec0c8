"""Hypothesis strategies: models, and the checkpoints DeepSpeed would have written of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from hypothesis import strategies as st

from tests.synthetic import Buffer, Era, Kind, Param, Spec

MAX_PARAMS = 10
MAX_WORLD = 9
STAGES = (0, 1, 2, 3)
ERAS: tuple[Era, ...] = ("0.5", "0.6", "0.9.2", "now")
MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BUFFER_DTYPES = (
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
)


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of every rank from none to three, odd sizes and empty ones among them."""
    small = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    odd = st.sampled_from([(), (1,), (1, 1), (13,), (17, 13), (101,), (64, 3)])
    return st.one_of(odd, small)


@st.composite
def params(draw: st.DrawFn, kinds: Sequence[Kind] = ("trained", "frozen")) -> list[Param]:
    """A model's parameters: several groups, ties (chains too) and the given kinds.

    Args:
        draw: Supplied by Hypothesis.
        kinds: Which kinds there may be beside trained ones, of which there is at least one.
    """
    made = [Param("first.weight", draw(shapes().filter(math.prod)), group=draw(_groups()))]
    for number in range(draw(st.integers(0, MAX_PARAMS - 1))):
        name = draw(st.sampled_from(["layers.{}.weight", "p{}", "a-b.{}.c", "h.{}.bias"]))
        name = name.format(number)
        if draw(st.integers(0, 3)) == 0:
            root = draw(st.sampled_from(made))
            made.append(replace(root, name=name, tie_of=root.name))
        else:
            kind = draw(st.sampled_from(["trained", "trained", *kinds]))
            made.append(Param(name, draw(shapes()), draw(_groups()), kind))
    return made


@st.composite
def buffers(draw: st.DrawFn) -> list[Buffer]:
    """Up to four buffers of any dtype, perhaps tied."""
    made: list[Buffer] = []
    for number in range(draw(st.integers(0, 4))):
        other = draw(st.sampled_from([None, *made]))
        if other is not None:
            made.append(Buffer(f"buffer{number}", other.tensor, tie_of=other.name))
        else:
            made.append(Buffer(f"buffer{number}", draw(_tensors())))
    return made


@st.composite
def specs(
    draw: st.DrawFn,
    *,
    stages: Sequence[int] = STAGES,
    eras: Sequence[Era] = ERAS,
    max_world: int = MAX_WORLD,
    lossless: bool = True,
    cloned_aliases: bool = False,
) -> Spec:
    """Any checkpoint that DeepSpeed could have written.

    Args:
        draw: Supplied by Hypothesis.
        stages: ZeRO stages to choose from.
        eras: Forms of metadata to choose from.
        max_world: Upper bound of data-parallel ranks.
        lossless: Whether every value of the model must be in some file; otherwise some names may
            be lost, and the right answer to these is a refusal.
        cloned_aliases: Whether a tied name may have a 16-bit copy of its own in ``module``, as
            where tensors were cloned before they were pickled (stages 0 to 2).
    """
    stage = draw(st.sampled_from(list(stages)))
    era = draw(st.sampled_from([e for e in eras if stage > 0 or e == "now"]))
    later, in_parts = era == "now", stage in (1, 2)
    kinds = _kinds(stage, era, lossless)
    always_stored = stage < 3 and not cloned_aliases
    model = [_retied(draw, p, always_stored) for p in draw(params(kinds))]
    if lossless and stage == 3:
        model = [_found_again(param, era) for param in model]
    bf16_optimizer = stage == 1 and era in ("0.9.2", "now") and draw(st.booleans())
    aligned = in_parts and later and not bf16_optimizer and draw(st.booleans())
    spec = Spec(
        stage=cast(Any, stage),
        world=draw(st.integers(1, max_world)),
        params=model,
        buffers=draw(buffers()),
        buffers_after=draw(st.one_of(st.none(), st.integers(0, len(model)))),
        model_dtype=draw(st.sampled_from(MODEL_DTYPES)),
        sub_group_numel=draw(st.sampled_from([1, 10, 100, 1_000_000_000])),
        bf16_optimizer=bf16_optimizer,
        stage0_fused=draw(st.booleans()),
        trimming=draw(st.sampled_from(["exact", "last_rank", "none"])),
        alignment_padding=aligned,
        round_robin=draw(st.booleans()),
        era=era,
        tuple_shapes=draw(st.booleans()),
        packed_fragments=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 16)),
        moments=draw(st.sampled_from(["real", "none"])),
    )
    return _with_one_dict(spec) if era in ("0.5", "0.6") and draw(st.booleans()) else spec


def _groups() -> st.SearchStrategy[int]:
    return st.integers(0, 2)


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    dtype = draw(st.sampled_from(BUFFER_DTYPES))
    tensor = torch.randn(draw(shapes()), generator=generator, dtype=torch.float64)
    if dtype in (torch.int64, torch.int32):
        return (tensor * (1 << 29)).to(dtype)
    return tensor.abs().to(dtype) if dtype == torch.uint8 else tensor.to(dtype)


def _kinds(stage: int, era: Era, lossless: bool) -> tuple[Kind, ...]:
    if not lossless or stage < 3:
        return ("frozen", "unoptimized")
    return ("frozen",) if era in ("0.9.2", "now") else ()


def _retied(draw: st.DrawFn, param: Param, always_stored: bool) -> Param:
    """Choose how a tie shows in the files."""
    if param.tie_of is None:
        return param
    storage = always_stored or draw(st.booleans())
    return replace(param, record_tie=draw(st.booleans()), storage_tie=storage)


def _found_again(param: Param, era: Era) -> Param:
    """See to it that a stage-3 alias is tied by its record or by its storage."""
    recorded = param.record_tie and era in ("0.9.2", "now")
    return param if recorded else replace(param, storage_tie=True)


def _with_one_dict(spec: Spec) -> Spec:
    try:
        return replace(spec, single_dict_shapes=True)
    except ValueError:
        return spec
