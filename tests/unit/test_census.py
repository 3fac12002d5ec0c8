"""Who is there: missing, surplus and contradicting ranks, and kinds that are not read."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dist_consolidate.checkpoint.census import SALVAGE_HINT
from dist_consolidate.checkpoint.layout import find_tag
from dist_consolidate.checkpoint.model import Checkpoint
from dist_consolidate.checkpoint.reader import read_checkpoint
from dist_consolidate.errors import CheckpointError
from tests.synthetic import Param, Spec, Truth, write

PARAMS = (
    Param("emb.weight", (11, 5)),
    Param("inp.weight", (7, 13)),
    Param("inp.bias", (7,), group=1),
    Param("head.weight", (11, 5), tie_of="emb.weight"),
)
FROZEN = (*PARAMS, Param("base.weight", (9, 3), kind="frozen"))


def make(root: Path, stage: int = 3, world: int = 2, **more: object) -> Truth:
    params = more.pop("params", PARAMS)
    return write(root, Spec(stage=stage, world=world, params=params, bf16_prefix=False, **more))


def optim(rank: int, prefix: str = "") -> str:
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def read(root: Path) -> Checkpoint:
    return read_checkpoint(find_tag(root))


def refusal(root: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(root)
    assert type(caught.value) is kind
    assert str(root) in str(caught.value)
    return str(caught.value)


def items(message: str) -> list[str]:
    """The problems in a message, without its headline."""
    lines = message.removesuffix(f"\n{SALVAGE_HINT}").splitlines()
    assert all(line.startswith("  - ") for line in lines[1:])
    return [line.removeprefix("  - ") for line in lines[1:]]


def assert_items(message: str, beginnings: Sequence[str]) -> None:
    """Check that there is exactly one problem for each beginning, in that order."""
    found = items(message)
    assert len(found) == len(beginnings), found
    for item, beginning in zip(found, beginnings, strict=True):
        assert item.startswith(beginning), (item, beginning)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 12])
def test_complete_checkpoints_are_read(tmp_path, stage, world):
    truth = make(tmp_path, stage, world, params=FROZEN)
    found = read(tmp_path)
    assert (found.stage, found.tag, found.step) == (stage, truth.tag, 3)
    assert found.world_size == (world if stage else 1)
    assert found.ds_version == "0.19.8"
    assert list(found.module) == [param.name for param in FROZEN]
    sizes = {path.name: path.stat().st_size for path in truth.tag_dir.iterdir()}
    assert found.file_bytes == sizes


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_missing_rank(tmp_path, stage, rank):
    path = make(tmp_path, stage, 4).tag_dir / optim(rank)
    path.unlink()
    assert_items(refusal(tmp_path), [f"{path}: is missing (rank {rank} of 4)"])


def test_every_missing_rank_is_named(tmp_path):
    folder = make(tmp_path, 2, 12).tag_dir
    for rank in (10, 2, 11):
        (folder / optim(rank)).unlink()
    expected = [f"{folder / optim(r)}: is missing (rank {r} of 12)" for r in (2, 10, 11)]
    assert_items(refusal(tmp_path), expected)


def test_missing_ranks_keep_the_prefix(tmp_path):
    truth = write(tmp_path, Spec(stage=2, params=PARAMS, bf16_prefix=True))
    (truth.tag_dir / optim(1, "bf16_")).unlink()
    assert str(truth.tag_dir / optim(1, "bf16_")) in refusal(tmp_path)


def test_right_count_but_one_rank_twice(tmp_path):
    folder = make(tmp_path, 3, 2).tag_dir
    (folder / optim(1)).unlink()
    shutil.copy(folder / optim(0), folder / optim(0, "bf16_"))
    message = refusal(tmp_path)
    missing, twice = items(message)
    assert f"{optim(1)}: is missing (rank 1 of 2); " in missing
    assert twice.startswith(f"{folder}: rank 0 is there 2 times: ")
    assert optim(0, "bf16_") in message


def test_right_count_but_a_rank_of_a_bigger_run(tmp_path):
    folder = make(tmp_path / "run", 3, 2).tag_dir
    bigger = make(tmp_path / "bigger", 3, 8).tag_dir
    (folder / optim(1)).unlink()
    shutil.copy(bigger / optim(5), folder)
    message = refusal(tmp_path / "run")
    assert_items(
        message,
        [f"{folder / optim(1)}: is missing (rank 1 of 2)", f"{folder / optim(5)}: is surplus"],
    )
    assert "a run with 2 ranks (this file: 8)" in message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_bigger_run_left_over(tmp_path, stage):
    folder = make(tmp_path, stage, 5).tag_dir
    make(tmp_path, stage, 2)
    expected = [f"{folder / optim(rank)}: is surplus: rank {rank}" for rank in (2, 3, 4)]
    assert_items(refusal(tmp_path), expected)


def test_a_rank_of_a_run_of_another_size(tmp_path):
    folder = make(tmp_path / "run", 2, 2).tag_dir
    other = make(tmp_path / "other", 2, 3).tag_dir
    shutil.copy(other / optim(1), folder)
    found = f"{folder / optim(1)}: was saved by a run with 3 ranks"
    expected = f"{found}, but {optim(0)} by one with 2"
    assert items(refusal(tmp_path / "run"))[0] == expected


@pytest.mark.parametrize("params", [PARAMS, FROZEN], ids=["plain", "frozen"])
def test_mixed_steps(tmp_path, params):
    folder = make(tmp_path / "run", 3, 3, params=params).tag_dir
    other = make(tmp_path / "other", 3, 3, params=params, global_step=7).tag_dir
    for name in (optim(1), model(1)):
        shutil.copy(other / name, folder)
    expected = f"{folder / model(1)}: is of step 7, but {model(0)} of step 3"
    assert_items(refusal(tmp_path / "run"), [expected])


@pytest.mark.parametrize("stage", [2, 3])
def test_mixed_releases(tmp_path, stage):
    folder = make(tmp_path / "run", stage, 2).tag_dir
    other = make(tmp_path / "other", stage, 2, era="0.9.2").tag_dir
    shutil.copy(other / optim(1), folder)
    message = refusal(tmp_path / "run")
    assert_items(message, [f"{folder / optim(1)}: ds_version is 0.9.2, but 0.19.8 in {optim(0)}"])


def test_mixed_stages(tmp_path):
    folder = make(tmp_path / "run", 3, 2).tag_dir
    other = make(tmp_path / "other", 2, 2).tag_dir
    shutil.copy(other / optim(1), folder)
    assert f"{folder / optim(1)}: striped is False, but True" in refusal(tmp_path / "run")


def test_a_missing_model_state(tmp_path):
    path = make(tmp_path, 2).tag_dir / "mp_rank_00_model_states.pt"
    path.unlink()
    assert f"{path}: is missing" in refusal(tmp_path)


def test_a_missing_first_model_state_in_stage_3(tmp_path):
    path = make(tmp_path, 3).tag_dir / model(0)
    path.unlink()
    assert f"{path}: is missing" in refusal(tmp_path)


def test_a_missing_model_state_that_is_not_needed(tmp_path):
    (make(tmp_path, 3, 3).tag_dir / model(2)).unlink()
    assert read(tmp_path).notes == (f"{model(2)} is missing; it holds nothing that is needed",)


def test_a_missing_model_state_with_frozen_slices(tmp_path):
    path = make(tmp_path, 3, 3, params=FROZEN).tag_dir / model(2)
    path.unlink()
    assert items(refusal(tmp_path))[0].startswith(f"{path}: is missing (rank 2 of 3)")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_optimizer_states_are_missing(tmp_path, stage):
    folder = make(tmp_path, stage, 2).tag_dir
    for rank in (0, 1):
        (folder / optim(rank)).unlink()
    assert "all optimizer states are missing" in refusal(tmp_path)


def test_several_problems_in_one_message(tmp_path):
    folder = make(tmp_path / "run", 3, 6).tag_dir
    other = make(tmp_path / "other", 3, 9).tag_dir
    (folder / optim(2)).unlink()
    (folder / optim(4)).write_bytes((folder / optim(4)).read_bytes()[:-200])
    shutil.copy(folder / optim(1), folder / optim(1, "bf16_"))
    for rank in (3, 8):
        shutil.copy(other / optim(rank), folder)
    found = items(refusal(tmp_path / "run"))
    for part in (
        f"{folder / optim(4)}: truncated or damaged",
        f"{folder / optim(2)}: is missing (rank 2 of 6)",
        f"{folder}: rank 1 is there 2 times",
        f"{folder / optim(3)}: was saved by a run with 9 ranks",
        f"{folder / optim(8)}: is surplus",
    ):
        assert any(item.startswith(part) for item in found), (part, found)


def test_a_damaged_rank_is_not_called_missing(tmp_path):
    path = make(tmp_path, 2, 3).tag_dir / optim(1)
    path.write_bytes(path.read_bytes()[:-200])
    assert_items(refusal(tmp_path), [f"{path}: truncated or damaged"])


def test_every_damaged_file_is_named(tmp_path):
    folder = make(tmp_path, 2, 2).tag_dir
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-200])
    found = items(refusal(tmp_path))
    assert {item.split(": ")[0] for item in found} == {str(path) for path in folder.iterdir()}


def with_mp_rank_1(folder: Path) -> None:
    """Give rank 1's files the names that sequence parallelism gave them."""
    for path in list(folder.iterdir()):
        target = folder / path.name.replace("mp_rank_00", "mp_rank_01")
        if path.name.startswith(("mp_rank_00", "zero_pp_rank_1_")):
            torch.save(torch.load(path, weights_only=False), target)
        if path.name.startswith("zero_pp_rank_1_"):
            path.unlink()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("params", [PARAMS, FROZEN], ids=["plain", "frozen"])
