"""The index of a torch file: torch says where the bytes lie; damage is told with the path."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_consolidate.checkpoint.archive import Archive, ZipRecords, scan_integer
from dist_consolidate.checkpoint.unpickle import TensorRef
from dist_consolidate.errors import CheckpointError, UnsupportedLayoutError
from tests.cases import CASES, bits
from tests.synthetic import Param, Spec, write

Records = dict[str, bytes]


def tree() -> dict[str, Tensor]:
    """Tensors that are laid out in every way."""
    flat = torch.arange(40.0)
    return {
        "flat": flat,
        "view": flat[10:22].view(3, 4),
        "turned": flat[8:20].view(3, 4).t(),
        "steps": flat[1::3],
        "trimmed": torch.arange(1000, dtype=torch.int64)[5:9],
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "mask": torch.tensor([True, False, True]),
        "wide": torch.arange(3.0).to(torch.complex128),
        "float8": torch.arange(9.0).to(torch.float8_e5m2)[2:],
        "spread": torch.tensor([2.5]).expand(4),
    }


def tensor_bytes(path: Path, archive: Archive, ref: TensorRef) -> bytes:
    """The elements of a tensor in row-major order, picked one by one from the file."""
    span, width, data = archive.span(ref), ref.dtype.itemsize_bytes, path.read_bytes()
    assert span.file == path.name
    offsets = [span.offset_bytes]
    for size, step in zip(span.shape, span.stride, strict=True):
        offsets = [o + index * step * width for o in offsets for index in range(size)]
    return b"".join(data[offset : offset + width] for offset in offsets)


def records_of(path: Path) -> Records:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewritten(path: Path, records: Records, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved_states.pt"
    torch.save(tree(), path)
    return path


@pytest.mark.parametrize("to", ["path", "file object"])
def test_bytes_of_every_tensor(tmp_path, to):
    path = tmp_path / "some_states.pt"
    if to == "path":
        torch.save(tree(), path)
    else:
        with path.open("wb") as stream:
            torch.save(tree(), stream)
    archive = Archive(path)
    assert list(archive.tree) == list(tree())
    for name, tensor in tree().items():
        assert archive.tree[name].shape == tuple(tensor.shape)
        assert tensor_bytes(path, archive, archive.tree[name]) == bits(tensor).numpy().tobytes()


@pytest.mark.parametrize("value", [tree(), [torch.zeros(n) for n in range(1, 30)]])
def test_offsets_are_those_of_torch(tmp_path, value):
    path = tmp_path / "x.pt"
    torch.save(value, path)
    refs = Archive(path)
    with FakeTensorMode():
        faked = torch.load(path, weights_only=True)
    pairs = faked.items() if isinstance(faked, dict) else enumerate(faked)
    for key, fake in pairs:
        start = fake.untyped_storage()._checkpoint_offset
        start += fake.storage_offset() * fake.element_size()
        assert refs.span(refs.tree[key]).offset_bytes == start


def storages_differ(path: Path) -> list[str]:
    """Compare the place of each tensor in a real file with what torch reads there."""
    archive, wrong = Archive(path), []
    loaded = torch.load(path, map_location="cpu", weights_only=False)
    for name, tensor in loaded["module"].items():
        ref = archive.tree["module"][name]
        if tensor_bytes(path, archive, ref) != bits(tensor).numpy().tobytes():
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("case", ["ds0.5.4_half_z1_w2", "ds0.6.1_gpt2_z2_w2", "noncontig_z2_w2"])
def test_files_of_real_releases(case):
    paths = sorted(CASES[case].ckpt.glob("*/mp_rank_00_model_states.pt"))
    assert paths
    assert [storages_differ(path) for path in paths] == [[]]


def test_zero_size_storages_and_empty_views(tmp_path):
    path = tmp_path / "x.pt"
    full = torch.arange(6.0)
    torch.save({"none": torch.empty(0), "view": full[2:2], "shape": torch.empty(0, 8)}, path)
    archive = Archive(path)
    spans = [archive.span(ref) for ref in archive.tree.values()]
    assert [(span.num_numel, span.shape) for span in spans] == [(0, (0,)), (0, (0,)), (0, (0, 8))]


def test_the_device_a_tensor_was_saved_on_does_not_matter(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(5.0)}, path)
    records = records_of(path)
    pickled = records["x/data.pkl"]
    assert pickled.count(b"X\x03\x00\x00\x00cpu") == 1
    records["x/data.pkl"] = pickled.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:3")
    archive = Archive(rewritten(path, records))
    want = torch.arange(5.0).numpy().tobytes()
    assert tensor_bytes(path, archive, archive.tree["a"]) == want


def test_other_checksums_and_alignments(tmp_path):
    path = tmp_path / "x.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tree(), path)
    finally:
        torch.serialization.set_crc32_options(True)
    archive = Archive(path)
    for name, tensor in tree().items():
        assert tensor_bytes(path, archive, archive.tree[name]) == bits(tensor).numpy().tobytes()


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_in_the_pickle(saved, bit):
    """The archive's directory knows the pickle's checksum."""
    with zipfile.ZipFile(saved) as archive:
        (info,) = (item for item in archive.infolist() if item.filename.endswith("/data.pkl"))
        pickled = archive.read(info)
    content = bytearray(saved.read_bytes())
    content[content.index(pickled) + len(pickled) // 2] ^= 1 << bit
    saved.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"record 'data\.pkl' has another CRC-32"):
        Archive(saved)


def test_records_in_any_order_and_without_byteorder(saved):
    records = dict(reversed(records_of(saved).items()))
    del records["saved_states/byteorder"]
    archive = Archive(rewritten(saved, records))
    for name, tensor in tree().items():
        assert tensor_bytes(saved, archive, archive.tree[name]) == bits(tensor).numpy().tobytes()


# What is refused.


def refusal(path: Path, *, kind: type[CheckpointError] = CheckpointError) -> str:
    """The message of the error that opening a file and locating all its tensors gives."""
    with pytest.raises(kind) as caught:
        archive = Archive(path)
        for ref in archive.tree.values():
            archive.span(ref)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_a_missing_file(tmp_path):
    assert "No such file or directory" in refusal(tmp_path / "gone.pt")


def test_a_folder(tmp_path):
    assert "is a folder" in refusal(tmp_path)


def test_an_empty_file(tmp_path):
    path = tmp_path / "x.pt"
    path.touch()
    assert "is empty (0 bytes)" in refusal(path)


@pytest.mark.parametrize("data", [b"x", b"not a torch file" * 99, b"\x80\x02}."])
def test_not_a_torch_file(tmp_path, data):
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    assert f"not a torch file: found {len(data)} bytes" in refusal(path)


def test_a_zip_of_something_else(tmp_path):
    path = rewritten(tmp_path / "x.pt", {"a/readme.txt": b"hello"})
    assert "found 0 pickles" in refusal(path)
    two = rewritten(tmp_path / "y.pt", {"a/data.pkl": b"N.", "b/data.pkl": b"N."})
    assert "found 2 pickles" in refusal(two)


@pytest.mark.parametrize("cut", [1, 21, 200, 1000])
def test_a_truncated_file(saved, cut):
    data = saved.read_bytes()
    saved.write_bytes(data[:-cut])
    assert f"truncated or damaged: found {len(data) - cut} bytes" in refusal(saved)


def test_compressed_records(saved):
    rewritten(saved, records_of(saved), zipfile.ZIP_DEFLATED)
    assert "is compressed" in refusal(saved)


def test_a_record_that_is_there_twice(saved):
    records = records_of(saved)
    with warnings.catch_warnings(), zipfile.ZipFile(saved, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("saved_states/data/0", records["saved_states/data/0"])
    assert "'saved_states/data/0' is there twice" in refusal(saved)


def test_a_missing_record(saved):
    records = records_of(saved)
    del records["saved_states/data/1"]
    assert "'data/1' is missing" in refusal(rewritten(saved, records))


def test_a_short_record(saved):
    records = records_of(saved)
    records["saved_states/data/0"] = records["saved_states/data/0"][:-4]
    message = refusal(rewritten(saved, records))
    assert "data/0 holds 156 bytes, but a tensor of shape [40] in it needs 160" in message


def test_a_tensor_that_shows_one_element_for_ever(saved):
    torch.save({"a": torch.zeros(1).expand(1 << 28)}, saved)
    assert Archive(saved).span(Archive(saved).tree["a"]).num_numel == 1 << 28
    torch.save({"a": torch.zeros(1).expand(1 << 20, 1 << 20)}, saved)
    assert "spreads 4 bytes of storage record data/0 over 4398046511104" in refusal(saved)


def edit_directory(path: Path, record: str, edit: Callable[[bytearray, int], None]) -> None:
    """Change a record's entry in the zip directory, given the whole file and its position."""
    data = bytearray(path.read_bytes())
    name = record.encode()
    at = data.rindex(name) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    edit(data, at)
    path.write_bytes(data)


