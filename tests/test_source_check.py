"""Shards that hold other bytes than were saved, or change while they are read, are named.

Run as a module, this file is what each rank does (see :func:`main`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_consolidate import CheckpointError, ConsolidateError, consolidate, filesystems
from dist_consolidate.checkpoint.records import read_records
from dist_consolidate.consolidation import _Run
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output, lost_keys
from tests.special import copy_of, edit
from tests.synthetic import Param, Spec, Truth, write
from tests.test_damaged_shards import RENAMED, shards
from tests.zygote import fork_together

PARAMS = (
    Param("emb.weight", (700, 1001)),
    Param("a.weight", (301, 500)),
    Param("a.bias", (17,), group=1),
    Param("base.weight", (250, 999), kind="frozen"),
    Param("b.weight", (1200, 1000)),
)
SPECS = {
    "z2": Spec(stage=2, world=3, params=PARAMS, buffers=()),
    "z3": Spec(stage=3, world=3, params=PARAMS, buffers=(), sub_group_numel=1_000_000),
}


def flip(path: Path, offset: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def master_record(path: Path, group: int = 0) -> tuple[str, int, int]:
    """Name, first byte and length of the record of a group's fp32 part, by torch's own reader."""
    state = torch.load(path, map_location="cpu", weights_only=False)["optimizer_state_dict"]
    key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
    data = state[key][group].detach().contiguous().view(torch.uint8).numpy().tobytes()
    content = path.read_bytes()
    # Padding that was cut off the tensor is still in its record.
    (record,) = [
        r
        for r in read_records(path)
        if r.name.startswith("data/") and content[r.start_bytes :].startswith(data)
    ]
    return record.name, record.start_bytes, len(data)


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Truth]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write(folder / name, spec) for name, spec in SPECS.items()}


@pytest.fixture
def damaged(truths: dict[str, Truth], tmp_path: Path) -> Callable[[str], tuple[Path, Path, str]]:
    """Give a checkpoint with a bit of rank 1's masters flipped, the file, and the record."""

    def make(name: str) -> tuple[Path, Path, str]:
        ckpt = tmp_path / "ckpt"
        shutil.copytree(truths[name].tag_dir.parent, ckpt)
        (path,) = (ckpt / truths[name].tag_dir.name).glob("*pp_rank_1_*optim_states.pt")
        record, start, num_bytes = master_record(path)
        flip(path, start + num_bytes // 2)
        return ckpt, path, record

    return make


# Every layout.


def positions(path: Path, choice: random.Random) -> Iterator[int]:
    """A byte of the values, if there are any, and one anywhere."""
    if zipfile.is_zipfile(path):
        values = [r for r in read_records(path) if r.name.startswith("data/") and r.num_bytes > 8]
        if values:
            record = choice.choice(values)
            yield choice.randrange(record.start_bytes, record.stop_bytes)
    yield choice.randrange(path.stat().st_size)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_flipped_bit_is_named_or_harmless(name: str, tmp_path: Path) -> None:
    case, choice = CASES[name], random.Random(name)
    expected = {k: v for k, v in expected_fp32(case).items() if k not in lost_keys(case)}
    for path in shards(case.ckpt):
        if name.startswith("not_zip"):
            continue  # torch's format of before 1.6 holds no checksum
        for offset in positions(path, choice):
            ckpt, out = tmp_path / "ckpt", tmp_path / "out"
            shutil.copytree(case.ckpt, ckpt)
            bit = choice.randrange(8)
            flip(ckpt / path.relative_to(case.ckpt), offset, bit)
            where = (path.name, offset, bit)
            try:
                consolidate(
                    ckpt,
                    out,
                    tag=case.tag,
                    allow_missing=lost_keys(case),
                    rename=RENAMED.get(name, ()),
                )
            except ConsolidateError as error:
                assert not out.exists(), where
                assert path.name in str(error), (where, error)
            else:
                assert_same_bits(load_output(out), expected)
            shutil.rmtree(ckpt)
            shutil.rmtree(out, ignore_errors=True)


def test_values_that_do_not_fit_are_looked_at_for_damage(tmp_path: Path) -> None:
    """A layout that is found by values must not be blamed for a flipped bit."""
    _, tag = copy_of("moe_z1_fp32_w2", tmp_path)
    path = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    _, start, num_bytes = master_record(path, -1)  # of the experts
    flip(path, start + num_bytes // 2, 6)
    with pytest.raises(CheckpointError) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert "The cause may be damage:\n  - " in str(error.value)
    assert f"{path} (of rank 1): record data/" in str(error.value)


# What is said, and what is not checked.


@pytest.mark.parametrize("transport", ["direct", "gather"])
@pytest.mark.parametrize("name", SPECS)
def test_file_rank_record_and_tensors_are_named(
    name: str, transport: str, damaged: Callable[[str], tuple[Path, Path, str]], tmp_path: Path
) -> None:
    ckpt, path, record = damaged(name)
    with pytest.raises(CheckpointError) as error:
        consolidate(ckpt, tmp_path / "out", transport=transport, bucket_size="300KB")
    message = str(error.value)
    assert f"{path} (of rank 1): record {record} (" in message
    assert "when it was saved; it fills " in message and "emb.weight" in message.split("fills")[1]
    assert "--salvage" in message and error.value.exit_code == 3
    assert not (tmp_path / "out").exists()
    assert not [p for p in tmp_path.iterdir() if "consolidating" in p.name]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"io": "buffered"},
        {"io": "direct"},
        {"max_shard_size": "none"},
        {"format": "bin"},
        {"dtype": "bf16"},
        {"transport": "gather", "bucket_size": "70KB"},
        {"transport": "gather", "ties": "drop", "max_shard_size": "1MB"},
    ],
)
@pytest.mark.parametrize("name", SPECS)
def test_all_that_is_read_is_checked(
    name: str, options: dict[str, Any], truths: dict[str, Truth], tmp_path: Path
) -> None:
    report = consolidate(truths[name].tag_dir.parent, tmp_path / "out", **options)
    # Padding, which is not read otherwise, belongs to the records.
    assert 0 <= report.num_bytes_checked - report.num_bytes_read < 1000
    assert report.notes == ()


