"""The torch layout: torch.load and zipfile as independent readers, torch.save as the model."""

from __future__ import annotations

import collections
import hashlib
import pickletools
import random
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.dtypes import BY_NAME, FLOAT32, UINT8
from dist_consolidate.output.layout import layout_for
from dist_consolidate.output.torch_file import torch_archive
from dist_consolidate.plan.outputs import OutputFile, StoredTensor

SHAPES = ((), (1,), (3, 5), (0,), (2, 0, 3), (4, 1, 2))


def stored(*names, dtype=FLOAT32, shape=(2,)):
    return StoredTensor(names, dtype, shape)


def content(tensor, index):
    """Bytes that differ from tensor to tensor and are valid for every dtype, bool included."""
    if tensor.dtype.kind == "bool":
        return bytes((index + i) % 2 for i in range(tensor.num_bytes))
    return random.Random(index).randbytes(tensor.num_bytes)


def write(tensors, path, finish=True):
    """Write a file as ranks do, its tensors last to first."""
    layout = layout_for("bin", OutputFile("f", tuple(tensors)))
    data = [content(tensor, index) for index, tensor in enumerate(tensors)]
    parts = [*layout.blocks, *reversed(list(zip(layout.data_offset_bytes, data, strict=True)))]
    if finish:
        parts += layout.finishing_blocks([zlib.crc32(item) for item in data])
    with Path(path).open("wb") as file:
        file.truncate(layout.num_bytes)
        for offset, item in parts:
            file.seek(offset)
            file.write(item)
    assert path.stat().st_size == layout.num_bytes
    return layout


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("mmap", [False, True])
def test_every_dtype_and_odd_shape_is_read_back(tmp_path, mmap):
    tensors = [
        stored(f"{dtype.name}{shape}", dtype=dtype, shape=shape)
        for dtype in BY_NAME.values()
        for shape in SHAPES
    ]
    layout = write(tensors, tmp_path / "f")
    assert layout.needs_crc
    loaded = torch.load(tmp_path / "f", weights_only=True, mmap=mmap)
    assert type(loaded) is collections.OrderedDict
    assert list(loaded) == [tensor.names[0] for tensor in tensors]
    for index, tensor in enumerate(tensors):
        found = loaded[tensor.names[0]]
        assert found.dtype == getattr(torch, tensor.dtype.name)
        assert tuple(found.shape) == tensor.shape
        assert found.stride() == torch.empty(tensor.shape).stride()
        assert not found.requires_grad
        assert raw(found) == content(tensor, index)


@pytest.mark.parametrize("mmap", [False, True])
def test_names_of_one_stored_tensor_share_storage(tmp_path, mmap):
    write([stored("a", "tied", "again"), stored("alone")], tmp_path / "f")
    loaded = torch.load(tmp_path / "f", weights_only=True, mmap=mmap)
    assert list(loaded) == ["a", "tied", "again", "alone"]
    pointers = {name: tensor.untyped_storage().data_ptr() for name, tensor in loaded.items()}
    assert pointers["a"] == pointers["tied"] == pointers["again"] != pointers["alone"]
    loaded["tied"][0] = 7.0
    assert loaded["again"][0] == 7.0
    # As after torch.save(model.state_dict()): distinct tensors over one storage.
    assert loaded["a"] is not loaded["tied"]


def test_the_pickle_is_the_one_torch_writes(tmp_path):
    tensors = [
        stored(f"{dtype.name}{shape}", dtype=dtype, shape=shape)
        for dtype in BY_NAME.values()
        for shape in SHAPES
    ]
    state = collections.OrderedDict(
        (t.names[0], torch.zeros(t.shape, dtype=getattr(torch, t.dtype.name))) for t in tensors
    )
    torch.save(state, tmp_path / "theirs")
    write(tensors, tmp_path / "ours")

    def operations(path):
        with zipfile.ZipFile(path) as archive:
            (name,) = [item for item in archive.namelist() if item.endswith("data.pkl")]
            return [
                (op.name, argument)
                for op, argument, _ in pickletools.genops(archive.read(name))
                if "PUT" not in op.name and "GET" not in op.name
            ]

    # The memo's numbering depends on which equal objects were one object; the rest must not.
    ours, theirs = operations(tmp_path / "ours"), operations(tmp_path / "theirs")
    assert ours == theirs