def test_a_record_past_the_end(saved):
    def enlarge(data: bytearray, at: int) -> None:
        struct.pack_into("<II", data, at + 20, 10**6, 10**6)

    edit_directory(saved, "saved_states/data/0", enlarge)
    assert "record 'saved_states/data/0' reaches into what follows it" in refusal(saved)


def test_a_record_without_a_local_header(saved):
    def move(data: bytearray, at: int) -> None:
        (offset,) = struct.unpack_from("<I", data, at + 42)
        struct.pack_into("<I", data, at + 42, offset + 1)

    edit_directory(saved, "saved_states/data/0", move)
    assert "record 'data/0' has no local header" in refusal(saved)


def test_a_big_endian_file(saved):
    records = records_of(saved)
    records["saved_states/byteorder"] = b"big"
    message = refusal(rewritten(saved, records), kind=UnsupportedLayoutError)
    assert "big-endian" in message


def test_a_damaged_pickle(saved):
    records = records_of(saved)
    records["saved_states/data.pkl"] = records["saved_states/data.pkl"][:-9]
    assert "the pickle inside is damaged" in refusal(rewritten(saved, records))


def test_small_records(saved):
    records = ZipRecords(saved)
    assert records.name == "saved_states.pt"
    pickled = records_of(saved)["saved_states/data.pkl"]
    assert records.read_small("data.pkl") == pickled


