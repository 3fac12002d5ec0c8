"""Weights in ``module`` testify against a layout that puts other values under their names."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_consolidate import CheckpointError, consolidate, open_checkpoint
from tests.cases import CASES, assert_same_bits, load_output
from tests.synthetic import Param, Spec, Truth, write

PARAMS = tuple(Param(f"w{index}", (6, 4)) for index in range(9))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make(root: Path, seed: int = 0, **more: Any) -> Truth:
    return write(root, Spec(params=PARAMS, world=2, seed=seed, bf16_prefix=False, **more))


def rewrite(path: Path, change: Any) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def refusal(root: Path, out: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        consolidate(root, out)
    assert not out.exists()
    with pytest.raises(CheckpointError) as also:
        open_checkpoint(root)
    assert str(also.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("model_dtype", DTYPES)
def test_model_states_of_another_run(tmp_path, stage, model_dtype):
    """Same names, shapes, step and release: only the values tell."""
    truth = make(tmp_path / "run", stage=stage, model_dtype=model_dtype)
    other = make(tmp_path / "other", 1, stage=stage, model_dtype=model_dtype)
    name = "mp_rank_00_model_states.pt"
    shutil.copy(other.tag_dir / name, truth.tag_dir / name)
    message = refusal(tmp_path / "run", tmp_path / "out")
    assert f"{truth.tag_dir}: 9 of 9 fp32 masters that were looked at hold other values" in message
    assert f"`module` of {name}, the first is 'w0'" in message
    assert message.endswith("pass --trust-masters")


def test_masters_that_are_trusted_are_exact(tmp_path):
    truth = make(tmp_path / "run", stage=2)
    other = make(tmp_path / "other", 1, stage=2)
    name = "mp_rank_00_model_states.pt"
    shutil.copy(other.tag_dir / name, truth.tag_dir / name)
    report = consolidate(tmp_path / "run", tmp_path / "out", trust_masters=True)
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)
    (note,) = (note for note in report.notes if "--trust-masters" in note)
    assert "9 of 9 fp32 masters" in note
    found = open_checkpoint(tmp_path / "run", trust_masters=True)
    assert note in found.notes


@pytest.mark.parametrize("model_dtype", DTYPES)
def test_two_names_that_changed_places(tmp_path, model_dtype):
    """Where ``module`` was cloned before it was saved, no offset tells; the values do."""
    truth = make(tmp_path / "run", stage=2, model_dtype=model_dtype)

    def swap(state: dict[str, Any]) -> None:
        state["module"] = {name: value.clone() for name, value in state["module"].items()}
        (shapes,) = state["param_shapes"]
        order = ["w1", "w0", *list(shapes)[2:]]
        state["param_shapes"] = [{name: shapes[name] for name in order}]

    rewrite(truth.tag_dir / "mp_rank_00_model_states.pt", swap)
    message = refusal(tmp_path / "run", tmp_path / "out")
    assert "2 of 9 fp32 masters" in message
    assert "the first is 'w1'" in message


def test_values_that_are_no_numbers_agree(tmp_path):
    """NaN of any pattern, infinities, both zeros, and what rounds to infinity in fp16."""
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e9] * 4)
    values.view(torch.int32)[0] = -1  # a NaN of another pattern
    for model_dtype in DTYPES:
        root = tmp_path / str(model_dtype)
        truth = make(root, stage=1, model_dtype=model_dtype)
        flat = values.repeat(len(PARAMS))

        def masters(state: dict[str, Any], flat: torch.Tensor = flat) -> None:
            part = state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
            part.copy_(flat[: len(part)])

        def weights(state: dict[str, Any], flat: torch.Tensor = values) -> None:
            for value in state["module"].values():
                value.copy_(flat.view(6, 4))

        for path in truth.tag_dir.iterdir():
            rewrite(path, masters if "optim_states" in path.name else weights)
        consolidate(root, root / "out")


def test_layer_files_of_another_run(tmp_path):
    """A pipeline's layer files hold the rounded weights."""
    case = CASES["pipe_z1_bf16_w2"]
    shutil.copytree(case.ckpt, tmp_path / "run")
    (layer,) = (tmp_path / "run").glob("*/layer_02-model_states.pt")
    rewrite(layer, lambda state: state["weight"].add_(1))
    message = refusal(tmp_path / "run", tmp_path / "out")
    assert "`module` of layer_02-model_states.pt, the first is '2.weight'" in message
    report = consolidate(tmp_path / "run", tmp_path / "out", trust_masters=True)
    assert any("--trust-masters" in note for note in report.notes)
    assert_same_bits(load_output(tmp_path / "out"), case.truth["fp32"])
