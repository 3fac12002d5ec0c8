"""Buckets of checkpoints whose shards no rank sees all of: read by hand, and put together."""

from __future__ import annotations

import math

import pytest
import torch

from dist_consolidate.checkpoint.layout import find_tag
from dist_consolidate.checkpoint.reader import read_checkpoint
from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.errors import CheckpointError
from dist_consolidate.options import Options
from dist_consolidate.plan.scattered import phases_for
from dist_consolidate.planning import plan_here
from dist_consolidate.runtime.placement import place_rows
from tests.cases import CASES, assert_same_bits, expected_fp32

NAMES = [
    "tp2_z1_fp32_w2",
    "universal_tp2_z1_fp32_w2",
    "pipe_z1_bf16_w2",
    "moe_z1_fp32_w2",
    "universal_kitchen_z3_bf16_w2",
    "kitchen_z2_groups_w4",
    "kitchen_z3_bf16_w2",
    "noncontig_z2_w2",
]


def planned(name):
    case = CASES[name]
    folder = find_tag(case.ckpt, case.tag)
    return folder, plan_here(read_checkpoint(folder), Options(dtype="keep"))


def scattered(folder, num_ranks, shift):
    """Give each shard to one rank."""
    visible = [set() for _ in range(num_ranks)]
    for number, shard in enumerate(folder.shards):
        visible[(number + shift) % num_ranks].add(shard.name)
    return [frozenset(names) for names in visible]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_ranks", "shift"), [(2, 0), (3, 1), (7, 3)])
@pytest.mark.parametrize("bucket_bytes", [160, 3000, 1 << 20])
def test_every_element_is_read_once_by_a_rank_that_sees_it(name, num_ranks, shift, bucket_bytes):
    folder, plan = planned(name)
    visible = scattered(folder, num_ranks, shift)
    reader = ShardReader(folder.folders, {})
    filled = [bytearray(t.source.num_numel * t.source.dtype.itemsize_bytes) for t in plan.tensors]
    counts = [torch.zeros(tensor.source.num_numel, dtype=torch.int8) for tensor in plan.tensors]
    for phase in phases_for(plan, bucket_bytes, visible):
        placement = place_rows(phase, visible)
        for rank, rows in enumerate(placement.rows):
            assert all(phase.row_files(row) <= visible[rank] for row in rows)
        assert sorted(row for rows in placement.rows for row in rows) == list(range(phase.num_rows))
        for bucket in range(phase.num_buckets):
            table = [bytearray(phase.row_bytes) for _ in range(phase.num_rows)]
            for row, room in enumerate(table):
                for read in phase.reads(bucket, row):
                    assert read.span is not None or read.extent.file in phase.row_files(row)
                    reader.fill(memoryview(room), read)
            for piece in phase.pieces(bucket):
                take(piece, plan.tensors[piece.tensor].source, table, filled, counts)
    reader.close()
    assert all((count == 1).all() for count in counts)
    truth = expected_fp32(CASES[name])
    got = {t.name: as_tensor(t.source, data) for t, data in zip(plan.tensors, filled, strict=True)}
    same = {n: t for n, t in got.items() if n in truth and t.dtype == truth[n].dtype}
    assert len(same) > len(truth) // 2
    assert_same_bits(same, {n: truth[n] for n in same})


def take(piece, source, table, filled, counts):
    width = source.dtype.itemsize_bytes
    for index in range(piece.num_rows):
        start = piece.start_numel + index * piece.step_numel
        count = min(piece.num_numel, source.num_numel - start)
        if count > 0:
            row, at = table[piece.row + index], piece.at_bytes
            filled[piece.tensor][start * width : (start + count) * width] = row[
                at : at + count * width
            ]
            counts[piece.tensor][start : start + count] += 1


def as_tensor(source, data):
    dtype = getattr(torch, source.dtype.name)
    if not math.prod(source.shape):
        return torch.empty(source.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(source.shape)


def test_a_shard_that_nobody_sees_is_named():
    folder, plan = planned("tp2_z1_fp32_w2")
    names = {shard.name for shard in folder.shards}
    lost = min(name for name in names if name.endswith("optim_states.pt"))
    visible = [frozenset(names - {lost}), frozenset()]
    with pytest.raises(CheckpointError, match=lost):
        for phase in phases_for(plan, 1000, visible):
            place_rows(phase, visible)
