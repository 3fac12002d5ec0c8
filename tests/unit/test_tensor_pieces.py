"""Pieces of tensors: what is read by them is the tensor, in order, whatever the cut."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.checkpoint.extents import Extent
from dist_consolidate.checkpoint.fragments import Fragments
from dist_consolidate.checkpoint.model import FlatGroup, FlatSlot, Source
from dist_consolidate.checkpoint.tensor_pieces import (
    DoesNotFit,
    Merged,
    Piece,
    blocks_of,
    concatenated,
    cut_rows,
    source_of,
)
from dist_consolidate.dtypes import BY_NAME

torch = pytest.importorskip("torch")
FLOAT32 = BY_NAME["float32"]


def shard_sources(shards):
    """Each shard alone in a flat group of its own file."""
    groups, sources, files = [], [], {}
    for rank, shard in enumerate(shards):
        name = f"rank{rank}"
        files[name] = struct.pack(f"{shard.numel()}f", *shard.flatten().tolist())
        part = Extent(name, 0, len(files[name]))
        groups.append(FlatGroup(name, False, FLOAT32, (part,)))
        slot = FlatSlot(rank, 0)
        sources.append(Source("fp32 partition", tuple(shard.shape), FLOAT32, slot))
    return groups, sources, files


def read(merged, shards, start, stop):
    groups, sources, files = shard_sources(shards)
    source = source_of(merged, sources)
    out = b""
    reads = Fragments(groups).reads(source, start, stop)
    for found in sorted(reads, key=lambda part: part.at_bytes):
        assert found.at_bytes == len(out), "a gap, or an overlap"
        extent = found.extent
        out += files[extent.file][extent.offset_bytes : extent.offset_bytes + extent.num_bytes]
    return list(struct.unpack(f"{len(out) // 4}f", out))


@st.composite
def cuts(draw):
    """A full tensor, its dimension of cut, the widths of parts on ranks, and the shards."""
    degree = draw(st.integers(1, 4))
    num_parts = draw(st.integers(1, 3))
    width = st.lists(st.integers(0, 3), min_size=degree, max_size=degree)
    parts = draw(st.lists(width, min_size=num_parts, max_size=num_parts))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(map(sum, parts))
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    pieces = [[] for _ in range(degree)]
    at = 0
    for part in parts:
        for rank, size in enumerate(part):
            pieces[rank].append(full.narrow(dim, at, size))
            at += size
    return full, dim, parts, [torch.cat(mine, dim=dim) for mine in pieces]


@settings(deadline=None, max_examples=150)
@given(cut=cuts(), data=st.data())
def test_joined_parts(cut, data):
    full, dim, parts, shards = cut
    merged = concatenated([tuple(shard.shape) for shard in shards], dim, parts)
    assert merged.shape == tuple(full.shape)
    rows = data.draw(st.integers(0, full.shape[0]))
    merged, full = cut_rows(merged, rows), full[:rows]
    start = data.draw(st.integers(0, full.numel()))
    stop = data.draw(st.integers(start, full.numel()))
    assert read(merged, shards, start, stop) == full.flatten()[start:stop].tolist()


@settings(deadline=None, max_examples=100)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    turn=st.randoms(use_true_random=False),
)
def test_a_piece_that_lies_in_another_order(shape, turn):
    order = list(range(len(shape)))
    turn.shuffle(order)
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    shard = full.permute(order).contiguous()
    own = shard.permute([order.index(dim) for dim in range(len(shape))]).stride()
    piece = Piece(0, tuple(shape), 0, tuple(full.stride()), 0, tuple(own))
    merged = Merged(tuple(shape), (piece,))
    assert read(merged, [shard], 0, full.numel()) == full.flatten().tolist()


def test_a_piece_in_too_many_bits():
    source = Source("fp32 partition", (800_000,), FLOAT32, FlatSlot(0, 0))
    turned = Piece(0, (400_000, 2), 0, (2, 1), 0, (1, 400_000))
    assert [block.num_runs for block in blocks_of(turned, source)] == [400_000, 400_000]
    scattered = Piece(0, (20_000, 20_000, 2), 0, (200_000, 7, 3), 0, (200_000, 5, 2))
    with pytest.raises(DoesNotFit, match="in too many bits"):
        list(blocks_of(scattered, source))