def test_records_are_stored_aligned_and_checked(tmp_path):
    tensors = [stored("a", dtype=UINT8, shape=(3,)), stored("none", shape=(0,)), stored("b")]
    layout = write(tensors, tmp_path / "f")
    with zipfile.ZipFile(tmp_path / "f") as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [
            "archive/data.pkl",
            "archive/byteorder",
            "archive/data/0",
            "archive/data/1",
            "archive/data/2",
            "archive/version",
        ]
        assert archive.read("archive/byteorder") == b"little"
        assert archive.read("archive/version") == b"3\n"
        for item in archive.infolist():
            assert item.compress_type == zipfile.ZIP_STORED
            assert item.date_time == (1980, 1, 1, 0, 0, 0)
            assert zlib.crc32(archive.read(item)) == item.CRC
        assert [item.file_size for item in archive.infolist()][2:5] == [3, 0, 8]
    image = (tmp_path / "f").read_bytes()
    for index, (tensor, offset) in enumerate(zip(tensors, layout.data_offset_bytes, strict=True)):
        assert offset % 64 == 0
        assert image[offset : offset + tensor.num_bytes] == content(tensor, index)


def test_local_headers_agree_with_the_central_directory(tmp_path):
    write([stored("a"), stored("b", shape=(70,))], tmp_path / "f")
    image = (tmp_path / "f").read_bytes()
    with zipfile.ZipFile(tmp_path / "f") as archive:
        for item in archive.infolist():
            local = image[item.header_offset :]
            assert local[:4] == b"PK\3\4"
            assert int.from_bytes(local[14:18], "little") == item.CRC
            assert int.from_bytes(local[18:22], "little") == item.compress_size
            assert int.from_bytes(local[22:26], "little") == item.file_size
            num_name_bytes = int.from_bytes(local[26:28], "little")
            extra = local[30 + num_name_bytes :][: int.from_bytes(local[28:30], "little")]
            assert extra[:2] == b"FB"
            assert int.from_bytes(extra[2:4], "little") == len(extra) - 4


def test_a_flipped_byte_is_seen(tmp_path):
    layout = write([stored("a"), stored("b")], tmp_path / "f")
    image = bytearray((tmp_path / "f").read_bytes())
    image[layout.data_offset_bytes[1]] ^= 1
    (tmp_path / "f").write_bytes(image)
    with zipfile.ZipFile(tmp_path / "f") as archive:
        assert archive.testzip() == "archive/data/1"


def test_an_unfinished_file_is_visibly_so(tmp_path):
    write([stored("a")], tmp_path / "f", finish=False)
    assert not zipfile.is_zipfile(tmp_path / "f")
    with pytest.raises(RuntimeError, match="failed finding central directory"):
        torch.load(tmp_path / "f", weights_only=True)


def test_only_checksums_and_directory_wait_for_the_end():
    layout = layout_for("bin", OutputFile("f", (stored("a"), stored("b"))))
    first, second, (offset, directory) = layout.finishing_blocks([1, 0xDEADBEEF])
    headers = {at for at, _ in layout.blocks}
    assert {first[0] - 14, second[0] - 14} < headers
    assert (first[1], second[1]) == (b"\1\0\0\0", b"\xef\xbe\xad\xde")
    assert offset + len(directory) == layout.num_bytes
    assert b"\xef\xbe\xad\xde" in directory
    with pytest.raises(ValueError, match="zip"):
        layout.finishing_blocks([1])


