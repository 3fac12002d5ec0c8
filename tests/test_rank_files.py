"""ZeRO-3 files that do not remember their names, copied over each other or exchanged."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from dist_consolidate import CheckpointError, consolidate
from tests.cases import assert_same_bits, expected_fp32, load_output
from tests.special import copy_of
from tests.test_swapped import swapped_out

THROUGH_A_STREAM = ["ds0.6.1_gpt2_z3_w2", "ds0.6.1_t5real_z3_w2"]


def refusal(tmp_path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    return str(error.value)


def exchange(paths: list[Path]) -> None:
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)


@pytest.mark.parametrize("name", [*THROUGH_A_STREAM, "not_zip_z3_w2"])
@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_copy_is_found(name: str, kind: str, tmp_path: Path) -> None:
    _, tag = copy_of(name, tmp_path)
    paths = sorted(tag.glob(f"*_{kind}_states.pt"))
    assert len(paths) == 2
    shutil.copy(paths[0], paths[1])
    message = refusal(tmp_path)
    if kind == "model" and name in THROUGH_A_STREAM:
        assert f"{paths[1]}: was saved as {paths[0].name}" in message
        return
    assert f"{paths[1]}: holds the same values as {paths[0].name}" in message


def test_a_copy_of_a_swap_file_is_found(tmp_path: Path) -> None:
    _, _, files = swapped_out("kitchen_z3_bf16_w2", tmp_path)
    shutil.copy(files[0], files[1])
    message = refusal(tmp_path)
    assert f"{files[1]}: holds the same values as offloaded_tensors/rank00/" in message


@pytest.mark.parametrize("name", THROUGH_A_STREAM)
def test_exchanged_files_tell_by_their_devices(name: str, tmp_path: Path) -> None:
    _, tag = copy_of(name, tmp_path)
    paths = sorted(tag.glob("*_optim_states.pt"))
    exchange(paths)
    message = refusal(tmp_path)
    assert f"{paths[0]}: was saved from the CUDA device 1" in message
    assert f"({paths[0].name} 1, {paths[1].name} 0)" in message and "--trust-masters" in message


def with_device(path: Path, old: int, new: int) -> None:
    """Write a file anew, as if its tensors had lain on another device."""
    with zipfile.ZipFile(path) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            moved = data.replace(b"cuda:%d" % old, b"cuda:%d" % new)
            archive.writestr(name, moved if name.endswith("/data.pkl") else data)


@pytest.mark.parametrize(("devices", "odd"), [((3, 2), True), ((4, 6), False), ((5, 5), False)])
def test_a_run_that_had_its_devices_so(devices: tuple[int, int], odd: bool, tmp_path: Path) -> None:
    """Of other devices of a node, or of two nodes, nothing is said; the user has the last word."""
    case, tag = copy_of(THROUGH_A_STREAM[0], tmp_path)
    for rank, path in enumerate(sorted(tag.glob("*_optim_states.pt"))):
        with_device(path, rank, devices[rank])
    if odd:
        assert "was saved from the CUDA device 3" in refusal(tmp_path)
    consolidate(tmp_path / "ckpt", tmp_path / "out", trust_masters=odd)
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))