def test_sequence_parallel_names_are_accepted(tmp_path, stage, params):
    folder = make(tmp_path, stage, 2, params=params).tag_dir
    before = read(tmp_path)
    with_mp_rank_1(folder)
    found = read(tmp_path)
    assert found.notes == ()
    assert (found.stage, found.world_size) == (stage, 2)
    files = [part.file for part in found.groups[0].parts]
    assert files == [optim(0), optim(1).replace("mp_rank_00", "mp_rank_01")]
    assert found.partitions == before.partitions


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_missing_tensor_ranks_are_named(tmp_path, stage):
    degrees = {"pp_degree": 1, "tp_degree": 2}
    make(tmp_path, stage, client_state={"checkpoint_parallel_dimensions": degrees})
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    assert f"{prefix}mp_rank_01_model_states.pt: is missing" in refusal(tmp_path)


def test_tensor_parallel_names_without_a_size(tmp_path):
    client_state = {"mp_world_size": None, "checkpoint_parallel_dimensions": None}
    folder = make(tmp_path, 2, client_state=client_state).tag_dir
    with_mp_rank_1(folder)
    # Nothing says that the second index is a sequence rank's: each needs both of its ranks.
    message = refusal(tmp_path)
    assert "zero_pp_rank_0_mp_rank_01_optim_states.pt: is missing (rank 0 of 2)" in message


