"""Masters of stage 0 that no tensor of `module` is rounded from as a whole, or at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_consolidate import CheckpointError, consolidate
from tests.cases import CASES, assert_same_bits, load_output


def _without(tmp_path: Path, gone: str, change: str = "") -> tuple[Path, dict[str, Any]]:
    """Copy a real checkpoint, as if keys were left out when saving (and one changed after)."""
    case = CASES["z0_bf16_w2"]
    shutil.copytree(case.ckpt, tmp_path / "ckpt")
    (file,) = (tmp_path / "ckpt").rglob("mp_rank_00_model_states.pt")
    state = torch.load(file, weights_only=False)
    del state["module"][gone]
    if change:
        state["module"][change] += 1
    torch.save(state, file)
    return tmp_path / "ckpt", {k: v for k, v in case.truth["fp32"].items() if k != gone}


def test_a_parameter_that_was_left_out(tmp_path: Path) -> None:
    """A master more than `module` has parameters: the others are right, the report speaks of it."""
    ckpt, want = _without(tmp_path, "mid.weight")
    notes = consolidate(ckpt, tmp_path / "out").notes
    assert_same_bits(load_output(tmp_path / "out"), want)
    assert any(note.startswith("1 fp32 master is of parameters that `module`") for note in notes)


def test_a_changed_parameter_is_none_that_was_left_out(tmp_path: Path) -> None:
    """Where a key without a master could be the nameless one's, nothing is assumed."""
    ckpt, _ = _without(tmp_path, "norm.bias", change="inp.bias")
    with pytest.raises(CheckpointError, match="rounds to no tensor of `module`"):
        consolidate(ckpt, tmp_path / "out")
