"""Reading a range of a shard into many places, whatever a call to the system gives."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.errors import CheckpointError

MAX_PLACES = os.sysconf("SC_IOV_MAX")
CONTENT = random.Random(0).randbytes(300_000)


@pytest.fixture
def reader(tmp_path):
    (tmp_path / "f").write_bytes(CONTENT)
    reader = ShardReader(tmp_path, {"f": len(CONTENT)})
    yield reader
    reader.close()


def places(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def expected(offset: int, *sizes: int) -> list[bytes]:
    """What each place must hold in the end."""
    starts = itertools.accumulate(sizes, initial=offset)
    return [CONTENT[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def check(reader: ShardReader, offset: int, *sizes: int) -> None:
    before, targets = reader.num_bytes_read, places(*sizes)
    reader.scatter("f", offset, targets)
    assert [bytes(target) for target in targets] == expected(offset, *sizes)
    assert reader.num_bytes_read - before == sum(sizes)


def give_less(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let preadv give at most so many bytes, as a signal or a network file system may."""
    real, counts = os.preadv, []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        left, cut = most, []
        for buffer in buffers:
            cut.append(buffer[:left])
            left -= len(cut[-1])
        counts.append(real(descriptor, cut, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    return counts


@pytest.mark.parametrize(
    "count", [1, MAX_PLACES - 1, MAX_PLACES, MAX_PLACES + 1, 3 * MAX_PLACES + 5]
)
def test_more_places_than_one_call_takes(reader, count):
    check(reader, 11, *(number % 7 for number in range(count)))


def test_nothing_but_empty_places(reader):
    check(reader, 5)
    check(reader, 5, 0, 0)
    check(reader, 5, *[0] * (MAX_PLACES + 2), 3, 0)
    check(reader, len(CONTENT), 0)


@pytest.mark.parametrize("most", [1, 3, 64, 100])
def test_calls_that_give_less_than_asked_for(reader, monkeypatch, most):
    counts = give_less(monkeypatch, most)
    check(reader, 1000, 0, 5, 64, 0, 0, 200, 1)
    assert max(counts) == most
    assert sum(counts) == 270


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 50), max_size=30),
    offset=st.integers(0, 500),
    most=st.integers(1, 60),
)
def test_any_places_and_any_short_reads(tmp_path_factory, sizes, offset, most):
    folder = tmp_path_factory.mktemp("shard")
    (folder / "f").write_bytes(CONTENT[:3000])
    reader = ShardReader(folder, {})
    with pytest.MonkeyPatch.context() as patch:
        give_less(patch, most)
        check(reader, offset, *sizes)
    reader.close()


def test_a_call_asks_for_no_more_than_the_system_gives(reader, monkeypatch):
    monkeypatch.setattr("dist_consolidate.checkpoint.shards._MAX_READ_BYTES", 100)
    asked, real = [], os.preadv

    def preadv(descriptor, buffers, offset):
        asked.append(sum(map(len, buffers)))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    check(reader, 3, 250, 40, 10, 5)
    assert asked == [100, 100, 100, 5]


def test_a_file_cut_short_meanwhile(reader, tmp_path):
    check(reader, 0, 10)
    os.truncate(tmp_path / "f", 1050)
    with pytest.raises(CheckpointError) as caught:
        reader.scatter("f", 1000, places(30, 0, 30, 40))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'f'}: ended at byte 1050 while being read"), text
    assert "expected 50 bytes more" in text, text


def test_a_disk_that_fails_is_told_with_file_and_place(reader, monkeypatch, tmp_path):
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError) as caught:
        reader.scatter("f", 123, places(4))
    assert str(caught.value) == (
        f"{tmp_path / 'f'}: cannot be read at byte 123: {os.strerror(errno.EIO)}"
    )


def test_several_threads_at_once(reader):
    failed: list[str] = []

    def read(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(100):
            sizes = [chosen.randrange(0, 2000) for _ in range(chosen.randrange(1, 40))]
            offset = chosen.randrange(len(CONTENT) - sum(sizes))
            targets = places(*sizes)
            reader.scatter("f", offset, targets)
            if [bytes(target) for target in targets] != expected(offset, *sizes):
                failed.append(f"{seed}: {offset}, {sizes}")
            with lock:
                total.append(sum(sizes))

    lock, total = threading.Lock(), []
    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(total) == 600
    assert reader.num_bytes_read == sum(total)


def test_each_shard_is_opened_once_for_all_threads_and_closed_again(tmp_path):
    (tmp_path / "f").write_bytes(CONTENT)
    before = len(list(Path("/proc/self/fd").iterdir()))
    reader, barrier = ShardReader(tmp_path, {}), threading.Barrier(5)
    found: list[int] = []

    def ask() -> None:
        barrier.wait()
        found.append(reader.descriptor("f"))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 5
    assert len(set(found)) == 1
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    reader.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
