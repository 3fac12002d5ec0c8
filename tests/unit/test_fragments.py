"""Ranges of tensors: what is read for some elements is what lies there, each byte once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.checkpoint.extents import Extent
from dist_consolidate.checkpoint.fragments import Fragments, Read, part_starts_bytes
from dist_consolidate.checkpoint.model import FlatGroup, FlatSlot, Source
from dist_consolidate.dtypes import BY_NAME
from tests.unit.test_buckets import World, worlds

FLOAT32, BFLOAT16 = BY_NAME["float32"], BY_NAME["bfloat16"]


def range_of(world: World, source: Source, found: list[Read], num_bytes: int) -> bytes:
    """Carry reads out into a buffer of the range's size; none may overlap or leave a gap."""
    ends = 0
    out = bytearray()
    for read in sorted(found, key=lambda read: read.at_bytes):
        assert read.at_bytes == ends, "a gap, or two reads overlap"
        data = world.fetch(read)
        assert data
        out += data
        ends += len(data)
    assert ends == num_bytes
    return bytes(out)


@settings(deadline=None, max_examples=200)
@given(world=worlds(), data=st.data())
def test_a_range_is_a_slice_of_the_tensor(world, data):
    fragments = Fragments(world.groups)
    for source, truth in zip(world.sources, world.truth, strict=True):
        width = source.dtype.itemsize_bytes
        start = data.draw(st.integers(0, source.num_numel))
        stop = data.draw(st.integers(start, source.num_numel))
        found = list(fragments.reads(source, start, stop))
        want = truth[start * width : stop * width]
        assert range_of(world, source, found, len(want)) == want


@settings(deadline=None, max_examples=60)
@given(world=worlds(), step=st.integers(1, 7))
def test_ranges_one_behind_the_other_are_the_tensor(world, step):
    # One object serves all of them in any order, as it does for the buckets of a rank.
    fragments = Fragments(world.groups)
    got = [b""] * len(world.sources)
    for index in reversed(range(len(world.sources))):
        source = world.sources[index]
        width = source.dtype.itemsize_bytes
        for start in range(0, source.num_numel, step):
            stop = min(start + step, source.num_numel)
            found = list(fragments.reads(source, start, stop))
            got[index] += range_of(world, source, found, (stop - start) * width)
    assert got == world.truth


def extents(*sizes: int) -> tuple[Extent, ...]:
    return tuple(Extent(f"f{n}", 100 * n, size) for n, size in enumerate(sizes))


def test_a_striped_tensor_ends_before_its_padding():
    # Ten elements on four ranks, three on each: the last rank has one and two of padding.
    group = FlatGroup("g", True, FLOAT32, extents(40, 40, 40, 40))
    source = Source("fp32 partition", (10,), FLOAT32, FlatSlot(0, 2, 3))
    assert list(Fragments([group]).reads(source, 4, 10)) == [
        Read(0, Extent("f1", 100 + 4 * (2 + 1), 8)),
        Read(8, Extent("f2", 200 + 4 * 2, 12)),
        Read(20, Extent("f3", 300 + 4 * 2, 4)),
    ]


def test_a_tensor_smaller_than_the_number_of_ranks():
    group = FlatGroup("g", True, BFLOAT16, extents(2, 2, 2, 2))
    source = Source("fp32 partition", (2,), BFLOAT16, FlatSlot(0, 0, 1))
    found = list(Fragments([group]).reads(source, 0, 2))
    assert found == [Read(0, Extent("f0", 0, 2)), Read(2, Extent("f1", 100, 2))]


def test_a_tensor_that_crosses_parts_of_which_some_are_empty():
    group = FlatGroup("g", False, FLOAT32, extents(12, 0, 4, 0, 40))
    source = Source("fp32 partition", (6,), FLOAT32, FlatSlot(0, 2))
    assert list(Fragments([group]).reads(source, 0, 6)) == [
        Read(0, Extent("f0", 8, 4)),
        Read(4, Extent("f2", 200, 4)),
        Read(8, Extent("f4", 400, 16)),
    ]
    assert list(Fragments([group]).reads(source, 1, 2)) == [Read(0, Extent("f2", 200, 4))]
    assert list(Fragments([group]).reads(source, 3, 3)) == []


def test_where_parts_begin():
    assert part_starts_bytes(extents(12, 0, 4)) == [0, 12, 12]
    assert part_starts_bytes(()) == []
