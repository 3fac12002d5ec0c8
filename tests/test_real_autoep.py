"""Models whose experts DeepSpeed fuses itself (AutoEP), trained here and now."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_consolidate import consolidate, open_checkpoint
from tests.cases import assert_same_bits, load_output
from tests.real_experts import TrainedExperts, train_experts

pytestmark = [pytest.mark.deepspeed, pytest.mark.dist, pytest.mark.slow]

TWO_RANKS = ["auto1:1:fp32", "auto2:2:bf16", "auto2:0:fp32"]
FOUR_RANKS = ["auto2:1:bf16", "auto2:2:bf16:before", "auto4:2:fp32"]
NAMES = [f"w2-{run}" for run in TWO_RANKS] + [f"w4-{run}" for run in FOUR_RANKS]


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
