"""Reading in threads: every table is right and comes in order; what goes wrong is said."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.checkpoint.extents import Extent, TensorSpan
from dist_consolidate.checkpoint.fragments import Read
from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.dtypes import BY_NAME
from dist_consolidate.errors import CheckpointError
from dist_consolidate.runtime.buffers import Pool, Table
from dist_consolidate.runtime.clock import Clock
from dist_consolidate.runtime.loader import Load, Loader, chunks

CPU = torch.device("cpu")


@dataclasses.dataclass
class FakePhase:
    """Rows whose reads are given by hand, the same ones in every bucket but for the offset."""

    row_bytes: int
    rows: list[list[Read]]
    step_bytes: int = 0

    def reads(self, bucket: int, row: int) -> Iterator[Read]:
        for read in self.rows[row]:
            if read.extent is None:
                yield read
            else:
                file, offset, length = dataclasses.astuple(read.extent)
                moved = Extent(file, offset + bucket * self.step_bytes, length)
                yield dataclasses.replace(read, extent=moved)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    rows, row_bytes = [], 64 * draw(st.integers(1, 4))
    for _ in range(draw(st.integers(0, 4))):
        row, at = [], 0
        while at < row_bytes and draw(st.booleans()):
            at += 8 * draw(st.integers(0, 3))
            length = 8 * draw(st.integers(1, 16))
            if at + length > row_bytes:
                break
            if draw(st.booleans()):
                span = TensorSpan("f", 0, BY_NAME["int64"], (500,), (2,))
                first = draw(st.integers(0, 400))
                row.append(Read(at, None, span, first, first + length // 8))
            else:
                row.append(Read(at, Extent("f", draw(st.integers(0, 900)), length)))
            at += length
        rows.append(row)
    phase = FakePhase(row_bytes, rows)
    wanted = draw(st.lists(st.sampled_from(range(len(rows))), unique=True)) if rows else []
    return Load(phase, 0, tuple(wanted), draw(st.integers(0, 3)) * row_bytes)  # type: ignore[arg-type]


@settings(deadline=None)
@given(loads(), st.integers(8, 200))
def test_chunks_are_the_load(load, max_bytes):
    content = np.random.default_rng(0).bytes(9000)

    def fetch(read: Read) -> bytes:
        if read.extent is not None:
            return content[read.extent.offset_bytes :][: read.extent.num_bytes]
        words = [content[16 * i : 16 * i + 8] for i in range(read.start_numel, read.stop_numel)]
        return b"".join(words)

    size = load.at_bytes + 5 * load.phase.row_bytes
    want, got = bytearray(size), bytearray(size)
    for index, row in enumerate(load.rows):
        for read in load.phase.reads(load.bucket, row):
            at = load.at_bytes + index * load.phase.row_bytes + read.at_bytes
            want[at : at + len(data)] = (data := fetch(read))
    end = 0
    for low, high, reads in chunks(load, max_bytes):
        assert end <= low < high <= low + max_bytes, "chunks overlap or are too long"
        end = high
        for read in reads:
            data = fetch(read)
            assert 0 <= read.at_bytes < read.at_bytes + len(data) <= high - low
            got[low + read.at_bytes : low + read.at_bytes + len(data)] = data
    assert got == want


@pytest.mark.parametrize("num_threads", [1, 4])
def test_tables_come_filled_and_in_order(tmp_path, monkeypatch, num_threads):
    monkeypatch.setattr("dist_consolidate.runtime.loader.CHUNK_BYTES", 700)
    content = np.random.default_rng(1).bytes(100_000)
    (tmp_path / "f").write_bytes(content)
    phase = FakePhase(2000, [[Read(0, Extent("f", 0, 2000))]], step_bytes=1000)
    table_list = [Table(2000, CPU) for _ in range(3)]
    tables = Pool(table_list)
    loads = (Load(phase, bucket, (0,), 0) for bucket in range(90))  # type: ignore[arg-type]
    clock = Clock(CPU)
    loader = Loader(
        lambda: ShardReader(tmp_path, {}),
        loads,
        tables,
        num_threads=num_threads,
        device=CPU,
        clock=clock,
    )
    for bucket in range(90):
        table = loader.next()
        assert table.view is not None
        assert bytes(table.view) == content[1000 * bucket :][:2000]
        tables.give_back(table)
    loader.stop()
    assert loader.num_bytes_read == 90 * 2000
    ((name, num_bytes, _),) = clock.totals()
    assert (name, num_bytes) == ("read", 90 * 2000)


@pytest.mark.parametrize("failing", [0, 5])
def test_a_failed_read_is_raised_and_all_threads_end(tmp_path, failing):
    (tmp_path / "f").write_bytes(bytes(1000 + 1000 * failing))
    phase = FakePhase(2000, [[Read(0, Extent("f", 0, 2000))]], step_bytes=1000)
    tables = Pool(Table(2000, CPU) for _ in range(2))
    before = threading.active_count()
    loads = (Load(phase, bucket, (0,), 0) for bucket in range(20))  # type: ignore[arg-type]
    loader = Loader(
        lambda: ShardReader(tmp_path, {}),
        loads,
        tables,
        num_threads=3,
        device=CPU,
        clock=Clock(CPU),
    )
    for _ in range(failing):
        tables.give_back(loader.next())
    with pytest.raises(CheckpointError, match="ended at byte"):
        loader.next()
    loader.stop()
    assert threading.active_count() == before


def test_stopping_in_the_middle_closes_all_files(tmp_path):
    (tmp_path / "f").write_bytes(bytes(100))
    phase = FakePhase(64, [[Read(0, Extent("f", 0, 64))]])
    loads = (Load(phase, bucket, (0,), 0) for bucket in range(10**9))  # type: ignore[arg-type]
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    tables = Pool(Table(64, CPU) for _ in range(2))
    loader = Loader(
        lambda: ShardReader(tmp_path, {}),
        loads,
        tables,
        num_threads=4,
        device=CPU,
        clock=Clock(CPU),
    )
    loader.next()
    loader.stop()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
