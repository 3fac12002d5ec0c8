"""Reading past the page cache gives the same bytes, and is chosen where it is faster."""

from __future__ import annotations

import errno
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.errors import CheckpointError
from dist_consolidate.runtime import bypass
from dist_consolidate.runtime.bypass import BypassReader, IoChoice, Lap, Way
from tests.unit.test_outfiles import is_direct, strike

PAGE, MB = 4096, 1 << 20
CONTENT = random.Random(1).randbytes(1_000_003)
THROUGH, PAST = Way(False, False), Way(True, True)
LARGE = 16 * 10**9


# Which way.


@pytest.mark.parametrize("num_bytes", [0, 1000, LARGE, 10 * LARGE])
def test_what_was_asked_for_is_done_whatever_it_takes(num_bytes):
    for mode, way in (("buffered", THROUGH), ("direct", PAST)):
        choice = IoChoice(mode, num_bytes)
        for _ in range(3):
            assert choice.next() == way


@pytest.mark.parametrize("num_bytes", [0, LARGE - 1])
def test_what_is_not_large_is_not_worth_a_trial(num_bytes):
    assert IoChoice("auto", num_bytes).next() == THROUGH


def tried(rates: dict[tuple[str, bool], float], bucket_bytes: int = 8 * MB) -> tuple[IoChoice, int]:
    """Carry out a trial with certain bytes per second; give its choice and its buckets."""
    choice, count = IoChoice("auto", LARGE), 0
    while (way := choice.next()).is_trial:
        assert way.bypass_reads == way.bypass_writes
        times = [bucket_bytes / rates[name, way.bypass_writes] for name in ("read", "write")]
        choice.tell(way, bucket_bytes, *times)
        count += 1
        assert count < 1000
    return choice, count


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_reads_and_writes_are_decided_by_their_own_rates(reads, writes):
    rates = {
        ("read", reads): 2e9,
        ("read", not reads): 1.9e9,
        ("write", writes): 0.5e9,
        ("write", not writes): 0.4e9,
    }
    choice, count = tried(rates)
    assert choice.next() == Way(reads, writes)
    # 128 MiB each way, one bucket after another.
    assert count == 2 * 128 // 8


def test_a_trial_takes_turns():
    choice = IoChoice("auto", LARGE)
    ways = [choice.next() for _ in range(4)]
    assert [way.bypass_writes for way in ways] == [True, False, True, False]
    assert all(way.is_trial for way in ways)


def test_slow_buckets_count_by_their_bytes_not_by_their_number():
    # Past the cache: many small buckets at 1 GB/s. Through it: few large ones at 2 GB/s.
    choice = IoChoice("auto", LARGE)
    for way, num_bytes, count in (
        (Way(True, True, True), MB, 128),
        (Way(False, False, True), 64 * MB, 2),
    ):
        for _ in range(count):
            assert choice.next().is_trial
            seconds = num_bytes / (1e9 if way.bypass_writes else 2e9)
            choice.tell(way, num_bytes, seconds, seconds)
    assert choice.next() == THROUGH


def test_one_way_alone_decides_nothing():
    choice = IoChoice("auto", LARGE)
    for _ in range(100):
        choice.tell(Way(True, True, True), 128 * MB, 0.001, 0.001)
    assert choice.next().is_trial


def test_times_of_zero():
    choice = IoChoice("auto", LARGE)
    for bypasses in (True, False):
        choice.tell(Way(bypasses, bypasses, True), 128 * MB, 0.0, 0.0)
    assert choice.next() == THROUGH


def test_a_lap_is_the_time_since_the_last_one(monkeypatch):
    clock = iter([10.0, 12.5, 13.0])
    monkeypatch.setattr(bypass.time, "perf_counter", lambda: next(clock))
    lap = Lap()
    assert [lap(), lap()] == [2.5, 0.5]


# Reading.


@pytest.fixture
def reader(tmp_path):
    (tmp_path / "f").write_bytes(CONTENT)
    reader = ShardReader(tmp_path, {"f": len(CONTENT)})
    yield reader
    reader.close()


@pytest.fixture(autouse=True)
def small_reads_too(monkeypatch):
    monkeypatch.setattr(bypass, "_MIN_READ_BYTES", 1)


