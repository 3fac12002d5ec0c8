"""The journal: what counts as claimed, and when; and the arithmetic of ranges."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.plan.ranges import Finished, merged
from dist_consolidate.runtime import journal
from dist_consolidate.runtime.journal import Journal, JournalPlace, has_claims, read_journals
from dist_consolidate.runtime.outfiles import OutputFiles
from dist_consolidate.runtime.stages import Stopwatch

SIZE = 1 << 16
INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def place(folder: Path, digest: str = "d") -> JournalPlace:
    return read_journals(folder, digest, [SIZE, SIZE])


def some_files(folder: Path) -> list[Path]:
    paths = [folder / "a", folder / "b"]
    for path in paths:
        path.write_bytes(bytes(SIZE))
    return paths


@settings(deadline=None)
@given(INTERVALS, st.integers(0, 40), st.integers(0, 40))
def test_ranges_are_sets_of_bytes(intervals: list[tuple[int, int]], low: int, high: int) -> None:
    held = {byte for start, stop in intervals for byte in range(start, stop)}
    found = Finished(((), merged(intervals)))
    assert {byte for start, stop in found.by_file[1] for byte in range(start, stop)} == held
    assert all(one[1] < other[0] for one, other in zip(found.by_file[1], found.by_file[1][1:]))  # noqa: B905
    assert found.num_bytes == len(held)
    assert bool(found) == bool(held)
    assert found.covers(1, low, high) == (set(range(low, high)) <= held)
    assert found.covers(0, low, high) == found.covers(7, low, high) == (low >= high)


def test_what_is_written_is_claimed_and_read_back(tmp_path: Path) -> None:
    paths = some_files(tmp_path)
    for rank in range(2):
        output = OutputFiles(paths, Stopwatch(), journal=Journal(place(tmp_path), rank, paths))
        for start in range(0, 1000, 100):
            output.write(rank, memoryview(bytes([7]) * 100), start + rank * 5000)
        output.write(0, memoryview(b"x" * 10), 2000 + 10 * rank)
        output.sync()
        output.close()
    found = place(tmp_path)
    assert found.finished.by_file == (((0, 1000), (2000, 2020)), ((5000, 6000),))
    assert found.attempt == 3
    assert has_claims(tmp_path)
    assert not has_claims(tmp_path / "nowhere")


def test_the_order_is_bytes_then_their_sync_then_the_record_then_its_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every claim, and no claim names what was written after the sync had begun."""
    paths, steps = some_files(tmp_path), list[tuple[str, str, object]]()
    real = {name: getattr(os, name) for name in ("pwrite", "fdatasync", "write")}

    def name_of(descriptor: int) -> str:
        return Path(f"/proc/self/fd/{descriptor}").readlink().name

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        steps.append(("pwrite", name_of(descriptor), offset))
        return int(real["pwrite"](descriptor, data, offset))

    def fdatasync(descriptor: int) -> None:
        steps.append(("sync", name_of(descriptor), None))
        real["fdatasync"](descriptor)

    def write(descriptor: int, data: memoryview) -> int:
        steps.append(("record", name_of(descriptor), bytes(data)))
        return int(real["write"](descriptor, data))

    for name, function in (("pwrite", pwrite), ("fdatasync", fdatasync), ("write", write)):
        monkeypatch.setattr(os, name, function)
    monkeypatch.setattr(journal, "_CLAIM_BYTES", 1)
    monkeypatch.setattr(journal, "_PAUSE_SEC", 0.0)
    output = OutputFiles(paths, Stopwatch(), journal=Journal(place(tmp_path), 0, paths))
    for index in range(50):
        output.write(index % 2, memoryview(b"x" * 100), index * 100)
        deadline = time.monotonic() + 20
        while index == 25 and not any(step[0] == "record" for step in steps):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    output.sync()
    output.close()
    claims = [index for index, step in enumerate(steps) if step[0] == "record"]
    assert len(claims) > 1
    for claim in claims[:-1]:
        assert steps[claim + 1 :][[s[0] for s in steps[claim + 1 :]].index("sync")][1] == (
            "journal-0001-0"
        )
        for record in bytes(steps[claim][2]).splitlines():  # type: ignore[call-overload]
            file, low, high, _ = record.split()
            name = "ab"[int(file)]
            written = [
                index
                for index, (what, where, offset) in enumerate(steps)
                if what == "pwrite" and where == name and int(low) <= int(offset) < int(high)  # type: ignore[call-overload]
            ]
            synced = [i for i, s in enumerate(steps[:claim]) if s[:2] == ("sync", name)]
            assert max(written) < max(synced) < claim
    assert place(tmp_path).finished.num_bytes == 5000


def write_records(folder: Path, ranges: Sequence[tuple[int, int, int]], digest: str = "d") -> Path:
    paths = some_files(folder)
    claims = Journal(place(folder, digest), 0, paths)
    for item in ranges:
        claims.written(*item)
        claims._claim(is_synced=True)
    claims.close()
    (path,) = folder.glob("journal-*")
    return path


def test_a_torn_record_ends_what_counts(tmp_path: Path) -> None:
    path = write_records(tmp_path, [(0, 0, 10), (1, 5, 105), (0, 20, 30)])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        lines = whole[:length].count(b"\n")
        want = Finished((((0, 10),) if lines else (), ((5, 105),) if lines > 1 else ()))
        assert place(tmp_path).finished == want, length


def test_a_flipped_bit_ends_what_counts(tmp_path: Path) -> None:
    path = write_records(tmp_path, [(0, 0, 10), (1, 5, 105)])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for at in range(first, len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            assert place(tmp_path).finished == Finished((((0, 10),), ())), (at, bit)


def test_records_of_another_checkpoint_or_beyond_the_files_count_for_nothing(
    tmp_path: Path,
) -> None:
    path = write_records(tmp_path, [(0, 0, 10)], "of another run")
    assert not place(tmp_path).finished
    path.unlink()
    write_records(tmp_path, [(0, 0, SIZE + 1), (2, 0, 1), (1, 9, 9), (1, 0, 1)])
    assert place(tmp_path).finished == Finished(((), ((0, 1),)))


def test_a_disk_that_refuses_to_sync_ends_the_run_and_claims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = some_files(tmp_path)

    def refuse(_: int) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(os, "fdatasync", refuse)
    monkeypatch.setattr(journal, "_CLAIM_BYTES", 1)
    monkeypatch.setattr(journal, "_PAUSE_SEC", 0.0)
    output = OutputFiles(paths, Stopwatch(), journal=Journal(place(tmp_path), 0, paths))
    with pytest.raises(OSError, match=r"broken.*/a'"):
        for index in range(10_000):
            output.write(0, memoryview(b"x"), index)
        output.sync()
    output.close()
    assert not place(tmp_path).finished