def test_never(damaged: Callable[[str], tuple[Path, Path, str]], tmp_path: Path) -> None:
    ckpt, _, _ = damaged("z2")
    report = consolidate(ckpt, tmp_path / "out", check_crc="never")
    assert report.num_bytes_checked == 0


def test_files_without_checksums_are_taken(truths: dict[str, Truth], tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    shutil.copytree(truths["z2"].tag_dir.parent, ckpt)
    torch.serialization.set_crc32_options(False)
    try:
        for path in ckpt.glob("*/*.pt"):
            edit(path, lambda state: state)
    finally:
        torch.serialization.set_crc32_options(True)
    report = consolidate(ckpt, tmp_path / "out", check_crc="always")
    assert report.num_bytes_checked == 0
    assert_same_bits(load_output(tmp_path / "out"), truths["z2"].fp32)


@pytest.mark.parametrize("policy", ["auto", "always"])
def test_records_that_are_read_in_part(policy: str, tmp_path: Path) -> None:
    """A tensor that is a small part of its record, as a view of a large buffer is."""
    case, tag = copy_of("z0_bf16_w2", tmp_path)
    name = sorted(case.truth["buffers"])[0] if case.truth["buffers"] else None

    def widen(state: dict[str, Any]) -> None:
        key = name or "extra"
        value = state["module"].get(key, torch.zeros(4))
        room = torch.zeros(2_000_000 + value.numel(), dtype=value.dtype)
        room[: value.numel()] = value.reshape(-1)
        state["module"][key] = room[: value.numel()].view(value.shape)

    edit(tag / "mp_rank_00_model_states.pt", widen)
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", check_crc=policy)
    told = [note for note in report.notes if "read in part only" in note]
    assert len(told) == (policy == "auto"), report.notes
    manifest = json.loads((tmp_path / "out" / "consolidation.json").read_text())
    assert told == [] or told[0] not in manifest["notes"]


# Changes while reading.


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    shutil.copy2(path, other)
    other.replace(path)


def append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"\0")


@pytest.mark.parametrize("policy", ["auto", "never"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (touch, "was written to after the run began"),
        (replace, "it was replaced"),
        (append, "bytes when the run began and has"),
        (Path.unlink, "it is gone"),
    ],
)
@pytest.mark.parametrize("role", ["model", "optim"])
def test_a_shard_that_changes_while_it_is_read(
    role: str,
    change: Callable[[Path], object],
    said: str,
    policy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, tag = copy_of("kitchen_z3_bf16_w2", tmp_path)
    (path,) = tag.glob(f"*zero_pp_rank_1_*{role}_states.pt")
    real = _Run.move

    def move(run: _Run, *arguments: Any) -> Any:
        result = real(run, *arguments)
        change(path)
        return result

    monkeypatch.setattr(_Run, "move", move)
    with pytest.raises(CheckpointError) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out", check_crc=policy)
    assert f"{path} (of rank 1): " in str(error.value) and said in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["fuse.s3fs", "ext4"])
