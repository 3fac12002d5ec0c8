"""Models with experts that real DeepSpeed trains here and now, against the engine that did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dist_consolidate import CheckpointError, consolidate, open_checkpoint
from tests.cases import assert_same_bits, load_output
from tests.real_experts import TrainedExperts, train_experts

pytestmark = [pytest.mark.deepspeed, pytest.mark.dist, pytest.mark.slow]

TWO_RANKS = [
    "ep1:1:fp32",
    "ep1:2:bf16",
    "ep2:1:fp32",
    "ep2:1:bf16",
    "ep2:2:bf16",
    "ep2:2:fp32",
    "ep2:1:fp32:elastic",
    "ep2:2:bf16:round",
    "mixed2:1:bf16",
    "mixed2:1:fp32:shuffle",
    "residual:2:fp32",
    "residual:1:bf16",
    "tied:1:bf16",
    "frozen:1:bf16",
    "frozen:2:bf16",
    "ep2:0:fp32",
    "ep2:0:bf16",
    "frozen:0:bf16",
    "residual:0:bf16",
    "tied:0:bf16",
    "ep2:0:bf16:fused",
    "residual:0:bf16:fused",
    "tied:0:bf16:fused",
    "frozen:0:bf16:fused",
]
FOUR_RANKS = [
    "ep1:1:bf16",
    "ep2:1:fp32",
    "ep2:2:bf16",
    "ep2:2:bf16:before",
    "ep2:1:bf16:elastic",
    "ep4:2:bf16",
    "mixed:1:bf16",
    "mixed:2:fp32:before",
    "mixed:0:bf16",
    "ep2:0:bf16:before",
    "mixed:0:bf16:fused",
    "ep2:0:bf16:before:fused",
]
NAMES = [f"w2-{run}" for run in TWO_RANKS] + [f"w4-{run}" for run in FOUR_RANKS]
TIED = [name for name in NAMES if "tied" in name or "residual" in name]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainedExperts]:
    folder = tmp_path_factory.mktemp("w2")
    with pytest.MonkeyPatch.context() as patch:
        # DeepSpeed goes through a set of names; with another order on each rank, its collectives
        # may wait for each other. The run with `shuffle` brings that order about on purpose.
        patch.setenv("PYTHONHASHSEED", "0")
        return train_experts(folder, TWO_RANKS, world=2)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainedExperts]:
    folder = tmp_path_factory.mktemp("w4")
    with pytest.MonkeyPatch.context() as patch:
        # DeepSpeed goes through a set of names; with another order on each rank, its collectives
        # may wait for each other. The run with `shuffle` brings that order about on purpose.
        patch.setenv("PYTHONHASHSEED", "0")
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
def test_what_is_trained_comes_from_fp32_masters(trained: TrainedExperts) -> None:
    checkpoint = open_checkpoint(trained.ckpt)
    assert not checkpoint.missing
    from_masters = {name for name in checkpoint if checkpoint[name].source == "fp32 partition"}
    untrained = {*trained.truth["frozen"], *trained.truth["buffers"]}
    if trained.stage == 0 and "fp32" in trained.run:
        assert not from_masters
    else:
        assert from_masters == trained.fp32.keys() - untrained


@pytest.mark.parametrize("trained", TIED, indirect=True)
def test_ties_inside_every_expert_are_known(trained: TrainedExperts) -> None:
    ties = open_checkpoint(trained.ckpt).ties
    assert {(holder, alias) for alias, holder in ties.items()} == {
        (names[0], alias) for names in trained.truth["ties"] for alias in names[1:]
    }


@pytest.mark.parametrize("order", ["ep2:2:bf16", "ep2:2:bf16:before"])
def test_without_a_recorded_order_the_values_decide(
    four_ranks: dict[str, TrainedExperts], order: str, tmp_path: Path
) -> None:
    """A run that was given the path of its configuration records the path and no more."""
    trained = four_ranks[order]
    copy = _with_config(trained, tmp_path / "ckpt", "ds_config.json")
    consolidate(copy, tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), trained.fp32)


@pytest.mark.parametrize(("order", "says"), [("ep2:2:bf16", True), ("ep2:2:bf16:before", False)])
def test_a_recorded_order_that_the_values_contradict_is_refused(
    four_ranks: dict[str, TrainedExperts], order: str, says: bool, tmp_path: Path
) -> None:
    trained = four_ranks[order]
    config = {"use_data_before_expert_parallelism": says}
    copy = _with_config(trained, tmp_path / "ckpt", config)
    with pytest.raises(CheckpointError, match="as the configuration says; they fit if neighb"):
        consolidate(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_alike_experts_and_no_recorded_order(
    four_ranks: dict[str, TrainedExperts], tmp_path: Path
) -> None:
    """Nothing tells the ranks apart where all of them hold the same; then it does not matter."""
    trained = four_ranks["ep2:2:bf16"]
    copy = _with_config(trained, tmp_path / "ckpt", "ds_config.json")
    folder = copy / "global_step3"
    for path in folder.glob("*optim_states.pt"):
        state = torch.load(path, weights_only=False)
        for part in state["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
            part.detach().fill_(0.5)
        torch.save(state, path)
    for path in folder.glob("*_expert_*"):
        state = {key: torch.full_like(value, 0.5) for key, value in torch.load(path).items()}
        torch.save(state, path)
    consolidate(copy, tmp_path / "out", trust_masters=True)
    output = load_output(tmp_path / "out")
    assert output.keys() == trained.fp32.keys()
    assert all(bool((output[key] == 0.5).all()) for key in output)


def _with_config(trained: TrainedExperts, target: Path, config: object) -> Path:
    """Copy a checkpoint with another recorded configuration."""
    folder = target / "global_step3"
    folder.mkdir(parents=True)
    (target / "latest").write_text("global_step3")
    for path in (trained.ckpt / "global_step3").iterdir():
        state = torch.load(path, weights_only=False)
        if "ds_config" in state:
            state["ds_config"] = config
        torch.save(state, folder / path.name)
    return target
