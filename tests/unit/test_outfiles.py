"""Writing into output files: whichever way bytes go, the same bytes arrive."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.runtime.outfiles import OutputFiles, address_of, aligned_bytes
from dist_consolidate.runtime.stages import Stopwatch

PAGE = 4096
SIZE = 40 * PAGE
CONTENT = random.Random(0).randbytes(SIZE)


class Folder:
    """Two files of zeros to be written to."""

    def __init__(self, path: Path, size: int = SIZE) -> None:
        self.paths = [path / "model-1.safetensors", path / "model-2.safetensors"]
        for each in self.paths:
            each.write_bytes(bytes(size))
        self.watch = Stopwatch()
        self.output = OutputFiles(self.paths, self.watch)

    def contents(self) -> list[bytes]:
        return [path.read_bytes() for path in self.paths]


@pytest.fixture
def folder(tmp_path):
    folder = Folder(tmp_path)
    yield folder
    folder.output.close()


def memory(data: bytes, shift: int = 0) -> memoryview:
    """Data in memory that begins so many bytes behind a page."""
    room = aligned_bytes(shift + len(data))
    room[shift:] = data
    return room[shift:]


def patched(data: bytes, offset: int, size: int = SIZE) -> bytes:
    whole = bytearray(size)
    whole[offset : offset + len(data)] = data
    return bytes(whole)


def strike(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: int,
    when: Callable[..., bool] = lambda *_: True,
) -> list[int]:
    """Let a function of the system fail where a condition holds; give how often it did."""
    real, struck = getattr(os, name), []

    def call(*arguments: Any) -> Any:
        if when(*arguments):
            struck.append(number)
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, name, call)
    return struck


def direct_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Note offset and length of every write past the page cache."""
    real, found = os.pwrite, []

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if is_direct(descriptor):
            found.append((offset, len(data)))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return found


def is_direct(descriptor: int, *_: object) -> bool:
    text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    (flags,) = [line.split()[1] for line in text.splitlines() if line.startswith("flags:")]
    return bool(int(flags, 8) & os.O_DIRECT)


# Memory.


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE, PAGE + 1, 1 << 20])
def test_memory_begins_at_a_page(num_bytes):
    room = aligned_bytes(num_bytes)
    assert len(room) == num_bytes
    if num_bytes:
        assert address_of(room) % PAGE == 0
        room[:] = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)


def test_memory_that_is_not_there_is_told_as_such():
    with pytest.raises(MemoryError, match=f"{1 << 61:,} bytes cannot be allocated"):
        aligned_bytes(1 << 61)


# Writing.


@settings(deadline=None, max_examples=100)
@given(
    offset=st.one_of(st.integers(0, SIZE), st.integers(0, 39).map(lambda page: page * PAGE)),
    length=st.one_of(st.integers(0, SIZE), st.integers(0, 40).map(lambda pages: pages * PAGE)),
    is_aligned=st.booleans(),
    shift=st.integers(0, PAGE),
    wait=st.booleans(),
)
def test_past_the_cache_and_through_it_the_same_bytes_arrive(
    tmp_path_factory, offset, length, is_aligned, shift, wait
):
    data = CONTENT[: min(length, SIZE - offset)]
    folder = Folder(tmp_path_factory.mktemp("out"))
    # Memory lies like the file, as it does for buckets, or anywhere.
    view = memory(data, offset % PAGE if is_aligned else shift)
    folder.output.write(0, view, offset, bypass=True, wait=wait)
    folder.output.write(1, view, offset, wait=wait)
    folder.output.close()
    assert folder.contents() == [patched(data, offset)] * 2
    assert folder.output.num_bytes_written == 2 * len(data)
    assert {stage.name: stage.num_bytes for stage in folder.watch.totals()} == {
        "write": 2 * len(data)
    }


