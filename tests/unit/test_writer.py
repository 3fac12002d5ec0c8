"""Writing in threads: the same bytes whatever their number; a failure is said and blocks nobody."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_consolidate.plan.buckets import Piece
from dist_consolidate.plan.owners import Owned, Owners
from dist_consolidate.runtime.buffers import Pool, Table
from dist_consolidate.runtime.clock import Clock
from dist_consolidate.runtime.ownership import Ownership, Place, Run
from dist_consolidate.runtime.writer import Filled, Writer

CPU = torch.device("cpu")
NUM_BYTES, BLOCK = 60_000, 1000
DATA = np.random.default_rng(0).bytes(NUM_BYTES)


PLACES = [(Place(0, 3, 0), Place(1, 4, 7))]
WHOLE = [Owned(0, 0, NUM_BYTES + 7), Owned(1, 0, NUM_BYTES + 7)]


def make_writer(
    folder: Path,
    num_threads: int,
    dealt: Sequence[Sequence[Owned]] = (WHOLE,),
    rank: int = 0,
) -> tuple[Writer, Clock]:
    """One tensor that goes to two files, behind other bytes."""
    files = [folder / "a", folder / "b"]
    for file in files:
        file.write_bytes(bytes(NUM_BYTES + 7))
    clock = Clock(CPU)
    writer = Writer(
        files,
        PLACES,
        ownership=Ownership(Owners(dealt), range(len(dealt)), rank, PLACES, [1]),
        checksums=True,
        num_threads=num_threads,
        device=CPU,
        clock=clock,
    )
    return writer, clock


def feed(writer: Writer, pool: Pool[Table], blocks: Sequence[int]) -> None:
    """Hand over blocks of the data, two in each buffer, the second one first."""
    for first, second in zip(blocks[::2], blocks[1::2], strict=True):
        table = pool.take()
        assert table is not None
        assert table.view is not None
        runs = []
        for at, block in ((BLOCK, first), (0, second)):
            table.view[at : at + BLOCK] = DATA[block * BLOCK :][:BLOCK]
            runs.append(Run(0, block * BLOCK, at, BLOCK))
        give_back: Callable[[], None] = functools.partial(pool.give_back, table)
        writer.submit(Filled(table.view, runs, None, give_back))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_many_threads_write_the_same_bytes(tmp_path, num_threads):
    writer, clock = make_writer(tmp_path, num_threads)
    blocks = np.random.default_rng(1).permutation(NUM_BYTES // BLOCK).tolist()
    feed(writer, Pool(Table(2 * BLOCK, CPU) for _ in range(3)), blocks)
    writer.finish()
    writer.close()
    assert (tmp_path / "a").read_bytes() == DATA + bytes(7)
    assert (tmp_path / "b").read_bytes() == bytes(7) + DATA
    assert writer.num_bytes_written == 2 * NUM_BYTES
    for file, tensor, start, length, crc in writer.checksums:
        assert (file, tensor) in ((0, 3), (1, 4))
        assert crc == zlib.crc32(DATA[start : start + length])
    assert sum(check.num_bytes for check in writer.checksums) == 2 * NUM_BYTES
    assert [stage.name for stage in clock.totals()] == ["write", "sync"]


def test_writers_keep_to_what_they_own(tmp_path):
    dealt = [
        [Owned(0, 0, 8192), Owned(1, 4096, 40960)],
        [Owned(0, 8192, NUM_BYTES + 7), Owned(1, 0, 4096), Owned(1, 40960, NUM_BYTES + 7)],
    ]
    want = DATA + bytes(7), bytes(7) + DATA
    for rank, owned in enumerate(dealt):
        writer, _ = make_writer(tmp_path, 2, dealt, rank)
        feed(writer, Pool(Table(2 * BLOCK, CPU) for _ in range(3)), range(NUM_BYTES // BLOCK))
        writer.finish()
        writer.close()
        for file, name in enumerate("ab"):
            mask = bytearray(NUM_BYTES + 7)
            for part in owned:
                if part.file == file:
                    at = slice(part.start_bytes, part.stop_bytes)
                    mask[at] = want[file][at]
            assert (tmp_path / name).read_bytes() == bytes(mask)
        for _, tensor, start, length, crc in writer.checksums:
            assert tensor in (3, 4)
            assert crc == zlib.crc32(DATA[start : start + length])


def test_a_bucket_concerns_whoever_owns_a_place_of_it():
    dealt = [[Owned(0, 0, 4096)], [Owned(0, 4096, NUM_BYTES + 7)], [Owned(1, 0, NUM_BYTES + 7)]]
    owners = Owners(dealt)
    piece = Piece(tensor=0, row=0, num_rows=1, at_bytes=0, num_numel=96, start_numel=4000,
                  step_numel=96)  # fmt: skip
    across = dataclasses.replace(piece, num_rows=2)
    for rank, concerned in enumerate((True, False, True)):
        ownership = Ownership(owners, range(3), rank, PLACES, [1])
        assert ownership.writers(iter([piece])) == (0, 2)
        assert ownership.writers(iter([across])) == (0, 1, 2)
        assert ownership.concerns(piece) == concerned


def test_one_failing_thread_among_several_ends_all(tmp_path, monkeypatch):
    writer, _ = make_writer(tmp_path, 4)
    real = os.pwrite

    def fail_in_the_middle(descriptor: int, data: memoryview, offset: int) -> int:
        if offset == 20 * BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fail_in_the_middle)
    tables = [Table(2 * BLOCK, CPU) for _ in range(2)]
    pool = Pool(tables)
    with pytest.raises(OSError, match="No space left") as caught:
        # More than there are buffers: they must come back after the failure too.
        for _ in range(100):
            feed(writer, pool, range(NUM_BYTES // BLOCK))
    assert caught.value.filename == str(tmp_path / "a")
    with pytest.raises(OSError, match="No space left"):
        writer.finish()
    writer.close()
    assert {id(pool.take()) for _ in tables} == set(map(id, tables))


def test_giving_up_leaves_no_file_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    writer, _ = make_writer(tmp_path, 3)
    feed(writer, Pool(Table(2 * BLOCK, CPU) for _ in range(8)), range(8))
    writer.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
