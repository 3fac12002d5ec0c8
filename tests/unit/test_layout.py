"""From a folder to the shards of one tag: names, ranks, and which tag it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dist_consolidate.checkpoint.layout import find_tag, list_shards, parse_name
from dist_consolidate.errors import CheckpointError, UnsupportedLayoutError
from tests.cases import CASES
from tests.synthetic import Param, Spec, write

PARAMS = (Param("a.weight", (5, 3)), Param("b", (7,)))


def checkpoint(root: Path, tag: str, **more: object) -> Path:
    """A small checkpoint under a tag."""
    return write(root, Spec(stage=2, params=PARAMS, tag=tag, **more)).tag_dir


def refusal(root: Path, tag: str | None = None, kind: type = CheckpointError) -> str:
    with pytest.raises(CheckpointError) as caught:
        find_tag(root, tag)
    assert type(caught.value) is kind
    assert str(root) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "role", "dp_rank", "mp_rank", "prefix"),
    [
        ("mp_rank_00_model_states.pt", "model", None, 0, ""),
        ("mp_rank_17_model_states.pt", "model", None, 17, ""),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "model", 0, 0, ""),
        ("zero_pp_rank_1023_mp_rank_00_model_states.pt", "model", 1023, 0, ""),
        ("zero_pp_rank_3_mp_rank_00_optim_states.pt", "optim", 3, 0, ""),
        ("bf16_zero_pp_rank_3_mp_rank_01_optim_states.pt", "optim", 3, 1, "bf16_"),
        ("fp16_zero_pp_rank_10_mp_rank_00_optim_states.pt", "optim", 10, 0, "fp16_"),
        ("zero_pp_rank_2_mp_rank_00optim_states.pt", "optim", 2, 0, ""),
        ("zero_pp_rank_2_mp_rank_100_optim_states.pt", "optim", 2, 100, ""),
        ("layer_01-model_00-model_states.pt", "layer", None, 0, ""),
        ("layer_123-model_states.pt", "layer", None, 0, ""),
        ("layer_0_expert_12_mp_rank_00_model_states.pt", "expert", None, 0, ""),
        ("expert_3_mp_rank_01_model_states.pt", "expert", None, 1, ""),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "expert-optim", 0, 0, ""),
        ("mp_rank_00_model_states.pt-0.1", "foreign", None, 0, ""),
    ],
)
def test_names(name, role, dp_rank, mp_rank, prefix):
    shard = parse_name(name, 12)
    assert shard is not None
    assert (shard.name, shard.role, shard.num_bytes) == (name, role, 12)
    assert (shard.dp_rank, shard.mp_rank, shard.prefix) == (dp_rank, mp_rank, prefix)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "latest",
        "zero_to_fp32.py",
        "pytorch_model.bin",
        "mp_rank_00_model_states.pt.tmp",
        "mp_rank_00_model_states.pt\n",
        "old_mp_rank_00_model_states.pt",
        "mp_rank_xx_model_states.pt",
        "zero_pp_rank_-1_mp_rank_00_optim_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pth",
        "fp8_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_model_states.pt",
    ],
)
def test_other_names(name):
    assert parse_name(name) is None


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_are_in_numeric_order(tmp_path, stage):
    truth = write(tmp_path, Spec(stage=stage, world=12, params=PARAMS))
    folder = find_tag(tmp_path)
    assert folder.path == truth.tag_dir
    assert [shard.dp_rank for shard in folder.of("optim")] == list(range(12))
    models = [shard.dp_rank for shard in folder.of("model")]
    assert models == (list(range(12)) if stage == 3 else [None])
    sizes = {path.name: path.stat().st_size for path in truth.tag_dir.iterdir()}
    assert {shard.name: shard.num_bytes for shard in folder.shards} == sizes


def test_model_parallel_ranks_come_before_ranks(tmp_path):
    for name in ("10_mp_rank_00", "9_mp_rank_00", "2_mp_rank_01", "0_mp_rank_10", "0_mp_rank_02"):
        (tmp_path / f"zero_pp_rank_{name}_optim_states.pt").touch()
    found = [(shard.mp_rank, shard.dp_rank) for shard in list_shards(tmp_path)]
    assert found == [(0, 9), (0, 10), (1, 2), (2, 0), (10, 0)]


def test_folders_are_no_shards(tmp_path):
    (tmp_path / "mp_rank_00_model_states.pt").mkdir()
    assert list_shards(tmp_path) == ()


def test_latest_names_the_tag(tmp_path):
    for tag in ("global_step9", "global_step10"):
        checkpoint(tmp_path, tag)
    (tmp_path / "latest").write_text("global_step9")
    folder = find_tag(tmp_path)
    assert (folder.tag, folder.chosen) == ("global_step9", "named by `latest`")


@pytest.mark.parametrize(
    "content",
    [b"my tag\n", b"my tag\r\n", b"  my tag  ", b"\xef\xbb\xbfmy tag", b"my tag\0", b"my tag\n\n"],
)
def test_latest_with_something_around_it(tmp_path, content):
    checkpoint(tmp_path, "my tag")
    (tmp_path / "latest").write_bytes(content)
    assert find_tag(tmp_path).tag == "my tag"


def test_latest_names_a_tag_that_is_gone(tmp_path):
    for tag in ("global_step9", "global_step10"):
        checkpoint(tmp_path, tag)
    (tmp_path / "latest").write_text("global_step11")
    message = refusal(tmp_path)
    assert "`latest` names 'global_step11', which is not there" in message
    assert "global_step9" in message
    assert "global_step10" in message
    assert "--tag" in message


@pytest.mark.parametrize(
    "content", [b"../elsewhere", b"a/../../elsewhere", b"/", b"", b"\n", b"\0"]
)
def test_latest_that_is_no_tag(tmp_path, content):
    root = tmp_path / "run"
    checkpoint(root, "global_step1")
    checkpoint(tmp_path, "elsewhere")
    (root / "latest").write_bytes(content)
    message = refusal(root)
    empty = not content.strip(b"\n\0")
    assert ("latest: is empty" if empty else "is no tag") in message
    assert str(root / "latest") in message


def test_latest_with_an_absolute_path(tmp_path):
    checkpoint(tmp_path / "run", "global_step1")
    (tmp_path / "run" / "latest").write_text(str(checkpoint(tmp_path, "elsewhere")))
    assert "is no tag" in refusal(tmp_path / "run")


def test_without_latest_the_newest_step_is_read(tmp_path):
    for tag in ("global_step9", "global_step100", "global_step20"):
        path = checkpoint(tmp_path, tag, save_latest=False)
        os.utime(path, (1, 1) if tag == "global_step100" else None)
    (tmp_path / "global_step500").mkdir()
    folder = find_tag(tmp_path)
    assert folder.tag == "global_step100"
    assert folder.chosen == "no `latest`; the newest of 3 tags"


def test_without_latest_and_steps_the_last_one_written_is_read(tmp_path):
    for time, tag in enumerate(("first", "last", "middle")):
        path = checkpoint(tmp_path, tag, save_latest=False)
        os.utime(path, (100 - time, 100 + (50 if tag == "last" else time)))
    assert find_tag(tmp_path).tag == "last"


def test_the_tag_folder_itself(tmp_path):
    path = checkpoint(tmp_path, "global_step7")
    folder = find_tag(path)
    assert (folder.path, folder.tag, folder.chosen) == (path, "global_step7", "the folder itself")
    assert find_tag(path, "global_step7").shards == folder.shards


def test_the_tag_folder_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(checkpoint(tmp_path, "global_step7"))
    assert find_tag(Path()).tag == "global_step7"


def test_an_explicit_tag(tmp_path):
    for tag in ("global_step9", "global_step10"):
        checkpoint(tmp_path, tag)
    folder = find_tag(tmp_path, "global_step9")
    assert (folder.path, folder.tag) == (tmp_path / "global_step9", "global_step9")
    assert folder.chosen == "asked for"


def test_an_explicit_tag_that_is_not_there(tmp_path):
    path = checkpoint(tmp_path, "global_step9")
    message = refusal(tmp_path, "global_step8")
    assert "has no tag 'global_step8'; found" in message
    assert "global_step9" in message
    refusal(path, "global_step8")
    refusal(tmp_path, str(checkpoint(tmp_path / "other", "global_step1")))


def test_an_explicit_tag_without_shards(tmp_path):
    checkpoint(tmp_path, "global_step9")
    (tmp_path / "empty").mkdir()
    assert "no file named like a DeepSpeed shard" in refusal(tmp_path, "empty")


def test_a_trainer_checkpoint(tmp_path):
    checkpoint(tmp_path / "checkpoint-5", "global_step5")
    (tmp_path / "checkpoint-5" / "config.json").write_text("{}")
    (tmp_path / "checkpoint-5" / "model.safetensors").write_bytes(b"dummy")
    assert find_tag(tmp_path / "checkpoint-5").tag == "global_step5"


def test_the_parent_of_trainer_checkpoints(tmp_path):
    for step in (5, 10):
        checkpoint(tmp_path / f"checkpoint-{step}", f"global_step{step}")
    message = refusal(tmp_path)
    assert "holds checkpoints; pass one of them" in message
    assert "  - checkpoint-5" in message
    assert "  - checkpoint-10" in message


def test_a_lightning_checkpoint(tmp_path):
    checkpoint(tmp_path / "last.ckpt", "checkpoint")
    folder = find_tag(tmp_path / "last.ckpt")
    assert (folder.tag, folder.path.name) == ("checkpoint", "checkpoint")


def test_an_accelerate_folder(tmp_path):
    checkpoint(tmp_path, "pytorch_model")
    (tmp_path / "random_states_0.pkl").write_bytes(b"")
    assert find_tag(tmp_path).tag == "pytorch_model"


def universal(root: Path, stage: int) -> Path:
    """What ds_to_universal writes: copies of the model states beside a folder of tensors."""
    truth = write(root, Spec(stage=stage, params=PARAMS))
    for path in truth.tag_dir.glob("*optim_states.pt"):
        path.unlink()
    for param in PARAMS:
        (truth.tag_dir / "zero" / param.name).mkdir(parents=True)
        (truth.tag_dir / "zero" / param.name / "fp32.pt").write_bytes(b"PK")
    (truth.tag_dir / "zero" / "optimizer_state.pt").write_bytes(b"PK")
    return truth.tag_dir


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_universal_checkpoint(tmp_path, stage):
    path = universal(tmp_path, stage)
    assert "universal checkpoint" in refusal(path, kind=UnsupportedLayoutError)


def test_a_universal_checkpoint_without_its_model_states(tmp_path):
    path = universal(tmp_path, 2)
    for file in path.glob("*.pt"):
        file.unlink()
    assert "universal checkpoint" in refusal(path, kind=UnsupportedLayoutError)


def test_a_universal_checkpoint_beside_the_one_it_was_made_from(tmp_path):
    path = checkpoint(tmp_path, "global_step3", save_latest=False)
    universal(tmp_path / "made", 2).rename(tmp_path / "global_step3_universal")
    assert find_tag(tmp_path).path == path


def test_an_empty_folder(tmp_path):
    message = refusal(tmp_path)
    assert "no file named like a DeepSpeed shard" in message
    assert "pass the folder that holds `latest`" in message


def test_a_folder_that_does_not_exist(tmp_path):
    assert f"{tmp_path / 'gone'}: does not exist" in refusal(tmp_path / "gone")


def test_a_file(tmp_path):
    path = checkpoint(tmp_path, "global_step1") / "mp_rank_00_model_states.pt"
    assert f"{path}: is a file" in refusal(path)


@pytest.mark.parametrize("name", ["two_tags_z2_w2", "nolatest_z3_w2", "kitchen_z3_bf16_w2"])
def test_real_checkpoints(name):
    case = CASES[name]
    folder = find_tag(case.ckpt, case.tag)
    assert len(folder.of("optim")) == case.world
    assert {shard.name for shard in folder.shards} == {
        path.name for path in (case.ckpt / folder.tag).iterdir()
    }
