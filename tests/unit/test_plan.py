"""The plan: files, dtypes, tie policies, digest, and coverage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_consolidate.checkpoint.extents import Extent, TensorSpan, contiguous_stride
from dist_consolidate.checkpoint.layout import find_tag
from dist_consolidate.checkpoint.model import (
    Block,
    Checkpoint,
    FlatGroup,
    FlatSlot,
    ModuleKey,
    Source,
)
from dist_consolidate.checkpoint.reader import read_checkpoint
from dist_consolidate.dtypes import BFLOAT16, BY_NAME, FLOAT32, DType
from dist_consolidate.errors import CheckpointError
from dist_consolidate.plan.plan import Plan, make_plan, output_dtype
from dist_consolidate.plan.resolve import Resolution, Resolved, resolve
from dist_consolidate.plan.ties import Tie
from tests.synthetic import Buffer, Param, Spec, write

EMPTY = Checkpoint(
    tag="t",
    chosen="",
    stage=2,
    world_size=2,
    step=1,
    ds_version=None,
    groups=(),
    partitions={},
    frozen={},
    module={},
    saves_frozen=True,
    recorded_ties={},
    odd_entries={},
    file_bytes={},
    notes=(),
)


def span(shape: tuple[int, ...], dtype: DType = FLOAT32) -> Source:
    place = TensorSpan("f", 0, dtype, shape, contiguous_stride(shape))
    return Source("module", shape, dtype, span=place)


def resolution(
    sources: dict[str, Source], aliases: dict[str, tuple[str, ...]] | None = None
) -> Resolution:
    aliases = aliases or {}
    ties = {alias: Tie(n, "recorded") for n, tied in aliases.items() for alias in tied}
    tensors = tuple(Resolved(n, source, aliases.get(n, ())) for n, source in sources.items())
    return Resolution(tensors, ties, {}, ())


def plan(
    sources: dict[str, Source],
    aliases: dict[str, tuple[str, ...]] | None = None,
    *,
    dtype: str = "fp32",
    ties: str = "copy",
    limit: int | None = None,
    checkpoint: Checkpoint = EMPTY,
) -> Plan:
    return make_plan(
        checkpoint,
        resolution(sources, aliases),
        dtype=dtype,
        ties=ties,
        max_shard_bytes=limit,
        file_names=numbered,
    )


def numbered(count: int) -> Sequence[str]:
    return [f"file{index}of{count}" for index in range(count)]


def content(made: Plan) -> list[list[tuple[str, ...]]]:
    return [[stored.names for stored in file.tensors] for file in made.files]


def assert_targets(made: Plan) -> None:
    """Check that every stored tensor is the target of exactly one planned one, of its kind."""
    filled = []
    for tensor in made.tensors:
        for file, index in tensor.targets:
            stored = made.files[file].tensors[index]
            assert (stored.dtype, stored.shape) == (tensor.dtype, tensor.source.shape)
            filled.append((file, index))
    places = [(f, i) for f, file in enumerate(made.files) for i in range(len(file.tensors))]
    assert sorted(filled) == places


# Files.


def test_one_file():
    made = plan({"a": span((10,)), "b": span((5, 2)), "c": span(())})
    assert [file.name for file in made.files] == ["file0of1"]
    assert content(made) == [[("a",), ("b",), ("c",)]]
    assert made.num_bytes == 84
    assert_targets(made)


def test_files_by_size():
    sources = {name: span((10,)) for name in "abcdefg"}
    made = plan(sources, limit=100)
    assert content(made) == [[("a",), ("b",)], [("c",), ("d",)], [("e",), ("f",)], [("g",)]]
    assert [file.name for file in made.files] == [f"file{index}of4" for index in range(4)]
    assert content(plan(sources, limit=80)) == content(made)
    assert [len(names) for names in content(plan(sources, limit=79))] == [1] * 7
    assert len(plan(sources, limit=280).files) == 1
    assert len(plan(sources, limit=279).files) == 2


def test_the_size_is_that_of_the_output():
    sources = {name: span((10,)) for name in "abcd"}
    assert len(plan(sources, dtype="bf16", limit=40).files) == 2
    assert len(plan(sources, dtype="keep", limit=40).files) == 4


def test_a_tensor_larger_than_the_limit_gets_a_file_of_its_own():
    made = plan({"a": span((5,)), "big": span((100,)), "b": span((5,))}, limit=50)
    assert content(made) == [[("a",)], [("big",)], [("b",)]]
    made = plan({"big": span((100,)), "b": span((5,)), "c": span((5,))}, limit=50)
    assert content(made) == [[("big",)], [("b",), ("c",)]]


def test_empty_tensors_make_no_file():
    made = plan({"a": span((10,)), "e": span((0, 4)), "b": span((0,))}, limit=40)
    assert content(made) == [[("a",), ("e",), ("b",)]]
    assert made.num_bytes == 40


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 200))
def test_no_file_is_larger_than_the_limit(sizes, limit):
    made = plan({f"t{n}": span((size,)) for n, size in enumerate(sizes)}, limit=limit)
    stored = [names for file in content(made) for (names,) in file]
    assert stored == [f"t{number}" for number in range(len(sizes))]
    for file in made.files:
        filled = [tensor for tensor in file.tensors if tensor.num_bytes]
        total = sum(tensor.num_bytes for tensor in filled)
        assert file.tensors
        assert total <= limit or len(filled) == 1
    assert_targets(made)


def test_nothing_to_write_is_refused():
    with pytest.raises(CheckpointError, match="nothing is left to write"):
        plan({})


# Element types.

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
CHOSEN = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize("name", list(BY_NAME))
@pytest.mark.parametrize("choice", [*CHOSEN, "keep"])
def test_element_types(name, choice):
    expected = CHOSEN[choice] if name in FLOATS and choice != "keep" else name
    source = span((3,), BY_NAME[name])
    assert output_dtype(source, choice) == BY_NAME[expected]
    made = plan({"a": source}, dtype=choice)
    assert made.tensors[0].dtype.name == expected
    assert made.files[0].tensors[0].dtype.name == expected
    assert made.num_bytes == 3 * BY_NAME[expected].itemsize_bytes


def test_wide_elements_come_first():
    kinds = ["uint8", "float16", "int64", "float32", "bool", "complex128", "int16", "float64"]
    sources = {kind: span((1,), BY_NAME[kind]) for kind in kinds}
    made = plan(sources, dtype="keep")
    order = ["complex128", "int64", "float64", "float32", "float16", "int16", "uint8", "bool"]
    assert [tensor.name for tensor in made.tensors] == order
    assert_targets(made)


# Ties.

TIED = {"a": span((4,)), "b": span((2, 3))}
ALIASES = {"a": ("x", "y"), "b": ("z",)}


def test_ties_in_full():
    made = plan(TIED, ALIASES, ties="copy")
    assert content(made) == [[("a",), ("x",), ("y",), ("b",), ("z",)]]
    assert [tensor.targets for tensor in made.tensors] == [
        ((0, 0), (0, 1), (0, 2)),
        ((0, 3), (0, 4)),
    ]
    assert made.files[0].dropped == ()
    assert made.num_bytes == 3 * 16 + 2 * 24
    assert_targets(made)


def test_ties_in_full_over_several_files():
    made = plan(TIED, ALIASES, ties="copy", limit=32)
    assert content(made) == [[("a",), ("x",)], [("y",)], [("b",)], [("z",)]]
    assert [tensor.targets for tensor in made.tensors] == [
        ((0, 0), (0, 1), (1, 0)),
        ((2, 0), (3, 0)),
    ]


def test_ties_dropped():
    made = plan(TIED, ALIASES, ties="drop", limit=20)
    assert content(made) == [[("a",)], [("b",)]]
    assert [file.dropped for file in made.files] == [(("x", "a"), ("y", "a")), (("z", "b"),)]
    assert made.num_bytes == 16 + 24
    assert_targets(made)


def test_ties_that_share_a_storage():
    made = plan(TIED, ALIASES, ties="alias")
    assert content(made) == [[("a", "x", "y"), ("b", "z")]]
    assert made.files[0].dropped == ()
    assert made.num_bytes == 16 + 24
    assert_targets(made)


@pytest.mark.parametrize("ties", ["copy", "drop", "alias"])
def test_ties_are_in_the_plan(ties):
    made = plan(TIED, ALIASES, ties=ties)
    assert {alias: tie.holder for alias, tie in made.ties.items()} == {"x": "a", "y": "a", "z": "b"}


# The digest.

PARAMS = (
    Param("emb", (8, 4)),
    Param("w", (5, 3), group=1),
    Param("base", (3, 3), kind="frozen"),
    Param("head", (8, 4), tie_of="emb"),
)


def from_disk(root: Path, **changes: Any) -> Plan:
    checkpoint = read_checkpoint(find_tag(root))
    request: dict[str, Any] = {
        "dtype": "fp32",
        "ties": "copy",
        "max_shard_bytes": None,
        "file_names": numbered,
    }
    return make_plan(checkpoint, resolve(checkpoint), **{**request, **changes})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_digests(tmp_path, stage):
    write(tmp_path, Spec(stage=stage, params=PARAMS, buffers=[Buffer("ids", torch.arange(3))]))
    one = from_disk(tmp_path)
    assert one == from_disk(tmp_path)
    assert len(one.digest) == 64
    assert set(one.digest) <= set("0123456789abcdef")
    changes: list[dict[str, Any]] = [
        {"dtype": "bf16"},
        {"dtype": "keep"},
        {"ties": "drop"},
        {"ties": "alias"},
        {"max_shard_bytes": 100},
        {"file_names": lambda count: [f"other{index}" for index in range(count)]},
    ]
    digests = {one.digest, *(from_disk(tmp_path, **change).digest for change in changes)}
    assert len(digests) == 1 + len(changes)


def renamed(source: Source) -> Source:
    assert source.span is not None
    return dataclasses.replace(source, span=dataclasses.replace(source.span, file="g"))


def moved(source: Source) -> Source:
    assert source.span is not None
    return dataclasses.replace(source, span=dataclasses.replace(source.span, offset_bytes=4))


@pytest.mark.parametrize("change", [renamed, moved], ids=["file", "offset"])
def test_the_digest_depends_on_where_the_data_lies(change: Callable[[Source], Source]):
    one = plan({"a": span((4,)), "b": span((4,))})
    other = plan({"a": span((4,)), "b": change(span((4,)))})
    assert one.digest != other.digest


def test_the_digest_depends_on_the_order():
    sources = {"a": span((4,)), "b": span((4,))}
    assert plan(sources).digest != plan(dict(reversed(sources.items()))).digest


def test_the_digest_depends_on_the_groups():
    source = Source("fp32 partition", (4,), FLOAT32, FlatSlot(0, 0))
    parts = [[Extent("f", 0, 16)], [Extent("f", 16, 16)], [Extent("f", 0, 8), Extent("g", 0, 8)]]
    digests = {
        plan({"a": source}, checkpoint=with_groups(FlatGroup("g", False, FLOAT32, tuple(p)))).digest
        for p in parts
    }
    assert len(digests) == 3


# Coverage.


def with_groups(*groups: FlatGroup) -> Checkpoint:
    return dataclasses.replace(EMPTY, groups=groups)


def group(*numels: int, striped: bool = False) -> FlatGroup:
    parts = tuple(Extent(f"f{rank}", 0, numel * 4) for rank, numel in enumerate(numels))
    return FlatGroup("param group 0", striped, FLOAT32, parts)


def slot(shape: tuple[int, ...], offset: int, part: int = 0) -> Source:
    return Source("fp32 partition", shape, FLOAT32, FlatSlot(0, offset, part))


def problems(checkpoint: Checkpoint, sources: dict[str, Source]) -> list[str]:
    """The lines of the refusal."""
    with pytest.raises(CheckpointError) as caught:
        plan(sources, checkpoint=checkpoint)
    lines = str(caught.value).splitlines()
    assert lines[0] == "t: tensors and data do not fit each other:"
    return [line.removeprefix("  - ") for line in lines[1:]]


@pytest.mark.parametrize(
    ("flat", "sources"),
    [
        (group(10), {"a": slot((2, 3), 0), "b": slot((4,), 6)}),
        (group(5, 5), {"b": slot((4,), 6), "a": slot((2, 3), 0)}),
        (group(9, 0, 7), {"a": slot((3,), 2), "b": slot((4,), 9)}),
        (group(6), {"a": slot((6,), 0), "none": slot((0,), 6), "zero": slot((0, 3), 2)}),
        (group(3, 3, striped=True), {"a": slot((4,), 0, 2), "b": slot((1,), 2, 1)}),
        (group(3, 4, striped=True), {"a": slot((5,), 0, 3), "none": slot((0,), 3, 0)}),
    ],
)
def test_what_fits(flat, sources):
    made = plan(sources, checkpoint=with_groups(flat))
    assert [tensor.name for tensor in made.tensors] == list(sources)


@pytest.mark.parametrize(
    ("flat", "sources", "words"),
    [
        (
            group(10),
            {"a": slot((6,), 0), "b": slot((4,), 5)},
            ["b: overlaps the tensor before it in param group 0"],
        ),
        (
            group(4, 4),
            {"a": slot((6,), 0), "b": slot((3,), 6)},
            ["b: ends at element 9 of param group 0, but only 8 are there"],
        ),
        (
            group(3, 3, striped=True),
            {"a": slot((4,), 0, 2), "b": slot((4,), 2, 2)},
            ["b: ends at element 4 of param group 0, but only 3 are there"],
        ),
        (
            group(3, 2, striped=True),
            {"a": slot((6,), 0, 3)},
            ["a: ends at element 3 of param group 0, but only 2 are there"],
        ),
        (
            group(4, 4, striped=True),
            {"a": slot((5,), 0, 2)},
            ["a: 2 parts of 2 do not make 5 elements"],
        ),
        (
            group(8, 8, striped=True),
            {"a": slot((6,), 0, 3), "b": slot((6,), 2, 3)},
            ["b: overlaps the tensor before it in param group 0"],
        ),
        (
            group(4),
            {"a": slot((3,), 0), "b": slot((3,), 2), "c": slot((9,), 5)},
            [
                "b: overlaps the tensor before it in param group 0",
                "b: ends at element 5 of param group 0, but only 4 are there",
                "c: ends at element 14 of param group 0, but only 4 are there",
            ],
        ),
    ],
)
def test_what_does_not_fit(flat, sources, words):
    assert problems(with_groups(flat), sources) == words


def test_values_that_are_nowhere_or_of_another_shape():
    sources = {
        "a": Source("module", (3,), FLOAT32),
        "b": dataclasses.replace(span((2, 3)), shape=(6,)),
    }
    words = "its values are nowhere, or of another shape"
    assert problems(EMPTY, sources) == [f"a: {words}", f"b: {words}"]


def test_a_shape_that_the_module_contradicts():
    key = ModuleKey((3, 2), ("0",), span((3, 2)), False)
    checkpoint = dataclasses.replace(with_groups(group(6)), module={"a": key})
    message = "a: `module` holds shape [3, 2], but the recorded shape is [2, 3]"
    assert problems(checkpoint, {"a": slot((2, 3), 0)}) == [message]
    assert plan({"a": slot((3, 2), 0)}, checkpoint=checkpoint).num_bytes == 24


def columns(*parts: tuple[Source, int, int], rows: int, width: int) -> Source:
    """A matrix of which each part fills some columns: the part, its first column, how many."""
    blocks = [Block(part, rows, num, 0, num, first, width) for part, first, num in parts]
    return Source("fp32 partition", (rows, width), FLOAT32, blocks=tuple(blocks))


def test_parts_that_make_a_whole():
    left, right = slot((4, 2), 0), slot((4, 3), 8)
    matrix = columns((left, 0, 2), (right, 2, 3), rows=4, width=5)
    made = plan({"a": matrix, "b": slot((1,), 20)}, checkpoint=with_groups(group(21)))
    assert made.tensors[0].source == matrix
    rows = [Block(left, 1, 4, 4, 0, 0, 0), Block(left, 1, 4, 0, 0, 4, 0)]
    turned = Source("fp32 partition", (4, 2), FLOAT32, blocks=tuple(rows))
    assert plan({"a": turned}, checkpoint=with_groups(group(8))).num_bytes == 32
    uneven = [
        Block(left, 2, 1, 0, 1, 0, 3),
        Block(left, 1, 2, 2, 0, 1, 0),
        Block(left, 4, 1, 4, 1, 4, 1),
    ]
    mixed = Source("fp32 partition", (8,), FLOAT32, blocks=tuple(uneven))
    assert plan({"a": mixed}, checkpoint=with_groups(group(8))).num_bytes == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"to_numel": 3}, "elements 2 to 3 are left empty"),
        ({"to_numel": 1}, "elements 1 to 2 are filled twice"),
        ({"num_runs": 3}, "its parts fill 17 of 20 elements"),
        ({"run_numel": 2, "to_numel": 2}, "elements 4 to 5 are left empty"),
        ({"from_numel": 1}, "a part of it reaches beyond the values it is taken from"),
        ({"from_numel": -1}, "a part of it reaches beyond the values it is taken from"),
    ],
)
def test_parts_that_do_not(change, words):
    left, right = slot((4, 2), 0), slot((4, 3), 8)
    matrix = columns((left, 0, 2), (right, 2, 3), rows=4, width=5)
    blocks = (matrix.blocks[0], dataclasses.replace(matrix.blocks[1], **change))
    broken = dataclasses.replace(matrix, blocks=blocks)
    assert f"a: {words}" in problems(with_groups(group(20)), {"a": broken})


def test_parts_of_another_type_or_beyond_their_group():
    half = dataclasses.replace(slot((4, 3), 8), dtype=BFLOAT16)
    matrix = columns((slot((4, 2), 0), 0, 2), (half, 2, 3), rows=4, width=5)
    found = problems(with_groups(group(19)), {"a": matrix})
    assert "a: is float32, but a part of it bfloat16" in found
    assert "a: ends at element 20 of param group 0, but only 19 are there" in found
