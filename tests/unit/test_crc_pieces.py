"""What threads read of files, in any order and overlapping, against zlib's CRC-32 of the whole."""

from __future__ import annotations

import threading
import zlib

from hypothesis import given
from hypothesis import strategies as st

from dist_consolidate.checkpoint.records import Record, judge
from dist_consolidate.crc_pieces import CrcRange, ReadCrcs

CONTENT = bytes(range(256)) * 4
RECORD = Record("data/0", 100, 900, zlib.crc32(CONTENT[100:900]))
RANGES = st.lists(
    st.tuples(st.integers(100, 900), st.integers(1, 300)).map(lambda r: (r[0], min(sum(r), 900))),
    max_size=12,
)


def noted(ranges: list[tuple[int, int]]) -> tuple[CrcRange, ...]:
    crcs = ReadCrcs()
    for start, stop in ranges:
        data = memoryview(CONTENT)[start:stop]
        # In two places, with room behind them.
        places = [data[: len(data) // 3], memoryview(CONTENT)[start + len(data) // 3 :]]
        crcs.note("f", start, places, stop - start)
    return crcs.ranges().get("f", ())


def in_order(ranges: tuple[CrcRange, ...]) -> list[CrcRange]:
    return sorted(ranges, key=lambda r: (r.start_bytes, -r.stop_bytes))


@given(RANGES)
def test_what_is_kept_has_the_right_checksum(ranges: list[tuple[int, int]]) -> None:
    for found in noted(ranges):
        assert found.crc == zlib.crc32(CONTENT[found.start_bytes : found.stop_bytes])


@given(st.permutations(range(8)), st.integers(1, 99))
def test_neighbours_are_put_together_in_any_order(order: list[int], width: int) -> None:
    ranges = [(100 + width * index, 100 + width * (index + 1)) for index in order]
    assert noted(ranges) == (
        CrcRange(100, 100 + 8 * width, zlib.crc32(CONTENT[100 : 100 + 8 * width])),
    )


@given(RANGES)
def test_reading_what_is_missing_gives_the_records_checksum(ranges: list[tuple[int, int]]) -> None:
    found = noted([r for r in ranges if r[0] < r[1]])
    judged = judge(RECORD, in_order(found))
    if judged.crc is None:
        read = noted(list(judged.gaps))
        judged = judge(RECORD, in_order((*found, *read)))
    assert judged.crc == RECORD.crc and judged.gaps == ()


@given(RANGES)
def test_gaps_are_what_was_not_read(ranges: list[tuple[int, int]]) -> None:
    disjoint: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start < stop and (not disjoint or disjoint[-1][1] <= start):
            disjoint.append((start, stop))
    judged = judge(RECORD, in_order(noted(disjoint)))
    covered = {byte for start, stop in disjoint for byte in range(start, stop)}
    missing = {byte for start, stop in judged.gaps for byte in range(start, stop)}
    assert missing == set(range(100, 900)) - covered
    assert judged.is_touched == bool(covered)


def test_threads_take_turns() -> None:
    crcs, steps = ReadCrcs(), iter(range(0, 1024, 16))
    lock = threading.Lock()

    def read() -> None:
        while True:
            with lock:
                start = next(steps, None)
            if start is None:
                return
            crcs.note("f", start, [memoryview(CONTENT)[start : start + 16]], 16)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert crcs.ranges() == {"f": (CrcRange(0, 1024, zlib.crc32(CONTENT)),)}


def test_files_are_kept_apart() -> None:
    crcs = ReadCrcs()
    for file in ("a", "b", "a"):
        crcs.note(file, 5, [memoryview(b"xyz")], 3)
    assert crcs.ranges() == {file: (CrcRange(5, 8, zlib.crc32(b"xyz")),) for file in "ab"}
