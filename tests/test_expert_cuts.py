"""Expert partitions of which only the first parameters are named (DeepSpeed before 0.14.5).

The checkpoints were written by 0.12.6 on four ranks: two hold experts 0 and 1 of a layer, two the
others. Files are edited here so that values tell less than they do by nature.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_consolidate import CheckpointError, consolidate, open_checkpoint
from tests.cases import CASES, assert_same_bits, load_output

BASE = CASES["ds0.12.6_moe_z2_w4"]
ROUND = CASES["ds0.12.6_moe_round_robin_z2_w4"]
EXPERT = "layers.{}.deepspeed_moe.experts.deepspeed_experts.{}.{}"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BASE.ckpt, tmp_path / "ckpt"))


def refusal(ckpt: Path) -> str:
    out = ckpt.parent / "out"
    with pytest.raises(CheckpointError) as caught:
        consolidate(ckpt, out)
    assert not out.exists()
    return str(caught.value)


def edit(ckpt: Path, name: str, change: Callable[[Any], None]) -> None:
    (path,) = ckpt.rglob(name)
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def edit_expert(ckpt: Path, layer: int, expert: int, inner: str, value: Tensor) -> None:
    name = EXPERT.format(layer, expert, inner)
    file = f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
    edit(ckpt, file, lambda state: state.__setitem__(name, value))


def edit_masters(ckpt: Path, share: int, old: Tensor, new: Tensor) -> None:
    """Put other values in the place of a parameter's, in the partitions of one expert rank."""
    paths = [next(ckpt.rglob(OPTIM.format(rank))) for rank in (share, share + 2)]
    states = [torch.load(path, weights_only=False) for path in paths]
    groups = [s["optimizer_state_dict"]["single_partition_of_fp32_groups"] for s in states]
    for parts in zip(*groups, strict=True):
        flat = torch.cat([part.detach() for part in parts])
        for at in range(len(flat) - old.numel() + 1):
            if torch.equal(flat[at : at + old.numel()], old.flatten()):
                flat[at : at + old.numel()] = new.flatten()
                for part, piece in zip(
                    parts, flat.split([len(part) for part in parts]), strict=True
                ):
                    part.detach().copy_(piece)
                for path, state in zip(paths, states, strict=True):
                    torch.save(state, path)
                return
    raise AssertionError("these masters are in no partition")


def unnamed(case: Any) -> set[str]:
    """What experts a file of rank 0 or 2 does not name."""
    named = set()
    for rank in (0, 2):
        (path,) = case.ckpt.rglob(OPTIM.format(rank))
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        named |= {name for group in state["param_slice_mappings"] for name in group}
    every = {
        EXPERT.format(layer, expert, inner)
        for layer, experts in ((0, (0, 1)), (1, (0,)))
        for expert in experts
        for inner in ("up.weight", "up.bias", "down.weight")
    }
    return every - named


def test_most_of_the_experts_are_not_named() -> None:
    """The release that wrote these checkpoints does so; else the rest would prove nothing."""
    assert len(unnamed(BASE)) >= 4
    assert len(unnamed(ROUND)) >= 4


@pytest.mark.parametrize("case", [BASE, ROUND], ids=["plain", "round"])
def test_the_report_says_that_values_told(case: Any) -> None:
    checkpoint = open_checkpoint(case.ckpt)
    assert any("names a part of the experts only" in note for note in checkpoint.notes)
    held = {name for name in checkpoint if ".deepspeed_experts." in name}
    assert {checkpoint[name].source for name in held} == {"fp32 partition"}


def same_rounding(truth: Tensor) -> tuple[Tensor, Tensor]:
    """Two values that round to the same bf16 values and are none themselves."""
    low = truth.bfloat16().float()
    one = torch.nextafter(low, low + 1)
    return one, torch.nextafter(one, low + 1)


@pytest.mark.parametrize("case", [BASE, ROUND], ids=["plain", "round"])
@pytest.mark.parametrize("differ", [False, True])
def test_two_experts_that_round_alike(case: Any, differ: bool, tmp_path: Path) -> None:
    """Both experts of a rank have one matrix's values; it matters only if their masters differ.

    Dealt out in turn, they may lie in either place; otherwise the first is named.
    """
    ckpt = Path(shutil.copytree(case.ckpt, tmp_path / "ckpt"))
    inner = "down.weight"
    assert EXPERT.format(0, 1, inner) in unnamed(case)
    assert EXPERT.format(0, 0, inner) not in unnamed(case)
    want = dict(case.truth["fp32"])
    for share in (0, 1):
        one, other = same_rounding(want[EXPERT.format(0, 2 * share, inner)])
        for number in (0, 1):
            name = EXPERT.format(0, 2 * share + number, inner)
            value = other if differ and number else one
            edit_masters(ckpt, share, case.truth["fp32"][name], value)
            edit_expert(ckpt, 0, 2 * share + number, inner, value.bfloat16())
            want[name] = value
    if differ and case is ROUND:
        message = refusal(ckpt)
        assert "several places fit alike, and hold different masters" in message
        assert EXPERT.format(0, 0, inner) in message
        return
    consolidate(ckpt, ckpt.parent / "out")
    assert_same_bits(load_output(ckpt.parent / "out"), want)


def test_zeros_may_be_cut_anyhow(ckpt: Path) -> None:
    """Vectors of zeros, of several lengths, fit in many ways that all give the same."""
    want = dict(BASE.truth["fp32"])
    for layer, expert in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]:
        share = expert // 2 if layer == 0 else expert
        name = EXPERT.format(layer, expert, "up.bias")
        edit_masters(ckpt, share, want[name], torch.zeros_like(want[name]))
        edit_expert(ckpt, layer, expert, "up.bias", torch.zeros_like(want[name]).bfloat16())
        want[name] = torch.zeros_like(want[name])
    consolidate(ckpt, ckpt.parent / "out")
    assert_same_bits(load_output(ckpt.parent / "out"), want)


@pytest.mark.parametrize("share", [0, 1])
def test_an_expert_file_of_another_save(ckpt: Path, share: int) -> None:
    """Experts of every rank are held against the partitions, not those of the first only."""
    inner = "down.weight"
    value = BASE.truth["fp32"][EXPERT.format(0, 2 * share + 1, inner)].bfloat16() * 2
    edit_expert(ckpt, 0, 2 * share + 1, inner, value)
    message = refusal(ckpt)
    assert "cannot be cut into the saved tensors by value (nothing fits)" in message
    assert "a file is of another save" in message


def test_a_frozen_tensor_in_every_expert_takes_no_masters(ckpt: Path) -> None:
    """A tensor that no partition holds keeps its own values, even where it looks like another."""
    want = dict(BASE.truth["fp32"])
    for expert in range(4):
        like = want[EXPERT.format(0, expert, "up.weight")]
        value = like.bfloat16().flip(0).contiguous()
        edit_expert(ckpt, 0, expert, "frozen.weight", value)
        want[EXPERT.format(0, expert, "frozen.weight")] = value.float()
    consolidate(ckpt, ckpt.parent / "out")
    assert_same_bits(load_output(ckpt.parent / "out"), want)
