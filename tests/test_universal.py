"""Universal checkpoints, as ds_to_universal made them. test_checkpoints compares their bits."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from dist_consolidate import (
    CheckpointError,
    UnsupportedLayoutError,
    consolidate,
    open_checkpoint,
)
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.special import State, copy_of, edit
from tests.zygote import fork_together

REFUSED = Path(__file__).parent / "data" / "refused"
NAMES = sorted(name for name in CASES if name.startswith("universal_"))
STAGE_1, STAGE_3 = "universal_frozen_half_z1_w2", "universal_kitchen_z3_bf16_w2"
TENSOR_PARALLEL = "universal_tp2_z1_fp32_w2"


def copy(name: str, tmp_path: Path) -> Path:
    shutil.copytree(CASES[name].ckpt, tmp_path / "ckpt")
    return tmp_path / "ckpt" / "universal"


def refusal(tmp_path: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    return str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_told_and_the_folder_itself_will_do(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    report = consolidate(case.ckpt / "universal", tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))
    assert any("a universal checkpoint (ds_to_universal) was read" in n for n in report.notes)


def test_trained_parameters_come_from_the_files_and_nothing_else_does() -> None:
    case = CASES[STAGE_1]
    checkpoint = open_checkpoint(case.ckpt)
    ours = {name for name, tensor in checkpoint.items() if tensor.source == "fp32 partition"}
    tied = {name for names in case.ties for name in names if ours & set(names)}
    assert ours | tied == (set(case.truth["trainable"]) | tied)
    assert {checkpoint[name].dtype for name in case.truth["frozen"]} == {
        str(case.truth["model_dtype"]).removeprefix("torch.")
    }


def test_integer_buffers_are_not_those_cast_to_float(tmp_path: Path) -> None:
    case = CASES[STAGE_3]
    integers = [n for n in case.truth["buffers"] if not case.truth["fp32"][n].is_floating_point()]
    assert integers
    consolidate(case.ckpt, tmp_path / "out")
    got = load_output(tmp_path / "out")
    assert {got[n].dtype for n in integers} == {case.truth["fp32"][n].dtype for n in integers}


@pytest.mark.dist
@pytest.mark.parametrize("name", [STAGE_3, TENSOR_PARALLEL])
@pytest.mark.parametrize("transport", ["allgather", "direct"])
def test_by_several_ranks(name: str, transport: str, tmp_path: Path) -> None:
    arguments = [CASES[name].ckpt, tmp_path / "out", "--transport", transport]
    fork_together(2, arguments).ok()
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(CASES[name]))


def test_parameters_mixed_by_the_converter_are_refused(tmp_path: Path) -> None:
    """A run with round_robin_gradients, which ds_to_universal itself has scrambled."""
    shutil.copytree(REFUSED / "universal_round_robin_z2_w2" / "ckpt", tmp_path / "ckpt")
    message = refusal(tmp_path)
    assert "do not round to the values in mp_rank_00_model_states.pt" in message
    assert "round_robin_gradients" in message


@pytest.mark.parametrize("name", [STAGE_1, STAGE_3, TENSOR_PARALLEL])
def test_missing_files_are_all_named(name: str, tmp_path: Path) -> None:
    tag = copy(name, tmp_path)
    gone = [n for n in CASES[name].truth["trainable"] if (tag / "zero" / n / "fp32.pt").exists()]
    gone = gone[:2]
    for param in gone:
        (tag / "zero" / param / "fp32.pt").unlink()
    message = refusal(tmp_path)
    assert all(f"{tag / 'zero' / param / 'fp32.pt'}: is missing" in message for param in gone)


def test_damaged_and_wrong_files_are_all_named(tmp_path: Path) -> None:
    tag = copy(STAGE_3, tmp_path)
    files = sorted(tag.glob("zero/*/fp32.pt"))
    files[0].write_bytes(files[0].read_bytes()[:-100])
    torch.save({"other": torch.zeros(3)}, files[1])
    torch.save(torch.zeros(100003), files[2])
    message = refusal(tmp_path)
    assert f"{files[0]}: truncated or damaged" in message
    assert f"{files[1]}: has no tensor `param`" in message
    assert f"{files[2]}: holds shape [100003], but param_shapes says" in message


def test_an_experts_parameter_is_refused(tmp_path: Path) -> None:
    tag = copy(STAGE_1, tmp_path)
    path = min(tag.glob("zero/*/fp32.pt"))
    param = CASES[STAGE_1].truth["trainable"][0]
    path = tag / "zero" / param / "fp32.pt"
    edit(path, lambda state: state.update(is_expert_param=True))
    assert f"{path}: is an expert's parameter" in refusal(tmp_path, UnsupportedLayoutError)


def test_a_pipelines_is_refused(tmp_path: Path) -> None:
    tag = copy(STAGE_1, tmp_path)
    edit(tag / "mp_rank_00_model_states.pt", lambda state: state.update(module=None))
    assert "of a pipeline-parallel run" in refusal(tmp_path, UnsupportedLayoutError)


def test_buffers_that_differ_between_tensor_parallel_ranks(tmp_path: Path) -> None:
    tag = copy(TENSOR_PARALLEL, tmp_path)

    def add(value: float):
        def change(state: State) -> None:
            state["module"] = OrderedDict(state["module"], extra=torch.tensor([value]))
            state["buffer_names"] = [*state["buffer_names"], "extra"]

        return change

    for rank in range(2):
        edit(tag / f"mp_rank_0{rank}_model_states.pt", add(1.0))
    consolidate(tmp_path / "ckpt", tmp_path / "same")
    assert torch.equal(load_output(tmp_path / "same")["extra"], torch.tensor([1.0]))
    edit(tag / "mp_rank_01_model_states.pt", lambda s: s["module"]["extra"].add_(1.0))
    assert "buffer 'extra' differs" in refusal(tmp_path)


def test_a_tensor_parallel_key_that_was_not_merged(tmp_path: Path) -> None:
    tag = copy(TENSOR_PARALLEL, tmp_path)
    for rank in range(2):
        edit(
            tag / f"mp_rank_0{rank}_model_states.pt",
            lambda state: state["module"].update(late=torch.zeros(2)),
        )
    assert "'late' was not trained, and ds_to_universal merges" in refusal(tmp_path)


def test_a_runs_own_tag_is_read_rather_than_what_was_made_from_it(tmp_path: Path) -> None:
    _, tag = copy_of("frozen_half_z1_w2", tmp_path)
    shutil.copytree(CASES[STAGE_1].ckpt / "universal", tmp_path / "ckpt" / "step_9_universal")
    report = consolidate(tmp_path / "ckpt", tmp_path / "own")
    assert not any("universal" in note for note in report.notes)
    (tmp_path / "ckpt" / "latest").unlink()
    assert open_checkpoint(tmp_path / "ckpt").tag == tag.name
    assert open_checkpoint(tmp_path / "ckpt", "step_9_universal").tag == "step_9_universal"


def test_what_is_asked_for_in_vain_is_told(tmp_path: Path) -> None:
    case = CASES["universal_tp2_z1_fp32_w2"]
    with pytest.raises(CheckpointError, match="universal checkpoint, whose optimizer states"):
        consolidate(case.ckpt, tmp_path / "out", include=["optimizer"])
    report = consolidate(case.ckpt, tmp_path / "out", tp_rules=tmp_path / "no.toml")
    assert any(note.startswith(f"--tp-rules {tmp_path / 'no.toml'}") for note in report.notes)