def test_whole_pages_go_past_the_cache_and_the_rest_through_it(folder, monkeypatch):
    found = direct_calls(monkeypatch)
    folder.output.write(0, memory(CONTENT[:20_000], 100), PAGE + 100, bypass=True)
    assert found == [(2 * PAGE, 3 * PAGE)]
    assert folder.contents()[0] == patched(CONTENT[:20_000], PAGE + 100)


@pytest.mark.parametrize(("shift", "length"), [(101, 20_000), (100, PAGE - 200), (0, 300)])
def test_what_is_not_aligned_goes_through_the_cache(folder, monkeypatch, shift, length):
    found = direct_calls(monkeypatch)
    folder.output.write(0, memory(CONTENT[:length], shift), PAGE + 100, bypass=True)
    assert found == []
    assert folder.contents()[0] == patched(CONTENT[:length], PAGE + 100)


def test_a_file_system_that_opens_no_file_that_way(folder, monkeypatch):
    struck = strike(monkeypatch, "open", errno.EINVAL, lambda _, flags: flags & os.O_DIRECT)
    for _ in range(3):
        folder.output.write(0, memory(CONTENT[:20_000]), PAGE, bypass=True)
    assert len(struck) == 1, "it was asked again"
    assert folder.contents()[0] == patched(CONTENT[:20_000], PAGE)
    assert folder.output.num_bytes_written == 60_000


def test_a_file_system_that_wants_another_alignment(folder, monkeypatch):
    struck = strike(monkeypatch, "pwrite", errno.EINVAL, is_direct)
    for _ in range(3):
        folder.output.write(0, memory(CONTENT[:20_000]), PAGE, bypass=True)
    assert len(struck) == 1, "it was asked again"
    assert folder.contents()[0] == patched(CONTENT[:20_000], PAGE)


def test_an_error_in_the_middle_of_a_write_past_the_cache(folder, monkeypatch):
    # Half of it arrives, then the device wants another alignment: all of it goes the plain way.
    real = os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if is_direct(descriptor):
            if len(data) % (2 * PAGE) == 0:
                return real(descriptor, data[:PAGE], offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    folder.output.write(0, memory(CONTENT[: 4 * PAGE]), PAGE, bypass=True)
    assert folder.contents()[0] == patched(CONTENT[: 4 * PAGE], PAGE)


@pytest.mark.parametrize("most", [1, 1000, PAGE])
def test_short_writes_go_on_where_they_stopped(folder, monkeypatch, most):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:most], at))
    folder.output.write(1, memory(CONTENT[:5000]), 77)
    assert folder.contents() == [bytes(SIZE), patched(CONTENT[:5000], 77)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("bypass", [True, False])
def test_a_write_that_fails_names_the_file(folder, monkeypatch, number, bypass):
    strike(monkeypatch, "pwrite", number, lambda fd, *_: is_direct(fd) == bypass)
    with pytest.raises(OSError) as caught:
        folder.output.write(1, memory(CONTENT[: 2 * PAGE]), 0, bypass=bypass)
    assert (caught.value.errno, caught.value.filename) == (number, str(folder.paths[1]))
    assert folder.output.num_bytes_written == 0


def test_a_plain_write_does_not_take_an_invalid_argument_for_alignment(folder, monkeypatch):
    strike(monkeypatch, "pwrite", errno.EINVAL)
    with pytest.raises(OSError) as caught:
        folder.output.write(0, memory(CONTENT[:100]), 0)
    assert caught.value.filename == str(folder.paths[0])


def test_a_file_that_is_gone(folder):
    folder.paths[1].unlink()
    with pytest.raises(FileNotFoundError) as caught:
        folder.output.write(1, memory(CONTENT[:100]), 0)
    assert caught.value.filename == str(folder.paths[1])


def test_a_sync_that_fails_names_the_file(folder, monkeypatch):
    for file in (0, 1):
        folder.output.write(file, memory(CONTENT[:100]), 0)
    second = folder.paths[1].stat().st_ino
    strike(monkeypatch, "fsync", errno.EIO, lambda fd: os.fstat(fd).st_ino == second)
    with pytest.raises(OSError) as caught:
        folder.output.sync()
    assert caught.value.filename == str(folder.paths[1])


def test_every_file_that_was_written_is_synced(folder, monkeypatch):
    folder.output.write(0, memory(CONTENT[: 2 * PAGE]), 0, bypass=True)
    folder.output.write(1, memory(CONTENT[:100]), 0)
    real, synced = os.fsync, set()
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), real(fd)))
    folder.output.sync()
    assert synced == {path.stat().st_ino for path in folder.paths}


