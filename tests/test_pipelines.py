"""Pipelines that real DeepSpeed trains here and now, against the engines of all their stages."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dist_consolidate import CheckpointError, consolidate, open_checkpoint
from dist_consolidate.checkpoint.jobs import run_here
from dist_consolidate.checkpoint.layout import find_tag
from dist_consolidate.checkpoint.reader import read_checkpoint
from tests.cases import assert_same_bits, load_output
from tests.pipe_cases import Pipeline, load_strictly, train_pipelines

pytestmark = [pytest.mark.deepspeed, pytest.mark.dist, pytest.mark.slow]

# Processes, and what they train: model, ZeRO stage, element type, pipeline stages, options.
WORLDS = {
    2: [
        "plain:0:bf16:2:bf16acc",
        "plain:1:bf16:2:bf16opt",
        "plain:0:fp16:2",
        "tied:0:fp32:2",
        "tied:0:fp16:2",
        "tied:1:bf16:2",
        "tied:1:fp16:2",
        "tied:1:fp32:2",
        "repeated:0:fp16:2",
        "repeated:0:fp32:2",
        "repeated:1:bf16:2",
        "shared:0:fp16:2",
        "shared:1:bf16:2",
        "frozen:1:fp32:2:nofrozen",
        "biased:1:bf16:2",
        "biased:0:fp16:2",
    ],
    3: ["tied:1:bf16:3", "repeated:1:fp32:3", "plain:1:bf16:1", "tied:1:bf16:1"],
    4: [
        "plain:0:fp32:2",
        "plain:1:bf16:4:bf16opt",
        "tied:0:bf16:2:bf16acc",
        "tied:1:bf16:2:parallel",
        "tied:0:fp16:2:fused",
        "repeated:0:fp16:2:fused",
        "repeated:1:bf16:4",
        "frozen:1:bf16:2",
        "frozen:0:fp16:2:fused",
        "shared:1:bf16:2:bf16opt",
    ],
}
RUNS = [run for runs in WORLDS.values() for run in runs]


def has_names(run: str) -> bool:
    """Whether the checkpoint records what PipelineModule calls its tied tensors."""
    model, stage, dtype = run.split(":")[:3]
    return model not in ("tied", "repeated", "biased") or stage == "1" or dtype == "bf16"


NAMED = [run for run in RUNS if has_names(run) and "biased" not in run]
UNNAMED = [run for run in RUNS if not has_names(run)]


Train = Callable[[str], Pipeline]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains all runs of a world when the first of them is asked for."""
    found: dict[str, Pipeline] = {}

    def trained(run: str) -> Pipeline:
        if run not in found:
            world = next(number for number, runs in WORLDS.items() if run in runs)
            folder = tmp_path_factory.mktemp(f"pipelines{world}")
            found.update(train_pipelines(folder, WORLDS[world], world=world))
        return found[run]

    return trained


@pytest.fixture
def pipeline(train: Train, request: pytest.FixtureRequest) -> Pipeline:
    return train(request.param)


def wanted(pipeline: Pipeline, truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is to come out: what was saved without frozen parameters lacks these."""
    if "nofrozen" not in pipeline.run:
        return truth
    buffers = ("ids", "calls", "scale")
    return {n: t for n, t in truth.items() if n in pipeline.trained or n.endswith(buffers)}


@pytest.mark.parametrize("pipeline", NAMED, indirect=True)
@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_every_stage_comes_out_as_pipeline_module_names_it(
    pipeline: Pipeline, format: str, tmp_path: Path
) -> None:
    consolidate(pipeline.ckpt, tmp_path / "out", format=format)
    assert_same_bits(load_output(tmp_path / "out"), wanted(pipeline, pipeline.named))


@pytest.mark.parametrize("pipeline", RUNS, indirect=True)
def test_every_layer_comes_out_under_its_number(pipeline: Pipeline, tmp_path: Path) -> None:
    consolidate(pipeline.ckpt, tmp_path / "out", pipeline_names="layer")
    assert_same_bits(load_output(tmp_path / "out"), wanted(pipeline, pipeline.by_layer))


@pytest.mark.parametrize("pipeline", UNNAMED, indirect=True)
def test_names_that_nothing_records_are_the_layers(pipeline: Pipeline, tmp_path: Path) -> None:
    """Stage 0 in fp16 and fp32 records no names: layers' numbers, whatever is asked for."""
    report = consolidate(pipeline.ckpt, tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), wanted(pipeline, pipeline.by_layer))
    assert any("named after its layer" in note for note in report.notes)


@pytest.mark.parametrize("pipeline", [r for r in NAMED if ":0:fp" not in r], indirect=True)
def test_what_is_trained_comes_from_the_fp32_partitions(pipeline: Pipeline) -> None:
    checkpoint = open_checkpoint(pipeline.ckpt)
    from_partitions = {name for name in checkpoint if checkpoint[name].source == "fp32 partition"}
    assert from_partitions == pipeline.trained
    assert checkpoint.notes or "tied" not in pipeline.run


@pytest.mark.parametrize("pipeline", ["repeated:1:bf16:2", "repeated:1:bf16:4"], indirect=True)
def test_layers_that_are_one_module_are_ties(pipeline: Pipeline, tmp_path: Path) -> None:
    report = consolidate(pipeline.ckpt, tmp_path / "layer", pipeline_names="layer")
    twins = {f"{layer}.{key}": f"1.{key}" for layer in (2, 5) for key in ("weight", "scale")}
    assert report.ties == twins
    consolidate(pipeline.ckpt, tmp_path / "drop", pipeline_names="layer", ties="drop")
    kept = {n: t for n, t in pipeline.by_layer.items() if n not in twins}
    assert_same_bits(load_output(tmp_path / "drop"), kept)


