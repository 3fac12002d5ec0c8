"""The safetensors layout: exact header bytes, and the safetensors library as the reader."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model, save_model

from dist_consolidate.dtypes import BY_NAME, FLOAT16, FLOAT32, UINT8
from dist_consolidate.errors import UsageError
from dist_consolidate.output.layout import layout_for
from dist_consolidate.output.safetensors_file import header_bytes
from dist_consolidate.plan.outputs import OutputFile, StoredTensor

WRITABLE = [dtype for dtype in BY_NAME.values() if dtype.safetensors]


def stored(name, dtype=FLOAT32, shape=(2,)):
    return StoredTensor((name,), dtype, shape)


def content(tensor, index):
    """Bytes that differ from tensor to tensor and are valid for every dtype, bool included."""
    if tensor.dtype.kind == "bool":
        return bytes((index + i) % 2 for i in range(tensor.num_bytes))
    return random.Random(index).randbytes(tensor.num_bytes)


def write(file, path, seed=0):
    """Write a file as ranks do: blocks first, then tensors in any order."""
    layout = layout_for("safetensors", file)
    image = bytearray(layout.num_bytes)
    parts = list(layout.blocks)
    for index, (tensor, offset) in enumerate(
        zip(file.tensors, layout.data_offset_bytes, strict=True)
    ):
        parts.append((offset, content(tensor, index)))
    random.Random(seed).shuffle(parts)
    for offset, data in parts:
        image[offset : offset + len(data)] = data
    assert len(image) == layout.num_bytes
    Path(path).write_bytes(image)
    return layout


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_golden_header():
    file = OutputFile(
        "model.safetensors",
        (stored("b.weight", FLOAT32, (2, 3)), stored("a.bias", FLOAT16, (1,))),
        dropped=(("z", "a.bias"), ("y", "b.weight")),
    )
    text = (
        b'{"__metadata__":{"y":"b.weight","z":"a.bias","format":"pt"},'
        b'"b.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        b'"a.bias":{"dtype":"F16","shape":[1],"data_offsets":[24,26]}}'
    )
    assert len(text) == 183
    padded = text + b" "
    assert header_bytes(file) == (184).to_bytes(8, "little") + padded
    layout = layout_for("safetensors", file)
    assert layout.blocks == ((0, header_bytes(file)),)
    assert layout.data_offset_bytes == (192, 216)
    assert layout.num_bytes == 218
    assert not layout.needs_crc
    assert layout.finishing_blocks() == ()


@pytest.mark.parametrize(
    ("num_bytes", "alignment"), [(2**20 - 1, 64), (2**20, 4096), (2**20 + 1, 4096)]
)
def test_large_data_starts_at_a_page(num_bytes, alignment):
    header = header_bytes(OutputFile("f", (stored("w", UINT8, (num_bytes,)),)))
    assert len(header) % alignment == 0
    num_spaces = len(header) - len(header.rstrip(b" "))
    assert num_spaces < alignment
    assert len(header) == {64: 128, 4096: 4096}[alignment]
    assert int.from_bytes(header[:8], "little") == len(header) - 8


def test_every_dtype_and_odd_shape_is_read_back(tmp_path):
    tensors = tuple(
        stored(f"{dtype.name}{shape}", dtype, shape)
        for dtype in WRITABLE
        for shape in ((), (1,), (3, 5), (0,), (2, 0, 3))
    )
    write(OutputFile("f", tensors), tmp_path / "f")
    loaded = load_file(tmp_path / "f")
    assert loaded.keys() == {tensor.names[0] for tensor in tensors}
    for index, tensor in enumerate(tensors):
        found = loaded[tensor.names[0]]
        assert found.dtype == getattr(torch, tensor.dtype.name)
        assert tuple(found.shape) == tensor.shape
        assert raw(found) == content(tensor, index)


def test_metadata_and_names_beyond_ascii(tmp_path):
    file = OutputFile("f", (stored('w"\\\n\u00e9\U0001f600'),), dropped=(("format", "x"),))
    write(file, tmp_path / "f")
    with safetensors.safe_open(tmp_path / "f", "pt") as reader:
        assert list(reader.keys()) == ['w"\\\n\u00e9\U0001f600']
        assert reader.metadata() == {"format": "pt"}


def test_dropped_ties_are_recorded_as_save_model_does(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(3, 2)
            self.head = torch.nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight

    save_model(Tied(), str(tmp_path / "theirs"), metadata={"format": "pt"})
    file = OutputFile(
        "f", (stored("embed.weight", FLOAT32, (3, 2)),), (("head.weight", "embed.weight"),)
    )
    write(file, tmp_path / "ours")
    with (
        safetensors.safe_open(tmp_path / "theirs", "pt") as theirs,
        safetensors.safe_open(tmp_path / "ours", "pt") as ours,
    ):
        assert ours.metadata() == theirs.metadata()
        assert ours.keys() == theirs.keys()
    model = Tied()
    missing, unexpected = load_model(model, tmp_path / "ours")
    assert (list(missing), list(unexpected)) == ([], [])
    assert raw(model.head.weight.detach()) == content(file.tensors[0], 0)


def test_a_file_without_tensors_is_read_back(tmp_path):
    write(OutputFile("f", ()), tmp_path / "f")
    assert load_file(tmp_path / "f") == {}


def test_a_dtype_without_code_is_refused_by_name():
    file = OutputFile("f", (stored("ok"), stored("spectrum", BY_NAME["complex128"])))
    with pytest.raises(UsageError, match=r"tensor spectrum has dtype complex128.*--format bin"):
        layout_for("safetensors", file)


@pytest.mark.parametrize("name", ["__metadata__", "lone\ud800surrogate"])
def test_a_name_that_the_format_cannot_hold_is_refused(name):
    with pytest.raises(UsageError, match="--format bin"):
        layout_for("safetensors", OutputFile("f", (stored(name),)))


def test_a_header_at_the_limit_passes_and_one_byte_less_is_refused():
    file = OutputFile("model.safetensors", tuple(stored(f"layer.{i}") for i in range(100)))
    num_json_bytes = len(header_bytes(file)) - 8
    assert header_bytes(file, num_json_bytes) == header_bytes(file)
    with pytest.raises(UsageError, match=r"model\.safetensors.*smaller --max-shard-size"):
        header_bytes(file, num_json_bytes - 1)


def test_the_library_refuses_headers_above_our_limit(tmp_path):
    from dist_consolidate.output.safetensors_file import MAX_HEADER_BYTES

    image = (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}"
    with pytest.raises(safetensors.SafetensorError, match=r"(?i)header.*too ?large"):
        safetensors.deserialize(image)
    with pytest.raises(safetensors.SafetensorError, match=r"(?i)invalid header length"):
        safetensors.deserialize(MAX_HEADER_BYTES.to_bytes(8, "little") + b"{}")


def test_programming_errors_are_asserted():
    shared = StoredTensor(("a", "b"), FLOAT32, (2,))
    with pytest.raises(AssertionError, match="cannot share"):
        layout_for("safetensors", OutputFile("f", (shared,)))
    with pytest.raises(AssertionError, match="twice"):
        layout_for("safetensors", OutputFile("f", (stored("a"), stored("a"))))


def test_an_unknown_format_is_refused():
    with pytest.raises(UsageError, match=r"'gguf'.*safetensors, bin"):
        layout_for("gguf", OutputFile("f", ()))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(WRITABLE), st.lists(st.integers(0, 40), max_size=3)), max_size=8
    ),
    st.integers(0, 99),
)
def test_any_layout_tiles_and_is_read_back(tmp_path_factory, specs, seed):
    tensors = tuple(stored(f"t{i}", d, tuple(shape)) for i, (d, shape) in enumerate(specs))
    path = tmp_path_factory.mktemp("any") / "f"
    layout = write(OutputFile("f", tensors), path, seed)
    ends = [0]
    header = json.loads(layout.blocks[0][1][8:])
    for tensor in tensors:
        start, end = header[tensor.names[0]]["data_offsets"]
        assert start == ends[-1]
        ends.append(end)
    num_header_bytes = len(layout.blocks[0][1])
    assert layout.data_offset_bytes == tuple(num_header_bytes + end for end in ends[:-1])
    assert layout.num_bytes == num_header_bytes + ends[-1]
    loaded = load_file(path)
    assert [raw(loaded[t.names[0]]) for t in tensors] == [
        content(t, i) for i, t in enumerate(tensors)
    ]