def test_several_threads_at_once(folder):
    def write(number: int) -> None:
        for page in range(number, 40, 4):
            part = memory(CONTENT[page * PAGE : (page + 1) * PAGE])
            folder.output.write(page % 2, part, page * PAGE, bypass=number % 2 == 0)
            folder.output.write(1 - page % 2, part[:100], page * PAGE)
            folder.output.write(1 - page % 2, part[100:], page * PAGE + 100)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folder.contents() == [CONTENT, CONTENT]
    assert folder.output.num_bytes_written == 2 * SIZE


# Copies by the kernel.


@pytest.fixture
def source(tmp_path):
    (tmp_path / "shard").write_bytes(CONTENT)
    descriptor = os.open(tmp_path / "shard", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_the_kernel_copies_in_steps(folder, source, monkeypatch):
    monkeypatch.setattr("dist_consolidate.runtime.outfiles._COPY_BYTES", 10_000)
    real, steps = os.copy_file_range, []

    def copy(*arguments: int) -> int:
        steps.append(arguments[2])
        return real(*arguments)

    monkeypatch.setattr(os, "copy_file_range", copy)
    assert folder.output.copy(0, 5001, source, 333, 45_000) == 45_000
    assert steps == [10_000] * 4 + [5000]
    assert folder.contents()[0] == patched(CONTENT[333 : 333 + 45_000], 5001)
    assert folder.output.num_bytes_written == 45_000
    assert [tuple(stage)[:2] for stage in folder.watch.totals()] == [("copy", 45_000)]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_where_the_kernel_cannot_copy_nothing_is_done(folder, source, monkeypatch, number):
    strike(monkeypatch, "copy_file_range", number)
    assert folder.output.copy(0, 0, source, 0, 100) is None
    assert folder.output.num_bytes_written == 0
    assert folder.contents()[0] == bytes(SIZE)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_copy_that_fails_names_the_file(folder, source, monkeypatch, number):
    strike(monkeypatch, "copy_file_range", number)
    with pytest.raises(OSError) as caught:
        folder.output.copy(1, 0, source, 0, 100)
    assert (caught.value.errno, caught.value.filename) == (number, str(folder.paths[1]))


def test_a_copy_that_is_refused_half_way_is_an_error(folder, source, monkeypatch):
    monkeypatch.setattr("dist_consolidate.runtime.outfiles._COPY_BYTES", 1000)
    strike(monkeypatch, "copy_file_range", errno.EINVAL, lambda *found: found[3] >= 1000)
    with pytest.raises(OSError) as caught:
        folder.output.copy(1, 0, source, 0, 5000)
    assert caught.value.filename == str(folder.paths[1])


@pytest.mark.parametrize(("start", "left"), [(SIZE - 100, 100), (SIZE, 0)])
def test_a_source_that_ends_gives_what_there_is(folder, source, start, left):
    assert folder.output.copy(0, 50, source, start, 1000) == left
    assert folder.contents()[0] == patched(CONTENT[start:], 50)
    assert folder.output.num_bytes_written == left


def test_closing_gives_every_descriptor_back(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    folder = Folder(tmp_path)
    folder.output.write(0, memory(CONTENT[: 3 * PAGE]), 0, bypass=True)
    folder.output.write(1, memory(CONTENT[:10]), 0)
    assert len(list(Path("/proc/self/fd").iterdir())) > before
    folder.output.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
