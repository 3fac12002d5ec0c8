"""From tables to output bytes: uneven rows, rows out of order, short and long ranges, casts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.plan.buckets import Piece
from dist_consolidate.runtime import assemble
from dist_consolidate.runtime.assemble import Assembler, Moved, RowOrder
from dist_consolidate.runtime.buffers import Table
from dist_consolidate.runtime.clock import Clock
from dist_consolidate.runtime.placement import Placement
from dist_consolidate.runtime.staging import Staging
from dist_consolidate.runtime.writer import Filled

CPU = torch.device("cpu")
ROW_BYTES = 64


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, int]:
    """Rows dealt out unevenly, some ranks with none."""
    num_rows = draw(st.integers(1, 6))
    ranks = draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
    dealt = [tuple(row for row in range(num_rows) if ranks[row] == rank) for rank in range(4)]
    return Placement(tuple(dealt), max(map(len, dealt))), num_rows


def run(
    order: RowOrder, num_rows: int, moved: Moved, piece: Piece, slot_bytes: int
) -> tuple[bytes, torch.Tensor, frozenset[int], int]:
    """Assemble one piece of random numbers; give the output, the rows, and what overflowed."""
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(num_rows, 16)).astype("f4"))
    rows[-1, -1] = 1e6
    table = Table(order.height * ROW_BYTES, CPU)
    for row, position in enumerate(order.position):
        table.rows(order.height, ROW_BYTES)[position] = rows[row].view(torch.uint8)
    width = moved.output_dtype.itemsize
    out, times = bytearray(moved.num_numel * width), np.zeros(moved.num_numel * width, int)
    given_back: list[int] = []

    def submit(filled: Filled) -> None:
        for _, start, at, length in filled.runs:
            out[start : start + length] = filled.view[at : at + length]
            times[start : start + length] += 1
        filled.give_back()

    assembler = Assembler(
        [moved],
        Staging(2, slot_bytes, CPU, clock := Clock(CPU)),
        submit,
        concerns=lambda _: True,
        sorting_bytes=order.height * ROW_BYTES,
        clock=clock,
    )
    assembler.take(table, ROW_BYTES, order, [piece], lambda: given_back.append(1))
    assembler.flush()
    assert (times == 1).all()
    return bytes(out), rows, assembler.overflowed, len(given_back)


@settings(deadline=None)
@given(
    placements(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 300),
    st.integers(0, 15),
    st.integers(0, 15),
    st.booleans(),
)
def test_rows_come_out_in_order(dealt, dtype, slot_bytes, start, padding, in_place):
    placement, num_rows = dealt
    order = RowOrder(placement.position(num_rows), CPU)
    numel = 16 - start
    moved = Moved(max(numel * num_rows - padding, 1), torch.float32, dtype)
    piece = Piece(0, 0, num_rows, 4 * start, numel, 0, numel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "_IN_PLACE_BYTES", 1 if in_place else 1 << 30)
        got, rows, overflowed, returned = run(order, num_rows, moved, piece, 4 + slot_bytes)
    want = torch.cat([rows[:, start:].reshape(-1)[: moved.num_numel].to(dtype)])
    assert got == want.view(torch.uint8).numpy().tobytes()
    assert overflowed == ({0} if dtype == torch.float16 and want.isinf().any() else set())
    assert returned == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_rows_that_lie_apart_in_the_tensor(monkeypatch, in_place):
    # Two columns of each of three rows, whose tensors' parts are five elements long.
    monkeypatch.setattr(assemble, "_IN_PLACE_BYTES", 1 if in_place else 1 << 30)
    order = RowOrder([2, 0, 1], CPU)
    moved = Moved(14, torch.float32, torch.float32)
    parts = [Piece(0, 0, 3, 8, 5, 0, 5), Piece(0, 0, 3, 8, 2, 0, 5), Piece(0, 0, 3, 16, 3, 2, 5)]
    whole, rows, _, _ = run(order, 3, moved, parts[0], 40)
    assert whole == rows[:, 2:7].reshape(-1)[:14].numpy().tobytes()
    table = Table(3 * ROW_BYTES, CPU)
    for row, position in enumerate(order.position):
        table.rows(3, ROW_BYTES)[position] = rows[row].view(torch.uint8)
    out = bytearray(14 * 4)

    def submit(filled: Filled) -> None:
        for _, start, at, length in filled.runs:
            out[start : start + length] = filled.view[at : at + length]
        filled.give_back()

    clock = Clock(CPU)
    assembler = Assembler(
        [moved],
        Staging(1, 40, CPU, clock),
        submit,
        concerns=lambda _: True,
        sorting_bytes=3 * ROW_BYTES,
        clock=clock,
    )
    assembler.take(table, ROW_BYTES, order, parts[1:], lambda: None)
    assembler.flush()
    assert bytes(out) == whole


def test_positions_with_uneven_rows():
    placement = Placement(((0, 3), (), (1, 2, 4)), 3)
    order = RowOrder(placement.position(5), CPU)
    assert order.position == (0, 6, 7, 1, 8)
    assert order.height == 9
    assert not order.is_plain
    assert RowOrder(range(4), CPU).is_plain
    for numbers in itertools.permutations(range(3)):
        table = torch.arange(3, dtype=torch.uint8).view(3, 1)
        room = torch.empty(3, dtype=torch.uint8)
        assert RowOrder(numbers, CPU).sorted(table, room).flatten().tolist() == list(numbers)
