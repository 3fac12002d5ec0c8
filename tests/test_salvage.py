"""``--salvage``: what is intact is written exactly, and everything else is named.

Each optimizer file and each model file of the kept dense checkpoints is removed, cut, emptied or
given a flipped bit in its values; what is written then is held against the live engine's values.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dist_consolidate import (
    CheckpointError,
    UnsupportedLayoutError,
    cli,
    consolidate,
    verify,
)
from dist_consolidate.checkpoint.salvage_assembly import possible_parts
from dist_consolidate.report import Report
from tests.cases import CASES, Case, assert_same_bits, expected_fp32, load_output, lost_keys
from tests.special import copy_of, edit, save_as
from tests.test_damaged_shards import shards

_OTHER_KINDS = ("tp2_", "pipe_", "universal_")
DENSE = {
    name: case
    for name, case in CASES.items()
    if not name.startswith(_OTHER_KINDS) and "moe_" not in name
}
Z2, Z3, TIED = "kitchen_z2_groups_w4", "kitchen_z3_bf16_w2", "ds0.6.1_gpt2_z2_w2"


def flip(path: Path) -> None:
    """Flip a bit in the middle of every record of values that is longer than a step or a scale."""
    with zipfile.ZipFile(path) as archive:
        values = [e for e in archive.infolist() if "/data/" in e.filename and e.file_size > 8]
    data = bytearray(path.read_bytes())
    for entry in values:
        lengths = (data[entry.header_offset + at : entry.header_offset + at + 2] for at in (26, 28))
        start = entry.header_offset + 30 + sum(int.from_bytes(n, "little") for n in lengths)
        data[start + entry.file_size // 2] ^= 0x10
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": flip,
}


def rounded(value: Tensor, kind: str) -> Tensor:
    """What the 16-bit copy of a value is in an fp32 result."""
    return value.to(getattr(torch, kind)).to(torch.float32) if value.is_floating_point() else value


def check(case: Case, out: Path, report: Report) -> None:
    """Hold a salvaged result against the truth."""
    expected = expected_fp32(case)
    for name in lost_keys(case):
        expected.pop(name, None)
    gone = {n for n, what in report.lost.items() if what.startswith(("missing", "partial"))}
    want = {name: value for name, value in expected.items() if name not in gone}
    got = load_output(out)
    for name, what in report.lost.items():
        if "the model states of rank 0 are gone" in what:
            # Each rank has its own buffers (running averages).
            assert got[name].shape == want.pop(name).shape
            del got[name]
    for name, what in report.lost.items():
        if what.startswith("lower precision"):
            want[name] = rounded(want[name], what.rpartition("(")[2].rstrip(")"))
    assert_same_bits(got, want)
    section = json.loads((out / "consolidation.json").read_text()).get("salvage", {})
    assert {name: f"{loss['what']}: {loss['why']}" for name, loss in section.items()} == report.lost
    assert gone <= report.left_out.keys()


def salvage(case: Case, ckpt: Path, out: Path) -> Report:
    return consolidate(ckpt, out, tag=case.tag, allow_missing=lost_keys(case), salvage=True)


def damaged(name: str) -> Iterator[tuple[Path, str]]:
    """Every file of a checkpoint with one or two kinds of damage, all kinds over all of them."""
    paths = shards(CASES[name].ckpt)
    kinds = list(DAMAGES)
    for number, path in enumerate(paths):
        for what in (kinds[(number + len(name)) % 4], kinds[(number + len(name) + 2) % 4]):
            yield path, what


@pytest.mark.parametrize("name", sorted(DENSE))
def test_whatever_is_written_is_right(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for path, what in damaged(name):
        ckpt, out = tmp_path / "ckpt", tmp_path / "out"
        shutil.copytree(case.ckpt, ckpt)
        if what == "flipped" and not zipfile.is_zipfile(path):
            what = "cut"
        DAMAGES[what](ckpt / path.relative_to(case.ckpt))
        try:
            report = salvage(case, ckpt, out)
        except CheckpointError as error:
            # What names the tensors is gone, or nothing tells which ones are damaged.
            names = "renames" in str(error) and name.startswith(("renamed", "nested"))
            names = names or "nothing is left to write" in str(error)
            names = names or "no file named like a DeepSpeed shard" in str(error)
            names = names or ("ZenFlow" in str(error) and name.startswith("zenflow"))
            names = names or ("to name the tensors" in str(error) and "model_states" in path.name)
            assert names, (path, what, error)
            assert not out.exists()
        else:
            check(case, out, report)
        shutil.rmtree(ckpt)
        shutil.rmtree(out, ignore_errors=True)


@pytest.mark.parametrize("name", [Z2, Z3, "z0_bf16_w2", TIED])
def test_an_intact_checkpoint_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    plain = consolidate(CASES[name].ckpt, tmp_path / "plain")
    report = consolidate(CASES[name].ckpt, tmp_path / "out", salvage=True)
    assert report.lost == {} and report.notes == plain.notes
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("transport", ["direct", "gather"])
def test_the_16_bit_copy_is_taken_for_the_tensors_of_a_lost_part(
    transport: str, tmp_path: Path
) -> None:
    case, tag = copy_of(TIED, tmp_path)
    (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", salvage=True, transport=transport)
    check(case, tmp_path / "out", report)
    # Rank 0 has the first half of the flat group, the embeddings first.
    kept = {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"}
    assert kept.isdisjoint(report.lost)
    assert "transformer.ln_f.weight" in report.lost
    assert {what.partition(":")[0] for what in report.lost.values()} == {"lower precision"}
    section = json.loads((tmp_path / "out" / "consolidation.json").read_text())["salvage"]
    cut = section["transformer.h.0.mlp.c_proj.weight"]
    assert 0 < cut["intact_numel"] < cut["num_numel"] == 1600


def test_what_zero_3_lacks_is_left_out(tmp_path: Path) -> None:
    case, tag = copy_of(Z3, tmp_path)
    flip(tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", salvage=True)
    check(case, tmp_path / "out", report)
    partial = {name for name, what in report.lost.items() if what.startswith("partial")}
    assert partial and partial == set(report.left_out)
    assert all("rank 1" in what and "CRC-32" in what for what in report.lost.values())


def test_another_ranks_model_states_name_everything(tmp_path: Path) -> None:
    case, tag = copy_of(Z3, tmp_path)
    (tag / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="--salvage takes the names of zero_pp_rank_1"):
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", salvage=True)
    check(case, tmp_path / "out", report)
    assert set(report.lost) == set(case.truth["buffers"])
    assert all(what.startswith("other copy") for what in report.lost.values())


def test_all_optimizer_states_gone(tmp_path: Path) -> None:
    case, tag = copy_of(TIED, tmp_path)
    for path in tag.glob("*optim_states.pt"):
        path.unlink()
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", salvage=True)
    check(case, tmp_path / "out", report)
    assert set(report.lost) == set(case.truth["trainable"]) | {n for t in case.ties for n in t}


def test_nothing_is_left_of_zero_3_without_optimizer_states(tmp_path: Path) -> None:
    _, tag = copy_of(Z3, tmp_path)
    for path in tag.glob("*optim_states.pt"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="no optimizer states are left"):
        consolidate(tmp_path / "ckpt", tmp_path / "out", salvage=True)
    assert not (tmp_path / "out").exists()


def test_files_of_different_saves_are_not_salvaged(tmp_path: Path) -> None:
    _, tag = copy_of(Z2, tmp_path)
    (tag / "zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
    edit(
        tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt",
        lambda state: state["ds_config"]["optimizer"]["params"].update(lr=0.125),
    )
    with pytest.raises(CheckpointError, match="different runs"):
        consolidate(tmp_path / "ckpt", tmp_path / "out", salvage=True)


@pytest.mark.parametrize("name", ["tp2_z1_fp32_w2", "pipe_z1_bf16_w2", "moe_z2_bf16_w2"])
def test_other_kinds_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLayoutError, match="--salvage writes the weights of dense"):
        consolidate(CASES[name].ckpt, tmp_path / "out", salvage=True)


def test_the_command_line_lists_and_ends_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, tag = copy_of(Z2, tmp_path)
    (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    arguments = [str(tmp_path / "ckpt"), str(tmp_path / "out")]
    assert cli.main(arguments) == 3
    assert "--salvage writes what is intact" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert cli.main([*arguments, "--salvage"]) == 3
    said = capsys.readouterr().out
    assert "salvaged: body.c.weight: other copy: zero_pp_rank_1" in said
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(("name", "what"), [(Z2, "flipped"), (Z3, "flipped"), (TIED, "gone")])
def test_a_salvaged_result_is_verified(name: str, what: str, tmp_path: Path) -> None:
    """Against its manifest; and against damaged and whole shards, but for what is listed."""
    case, tag = copy_of(name, tmp_path)
    path = sorted(tag.glob("*_optim_states.pt"))[-1]
    if what == "gone":
        path.unlink()
    else:
        flip(path)
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", salvage=True, verify=True)
    assert report.lost
    check(case, tmp_path / "out", report)
    for ckpt in (tmp_path / "ckpt", case.ckpt, None):
        told = verify(tmp_path / "out", ckpt)
        assert not told.differences
        assert any(note.startswith("--salvage listed ") for note in told.notes)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert verify(tmp_path / "out").differences


def test_sizes_of_parts() -> None:
    assert possible_parts(10, 2, {0: 6}) == {6}
    assert possible_parts(10, 2, {1: 4}) == {6}
    assert possible_parts(12, 4, {1: 4, 2: 4}) == {4}
    assert possible_parts(10, 2, {0: 5}) == {5}
    assert possible_parts(100, 2, {0: 30}) == set()


def test_two_files_of_one_rank_are_not_chosen_from(tmp_path: Path) -> None:
    _, tag = copy_of(Z2, tmp_path)
    path = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(path, tag / f"bf16_{path.name}")
    (tag / "zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="rank 1 is there 2 times"):
        consolidate(tmp_path / "ckpt", tmp_path / "out", salvage=True)


def test_saves_of_two_stages_are_not_chosen_from(tmp_path: Path) -> None:
    _, tag = copy_of(Z3, tmp_path)
    first = tag / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    save_as(first, tag / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="two model states of rank 0"):
        consolidate(tmp_path / "ckpt", tmp_path / "out", salvage=True)


def test_a_file_that_is_not_needed_is_no_loss(tmp_path: Path) -> None:
    case, tag = copy_of(Z3, tmp_path)
    (tag / "zero_pp_rank_1_mp_rank_00_model_states.pt").write_bytes(b"")
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", salvage=True)
    check(case, tmp_path / "out", report)
    assert report.lost == {} and any("is empty" in note for note in report.notes)
