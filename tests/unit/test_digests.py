"""Digests beside the writing: whatever the order, the threads and the ranks, xxhash's of the bytes.

Every file is written for real; a digest is compared with that of the tensor's bytes in memory.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.errors import ConsolidateError
from dist_consolidate.runtime import digests as module
from dist_consolidate.runtime.digests import Digests, Stored
from dist_consolidate.runtime.outfiles import OutputFiles
from dist_consolidate.runtime.stages import Stopwatch

HEADER, SIZES = 100, (0, 7, 60_000, 1, 0, 25_000, 300)
CONTENT = random.Random(0).randbytes(HEADER + sum(SIZES) + 50)


def places(file: int) -> list[Stored]:
    starts = [HEADER + sum(SIZES[:index]) for index in range(len(SIZES))]
    return [Stored(file, i, *pair) for i, pair in enumerate(zip(starts, SIZES, strict=True))]


def expected(files: Sequence[int] = (0,)) -> dict[tuple[int, int], str]:
    return {
        (place.file, place.tensor): xxhash.xxh3_128(
            CONTENT[place.start_bytes :][: place.num_bytes]
        ).hexdigest()
        for file in files
        for place in places(file)
        if place.num_bytes
    }


def found(digests: Digests) -> dict[tuple[int, int], str]:
    return {(item.file, item.tensor): item.text for item in digests.finish()}


def files_in(folder: Path, num_files: int = 1) -> list[Path]:
    paths = [folder / f"file-{index}" for index in range(num_files)]
    for path in paths:
        path.write_bytes(bytes(len(CONTENT)))
    return paths


def view(low: int, high: int) -> memoryview:
    return memoryview(bytearray(CONTENT[low:high]))


def cuts(step: int) -> list[tuple[int, int]]:
    return [(low, min(low + step, len(CONTENT))) for low in range(0, len(CONTENT), step)]


@settings(max_examples=60, deadline=None)
@given(
    step=st.sampled_from([500, 3_333, 26_000, 10**6]),
    order=st.randoms(use_true_random=False),
    in_memory=st.sampled_from([1.0, 0.5, 0.0]),
    block=st.sampled_from([700, 1 << 20]),
    missing=st.integers(0, 3),
    twice=st.booleans(),
)
def test_any_order_gives_the_digests_of_the_bytes(
    tmp_path_factory, step, order, in_memory, block, missing, twice
):
    """Ranges from memory, or read back; some that nobody tells of; some told twice."""
    (path,) = files_in(tmp_path_factory.mktemp("out"))
    path.write_bytes(CONTENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_BYTES", block)
        digests = Digests([path], places(0))
        ranges = cuts(step) * (1 + twice)
        order.shuffle(ranges)
        for low, high in ranges[missing:]:
            kept = order.random() < in_memory
            digests.written(0, low, high, view(low, high) if kept else None)
        assert found(digests) == expected()


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_threads_that_take_turns(tmp_path, num_threads, in_order):
    """Threads take the next range as those of direct work do, and write it by real calls."""
    paths = files_in(tmp_path, 2)
    digests = Digests(paths, [*places(0), *places(1)], in_order=in_order)
    output = OutputFiles(paths, Stopwatch(), digests=digests)
    ranges, lock = iter([(f, *cut) for cut in cuts(2_000) for f in (0, 1)]), threading.Lock()
    chance = random.Random(1)

    def work() -> None:
        while True:
            with lock:
                item = next(ranges, None)
            if item is None:
                return
            file, low, high = item
            threading.Event().wait(chance.random() / 2000)
            output.write(file, view(low, high), low)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    output.close()
    assert not any(thread.is_alive() for thread in threads)
    assert digests.num_bytes_done == 2 * sum(SIZES)  # nothing is left to be read at the end
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert found(digests) == expected((0, 1))


def test_in_order_nothing_is_read_back(tmp_path, monkeypatch):
    (path,) = files_in(tmp_path)
    path.unlink()
    digests = Digests([path], places(0), in_order=True)
    for low, high in cuts(999):
        digests.written(0, low, high, view(low, high))
    assert found(digests) == expected()


def test_a_thread_that_waits_goes_on_when_another_has_failed(tmp_path):
    (path,) = files_in(tmp_path)
    digests = Digests([path], places(0), in_order=True)
    low, high = HEADER + 10_000, HEADER + 20_000
    waiting = threading.Thread(target=digests.written, args=(0, low, high, view(low, high)))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    digests.let_go()
    waiting.join(10)
    assert not waiting.is_alive()


def test_what_other_ranks_write_is_read_at_the_end(tmp_path):
    """The rank of a tensor's first byte digests it; here that is every tensor of its half."""
    (path,) = files_in(tmp_path)
    middle = HEADER + 30_000
    mine = [place for place in places(0) if place.start_bytes < middle]
    others = [place for place in places(0) if place.start_bytes >= middle]
    ranks = [Digests([path], mine), Digests([path], others)]
    path.write_bytes(CONTENT)
    ranks[0].written(0, 0, middle, view(0, middle))
    ranks[1].written(0, middle, len(CONTENT), view(middle, len(CONTENT)))
    parts = [found(digests) for digests in ranks]
    assert not parts[0].keys() & parts[1].keys()
    assert parts[0] | parts[1] == expected()


def test_a_file_that_ended_early_is_told(tmp_path):
    (path,) = files_in(tmp_path)
    digests = Digests([path], [places(0)[2]])
    path.write_bytes(CONTENT[: HEADER + 5000])
    with pytest.raises(ConsolidateError, match=f"file-0: ended at byte {HEADER + 5000} when"):
        digests.finish()


def test_a_file_that_is_gone_is_told_by_its_name(tmp_path):
    (path,) = files_in(tmp_path)
    digests = Digests([path], places(0))
    path.unlink()
    with pytest.raises(FileNotFoundError, match="file-0"):
        digests.written(0, 0, 5000)


def test_a_thread_waits_in_vain_only_so_long(tmp_path, monkeypatch):
    """Nobody comes with what stands before: then it is read in the end, and nothing hangs."""
    monkeypatch.setattr(module, "_PATIENCE_SEC", 0.05)
    (path,) = files_in(tmp_path)
    path.write_bytes(CONTENT)
    digests = Digests([path], places(0), in_order=True)
    low = HEADER + 10_000
    digests.written(0, low, len(CONTENT), view(low, len(CONTENT)))
    assert found(digests) == expected()


def test_what_an_earlier_run_left_is_told_first(tmp_path):
    """Threads that take turns find the ranges that are there already; some are written again."""
    (path,) = files_in(tmp_path)
    path.write_bytes(CONTENT)
    digests = Digests([path], places(0), in_order=True)
    for low, high in ((0, 20_000), (30_000, 40_000)):
        digests.written(0, low, high)
    for low, high in ((20_000, 30_000), (35_000, 50_000), (50_000, len(CONTENT))):
        digests.written(0, low, high, view(low, high))
    assert digests.num_bytes_done == sum(SIZES)
    assert found(digests) == expected()


def test_who_is_asked_to_stop_gives_no_digests(tmp_path):
    (path,) = files_in(tmp_path)
    path.write_bytes(CONTENT)
    digests = Digests([path], places(0))
    digests.stop()
    with pytest.raises(InterruptedError):
        digests.finish()