def test_some_file_systems_number_files_anew(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tag = copy_of("kitchen_z3_bf16_w2", tmp_path)
    (path,) = tag.glob("*zero_pp_rank_1_*optim_states.pt")
    real = _Run.move

    def move(run: _Run, *arguments: Any) -> Any:
        result = real(run, *arguments)
        replace(path)
        return result

    monkeypatch.setattr(_Run, "move", move)
    monkeypatch.setattr(filesystems, "_kind", lambda _: kind)
    if kind == "ext4":
        with pytest.raises(CheckpointError, match="it was replaced"):
            consolidate(tmp_path / "ckpt", tmp_path / "out")
    else:
        consolidate(tmp_path / "ckpt", tmp_path / "out")


# Torn saves and steps.


def test_a_torn_save_is_told_by_its_size(tmp_path: Path) -> None:
    _, tag = copy_of("kitchen_z2_groups_w4", tmp_path)
    path = tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    sizes = [p.stat().st_size for p in tag.glob("*optim_states.pt") if p != path]
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    said = f"A torn save: {path.name} of rank 2 has 2,000 bytes, its likes {min(sizes):,}"
    assert said in str(error.value)
    assert "--salvage writes what is intact" in str(error.value)


def older(state: dict[str, Any]) -> None:
    """As an earlier save of the same run has it."""
    for param in state["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        param["step"] = torch.tensor(1.0)


def test_optimizer_states_of_an_earlier_step_of_zero_3(tmp_path: Path) -> None:
    case, tag = copy_of("kitchen_z3_bf16_w2", tmp_path)
    for path in tag.glob("*optim_states.pt"):
        edit(path, older)
    with pytest.raises(CheckpointError, match=r"has taken 1 steps, but zero_pp_rank_0.*counts 3"):
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", trust_masters=True)
    assert any("has taken 1 steps" in note for note in report.notes)
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))


# Several ranks.


@pytest.mark.parametrize("transport", ["direct", "gather"])
def test_ranks_put_their_pieces_together(
    transport: str, truths: dict[str, Truth], tmp_path: Path
) -> None:
    """Two ranks read three shards, split anywhere; then a bit is flipped."""
    for name, truth in truths.items():
        shutil.copytree(truth.tag_dir.parent, tmp_path / "good" / name)
        bad = tmp_path / "bad" / name
        shutil.copytree(truth.tag_dir.parent, bad)
        (path,) = (bad / truth.tag_dir.name).glob("*pp_rank_2_*optim_states.pt")
        _, start, num_bytes = master_record(path)
        flip(path, start + num_bytes - 5000)
    fork_together(2, [tmp_path, transport], module="tests.test_source_check").ok()
    for name in SPECS:
        told = [json.loads((tmp_path / f"{name}{rank}.json").read_text()) for rank in range(2)]
        assert told[0][3] == told[1][3] != {}
        assert all("CRC-32" in why for why in told[0][3].values())
        for num_read, num_checked, message, _ in told:
            assert 0 <= num_checked - num_read < 1000
            assert "pp_rank_2_" in message and "(of rank 2)" in message and "CRC-32" in message
        assert not (tmp_path / f"bad_{name}").exists()


def main(folder: Path, transport: str) -> None:
    """Be a rank: consolidate the good checkpoints, then the bad ones."""
    dist.init_process_group("gloo")
    options: dict[str, Any] = {"transport": transport, "bucket_size": "333KB"}
    for name in SPECS:
        report = consolidate(folder / "good" / name, folder / f"out_{name}", **options)
        message = ""
        try:
            consolidate(folder / "bad" / name, folder / f"bad_{name}", **options)
        except ConsolidateError as error:
            message = str(error)
        salvaged = consolidate(folder / "bad" / name, folder / f"part_{name}", salvage=True)
        told = [report.num_bytes_read, report.num_bytes_checked, message, salvaged.lost]
        (folder / f"{name}{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
