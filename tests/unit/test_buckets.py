"""Buckets, fragments and boxes: a simulation in which every byte of every tensor is accounted for.

Files of random bytes stand for a checkpoint. What the phases say is carried out on rows of bytes;
the truth was cut out of the same files, element by element, without the package.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dist_consolidate.checkpoint.extents import Extent, TensorSpan, contiguous_stride
from dist_consolidate.checkpoint.fragments import Read, fragments
from dist_consolidate.checkpoint.model import Block, FlatGroup, FlatSlot, Source
from dist_consolidate.checkpoint.shards import ShardReader, boxes
from dist_consolidate.dtypes import BY_NAME, DType
from dist_consolidate.errors import CheckpointError
from dist_consolidate.plan.buckets import Phase, make_phases
from dist_consolidate.plan.plan import Plan, PlannedTensor

Bytes = NDArray[np.uint8]
DTYPES = [BY_NAME[name] for name in ("float32", "bfloat16", "int64", "uint8", "complex128")]
FLAT_DTYPES = [BY_NAME[name] for name in ("float32", "float32", "bfloat16", "float64")]
ALIGNMENT_BYTES = 16


class World:
    """Files of random bytes, and the tensors that were put into them."""

    def __init__(self, num_files: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.content: dict[str, bytearray] = {f"f{n}": bytearray() for n in range(num_files)}
        self.groups: list[FlatGroup] = []
        self.sources: list[Source] = []
        self.truth: list[bytes] = []
        self.held: list[Source] = []  # what tensors that were put together are made of

    def junk(self, num_bytes: int) -> bytes:
        """Random bytes: padding, and what else is in a file."""
        return self.random.bytes(num_bytes)

    def append(self, file: str, data: bytes) -> int:
        """Add data to a file behind something else; give its address."""
        content = self.content[file]
        content += self.junk(int(self.random.integers(0, 40)))
        offset = len(content)
        content += data
        return offset

    def add(self, source: Source, data: bytes) -> None:
        self.sources.append(source)
        self.truth.append(data)

    def add_striped(
        self, dtype: DType, shapes: Sequence[tuple[int, ...]], files: list[str]
    ) -> None:
        """A group as stage 3 has it: each tensor is cut over all parts."""
        parts, offset = [b""] * len(files), 0
        for shape in shapes:
            numel = math.prod(shape)
            taken = -(-numel // len(files))
            data = self.junk(numel * dtype.itemsize_bytes)
            padded = data + self.junk(taken * len(files) * dtype.itemsize_bytes - len(data))
            step = taken * dtype.itemsize_bytes
            parts = [old + padded[n * step : (n + 1) * step] for n, old in enumerate(parts)]
            slot = FlatSlot(len(self.groups), offset, taken)
            self.add(Source("fp32 partition", shape, dtype, slot), data)
            offset += taken
        self.close_group(True, dtype, parts, files)

    def add_linear(
        self, dtype: DType, items: Sequence[tuple[tuple[int, ...], int]], files: list[str]
    ) -> None:
        """A group as stages 1 and 2 have it: one row of tensors and gaps, cut anywhere."""
        flat, offset = b"", 0
        for shape, gap in items:
            data = self.junk(math.prod(shape) * dtype.itemsize_bytes)
            slot = FlatSlot(len(self.groups), offset)
            self.add(Source("fp32 partition", shape, dtype, slot), data)
            flat += data + self.junk(gap * dtype.itemsize_bytes)
            offset += math.prod(shape) + gap
        total = offset
        cuts = sorted(int(self.random.integers(0, total + 1)) for _ in files[1:])
        edges = [0, *cuts, total]
        width = dtype.itemsize_bytes
        parts = [flat[a * width : b * width] for a, b in itertools.pairwise(edges)]
        self.close_group(False, dtype, parts, files)

    def close_group(
        self, striped: bool, dtype: DType, parts: Sequence[bytes], files: Sequence[str]
    ) -> None:
        extents = [
            Extent(file, self.append(file, part), len(part))
            for file, part in zip(files, parts, strict=True)
        ]
        label = f"group {len(self.groups)}"
        self.groups.append(FlatGroup(label, striped, dtype, tuple(extents)))

    def add_span(
        self, dtype: DType, shape: tuple[int, ...], stride: tuple[int, ...], file: str
    ) -> None:
        """A tensor in one file, perhaps strided."""
        width = dtype.itemsize_bytes
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        storage = self.junk(max(reach, 0) * width)
        indices = element_offsets(shape, stride)
        data = b"".join(storage[i * width : (i + 1) * width] for i in indices)
        place = TensorSpan(file, self.append(file, storage), dtype, shape, stride)
        self.add(Source("module", shape, dtype, span=place), data)

    def join(self, count: int, dim: int) -> None:
        """Make one tensor of the last few, one behind the other along a dimension."""
        parts, data = self.sources[-count:], self.truth[-count:]
        del self.sources[-count:], self.truth[-count:]
        self.held += parts
        element = np.dtype((np.void, parts[0].dtype.itemsize_bytes))
        arrays = [
            np.frombuffer(text, element).reshape(part.shape)
            for part, text in zip(parts, data, strict=True)
        ]
        whole = np.concatenate(arrays, axis=dim)
        inner, blocks, at = math.prod(whole.shape[dim + 1 :]), [], 0
        for part in parts:
            run = part.shape[dim] * inner
            outer = math.prod(whole.shape[:dim])
            blocks.append(Block(part, outer, run, 0, run, at, whole.shape[dim] * inner))
            at += run
        source = Source(parts[0].origin, whole.shape, parts[0].dtype, blocks=tuple(blocks))
        self.add(source, whole.tobytes())

    def plan(self) -> Plan:
        tensors = tuple(
            PlannedTensor(f"t{index}", source, source.dtype, ())
            for index, source in enumerate(self.sources)
        )
        return Plan((), tensors, tuple(self.groups), {}, {}, (), "")

    def useful_bytes(self) -> int:
        """What a frugal reader fetches: no gap behind the last tensor of a group."""
        simple = [*self.held, *self.sources]
        total = sum(s.num_numel * s.dtype.itemsize_bytes for s in simple if s.span)
        for index, group in enumerate(self.groups):
            slots = [(s, s.slot) for s in simple if s.slot and s.slot.group == index]
            ends = [
                slot.offset_numel + (slot.part_numel if group.striped else source.num_numel)
                for source, slot in slots
                if source.num_numel
            ]
            copies = len(group.parts) if group.striped else 1
            total += max(ends, default=0) * group.dtype.itemsize_bytes * copies
        return total

    def fetch(self, read: Read) -> bytes:
        """Carry out a read, as a reader of the documentation would."""
        if read.extent is not None:
            assert read.span is None
            extent = read.extent
            assert extent.offset_bytes + extent.num_bytes <= len(self.content[extent.file])
            return bytes(self.content[extent.file][extent.offset_bytes :][: extent.num_bytes])
        assert read.span is not None
        place, width = read.span, read.span.dtype.itemsize_bytes
        offsets = element_offsets(place.shape, place.stride)[read.start_numel : read.stop_numel]
        starts = [place.offset_bytes + offset * width for offset in offsets]
        return b"".join(bytes(self.content[place.file][s : s + width]) for s in starts)


def element_offsets(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Where the elements of a strided tensor lie, in row-major order."""
    ranges = [range(size) for size in shape]
    return [
        sum(i * step for i, step in zip(index, stride, strict=True))
        for index in itertools.product(*ranges)
    ]


SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def worlds(draw: st.DrawFn, *, flat: bool = True, spans: bool = True) -> World:
    """Any checkpoint: groups of both kinds, uneven parts, gaps, padding, strided tensors."""
    num_parts = draw(st.integers(1, 5))
    world = World(num_parts + 1, draw(st.integers(0, 1 << 16)))
    for _ in range(draw(st.integers(0, 3)) if flat else 0):
        dtype = draw(st.sampled_from(FLAT_DTYPES))
        first = draw(st.integers(0, 1))
        files = [f"f{first + n}" for n in range(num_parts)]
        if draw(st.booleans()):
            world.add_striped(dtype, draw(st.lists(SHAPES, min_size=1, max_size=6)), files)
        else:
            item = st.tuples(SHAPES, st.integers(0, 5))
            world.add_linear(dtype, draw(st.lists(item, min_size=1, max_size=6)), files)
    for _ in range(draw(st.integers(0, 4)) if spans else 0):
        add_any_span(draw, world)
    if flat and spans and draw(st.booleans()):
        add_any_joined(draw, world, [f"f{n}" for n in range(num_parts)])
    return world


def add_any_joined(draw: st.DrawFn, world: World, files: list[str]) -> None:
    """A tensor of which every part lies in a group of its own, or in a file of its own."""
    dtype, dim = draw(st.sampled_from(FLAT_DTYPES)), draw(st.integers(0, 2))
    shape, sizes = [draw(st.integers(0, 4)) for _ in range(3)], draw(st.lists(st.integers(0, 3)))
    for size in (sizes := sizes[:4] or [1]):
        part = (*shape[:dim], size, *shape[dim + 1 :])
        kind = draw(st.sampled_from(("striped", "linear", "span")))
        if kind == "striped":
            world.add_striped(dtype, [part], files)
        elif kind == "linear":
            world.add_linear(dtype, [(part, draw(st.integers(0, 3)))], files)
        else:
            world.add_span(dtype, part, contiguous_stride(part), files[0])
    world.join(len(sizes), dim)


