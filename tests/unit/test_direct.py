"""Buckets of direct work: a simulation in which every byte of every output file is accounted for.

Output files are made up of random bytes. Carrying out every bucket of every rank on rows of bytes
must give the very files, each byte written once; a bucket takes its bytes from the tensor's own
copy, not from the file that is to come out.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.checkpoint.model import Source
from dist_consolidate.dtypes import BY_NAME, DType
from dist_consolidate.plan.direct import DirectBucket, FileMap, Share
from dist_consolidate.plan.owners import Owned, deal_out
from dist_consolidate.plan.plan import Plan, PlannedTensor

PAGE = 4096
DTYPES = [BY_NAME[n] for n in ("uint8", "bfloat16", "float16", "float32", "float64", "complex128")]
FLOATS = ("float32", "bfloat16", "float64", "float16")


@dataclasses.dataclass
class Result:
    """Output files that are to come out, and the tensors that are in them.

    Attributes:
        plan: The tensors and their places.
        maps: The files.
        content: What each file must hold in the end.
        values: The output bytes of each tensor.
        holes: What no bucket writes in each file.
    """

    plan: Plan
    maps: list[FileMap]
    content: list[bytes]
    values: list[bytes]
    holes: list[list[slice]]

    def size(self, tensor: int) -> int:
        return self.plan.tensors[tensor].source.num_numel


class Builder:
    """Puts tensors and literals into files, one behind the other."""

    def __init__(self, num_files: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.content = [b""] * num_files
        self.literals: list[list[tuple[int, bytes]]] = [[] for _ in range(num_files)]
        self.offsets: list[list[int]] = [[] for _ in range(num_files)]
        self.holes: list[list[slice]] = [[] for _ in range(num_files)]

    def hole(self, file: int, num_bytes: int) -> None:
        """Leave bytes to be written at the very end, as a zip file's directory is."""
        end = len(self.content[file])
        self.holes[file].append(slice(end, end + num_bytes))
        self.content[file] += bytes(num_bytes)

    def literal(self, file: int, num_bytes: int) -> None:
        if num_bytes:
            text = self.random.bytes(num_bytes)
            self.literals[file].append((len(self.content[file]), text))
            self.content[file] += text

    def stored(self, file: int, data: bytes, alignment: int, gap: int) -> tuple[int, int]:
        """Put a tensor's bytes behind a literal; give its place."""
        end = len(self.content[file]) + gap
        self.literal(file, gap + -end % alignment)
        self.offsets[file].append(len(self.content[file]))
        self.content[file] += data
        return file, len(self.offsets[file]) - 1

    def maps(self) -> list[FileMap]:
        rows = zip(self.content, self.literals, self.offsets, strict=True)
        return [FileMap(len(text), tuple(found), tuple(at)) for text, found, at in rows]


def planned(
    dtypes: tuple[DType, DType], numel: int, targets: Sequence[tuple[int, int]]
) -> PlannedTensor:
    source = Source("module", (numel,), dtypes[0])
    return PlannedTensor("t", source, dtypes[1], tuple(targets))


def made(builder: Builder, tensors: list[PlannedTensor], values: list[bytes]) -> Result:
    plan = Plan((), tuple(tensors), (), {}, {}, (), "")
    return Result(plan, builder.maps(), builder.content, values, builder.holes)


NUMELS = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.sampled_from([0, 1, 1024, 4096]))


@st.composite
def results(draw: st.DrawFn) -> Result:
    """Any files: tied copies in one file and in several, gaps, headers, casts, empty tensors."""
    num_files = draw(st.integers(1, 4))
    builder = Builder(num_files, draw(st.integers(0, 1 << 16)))
    files, gaps = st.integers(0, num_files - 1), st.sampled_from([0, 0, 3, 64, 5000])
    jobs, tensors, values = [], [], []
    for index in range(draw(st.integers(1, 7))):
        target = draw(st.sampled_from(DTYPES))
        wide = draw(st.booleans()) and target.name in FLOATS
        source = BY_NAME[draw(st.sampled_from(FLOATS))] if wide else target
        numel = draw(NUMELS)
        values.append(builder.random.bytes(numel * target.itemsize_bytes))
        tensors.append(((source, target), numel))
        copies = draw(st.lists(files, min_size=1, max_size=4))
        jobs += [(draw(st.integers(0, 99)), index, file, draw(gaps)) for file in copies]
    places: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for _, index, file, gap in sorted(jobs):
        width = tensors[index][0][1].itemsize_bytes
        places[index].append(builder.stored(file, values[index], width, gap))
    for file in range(num_files):
        builder.literal(file, draw(st.sampled_from([0, 7, 200])))
        builder.hole(file, draw(st.sampled_from([0, 0, 33, 6000])))
        builder.literal(file, draw(st.sampled_from([0, 0, 5])))
    done = [planned(*tensor, places[index]) for index, tensor in enumerate(tensors)]
    return made(builder, done, values)


