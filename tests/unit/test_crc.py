"""Checksums put together from pieces, against zlib's over the whole."""

from __future__ import annotations

import itertools
import pickle
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_consolidate.crc_pieces import combine_crc32
from dist_consolidate.dtypes import UINT8
from dist_consolidate.errors import ConsolidateError
from dist_consolidate.output.crc import CrcLedger, CrcPiece
from dist_consolidate.plan.outputs import StoredTensor


def tensor(num_bytes, name="w"):
    return StoredTensor((name,), UINT8, (num_bytes,))


@given(st.binary(max_size=400), st.binary(max_size=400))
def test_two_parts_combine_to_the_whole(first, second):
    combined = combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
    assert combined == zlib.crc32(first + second)


@pytest.mark.parametrize("num_bytes", [1, 255, 256, 65537, 2**20 + 3])
def test_long_parts(num_bytes):
    second = bytes(range(256)) * (num_bytes // 256 + 1)
    second = second[:num_bytes]
    assert combine_crc32(zlib.crc32(b"head"), zlib.crc32(second), num_bytes) == zlib.crc32(
        b"head" + second
    )


def test_parts_longer_than_memory_combine_associatively():
    # x + y + z with y and z of 2**40 + 1 and 2**33 + 7 bytes: both ways of bracketing agree.
    x, y, z = 0x12345678, 0x9ABCDEF0, 0x0FEDCBA9
    num_y, num_z = 2**40 + 1, 2**33 + 7
    left = combine_crc32(combine_crc32(x, y, num_y), z, num_z)
    right = combine_crc32(x, combine_crc32(y, z, num_z), num_y + num_z)
    assert left == right


def test_zeros_by_doubling():
    crc, num_bytes = zlib.crc32(b"\0"), 1
    while num_bytes < 2**20:
        crc, num_bytes = combine_crc32(crc, crc, num_bytes), 2 * num_bytes
    assert crc == zlib.crc32(bytes(2**20))
    thousand = zlib.crc32(bytes(1000))
    odd = combine_crc32(crc, thousand, 1000)
    assert odd == zlib.crc32(bytes(2**20 + 1000))


@given(st.data())
def test_pieces_in_any_order_from_any_process(data):
    contents = data.draw(st.lists(st.binary(max_size=60), max_size=5))
    pieces = []
    for index, content in enumerate(contents):
        cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=4))
        bounds = sorted({0, len(content), *cuts})
        for start, end in itertools.pairwise(bounds):
            pieces.append((index, start, end - start, zlib.crc32(content[start:end])))
    pieces = data.draw(st.permutations(pieces))
    split = data.draw(st.integers(0, len(pieces)))
    here, there = CrcLedger(), CrcLedger()
    for number, piece in enumerate(pieces):
        (here if number < split else there).add(*piece)
    here.extend(pickle.loads(pickle.dumps(there.pieces)))
    tensors = [tensor(len(content), f"t{i}") for i, content in enumerate(contents)]
    assert here.tensor_crcs(tensors) == tuple(zlib.crc32(content) for content in contents)


def test_empty_tensors_need_no_piece_and_bear_empty_ones():
    ledger = CrcLedger([CrcPiece(1, 0, 0, 0)])
    assert ledger.tensor_crcs([tensor(0), tensor(0)]) == (0, 0)


def test_an_empty_piece_inside_a_tensor_changes_nothing():
    ledger = CrcLedger()
    ledger.add(0, 2, 2, zlib.crc32(b"cd"))
    ledger.add(0, 2, 0, zlib.crc32(b""))
    ledger.add(0, 0, 2, zlib.crc32(b"ab"))
    assert ledger.tensor_crcs([tensor(4)]) == (zlib.crc32(b"abcd"),)


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(0, 3)],
        [(1, 3)],
        [(0, 2), (3, 1)],
        [(0, 3), (2, 2)],
        [(0, 3), (2, 1)],
        [(0, 4), (0, 4)],
        [(0, 2), (2, 3)],
        [(0, 4), (4, 1)],
    ],
)
def test_pieces_that_do_not_tile_are_refused(spans):
    ledger = CrcLedger(CrcPiece(0, start, length, 1) for start, length in spans)
    with pytest.raises(ConsolidateError, match=r"cover head\.weight exactly once: it has 4 bytes"):
        ledger.tensor_crcs([tensor(4, "head.weight")])


@pytest.mark.parametrize("index", [1, -1])
def test_a_piece_of_no_tensor_is_refused(index):
    ledger = CrcLedger([CrcPiece(0, 0, 1, 5), CrcPiece(index, 0, 1, 5)])
    with pytest.raises(ConsolidateError, match=rf"tensors \[{index}\], but the file has 1"):
        ledger.tensor_crcs([tensor(1)])