def add_any_span(draw: st.DrawFn, world: World) -> None:
    shape = draw(SHAPES)
    stride = contiguous_stride(shape)
    if draw(st.booleans()):
        stride = tuple(draw(st.integers(0, 9)) for _ in shape)
    file = draw(st.sampled_from(sorted(world.content)))
    world.add_span(draw(st.sampled_from(DTYPES)), shape, stride, file)


BUCKET_BYTES = st.one_of(st.integers(1, 64), st.integers(64, 600), st.just(1 << 20))


# The simulation.


class Ledger:
    """What has been read, and what has been written into which tensor."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.out = [np.zeros(len(data), np.uint8) for data in world.truth]
        self.times = [np.zeros(source.num_numel, np.int64) for source in world.sources]
        self.touched: dict[str, Bytes] = {
            name: np.zeros(len(content), np.uint8) for name, content in world.content.items()
        }
        self.spans: dict[TensorSpan, list[int]] = {}
        self.num_bytes_read = 0

    def read(self, phase: Phase, bucket: int, row: int) -> tuple[Bytes, NDArray[np.bool_]]:
        """Fill one row; give it with the mask of what is known of it."""
        data = np.full(phase.row_bytes, 0xA5, np.uint8)
        known = np.zeros(phase.row_bytes, bool)
        for read in phase.reads(bucket, row):
            fetched = np.frombuffer(self.world.fetch(read), np.uint8)
            stop = read.at_bytes + len(fetched)
            assert 0 <= read.at_bytes < stop <= phase.row_bytes
            assert not known[read.at_bytes : stop].any(), "two reads overlap in a row"
            data[read.at_bytes : stop], known[read.at_bytes : stop] = fetched, True
            self.num_bytes_read += len(fetched)
            self.note(read)
        return data, known

    def note(self, read: Read) -> None:
        """Remember which bytes of which file were read, and that it lies where it may."""
        if read.extent is not None:
            extent = read.extent
            bounds = [part for group in self.world.groups for part in group.parts]
            simple = (*self.world.held, *self.world.sources)
            bounds += [s.span.extent() for s in simple if s.span and is_plain(s.span)]
            assert any(is_inside(extent, bound) for bound in bounds)
            self.touched[extent.file][extent.offset_bytes :][: extent.num_bytes] += 1
        elif read.span is not None:
            places = self.spans.setdefault(read.span, [])
            places.extend(range(read.start_numel, read.stop_numel))

    def write(self, phase: Phase, bucket: int) -> None:
        """Read one bucket and move its pieces."""
        rows = [self.read(phase, bucket, row) for row in range(phase.num_rows)]
        for piece in phase.pieces(bucket):
            source = self.world.sources[piece.tensor]
            width = source.dtype.itemsize_bytes
            low, high = piece.at_bytes, piece.at_bytes + piece.num_numel * width
            assert 0 <= low < high <= phase.row_bytes, "a piece lies outside its row"
            assert low % width == 0
            assert 0 <= piece.row < piece.row + piece.num_rows <= phase.num_rows
            for index in range(piece.num_rows):
                start = piece.start_numel + index * piece.step_numel
                stop = min(start + piece.num_numel, source.num_numel)
                if start < stop:
                    data, known = rows[piece.row + index]
                    end = low + (stop - start) * width
                    assert known[low:end].all(), "a piece was never read"
                    self.out[piece.tensor][start * width : stop * width] = data[low:end]
                    self.times[piece.tensor][start:stop] += 1

    def check(self) -> None:
        """Check that every tensor is right and nothing was read or written twice."""
        assert [out.tobytes() for out in self.out] == self.world.truth
        assert all((times == 1).all() for times in self.times)
        assert all((times <= 1).all() for times in self.touched.values())
        assert all(len(places) == len(set(places)) for places in self.spans.values())
        assert self.num_bytes_read <= self.world.useful_bytes()


def is_plain(span: TensorSpan) -> bool:
    return element_offsets(span.shape, span.stride) == list(range(math.prod(span.shape)))


def is_inside(extent: Extent, bound: Extent) -> bool:
    stop, bound_stop = extent.offset_bytes + extent.num_bytes, bound.offset_bytes + bound.num_bytes
    return (
        extent.file == bound.file and bound.offset_bytes <= extent.offset_bytes < stop <= bound_stop
    )


def files_read(phase: Phase, row: int) -> set[str]:
    reads = [read for bucket in range(phase.num_buckets) for read in phase.reads(bucket, row)]
    return {place.file for read in reads for place in (read.extent, read.span) if place}


@settings(deadline=None, max_examples=300)
@given(worlds(), BUCKET_BYTES, st.integers(1, 7))
def test_every_byte_goes_where_it_belongs(world, bucket_bytes, num_ranks):
    phases = make_phases(world.plan(), bucket_bytes, num_ranks)
    ledger = Ledger(world)
    for phase in phases:
        assert phase.num_buckets > 0
        assert phase.row_bytes % ALIGNMENT_BYTES == 0
        rows = -(-phase.num_rows // num_ranks) * num_ranks
        assert phase.row_bytes * rows <= max(bucket_bytes, ALIGNMENT_BYTES * rows)
        for bucket in range(phase.num_buckets):
            ledger.write(phase, bucket)
        for row in range(phase.num_rows):
            assert files_read(phase, row) <= phase.row_files(row)
    ledger.check()


@settings(deadline=None, max_examples=40)
@given(worlds(spans=False), BUCKET_BYTES)
def test_each_lane_is_one_shard(world, bucket_bytes):
    for phase in make_phases(world.plan(), bucket_bytes, 1):
        files = [phase.row_files(row) for row in range(phase.num_rows)]
        assert all(len(names) == 1 for names in files)
        assert len({name for names in files for name in names}) == phase.num_rows


@settings(deadline=None, max_examples=40)
@given(worlds(), BUCKET_BYTES, st.integers(1, 7))
def test_asking_twice_gives_the_same(world, bucket_bytes, num_ranks):
    plan = world.plan()

    def told() -> list[object]:
        return [
            (
                list(phase.pieces(bucket)),
                [list(phase.reads(bucket, r)) for r in range(phase.num_rows)],
            )
            for phase in make_phases(plan, bucket_bytes, num_ranks)
            for bucket in range(phase.num_buckets)
        ]

    assert told() == told()


@settings(deadline=None, max_examples=40)
@given(worlds(spans=False), BUCKET_BYTES, st.integers(1, 7), st.randoms())
def test_tensors_that_are_not_wanted(world, bucket_bytes, num_ranks, random):
    # Some tensors of a group are left out, and the others stand in another order.
    kept = [index for index in range(len(world.sources)) if random.random() < 0.6]
    random.shuffle(kept)
    world.sources = [world.sources[index] for index in kept]
    world.truth = [world.truth[index] for index in kept]
    ledger = Ledger(world)
    for phase in make_phases(world.plan(), bucket_bytes, num_ranks):
        for bucket in range(phase.num_buckets):
            ledger.write(phase, bucket)
    ledger.check()


def test_an_empty_plan():
    assert make_phases(World(1, 0).plan(), 100, 1) == []


def test_only_empty_tensors():
    world = World(3, 0)
    world.add_striped(BY_NAME["float32"], [(0,), (0, 5)], ["f0", "f1"])
    world.add_linear(BY_NAME["float32"], [((0,), 0)], ["f0", "f1"])
    world.add_span(BY_NAME["int64"], (3, 0), (1, 1), "f2")
    assert make_phases(world.plan(), 100, 1) == []


def test_a_bucket_larger_than_everything_is_one_bucket():
    world = World(2, 0)
    world.add_striped(BY_NAME["float32"], [(5, 3), (7,)], ["f0", "f1"])
    (phase,) = make_phases(world.plan(), 1 << 30, 1)
    assert (phase.num_rows, phase.num_buckets, phase.row_bytes) == (2, 1, 48)


def test_a_bucket_by_hand():
    # Two ranks, one tensor of five elements: three on the first, two and a padding on the second.
    world = World(2, 0)
    world.add_striped(BY_NAME["float32"], [(5,)], ["f0", "f1"])
    (phase,) = make_phases(world.plan(), 1 << 20, 1)
    (piece,) = phase.pieces(0)
    assert dataclasses.asdict(piece) == {
        "tensor": 0,
        "row": 0,
        "num_rows": 2,
        "at_bytes": 0,
        "num_numel": 3,
        "start_numel": 0,
        "step_numel": 3,
    }
    for row, part in enumerate(world.groups[0].parts):
        assert list(phase.reads(0, row)) == [Read(0, part)]


# Fragments.


def assembled(world: World, source: Source) -> tuple[bytes, list[int]]:
    """A tensor from its fragments, and how often each byte was filled."""
    width = source.dtype.itemsize_bytes
    out, times = bytearray(source.num_numel * width), [0] * (source.num_numel * width)
    for read in fragments(source, world.groups):
        data = world.fetch(read)
        assert data
        out[read.at_bytes : read.at_bytes + len(data)] = data
        for position in range(read.at_bytes, read.at_bytes + len(data)):
            times[position] += 1
    return bytes(out), times


@settings(deadline=None, max_examples=100)
@given(worlds())
def test_fragments_fill_a_tensor_exactly(world):
    for source, truth in zip(world.sources, world.truth, strict=True):
        data, times = assembled(world, source)
        assert data == truth
        assert times == [1] * len(truth)


# Boxes.


@st.composite
def ranges(draw: st.DrawFn) -> tuple[TensorSpan, int, int]:
    """A tensor and a range of its elements."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    stride = tuple(draw(st.integers(0, 50)) for _ in shape)
    place = TensorSpan("f", draw(st.integers(0, 99)), draw(st.sampled_from(DTYPES)), shape, stride)
    start = draw(st.integers(0, math.prod(shape)))
    return place, start, draw(st.integers(start, math.prod(shape)))


