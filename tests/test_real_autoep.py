"""Models whose experts DeepSpeed fuses itself (AutoEP), trained here and now."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_consolidate import ConsolidateError, consolidate, open_checkpoint
from tests.cases import assert_same_bits, load_output
from tests.real_experts import TrainedExperts, train_experts

pytestmark = [pytest.mark.deepspeed, pytest.mark.dist, pytest.mark.slow]

TWO_RANKS = ["auto1:1:fp32", "auto2:2:bf16", "auto2:0:fp32", "auto1:3:bf16", "auto2:3:fp32"]
TWO_RANKS += ["auto2:2:bf16:tp", "auto2:0:fp32:tp"]
FOUR_RANKS = ["auto2:1:bf16", "auto2:2:bf16:before", "auto4:2:fp32"]
FOUR_RANKS += ["auto2:3:bf16", "auto2:3:fp32:before", "auto4:3:bf16"]
FOUR_RANKS += ["auto2:1:bf16:tp", "auto4:2:fp32:tp"]
NAMES = [f"w2-{run}" for run in TWO_RANKS] + [f"w4-{run}" for run in FOUR_RANKS]
# Without ZeRO, experts beside tensor ranks are refused.
NAMES.remove("w2-auto2:0:fp32:tp")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainedExperts]:
    folder = tmp_path_factory.mktemp("w2")
    return train_experts(folder, TWO_RANKS, world=2)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainedExperts]:
    folder = tmp_path_factory.mktemp("w4")
    return train_experts(folder, FOUR_RANKS, world=4)


@pytest.fixture
def trained(request: pytest.FixtureRequest) -> TrainedExperts:
    world, _, run = request.param.partition("-")
    return request.getfixturevalue({"w2": "two_ranks", "w4": "four_ranks"}[world])[run]


@pytest.mark.parametrize("trained", NAMES, indirect=True)
@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_the_result_is_the_live_engines_state(
    trained: TrainedExperts, format: str, tmp_path: Path
) -> None:
    consolidate(trained.ckpt, tmp_path / "out", format=format)
    assert_same_bits(load_output(tmp_path / "out"), trained.fp32)


@pytest.mark.parametrize("trained", NAMES, indirect=True)
def test_fused_tensors_are_whole(trained: TrainedExperts) -> None:
    """Every expert is in them, from the fp32 partitions where there are any."""
    checkpoint = open_checkpoint(trained.ckpt)
    fused = [name for name in checkpoint if ".experts.w" in name]
    assert len(fused) == 6
    assert {checkpoint[name].shape[0] for name in fused} == {4}
    wanted = "fp32 partition" if trained.stage else "module"
    assert {checkpoint[name].source for name in fused} == {wanted}


def _edited(
    trained: TrainedExperts, target: Path, pattern: str, edit: Callable[[dict[str, Any]], None]
) -> Path:
    """Copy a checkpoint with one file changed."""
    shutil.copytree(trained.ckpt, target)
    (path,) = target.rglob(pattern)
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)
    return target


def _refusal(ckpt: Path, out: Path) -> str:
    with pytest.raises(ConsolidateError) as caught:
        consolidate(ckpt, out)
    assert not out.exists()
    return str(caught.value)


def test_ranks_that_disagree_about_who_shares_experts(
    four_ranks: dict[str, TrainedExperts], tmp_path: Path
) -> None:
    def edit(state: dict[str, Any]) -> None:
        groups = state["optimizer_state_dict"]["ds_zero_partition_groups"]
        groups[-1]["partition_ranks"] = [1, 2]

    pattern = "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    ckpt = _edited(four_ranks["auto2:3:bf16"], tmp_path / "ckpt", pattern, edit)
    assert "is shared out over ranks [0, 2], say the optimizer states of ranks [0]" in _refusal(
        ckpt, tmp_path / "out"
    )


def test_experts_that_two_ranks_claim(
    four_ranks: dict[str, TrainedExperts], tmp_path: Path
) -> None:
    def edit(state: dict[str, Any]) -> None:
        for layer in state["ds_autoep_layers"]:
            layer["global_expert_start"], layer["global_expert_end"] = 0, 2

    pattern = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    ckpt = _edited(four_ranks["auto2:3:bf16"], tmp_path / "ckpt", pattern, edit)
    message = _refusal(ckpt, tmp_path / "out")
    assert "the ranks hold the experts [(0, 2), (0, 2)], expected each of 4 once" in message


def test_model_states_that_tell_whose_experts_they_are(
    four_ranks: dict[str, TrainedExperts], tmp_path: Path
) -> None:
    """Those of rank 3 say nothing new; those of rank 1 do."""
    trained = four_ranks["auto2:3:bf16"]
    shutil.copytree(trained.ckpt, tmp_path / "ckpt")
    (unneeded,) = (tmp_path / "ckpt").rglob("zero_pp_rank_3_*_model_states.pt")
    unneeded.unlink()
    consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), trained.fp32)
    (needed,) = (tmp_path / "ckpt").rglob("zero_pp_rank_1_*_model_states.pt")
    needed.unlink()
    message = _refusal(tmp_path / "ckpt", tmp_path / "other")
    assert "model states of rank 1 are missing" in message
    assert "which experts ranks [1, 3] hold" in message


def test_zero3_experts_without_a_record_of_who_shares_them(
    two_ranks: dict[str, TrainedExperts], tmp_path: Path
) -> None:
    def edit(state: dict[str, Any]) -> None:
        del state["optimizer_state_dict"]["ds_zero_partition_groups"]

    pattern = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    ckpt = _edited(two_ranks["auto2:3:fp32"], tmp_path / "ckpt", pattern, edit)
    assert "does not record which ranks hold which" in _refusal(ckpt, tmp_path / "out")


def test_a_rank_that_stands_elsewhere_beside_tensor_ranks(
    four_ranks: dict[str, TrainedExperts], tmp_path: Path
) -> None:
    def edit(state: dict[str, Any]) -> None:
        state["folding"]["ep_rank"] = 0

    pattern = "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"
    ckpt = _edited(four_ranks["auto2:1:bf16:tp"], tmp_path / "ckpt", pattern, edit)
    message = _refusal(ckpt, tmp_path / "out")
    assert f"{pattern}: its folding says tensor rank 1 of 2 and expert-parallel rank 0 of 2" in (
        message
    )
    assert "expected tensor rank 1 of 2 and expert-parallel rank 1" in message


def test_a_missing_expert_beside_tensor_ranks(
    four_ranks: dict[str, TrainedExperts], tmp_path: Path
) -> None:
    trained = four_ranks["auto2:1:bf16:tp"]
    shutil.copytree(trained.ckpt, tmp_path / "ckpt")
    (path,) = (tmp_path / "ckpt").rglob("layer_1_expert_3_mp_rank_01_model_states.pt")
    path.unlink()
    assert "is missing (expert 3 of 4 of MoE layer 1)" in _refusal(
        tmp_path / "ckpt", tmp_path / "out"
    )


def test_experts_beside_tensor_ranks_without_zero(
    two_ranks: dict[str, TrainedExperts], tmp_path: Path
) -> None:
    message = _refusal(two_ranks["auto2:0:fp32:tp"].ckpt, tmp_path / "out")
    assert "has experts beside 2 tensor-parallel ranks" in message
    assert "was trained without ZeRO" in message
