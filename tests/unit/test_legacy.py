"""Torch's format of before 1.6: every tensor's bytes, and damage told with the path."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_consolidate.checkpoint.archive import Archive, scan_integer
from dist_consolidate.checkpoint.legacy import MAGIC
from dist_consolidate.errors import CheckpointError, UnsupportedLayoutError
from tests.cases import CASES, bits
from tests.unit.test_archive import tensor_bytes, tree

MAGIC_NUMBER, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


def save(value: Any, path: Path) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=False)
    assert path.read_bytes().startswith(MAGIC)
    return path


def refusal(path: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as error:
        archive = Archive(path)
        for ref in archive.tree.values():
            archive.span(ref)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    return message


def pickles(*values: Any) -> bytes:
    return b"".join(pickle.dumps(value, protocol=2) for value in values)


def machine(**changes: Any) -> dict[str, Any]:
    return {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {}, **changes}


def test_bytes_of_every_tensor(tmp_path: Path) -> None:
    path = save(tree(), tmp_path / "x.pt")
    archive = Archive(path)
    assert list(archive.tree) == list(tree())
    for name, tensor in tree().items():
        assert archive.tree[name].shape == tuple(tensor.shape)
        assert tensor_bytes(path, archive, archive.tree[name]) == bits(tensor).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_modules_beside_the_tensors(tmp_path: Path) -> None:
    """Something that a user saved with the states: a layer, and the class of one."""
    value = {**tree(), "layer": torch.nn.Linear(2, 3), "kind": torch.nn.Linear}
    archive = Archive(save(value, tmp_path / "x.pt"))
    assert list(archive.tree) == list(value)
    for name, tensor in tree().items():
        got = tensor_bytes(tmp_path / "x.pt", archive, archive.tree[name])
        assert got == bits(tensor).numpy().tobytes()


@pytest.mark.parametrize("case", ["not_zip_z2_w2", "not_zip_z3_w2"])
def test_files_of_a_real_release(case: str) -> None:
    """Also that the files of these cases are what they are kept for."""
    paths = sorted(CASES[case].ckpt.glob("*/*_states.pt"))
    assert len(paths) > 2
    for path in paths:
        assert path.read_bytes().startswith(MAGIC)
        loaded = torch.load(path, map_location="cpu", weights_only=False)
        archive = Archive(path)
        if "module" not in loaded:
            continue
        assert list(archive.tree["module"]) == list(loaded["module"])
        for name, tensor in loaded["module"].items():
            data = tensor_bytes(path, archive, archive.tree["module"][name])
            assert data == bits(tensor).numpy().tobytes()
        assert scan_integer(path, "global_steps") == loaded["global_steps"]


def test_a_truncated_file_wherever_it_ends(tmp_path: Path) -> None:
    path = save({"a": torch.arange(5.0), "b": torch.arange(3)}, tmp_path / "x.pt")
    data = path.read_bytes()
    for length in range(len(MAGIC), len(data)):
        path.write_bytes(data[:length])
        message = refusal(path)
        assert "truncated" in message or "cut short" in message


def test_a_wrong_count(tmp_path: Path) -> None:
    path = save({"a": torch.arange(5.0)}, tmp_path / "x.pt")
    data = bytearray(path.read_bytes())
    data[-28] = 4
    path.write_bytes(data)
    assert "has 4 elements, expected 5; the file is damaged" in refusal(path)


def test_a_big_endian_machine(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(pickles(MAGIC_NUMBER, PROTOCOL, machine(little_endian=False), {}, []))
    assert "big-endian" in refusal(path, UnsupportedLayoutError)


def test_another_protocol(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(pickles(MAGIC_NUMBER, 1000, machine(), {}, []))
    assert "protocol 1000, expected 1001" in refusal(path)


def test_a_storage_of_unknown_kind(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(pickles(MAGIC_NUMBER, PROTOCOL, machine(), {}, ["17"]))
    assert "holds a storage '17' of a kind that is not known" in refusal(path)


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("place", range(5))
def test_nothing_is_run(place: int, tmp_path: Path) -> None:
    """In whichever of the five pickles a call stands."""
    values: list[Any] = [MAGIC_NUMBER, PROTOCOL, machine(), {"a": 1}, []]
    bait = Hostile(tmp_path / "run")
    values[place] = {**machine(), "bait": bait} if place == 2 else {"bait": bait}
    path = tmp_path / "x.pt"
    path.write_bytes(pickles(*values) if place else MAGIC + pickles(*values))
    try:
        archive: Archive | None = Archive(path)
    except CheckpointError:
        archive = None
    assert not (tmp_path / "run").exists()
    assert (archive is not None) == (place in (2, 3))
    pickle.loads(pickle.dumps(bait))
    assert (tmp_path / "run").exists()


def test_a_storage_that_is_missing(tmp_path: Path) -> None:
    path = save({"a": torch.arange(5.0)}, tmp_path / "x.pt")
    data = path.read_bytes()
    key = torch.load(path, weights_only=True)["a"]
    assert isinstance(key, Tensor)
    # The list of keys stands behind the object: put an empty one in its place.
    start = data.rindex(b"\x80\x02]")
    path.write_bytes(data[:start] + pickle.dumps([], protocol=2))
    assert "is missing from the file" in refusal(path)
