"""Checkpoints that real DeepSpeed writes here and now, against the engine that wrote them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from dist_consolidate import consolidate, open_checkpoint
from tests.cases import assert_same_bits, load_output
from tests.real_deepspeed import Run, Trained, train

pytestmark = [pytest.mark.deepspeed, pytest.mark.dist, pytest.mark.slow]

TWO_RANKS = [
    Run(model, stage, dtype)
    for model in ("gpt2", "t5", "half")
    for stage in (1, 2, 3)
    for dtype in ("bf16", "fp32")
]
THREE_RANKS = [Run("gpt2", 3, "bf16"), Run("t5", 2, "fp32"), Run("half", 1, "bf16")]
NAMES = [f"w2-{run}" for run in TWO_RANKS] + [f"w3-{run}" for run in THREE_RANKS]
WITH_LOGITS = [name for name in NAMES if "gpt2" in name and "fp32" in name]


@pytest.fixture(scope="module")
def all_trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    folder = tmp_path_factory.mktemp("deepspeed")
    two = train(folder / "w2", TWO_RANKS, world=2)
    three = train(folder / "w3", THREE_RANKS, world=3)
    named = {f"w2-{name}": trained for name, trained in two.items()}
    return named | {f"w3-{name}": trained for name, trained in three.items()}


@pytest.fixture
def trained(all_trained: dict[str, Trained], request: pytest.FixtureRequest) -> Trained:
    return all_trained[request.param]


@pytest.mark.parametrize("trained", NAMES, indirect=True)
@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_the_result_is_the_live_engines_state(
    trained: Trained, format: str, tmp_path: Path
) -> None:
    consolidate(trained.ckpt, tmp_path / "out", format=format)
    assert_same_bits(load_output(tmp_path / "out"), trained.fp32)


@pytest.mark.parametrize("trained", NAMES, indirect=True)
def test_every_tie_is_known_and_nothing_is_missing(trained: Trained) -> None:
    checkpoint = open_checkpoint(trained.ckpt)
    assert set(checkpoint) == set(trained.fp32)
    assert not checkpoint.missing
    assert len(checkpoint.ties) == sum(len(names) - 1 for names in trained.ties)
    for names in trained.ties:
        assert len({checkpoint.ties.get(name, name) for name in names}) == 1


@pytest.mark.parametrize("trained", NAMES, indirect=True)
def test_what_is_trained_comes_from_the_fp32_partitions(trained: Trained) -> None:
    checkpoint = open_checkpoint(trained.ckpt)
    from_partitions = {name for name in checkpoint if checkpoint[name].source == "fp32 partition"}
    frozen = set(trained.truth["frozen"])
    frozen |= {name for names in trained.ties if frozen & set(names) for name in names}
    assert from_partitions == trained.fp32.keys() - frozen - set(trained.truth["buffers"])


@pytest.mark.parametrize("trained", WITH_LOGITS, indirect=True)
@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_transformers_loads_it_and_answers_the_same(
    trained: Trained, format: str, tmp_path: Path
) -> None:
    from transformers import GPT2LMHeadModel

    consolidate(trained.ckpt, tmp_path / "out", format=format)
    shutil.copy(trained.folder / "config.json", tmp_path / "out")
    model, loading = GPT2LMHeadModel.from_pretrained(
        tmp_path / "out",
        attn_implementation="eager",
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
    )
    complaints = {what: list(names) for what, names in loading.items() if names}
    assert not complaints
    assert_same_bits({"logits": _logits(model, trained)}, {"logits": trained.truth["logits"]})


def _logits(model: torch.nn.Module, trained: Trained) -> torch.Tensor:
    """The model's answer, computed with one thread as in training: sums keep their order."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            output = model.eval()(input_ids=trained.truth["input_ids"], use_cache=False)
    finally:
        torch.set_num_threads(num_threads)
    logits: torch.Tensor = output.logits
    return logits
