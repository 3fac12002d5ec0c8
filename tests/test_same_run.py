"""Files of different runs in one folder: each of them has the run's configuration pickled in it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from dist_consolidate import CheckpointError, consolidate
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.special import State, copy_of, edit

STAGE_3, TENSOR_PARALLEL = "kitchen_z3_bf16_w2", "tp2_z1_fp32_w2"


def refusal(tmp_path: Path, **options: bool) -> str:
    with pytest.raises(CheckpointError) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    return str(error.value)


def other_rate(state: State) -> None:
    """As another run of the same model would have trained."""
    state["ds_config"]["optimizer"]["params"]["lr"] = 0.125


@pytest.mark.parametrize("name", [STAGE_3, TENSOR_PARALLEL, "z1_bf16opt_groups_w4"])
@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_file_of_another_run_is_named(name: str, kind: str, tmp_path: Path) -> None:
    _, tag = copy_of(name, tmp_path)
    path = sorted(tag.glob(f"*mp_rank_0*_{kind}_states.pt"))[-1 if kind == "optim" else 0]
    edit(path, other_rate)
    message = refusal(tmp_path)
    assert "optimizer.params.lr" in message and "0.125" in message
    assert path.name in message and "of different runs" in message


def test_what_the_user_knows_better_is_told(tmp_path: Path) -> None:
    case, tag = copy_of(STAGE_3, tmp_path)
    edit(sorted(tag.glob("*optim_states.pt"))[1], other_rate)
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", trust_masters=True)
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))
    assert any("optimizer.params.lr = 0.125" in note for note in report.notes)


def test_paths_and_other_texts_may_differ(tmp_path: Path) -> None:
    case, tag = copy_of(STAGE_3, tmp_path)

    def move(state: State) -> None:
        state["ds_config"]["zero_optimization"]["offload_optimizer"] = {"nvme_path": "/local/1"}
        state["ds_config"]["tensorboard"] = {"enabled": True}

    edit(sorted(tag.glob("*optim_states.pt"))[1], move)
    consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))


@pytest.mark.parametrize("config", ["ds_config.json", None])
def test_a_configuration_that_is_no_dictionary_tells_nothing(
    config: str | None, tmp_path: Path
) -> None:
    case, tag = copy_of(STAGE_3, tmp_path)
    edit(sorted(tag.glob("*optim_states.pt"))[1], lambda state: state.update(ds_config=config))
    consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))


def test_real_model_states_of_another_run(tmp_path: Path) -> None:
    """ZeRO stages 1 and 2 of one model fit each other in shapes and values of frozen tensors."""
    _, tag = copy_of("frozen_half_z1_w2", tmp_path)
    other = CASES["kitchen_z2_groups_w4"].ckpt
    source = next(other.rglob("mp_rank_00_model_states.pt"))
    shutil.copy(source, tag / source.name)
    assert "zero_optimization.stage = 1, but 2 is that of mp_rank_00" in refusal(tmp_path)


def test_model_states_that_list_other_tensors(tmp_path: Path) -> None:
    """Under ZeRO-3 rank 1's list the same keys as rank 0's, though nothing is read from them."""
    _, tag = copy_of("same_module_tie_z3_w2", tmp_path)
    path = min(tag.glob("zero_pp_rank_0*model_states.pt"))
    edit(path, lambda state: state["module"].update(extra=torch.ones(2)))
    message = refusal(tmp_path)
    assert "keys of `module`" in message and path.name in message and "'extra'" in message


def test_what_only_one_rank_has_on(tmp_path: Path) -> None:
    _, tag = copy_of(STAGE_3, tmp_path)

    def offload(state: State) -> None:
        state["ds_config"]["zero_optimization"]["offload_optimizer"] = {"ratio": 0.5}

    path = sorted(tag.glob("*optim_states.pt"))[1]
    edit(path, offload)
    assert f"{path}: its ds_config has zero_optimization.offload_optimizer.ratio" in refusal(
        tmp_path
    )


@pytest.mark.parametrize("allow_16bit", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_a_tensor_rank_without_optimizer_states(
    index: int, allow_16bit: bool, tmp_path: Path
) -> None:
    _, tag = copy_of(TENSOR_PARALLEL, tmp_path)
    path = tag / f"zero_pp_rank_0_mp_rank_{index:02d}_optim_states.pt"
    path.unlink()
    message = refusal(tmp_path, allow_16bit=allow_16bit)
    assert f"{path}: is missing, and with it every fp32 master" in message
    assert "different saves" not in message


def test_a_universal_checkpoint_without_a_tensor_ranks_model_states(tmp_path: Path) -> None:
    shutil.copytree(CASES["universal_tp2_z1_fp32_w2"].ckpt, tmp_path / "ckpt")
    path = next(tmp_path.rglob("mp_rank_01_model_states.pt"))
    path.unlink()
    assert f"{path}: is missing" in refusal(tmp_path)
