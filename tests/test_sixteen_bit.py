"""Folders of ZeRO runs whose optimizer states are all gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dist_consolidate import CheckpointError, cli, consolidate
from tests.cases import CASES, assert_same_bits, load_output
from tests.special import copy_of

BF16 = ["zenflow_z2_bf16_w2", "z1_bf16opt_groups_w4"]


def without_optimizer(name: str, tmp_path: Path) -> None:
    _, tag = copy_of(name, tmp_path)
    gone = list(tag.glob("*optim_states.pt"))
    assert gone
    for path in gone:
        path.unlink()


@pytest.mark.parametrize("name", BF16)
def test_refused_by_default_with_the_way_out(name: str, tmp_path: Path) -> None:
    without_optimizer(name, tmp_path)
    with pytest.raises(CheckpointError, match="all optimizer states are missing") as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert "in bfloat16" in str(error.value) and "--allow-16bit" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", BF16)
@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_the_live_models_own_weights_on_request(name: str, dtype: str, tmp_path: Path) -> None:
    without_optimizer(name, tmp_path)
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", allow_16bit=True, dtype=dtype)
    want = {key: value.clone() for key, value in CASES[name].truth["raw"].items()}
    if dtype == "fp32":
        want = {n: t.float() if t.is_floating_point() else t for n, t in want.items()}
    assert_same_bits(load_output(tmp_path / "out"), want)
    assert any("in bfloat16 (--allow-16bit)" in note for note in report.notes)
    case = CASES[name]
    assert (report.facts["stage"], report.facts["world_size"]) == (case.stage, case.world)


def test_by_the_command_line(tmp_path: Path) -> None:
    without_optimizer(BF16[0], tmp_path)
    arguments = [str(tmp_path / "ckpt"), str(tmp_path / "out"), "--device", "cpu"]
    assert cli.main([*arguments, "--allow-16bit"]) == 0
    assert load_output(tmp_path / "out")["inp.weight"].dtype == torch.float32


def test_zero_3_keeps_no_weights_elsewhere(tmp_path: Path) -> None:
    without_optimizer("kitchen_z3_bf16_w2", tmp_path)
    with pytest.raises(CheckpointError, match="ZeRO-3, whose weights are in no other file"):
        consolidate(tmp_path / "ckpt", tmp_path / "out", allow_16bit=True)


def test_masters_that_are_there_are_taken_all_the_same(tmp_path: Path) -> None:
    case = CASES[BF16[0]]
    consolidate(case.ckpt, tmp_path / "out", allow_16bit=True)
    assert_same_bits(load_output(tmp_path / "out"), case.truth["fp32"])


def test_a_rank_that_is_missing_is_missing_all_the_same(tmp_path: Path) -> None:
    _, tag = copy_of(BF16[0], tmp_path)
    next(tag.glob("*pp_rank_1*optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match=r"is missing \(rank 1 of 2\)"):
        consolidate(tmp_path / "ckpt", tmp_path / "out", allow_16bit=True)