def test_old_names_without_the_underscore(tmp_path):
    folder = make(tmp_path, 2, 2, era="0.5").tag_dir
    for path in list(folder.glob("zero_pp_rank_*")):
        path.rename(folder / path.name.replace("_optim", "optim"))
    assert read(tmp_path).world_size == 2


def test_the_order_of_ranks_is_numeric(tmp_path):
    make(tmp_path, 3, 12)
    assert [part.file for part in read(tmp_path).groups[0].parts] == [optim(r) for r in range(12)]


def test_model_states_left_over_from_another_stage(tmp_path):
    # As where a tag was written by a stage-3 run first, and by a stage-2 run later.
    folder = make(tmp_path, 2).tag_dir
    stale = make(tmp_path / "stale", 3, global_step=1).tag_dir
    for rank in (0, 1):
        shutil.copy(stale / model(rank), folder)
    assert model(0) in refusal(tmp_path)


@pytest.mark.parametrize(
    ("stage", "source", "target"),
    [
        (2, optim(1), optim(0)),
        (3, optim(0), optim(1)),
        (3, model(1), model(0)),
        (1, optim(0), "mp_rank_00_model_states.pt"),
    ],
)
def test_a_file_copied_over_another_is_refused(tmp_path, stage, source, target):
    folder = make(tmp_path, stage, 2).tag_dir
    shutil.copy(folder / source, folder / target)
    message = refusal(tmp_path)
    assert f"{folder / target}: was saved as {source}; " in message
    assert "put each file back" in message


def test_a_file_saved_through_a_stream_says_no_name(tmp_path):
    folder = make(tmp_path, 2, 2).tag_dir
    before = read(tmp_path)
    state = torch.load(folder / optim(1), weights_only=False)
    with (folder / optim(1)).open("wb") as stream:
        torch.save(state, stream)
    assert read(tmp_path).partitions == before.partitions