def dealt(result: Result, num_writers: int) -> list[list[Owned]]:
    return deal_out([len(text) for text in result.content], num_writers)


class Ledger:
    """What all ranks have written, and what one rank has read."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.out = [np.zeros(len(text), np.uint8) for text in result.content]
        self.times = [np.zeros(len(text), np.int64) for text in result.content]

    def rank(self, share: Share) -> list[np.ndarray]:
        """Carry out one rank's buckets; give how often it read each element of each tensor."""
        read = [np.zeros(self.result.size(t), int) for t in range(len(self.result.values))]
        num_written = num_read = 0
        for index in range(share.num_buckets):
            bucket = share.bucket(index)
            assert bucket.num_bytes <= share.max_bucket_bytes
            num_read += self.fill(bucket, read)
            num_written += sum(write.num_bytes for write in bucket.writes)
        assert (num_read, num_written) == (share.num_read_bytes, share.num_bytes)
        return read

    def fill(self, bucket: DirectBucket, read: list[np.ndarray]) -> int:
        """Carry out one bucket; give how many bytes of shards it took."""
        room = np.zeros(bucket.num_bytes, np.uint8)
        known = np.zeros(bucket.num_bytes, bool)
        parts = [(at, text) for at, text in bucket.literals]
        taken = 0
        for item in bucket.elements:
            tensor = self.result.plan.tensors[item.tensor]
            width = tensor.dtype.itemsize_bytes
            low, high = item.start_numel, item.start_numel + item.num_numel
            assert 0 <= low < high <= self.result.size(item.tensor)
            parts.append(
                (item.at_bytes, self.result.values[item.tensor][low * width : high * width])
            )
            read[item.tensor][low:high] += 1
            taken += item.num_numel * tensor.source.dtype.itemsize_bytes
            self.check_kept(item)
        for at, text in parts:
            assert not known[at : at + len(text)].any(), "two things lie in one place"
            room[at : at + len(text)] = np.frombuffer(text, np.uint8)
            known[at : at + len(text)] = True
        self.write(bucket, room, known)
        return taken

    def check_kept(self, item) -> None:
        """Check that what checksums are made of is where it is said to be in the bucket."""
        width = self.result.plan.tensors[item.tensor].dtype.itemsize_bytes
        places = self.result.plan.tensors[item.tensor].targets
        for kept in item.kept:
            assert (kept.file, kept.stored) in places
            inside = kept.at_bytes - item.at_bytes
            assert kept.start_bytes == item.start_numel * width + inside
            assert 0 <= inside < inside + kept.num_bytes <= item.num_numel * width
            assert kept.num_bytes % width == 0
        first = item.kept[0]
        assert (first.at_bytes, first.num_bytes) == (item.at_bytes, item.num_numel * width)

    def write(self, bucket: DirectBucket, room: np.ndarray, known: np.ndarray) -> None:
        for file, offset, at, num_bytes in bucket.writes:
            assert num_bytes > 0
            assert known[at : at + num_bytes].all(), "what was never filled is written"
            assert offset + num_bytes <= len(self.out[file])
            self.out[file][offset : offset + num_bytes] = room[at : at + num_bytes]
            self.times[file][offset : offset + num_bytes] += 1

    def check(self) -> None:
        """Check that each byte of each file was written once, and is right; holes are left."""
        for times, holes in zip(self.times, self.result.holes, strict=True):
            for hole in holes:
                times[hole] += 1
            assert (times == 1).all()
        assert [out.tobytes() for out in self.out] == self.result.content