def test_blocks_and_tensors_do_not_overlap_and_fill_the_file():
    tensors = (stored("a", dtype=UINT8, shape=(65,)), stored("b", shape=()), stored("c"))
    layout = layout_for("bin", OutputFile("f", tensors))
    spans = [(at, len(data)) for at, data in layout.blocks]
    spans += [(at, t.num_bytes) for at, t in zip(layout.data_offset_bytes, tensors, strict=True)]
    at, directory = layout.finishing_blocks([0, 0, 0])[-1]
    spans.append((at, len(directory)))
    end = 0
    for start, length in sorted(spans):
        assert start == end
        end = start + length
    assert end == layout.num_bytes


def test_records_of_more_than_4_gib(tmp_path):
    # Sparse: nothing is written where the tensors are, so the true checksum of zeros is left out.
    numel = 5 * 2**30 // 4
    tensors = (stored("small", shape=(3,)), stored("big", shape=(numel,)), stored("after"))
    layout = layout_for("bin", OutputFile("f", tensors))
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.truncate(layout.num_bytes)
        for offset, data in (*layout.blocks, *layout.finishing_blocks([0, 0, 0])):
            file.seek(offset)
            file.write(data)
        for value, offset in enumerate(layout.data_offset_bytes, 1):
            file.seek(offset)
            file.write(torch.tensor([float(value)]).numpy().tobytes())
    assert path.stat().st_blocks * 512 < 2**20
    with zipfile.ZipFile(path) as archive:
        big, after = archive.getinfo("archive/data/1"), archive.getinfo("archive/data/2")
        assert big.file_size == big.compress_size == 5 * 2**30
        assert after.header_offset > 5 * 2**30
        assert after.file_size == 8
        with archive.open(big) as member:
            assert member.read(4) == torch.tensor([2.0]).numpy().tobytes()
        assert archive.getinfo("archive/version").header_offset > after.header_offset
    with path.open("rb") as file:  # the local header, which carries its sizes in a zip64 field
        file.seek(big.header_offset)
        local = file.read(30 + len("archive/data/1") + 20)
    assert local[18:26] == b"\xff" * 8
    assert local[-20:] == b"\1\0\x10\0" + 2 * (5 * 2**30).to_bytes(8, "little")
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert [tuple(tensor.shape) for tensor in loaded.values()] == [(3,), (numel,), (2,)]
    assert [tensor[0].item() for tensor in loaded.values()] == [1.0, 2.0, 3.0]
    assert loaded["big"][-1].item() == 0.0


@pytest.mark.parametrize("num_bytes", [2**32 - 2, 2**32 - 1, 2**32])
def test_sizes_around_4_gib(tmp_path, num_bytes):
    layout = layout_for("bin", OutputFile("f", (stored("w", dtype=UINT8, shape=(num_bytes,)),)))
    with (tmp_path / "f").open("wb") as file:
        file.truncate(layout.num_bytes)
        for offset, data in (*layout.blocks, *layout.finishing_blocks([0])):
            file.seek(offset)
            file.write(data)
    is_zip64 = num_bytes >= 2**32 - 1  # all ones is the mark, so that size needs the field too
    with zipfile.ZipFile(tmp_path / "f") as archive:
        item = archive.getinfo("archive/data/0")
        assert item.file_size == num_bytes
        assert item.extract_version == (45 if is_zip64 else 20)
        assert item.extra[:4] == (b"\1\0\x10\0" if is_zip64 else b"")
        assert archive.read("archive/version") == b"3\n"
    local = next(data for at, data in layout.blocks if at == item.header_offset)
    mark = b"\1\0\x10\0" if is_zip64 else b"FB"
    assert local[30 + len("archive/data/0") :].startswith(mark)
    loaded = torch.load(tmp_path / "f", weights_only=True, mmap=True)
    assert loaded["w"].numel() == num_bytes


