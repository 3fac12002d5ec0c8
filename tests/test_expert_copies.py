"""Tensors of experts that have another's values and are no second name of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch

from dist_consolidate import consolidate
from tests.cases import CASES, assert_same_bits, load_output

DENSE = "layers.0.mlp.up.weight"


def test_a_frozen_copy_of_the_dense_layer_keeps_its_own_values(tmp_path: Path) -> None:
    """Residual experts begin as deep copies; where neither was trained, both look alike."""
    case = CASES["ds0.14.5_moe_round_robin_z2_w2"]
    shutil.copytree(case.ckpt, tmp_path / "ckpt")
    (model,) = (tmp_path / "ckpt").rglob("mp_rank_00_model_states.pt")
    low = torch.load(model, weights_only=False)["module"][DENSE]
    want = dict(case.truth["fp32"])
    assert not low.float().equal(want[DENSE])
    for file in (tmp_path / "ckpt").rglob("layer_0_expert_*_model_states.pt"):
        found = re.match(r"layer_0_expert_(\d+)_", file.name)
        assert found
        name = f"layers.0.deepspeed_moe.experts.deepspeed_experts.{found[1]}.frozen.weight"
        torch.save({**torch.load(file, weights_only=True), name: low.clone()}, file)
        want[name] = low.float()
    report = consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), want)
    assert not report.ties