def owns(result: Result, owned: Sequence[Owned], tensor: int) -> np.ndarray:
    """Which elements of a tensor have a place in the owned ranges."""
    item, found = result.plan.tensors[tensor], np.zeros(result.size(tensor), bool)
    for file, stored in item.targets:
        at = result.maps[file].data_offset_bytes[stored]
        at = at + np.arange(result.size(tensor)) * item.dtype.itemsize_bytes
        for part in owned:
            if part.file == file:
                found |= (part.start_bytes <= at) & (at < part.stop_bytes)
    return found


BUCKET_BYTES = st.one_of(st.integers(16, 64), st.integers(16, 20_000), st.just(1 << 20))
MAX_BUCKETS = 300


def at_least(bucket_bytes: int, result: Result) -> int:
    """A bucket size that large results are not cut into too many of."""
    return max(bucket_bytes, sum(map(len, result.content)) // MAX_BUCKETS)


@settings(deadline=None, max_examples=150)
@given(results(), BUCKET_BYTES, st.integers(1, 5))
def test_every_byte_of_every_file_is_written_once_and_right(result, bucket_bytes, num_writers):
    ledger, bucket_bytes = Ledger(result), at_least(bucket_bytes, result)
    for owned in dealt(result, num_writers):
        share = Share(result.plan, result.maps, owned, bucket_bytes)
        assert share.max_bucket_bytes <= max(bucket_bytes, 16)
        for tensor, times in enumerate(ledger.rank(share)):
            # Once, however many copies of an element this rank fills.
            assert (times == owns(result, owned, tensor)).all()
    ledger.check()


@st.composite
def cuts(draw: st.DrawFn, result: Result, num_writers: int) -> list[list[Owned]]:
    """Any ranges at pages, dealt out in any way; not only the ones that are dealt out today."""
    dealt: list[list[Owned]] = [[] for _ in range(num_writers)]
    for file, item in enumerate(result.maps):
        pages = range(PAGE, item.num_bytes, PAGE)
        inner = draw(st.sets(st.sampled_from(pages), max_size=3)) if len(pages) else set()
        edges = [0, *sorted(inner), item.num_bytes]
        for low, high in itertools.pairwise(edges):
            if low < high:
                dealt[draw(st.integers(0, num_writers - 1))].append(Owned(file, low, high))
    return dealt


@settings(deadline=None, max_examples=80)
@given(st.data(), results(), BUCKET_BYTES, st.integers(1, 4))
def test_ranges_may_be_dealt_out_in_any_way(data, result, bucket_bytes, num_writers):
    ledger, bucket_bytes = Ledger(result), at_least(bucket_bytes, result)
    for owned in data.draw(cuts(result, num_writers)):
        share = Share(result.plan, result.maps, owned, bucket_bytes)
        for tensor, times in enumerate(ledger.rank(share)):
            assert (times == owns(result, owned, tensor)).all()
    ledger.check()


def tied() -> Result:
    """Five float32 that stand twice in one file and once in another one, behind a header."""
    builder, value = Builder(2, 0), bytes(range(20))
    places = [builder.stored(file, value, 4, 8) for file in (0, 0, 1)]
    pair = (BY_NAME["bfloat16"], BY_NAME["float32"])
    return made(builder, [planned(pair, 5, places)], [value])


def test_a_rank_that_owns_all_copies_reads_the_first():
    result = tied()
    (owned,) = dealt(result, 1)
    share = Share(result.plan, result.maps, owned, 1 << 20)
    buckets = [share.bucket(index) for index in range(share.num_buckets)]
    assert [[item.start_numel for item in b.elements] for b in buckets] == [[0], []]
    (item,) = buckets[0].elements
    assert [(kept.file, kept.stored) for kept in item.kept] == [(0, 0), (0, 1), (1, 0)]
    assert (share.num_read_bytes, share.num_bytes) == (10, 28 * 3)


def test_ranks_that_own_a_copy_each_read_one_each():
    result = tied()
    shares = [
        Share(result.plan, result.maps, [Owned(file, 0, result.maps[file].num_bytes)], 1 << 20)
        for file in (0, 1)
    ]
    assert [share.num_read_bytes for share in shares] == [10, 10]


def test_neighbours_in_the_bucket_that_go_to_two_files_are_two_writes():
    # Both tensors stand in file 0; the copies in files 1 and 2 would follow one another in one.
    builder, values = Builder(3, 0), [b"abcdefgh", b"ijklmnop"]
    places = [[builder.stored(0, value, 4, 0)] for value in values]
    places[0].append(builder.stored(1, values[0], 4, 4))
    places[1].append(builder.stored(2, values[1], 4, 12))
    pair = (BY_NAME["float32"],) * 2
    result = made(builder, [planned(pair, 2, each) for each in places], values)
    (owned,) = dealt(result, 1)
    share, ledger = Share(result.plan, result.maps, owned, 1 << 20), Ledger(result)
    assert [tuple(write) for write in share.bucket(0).writes] == [
        (0, 0, 0, 16),
        (1, 4, 0, 8),
        (2, 12, 8, 8),
    ]
    ledger.rank(share)
    ledger.check()


def test_a_bucket_by_hand():
    # A header of 4 bytes, then 2 float32; 16 bytes to a bucket at least.
    builder = Builder(1, 0)
    place = builder.stored(0, b"abcdefgh", 4, 4)
    result = made(builder, [planned((BY_NAME["float32"],) * 2, 2, [place])], [b"abcdefgh"])
    share = Share(result.plan, result.maps, [Owned(0, 0, 12)], 1)
    assert share.num_buckets == 1
    assert dataclasses.asdict(share.bucket(0)) == {
        "num_bytes": 12,
        "elements": ((0, 0, 2, 4, ((0, 0, 0, 4, 8),)),),
        "literals": ((0, result.content[0][:4]),),
        "writes": ((0, 0, 0, 12),),
    }


def test_buckets_begin_at_multiples_of_their_size_in_the_file():
    builder = Builder(1, 0)
    data = builder.random.bytes(5 * PAGE)
    place = builder.stored(0, data, 1, 0)
    result = made(builder, [planned((BY_NAME["uint8"],) * 2, 5 * PAGE, [place])], [data])
    share = Share(result.plan, result.maps, [Owned(0, PAGE, 5 * PAGE)], 2 * PAGE + 17)
    starts = [share.bucket(index).writes[0].offset_bytes for index in range(share.num_buckets)]
    assert starts == [PAGE, 2 * PAGE, 4 * PAGE]


def test_a_few_files_are_filled_in_turn_and_then_the_next_few():
    builder = Builder(6, 0)
    # File 0 has three buckets, the others one.
    sizes = [3 * PAGE] + [PAGE] * 5
    data = [builder.random.bytes(size) for size in sizes]
    places = [[builder.stored(file, value, 1, 0)] for file, value in enumerate(data)]
    pair = (BY_NAME["uint8"],) * 2
    tensors = [planned(pair, size, place) for size, place in zip(sizes, places, strict=True)]
    result = made(builder, tensors, data)
    (owned,) = dealt(result, 1)
    share = Share(result.plan, result.maps, sorted(owned), PAGE)
    starts = [share.bucket(index).writes[0][:2] for index in range(share.num_buckets)]
    first = [(0, 0), (1, 0), (2, 0), (3, 0), (0, PAGE), (0, 2 * PAGE)]
    assert starts == [*first, (4, 0), (5, 0)]


def test_nothing_to_do():
    share = Share(tied().plan, tied().maps, [], 100)
    assert (share.num_buckets, share.max_bucket_bytes, share.num_bytes) == (0, 0, 0)
    assert share.num_read_bytes == 0


@pytest.mark.parametrize("bucket_bytes", [16, PAGE - 1, PAGE, 3 * PAGE + 1])
def test_no_element_lies_in_two_buckets(bucket_bytes):
    builder = Builder(1, 0)
    data = builder.random.bytes(16 * 1000)
    place = builder.stored(0, data, 16, 16)
    result = made(builder, [planned((BY_NAME["complex128"],) * 2, 1000, [place])], [data])
    ledger = Ledger(result)
    ledger.rank(Share(result.plan, result.maps, [Owned(0, 0, 16 * 1001)], bucket_bytes))
    ledger.check()
