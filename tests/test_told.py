"""What users are told: of the ranks, of missing keys, of folders that do not fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from dist_consolidate import CheckpointError, cli, consolidate, open_checkpoint
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.special import copy_of, edit


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("kitchen_z3_bf16_w2", "ZeRO stage 3, 2 ranks, step 3"),
        ("tp2_z1_fp32_w2", "1 data-parallel rank, 2 tensor-parallel ranks, step 3"),
        ("pipe_z1_bf16_w2", "1 data-parallel rank, 2 pipeline stages, step 3"),
        ("pipe_z0_fp32_w2", "1 data-parallel rank, 2 pipeline stages, step 3"),
        ("universal_tp2_z1_fp32_w2", "1 data-parallel rank, 2 tensor-parallel ranks, step 3"),
    ],
)
def test_the_ranks_that_saved_it(
    name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(CASES[name].ckpt), str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert told in capsys.readouterr().out.splitlines()[0]


def test_the_transport_that_was_asked_for(tmp_path: Path) -> None:
    report = consolidate(CASES["z0_bf16_w2"].ckpt, tmp_path / "out", transport="gather")
    assert report.transport == "gather"


def test_a_search_folder_of_another_tag(tmp_path: Path) -> None:
    _, tag = copy_of("frozen_half_z1_w2", tmp_path)
    other = tmp_path / "node1"
    shutil.copytree(tag, other)
    with pytest.raises(CheckpointError) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out", search_dir=other)
    assert f"{other}: holds shards, but as tag node1, while {tag.name} is read" in str(error.value)


def universal_twice(tmp_path: Path) -> Path:
    root = tmp_path / "ckpt"
    shutil.copytree(CASES["universal_frozen_half_z1_w2"].ckpt, root)
    shutil.copytree(root / "universal", root / "step_9_universal")
    (root / "latest").unlink(missing_ok=True)
    return root


def test_latest_universal_is_followed(tmp_path: Path) -> None:
    root = universal_twice(tmp_path)
    (root / "latest_universal").write_text("universal")
    assert open_checkpoint(root).tag == "universal"
    (root / "latest_universal").write_text("step_9_universal")
    report = consolidate(root, tmp_path / "out")
    assert report.facts["tag_chosen"] == "named by `latest_universal`"
    assert report.facts["tag"] == "step_9_universal"


def test_latest_universal_that_names_nothing(tmp_path: Path) -> None:
    root = universal_twice(tmp_path)
    (root / "latest_universal").write_text("gone")
    with pytest.raises(CheckpointError, match="`latest_universal` names 'gone'"):
        open_checkpoint(root)


def test_a_key_without_values_is_not_called_a_pipelines(tmp_path: Path) -> None:
    """Of a key that ds_to_universal did not merge, the rank's own part is all there is."""
    shutil.copytree(CASES["universal_tp2_z1_fp32_w2"].ckpt, tmp_path / "ckpt")
    for path in (tmp_path / "ckpt").rglob("mp_rank_0*_model_states.pt"):
        edit(
            path, lambda state: state["module"].update(empty=state["module"]["lm_head.weight"][:0])
        )
    with pytest.raises(CheckpointError) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert "neither the optimizer states nor `module` hold values of it" in str(error.value)
    assert "pipeline" not in str(error.value)


@pytest.mark.parametrize("name", ["moe_z2_bf16_w2", "moe_z1_fp32_w2"])
def test_masters_of_experts_are_taken_on_the_users_word(name: str, tmp_path: Path) -> None:
    case, tag = copy_of(name, tmp_path)
    path = min(tag.glob("layer_0_expert_1_*"))

    def change(state: dict[str, torch.Tensor]) -> None:
        for tensor in state.values():
            tensor.data += 1

    edit(path, change)
    with pytest.raises(CheckpointError) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert path.name in str(error.value) and "pass --trust-masters" in str(error.value)
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", trust_masters=True)
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))
    assert any("these were taken (--trust-masters)" in note for note in report.notes)


def test_masters_without_names_cannot_be_taken_on_anybodys_word(tmp_path: Path) -> None:
    _, tag = copy_of("z0_bf16_w2", tmp_path)

    def change(state: dict[str, dict[str, torch.Tensor]]) -> None:
        for tensor in state["module"].values():
            tensor.data += 1

    edit(tag / "mp_rank_00_model_states.pt", change)
    with pytest.raises(CheckpointError, match="--trust-masters cannot help"):
        consolidate(tmp_path / "ckpt", tmp_path / "out", trust_masters=True)


def test_the_precision_of_a_pipeline_without_optimizer_states(tmp_path: Path) -> None:
    _, tag = copy_of("pipe_z1_bf16_w2", tmp_path)
    for path in tag.glob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert "in the layer files' own element type with --allow-16bit" in str(error.value)


def test_a_pipelines_names_without_optimizer_states(tmp_path: Path) -> None:
    """The names are those of the run with its optimizer states; the tied module is one of them."""
    case, tag = copy_of("pipe_z1_bf16_w2", tmp_path)
    for path in tag.glob("*optim_states.pt"):
        path.unlink()
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", allow_16bit=True, dtype="keep")
    got = load_output(tmp_path / "out")
    # What the first stage's engine holds; the last one's layers are looked up by their masters.
    raw = case.truth["raw"]
    assert "tied_modules.embed.weight" in raw
    assert_same_bits({name: got[name] for name in raw}, raw)
    assert got.keys() == case.truth["fp32"].keys()
    rounded = {n: t.to(got[n].dtype) for n, t in case.truth["fp32"].items()}
    assert_same_bits(got, rounded)
    assert any("the layer files" in note for note in report.notes)
    (tag / "layer_02-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"layer_02-\*model_states.pt: 2.weight is recorded"):
        consolidate(tmp_path / "ckpt", tmp_path / "again", allow_16bit=True)