# Looking for a counter.

COUNTS = [0, 1, 255, 256, 65535, 65536, 2**31 - 1]


def states(step: int, more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "module": {"a": torch.ones(2)},
        "global_steps": step,
        "global_samples": 9,
        **(more or {}),
    }


@pytest.mark.parametrize("step", COUNTS)
def test_scan_finds_the_step(tmp_path, step):
    torch.save(states(step), tmp_path / "x.pt")
    assert scan_integer(tmp_path / "x.pt", "global_steps") == step


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_scan_finds_the_step_in_other_protocols(tmp_path, protocol):
    torch.save(states(70_000), tmp_path / "x.pt", pickle_protocol=protocol)
    # Protocol 4 writes short strings in another way; then nothing is found, and nothing wrong.
    found = scan_integer(tmp_path / "x.pt", "global_steps")
    assert found == (70_000 if protocol < 4 else None)


def test_scan_finds_the_step_far_from_the_end(tmp_path):
    many = {f"key{number}": number for number in range(20_000)}
    torch.save(states(77, many), tmp_path / "x.pt")
    assert scan_integer(tmp_path / "x.pt", "global_steps") == 77


@pytest.mark.parametrize("value", [None, "7", [7], 1.5])
def test_scan_finds_nothing(tmp_path, value):
    torch.save({"global_steps": value, "other": 3}, tmp_path / "x.pt")
    assert scan_integer(tmp_path / "x.pt", "global_steps") is None
    assert scan_integer(tmp_path / "x.pt", "no_such_key") is None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_scan_of_model_states(tmp_path, stage):
    truth = write(tmp_path, Spec(stage=stage, params=[Param("a", (3,))], global_step=41))
    paths = sorted(truth.tag_dir.glob("*model_states.pt"))
    assert [scan_integer(path, "global_steps") for path in paths] == [41] * len(paths)


def test_scan_names_a_damaged_file(saved):
    saved.write_bytes(saved.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="truncated or damaged") as caught:
        scan_integer(saved, "global_steps")
    assert str(saved) in str(caught.value)
    assert io.BytesIO(saved.read_bytes()).read(2) == b"PK"