def addresses(place: TensorSpan) -> Iterator[int]:
    for offset in element_offsets(place.shape, place.stride):
        yield place.offset_bytes + offset * place.dtype.itemsize_bytes


@settings(deadline=None, max_examples=200)
@given(ranges(), st.integers(1, 200))
def test_boxes_are_the_range_in_order(request_, max_numel):
    place, start, stop = request_
    cut = list(boxes(place, start, stop, max_numel))
    assert all(0 < math.prod(box.shape) <= max_numel for box in cut)
    assert all((box.file, box.dtype) == (place.file, place.dtype) for box in cut)
    assert [a for box in cut for a in addresses(box)] == list(addresses(place))[start:stop]


def test_a_whole_tensor_is_one_box():
    place = TensorSpan("f", 8, BY_NAME["float32"], (3, 4), (1, 3))
    assert list(boxes(place, 0, 12, 12)) == [place]
    assert list(boxes(place, 5, 5, 12)) == []


# Reading from real files.


@settings(deadline=None, max_examples=30)
@given(world=worlds())
def test_a_reader_of_files_gives_the_same(tmp_path_factory, world):
    folder = tmp_path_factory.mktemp("shards")
    for name, content in world.content.items():
        (folder / name).write_bytes(content)
    reader = ShardReader(folder, {name: len(c) for name, c in world.content.items()})
    for source, truth in zip(world.sources, world.truth, strict=True):
        out = bytearray(len(truth))
        for read in fragments(source, world.groups):
            reader.fill(memoryview(out), read)
        assert bytes(out) == truth
    reader.close()