@pytest.mark.parametrize("pipeline", ["shared:1:bf16:2", "shared:1:bf16:2:bf16opt"], indirect=True)
def test_one_parameter_under_two_names_keeps_its_precision(pipeline: Pipeline) -> None:
    checkpoint = open_checkpoint(pipeline.ckpt)
    modules = {"2.weight": "1.weight", "2.bias": "1.bias"}
    twins = {f"{layer}.two.weight": f"{layer}.one.weight" for layer in (3, 4)}
    assert checkpoint.ties == modules | twins
    assert all(any(note.startswith(name) for note in checkpoint.notes) for name in checkpoint.ties)


@pytest.mark.parametrize("pipeline", ["biased:1:bf16:2"], indirect=True)
def test_what_is_not_kept_equal_over_stages_is_not_merged(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    """DeepSpeed keeps only ``tied_weight_attr`` equal; the rest trains apart on each stage."""
    with pytest.raises(CheckpointError) as refusal:
        consolidate(pipeline.ckpt, tmp_path / "out")
    message = str(refusal.value)
    assert "tied_modules.mixer.bias: is tied on pipeline stages 0 and 1" in message
    assert "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt" in message
    assert "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt" in message
    assert "tied_modules.mixer.weight" not in message
    assert "--pipeline-names layer" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "pipeline", ["tied:1:fp32:2", "repeated:1:fp32:3", "plain:0:fp32:2"], indirect=True
)
def test_pipeline_module_loads_it_strictly(pipeline: Pipeline, tmp_path: Path) -> None:
    consolidate(pipeline.ckpt, tmp_path / "out")
    load_strictly(pipeline.run.split(":")[0], tmp_path / "out")


@pytest.mark.parametrize("pipeline", ["plain:0:fp16:2", "tied:0:fp16:2:fused"], indirect=True)
def test_a_master_without_its_layer_file_is_noticed(pipeline: Pipeline, tmp_path: Path) -> None:
    checkpoint = _copy(pipeline.ckpt, tmp_path / "ckpt")
    next(checkpoint.rglob("layer_01-model_states.pt")).unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt: fp32") as refusal:
        consolidate(checkpoint, tmp_path / "out")
    assert "missing or of another save" in str(refusal.value)


@pytest.mark.parametrize("pipeline", ["tied:0:fp16:2"], indirect=True)
def test_masters_without_names_that_differ_over_stages(pipeline: Pipeline, tmp_path: Path) -> None:
    """By one bit, which the 16-bit copy does not show: the lowest stage's is taken, and told."""
    checkpoint = _copy(pipeline.ckpt, tmp_path / "ckpt")
    path = next(checkpoint.rglob("mp_rank_01_model_states.pt"))
    state = torch.load(path, weights_only=False)
    tied = state["optimizer"]["fp32_groups"][0][0]
    assert tied.shape == pipeline.named["tied_modules.embed.weight"].shape
    tied.data.view(torch.int32)[-1, -1] ^= 1
    torch.save(state, path)
    report = consolidate(checkpoint, tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), pipeline.by_layer)
    assert any("0.weight is tied on pipeline stages 0 and 1" in note for note in report.notes)


@pytest.mark.parametrize("pipeline", ["tied:0:fp32:2", "repeated:0:fp32:2"], indirect=True)
def test_a_missing_layer_file_is_noticed_by_the_moments(pipeline: Pipeline, tmp_path: Path) -> None:
    """Without buffers or partitions that name the layer, only the optimizer's moments tell."""
    numbers = {int(name.split(".")[0]) for name in pipeline.by_layer}
    for number in numbers - {1, 2, 5} if "repeated" in pipeline.run else numbers:
        checkpoint = _copy(pipeline.ckpt, tmp_path / f"{number}")
        next(checkpoint.rglob(f"layer_{number:02d}-model_states.pt")).unlink()
        with pytest.raises(CheckpointError, match=r"layer_.*model_states.pt\)? is missing"):
            consolidate(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("pipeline", ["plain:0:bf16:2:bf16acc"], indirect=True)
def test_masters_missing_beside_stage_0(pipeline: Pipeline, tmp_path: Path) -> None:
    checkpoint = _copy(pipeline.ckpt, tmp_path / "ckpt")
    for path in checkpoint.rglob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError) as refusal:
        consolidate(checkpoint, tmp_path / "out")
    for index in (0, 1):
        name = f"bf16_zero_pp_rank_0_mp_rank_{index:02d}_optim_states.pt"
        assert f"{name}: is missing, and with it every fp32 master" in str(refusal.value)


@pytest.mark.parametrize("pipeline", ["plain:1:bf16:2:bf16opt", "frozen:1:bf16:2"], indirect=True)
def test_without_ties_no_rank_need_see_everything(pipeline: Pipeline, tmp_path: Path) -> None:
    whole = find_tag(pipeline.ckpt)
    (tmp_path / "seen").mkdir()
    seen = dataclasses.replace(whole, path=tmp_path / "seen")
    found = read_checkpoint(seen, lambda _, jobs: run_here(whole, jobs))
    assert found == read_checkpoint(whole)


def _copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target
