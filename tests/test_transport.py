"""Each way to exchange rows brings every row where it belongs, on real process groups.

Run as a module under torchrun, this file is also what each rank does (see :func:`main`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from dist_consolidate.runtime.placement import Placement
from dist_consolidate.runtime.transport import AllGather, PointToPoint, Transport
from dist_consolidate.runtime.world import World, join_world
from tests.zygote import fork_together

pytestmark = pytest.mark.dist

MODULE = "tests.test_transport"
ROW_BYTES = 37
WAYS: dict[str, Callable[[World], Transport]] = {
    "allgather": lambda world: AllGather(world.data_group),
    "point-to-point": lambda world: PointToPoint(world.rank, world.data_group, to_all=True),
    "gather": lambda world: PointToPoint(world.rank, world.data_group, to_all=False),
}
# Rows dealt out evenly, unevenly, to some ranks only, and in no order.
PLACEMENTS = (
    Placement(((0, 1), (2, 3), (4, 5)), 2),
    Placement(((0, 1), (2, 3), (4,)), 2),
    Placement(((), (1, 0, 2), ()), 3),
    Placement(((3,), (), (0, 2)), 2),
)
WRITERS = ((0,), (0, 1), (0, 1, 2))


def content(row: int, bucket: int) -> torch.Tensor:
    """Give a row that no other row or bucket has."""
    generator = torch.Generator().manual_seed(1000 * bucket + row)
    return torch.randint(0, 256, (ROW_BYTES,), dtype=torch.uint8, generator=generator)


def exchange(world: World, transport: Transport, placement: Placement, writers: Sequence[int]):
    """Exchange two buckets, both in flight at once, and look at what has come."""
    width, receives = placement.width, transport.receives(world.rank in writers)
    num_rows, first = (world.size * width, world.rank * width) if receives else (width, 0)
    tables, works = [], []
    for bucket in range(2):
        table = torch.zeros((num_rows, ROW_BYTES), dtype=torch.uint8)
        for index, row in enumerate(placement.rows[world.rank]):
            table[first + index] = content(row, bucket)
        works += transport.start(table, first, placement, writers)
        tables.append(table)
    for work in works:
        work.wait()
    if not receives:
        return
    for bucket, table in enumerate(tables):
        for rank, rows in enumerate(placement.rows):
            for index, row in enumerate(rows):
                got, where = table[rank * width + index], (bucket, rank, row)
                assert torch.equal(got, content(row, bucket)), where


def main(name: str) -> None:
    """Exchange in one way, whatever the rows and the writers."""
    with join_world("cpu", launch=True) as world:
        for placement in PLACEMENTS:
            for writers in WRITERS:
                exchange(world, WAYS[name](world), placement, writers)
        dist.barrier(world.data_group)
        number = len(PLACEMENTS) * len(WRITERS)
        sys.stdout.write(f"rank {world.rank}: {number} exchanges\n")


@pytest.mark.parametrize("name", WAYS)
def test_every_row_arrives(name):
    ended = fork_together(3, [name], module=MODULE).ok()
    for rank in range(3):
        assert f"rank {rank}: 12 exchanges" in ended.stdout


if __name__ == "__main__":
    main(sys.argv[1])