def places(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the descriptors of all reads past the page cache."""
    real, found = os.preadv, []

    def preadv(descriptor, buffers, offset):
        if is_direct(descriptor):
            found.append(descriptor)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return found


@settings(deadline=None, max_examples=100)
@given(
    offset=st.one_of(
        st.integers(0, len(CONTENT)),
        st.integers(0, 243).map(lambda page: page * PAGE),
        st.integers(1, 2 * PAGE).map(lambda left: len(CONTENT) - left),
    ),
    sizes=st.lists(st.integers(0, 70_000), max_size=5),
)
def test_any_range_is_what_a_plain_read_gives(tmp_path_factory, offset, sizes):
    folder = tmp_path_factory.mktemp("shard")
    (folder / "f").write_bytes(CONTENT)
    left = len(CONTENT) - offset
    sizes = [min(size, left // len(sizes)) for size in sizes]
    reader, targets = ShardReader(folder, {}), places(*sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bypass, "_MIN_READ_BYTES", 1)
        found = asked(patch)
        did = BypassReader(reader, 400_000).scatter("f", offset, targets)
    assert did == (sum(sizes) > 0)
    assert bool(found) == did
    if did:
        assert b"".join(map(bytes, targets)) == CONTENT[offset : offset + sum(sizes)]
    assert reader.num_bytes_read == sum(sizes)
    reader.close()


def test_the_longest_range_that_was_announced(reader):
    for offset in (0, 1, PAGE - 1):
        targets = places(500_000)
        assert BypassReader(reader, 500_000).scatter("f", offset, targets)
        assert bytes(targets[0]) == CONTENT[offset : offset + 500_000]


def test_up_to_the_last_byte(reader):
    targets = places(3, 5000)
    assert BypassReader(reader, 5003).scatter("f", len(CONTENT) - 5003, targets)
    assert b"".join(map(bytes, targets)) == CONTENT[-5003:]


def test_short_reads_of_whole_pages_go_on(reader, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, rooms, at: real(fd, [room[: 2 * PAGE] for room in rooms], at)
    )
    targets = places(100_000)
    assert BypassReader(reader, 100_000).scatter("f", 777, targets)
    assert bytes(targets[0]) == CONTENT[777:100_777]


def test_a_short_range_is_left_to_the_plain_way(reader, monkeypatch):
    monkeypatch.setattr(bypass, "_MIN_READ_BYTES", 256 << 10)
    found, past = asked(monkeypatch), BypassReader(reader, 300_000)
    assert not past.scatter("f", 0, places((256 << 10) - 1))
    assert found == []
    assert past.scatter("f", 0, places(256 << 10))
    assert past.works


def test_a_file_system_that_opens_no_file_that_way(reader, monkeypatch):
    struck = strike(monkeypatch, "open", errno.EINVAL, lambda _, flags: flags & os.O_DIRECT)
    past = BypassReader(reader, 100)
    assert [past.scatter("f", 0, places(100)) for _ in range(3)] == [False] * 3
    assert not past.works
    assert len(struck) == 1, "it was asked again"
    assert reader.num_bytes_read == 0


def test_a_file_system_that_wants_another_alignment(reader, monkeypatch):
    struck = strike(monkeypatch, "preadv", errno.EINVAL, is_direct)
    past, targets = BypassReader(reader, 100), places(100)
    assert [past.scatter("f", 0, targets) for _ in range(3)] == [False] * 3
    assert not past.works
    assert len(struck) == 1, "it was asked again"
    reader.scatter("f", 7, targets)
    assert bytes(targets[0]) == CONTENT[7:107]


def test_a_disk_that_fails_is_told_with_the_file(reader, monkeypatch, tmp_path):
    strike(monkeypatch, "preadv", errno.EIO)
    with pytest.raises(CheckpointError) as caught:
        BypassReader(reader, 100).scatter("f", 0, places(100))
    assert str(tmp_path / "f") in str(caught.value)
    assert os.strerror(errno.EIO) in str(caught.value)


@pytest.mark.parametrize("end", [PAGE, PAGE + 1, 2 * PAGE, 10 * PAGE + 5])
def test_a_file_cut_short_meanwhile(reader, tmp_path, end):
    past = BypassReader(reader, 100_000)
    assert past.scatter("f", 0, places(100))
    os.truncate(tmp_path / "f", end)
    with pytest.raises(CheckpointError) as caught:
        past.scatter("f", 100, places(50_000, 50_000))
    text = str(caught.value)
    assert f"{tmp_path / 'f'}: ended at byte {end} while being read" in text, text
    assert f"expected {100_100 - end} bytes more" in text, text