def test_elements_that_lie_far_apart(tmp_path):
    # 36 MB from the first to the last; the file is sparse, and half of it is to be left alone.
    shape, stride = (5, 3, 2), (2_000_000, 1, 1_000_000)
    values = np.arange(30, dtype=np.float32)
    with (tmp_path / "f").open("wb") as stream:
        for value, offset in zip(values, element_offsets(shape, stride), strict=True):
            stream.seek(12 + 4 * offset)
            stream.write(value.tobytes())
    reader = ShardReader(tmp_path, {})
    out = bytearray(7 + 4 * 20)
    place = TensorSpan("f", 12, BY_NAME["float32"], shape, stride)
    reader.fill(memoryview(out), Read(7, None, place, 5, 25))
    reader.close()
    assert bytes(out[7:]) == values[5:25].tobytes()
    assert bytes(out[:7]) == bytes(7)
    assert reader.num_bytes_read < 20_000_000


@pytest.mark.parametrize("change", ["shorter", "longer", "gone"])
def test_a_file_that_was_changed_meanwhile(tmp_path, change):
    path = tmp_path / "f"
    if change != "gone":
        path.write_bytes(bytes(90 if change == "shorter" else 110))
    reader = ShardReader(tmp_path, {"f": 100})
    with pytest.raises(CheckpointError) as caught:
        reader.fill(memoryview(bytearray(100)), Read(0, Extent("f", 0, 100)))
    reader.close()
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_ends_early(tmp_path):
    (tmp_path / "f").write_bytes(bytes(50))
    reader = ShardReader(tmp_path, {})
    with pytest.raises(CheckpointError, match="ended at byte 50 while being read") as caught:
        reader.fill(memoryview(bytearray(100)), Read(0, Extent("f", 0, 100)))
    reader.close()
    assert str(tmp_path / "f") in str(caught.value)
