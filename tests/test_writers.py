"""Names of `checkpoint.writer`: NAME-W.N. That such files are exact is in test_checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dist_consolidate import CheckpointError, consolidate
from tests.cases import assert_same_bits, expected_fp32, load_output
from tests.special import copy_of

ONE, SEVERAL = "fast_writer_machine_z1_w2", "fast_writer_replica_z2_w2"
MODEL = "mp_rank_00_model_states.pt"
OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def refusal(root: Path, tmp_path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        consolidate(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    return str(error.value)


def test_the_first_writers_copy_is_read_and_the_others_are_told(tmp_path: Path) -> None:
    _, tag = copy_of(SEVERAL, tmp_path)
    (tag / f"{MODEL}-1.2").write_bytes(b"not looked at")
    report = consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert any("left 1 copies of files" in note for note in report.notes)


def test_any_whole_copy_will_do(tmp_path: Path) -> None:
    case, tag = copy_of(SEVERAL, tmp_path)
    (tag / f"{MODEL}-0.2").unlink()
    consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))


def test_a_copy_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    _, tag = copy_of(SEVERAL, tmp_path)
    path = tag / f"{MODEL}-0.2"
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(tmp_path / "ckpt", tmp_path)
    assert f"{path}: truncated or damaged" in message


@pytest.mark.parametrize("name", [ONE, SEVERAL])
def test_a_missing_rank_is_named_without_a_writer(name: str, tmp_path: Path) -> None:
    _, tag = copy_of(name, tmp_path)
    (path,) = tag.glob(f"{OPTIM}-*")
    path.unlink()
    message = refusal(tmp_path / "ckpt", tmp_path)
    assert f"{tag / OPTIM}: is missing (rank 1 of 2)" in message


@pytest.mark.parametrize("other", [MODEL, f"{MODEL}-0.4"])
def test_saves_on_top_of_each_other_are_refused(other: str, tmp_path: Path) -> None:
    _, tag = copy_of(SEVERAL, tmp_path)
    shutil.copy(tag / f"{MODEL}-0.2", tag / other)
    message = refusal(tmp_path / "ckpt", tmp_path)
    assert f"{MODEL}-0.2" in message and other in message
    assert "keep the copies of one save" in message