@pytest.mark.parametrize("num_tensors", [65531, 65532])
def test_entry_counts_around_the_16_bit_limit(tmp_path, num_tensors):
    # Three further entries: 65534 fit the old end record, 65535 is its mark for zip64.
    tensors = tuple(stored(f"w{i}", dtype=UINT8, shape=(i % 2,)) for i in range(num_tensors))
    layout = layout_for("bin", OutputFile("f", tensors))
    image = bytearray(layout.num_bytes)
    crcs = [zlib.crc32(bytes(tensor.num_bytes)) for tensor in tensors]
    for offset, data in (*layout.blocks, *layout.finishing_blocks(crcs)):
        image[offset : offset + len(data)] = data
    (tmp_path / "f").write_bytes(image)
    is_zip64 = num_tensors + 3 >= 65535
    # APPNOTE 4.3.14.1: the record's size does not count its first twelve bytes.
    assert (image[-98:-86] == b"PK\6\6" + (44).to_bytes(8, "little")) == is_zip64
    assert (b"PK\6\6" in image[-98:]) == is_zip64
    with zipfile.ZipFile(tmp_path / "f") as archive:
        assert len(archive.namelist()) == num_tensors + 3
        assert archive.read("archive/data/65530") == b""
        assert archive.read("archive/version") == b"3\n"
    reader = torch._C.PyTorchFileReader(str(tmp_path / "f"))
    assert len(reader.get_all_records()) == num_tensors + 3
    assert reader.get_record_offset("data/65529") == layout.data_offset_bytes[65529]


def test_bytes_do_not_depend_on_object_identity():
    shape = (2, 3)
    shared = (stored("cpu", shape=shape), stored("storage", shape=shape), stored("10"))
    apart = (
        stored("".join(["c", "pu"]), shape=tuple([2, 3])),
        stored("".join(["stor", "age"]), shape=tuple([2, 3])),
        stored("".join(["1", "0"]), shape=tuple([2])),
    )
    many = tuple(stored(f"w{i}") for i in range(11))
    assert torch_archive(shared + many) == torch_archive(apart + many)


def test_bytes_do_not_depend_on_the_process():
    script = (
        "import hashlib\n"
        "from dist_consolidate.dtypes import BY_NAME, FLOAT32\n"
        "from dist_consolidate.output.torch_file import torch_archive\n"
        "from dist_consolidate.plan.outputs import StoredTensor\n"
        "t = (StoredTensor(('a', 'b'), FLOAT32, (2,)),"
        " StoredTensor(('c',), BY_NAME['uint16'], (3, 2)))\n"
        "print(hashlib.sha256(repr(torch_archive(t)).encode()).hexdigest())\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    archive = torch_archive((stored("a", "b"), stored("c", dtype=BY_NAME["uint16"], shape=(3, 2))))
    assert there.strip() == hashlib.sha256(repr(archive).encode()).hexdigest()


def test_a_name_that_occurs_twice_is_a_programming_error():
    with pytest.raises(AssertionError, match="twice"):
        torch_archive((stored("a"), stored("a")))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(BY_NAME.values())),
            st.lists(st.integers(0, 20), max_size=3),
            st.integers(1, 3),
        ),
        max_size=8,
    )
)
def test_any_layout_is_read_back(tmp_path_factory, specs):
    tensors = [
        stored(*(f"t{i}.{k}" for k in range(num_names)), dtype=dtype, shape=tuple(shape))
        for i, (dtype, shape, num_names) in enumerate(specs)
    ]
    path = tmp_path_factory.mktemp("any") / "f"
    layout = write(tensors, path)
    assert all(offset % 64 == 0 for offset in layout.data_offset_bytes)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    loaded = torch.load(path, weights_only=True)
    assert list(loaded) == [name for tensor in tensors for name in tensor.names]
    for index, tensor in enumerate(tensors):
        for name in tensor.names:
            assert raw(loaded[name]) == content(tensor, index)
