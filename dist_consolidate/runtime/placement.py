"""Which rank reads which row: M ranks take N rows, for any M and N."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dist_consolidate.errors import CheckpointError
from dist_consolidate.plan.buckets import Phase


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """The rows of a phase, dealt out.

    Attributes:
        rows: For each rank, the rows it reads, in the order they lie in its buffer.
        width: The most rows any rank has; gathered rows lie ``width`` per rank.
    """

    rows: tuple[tuple[int, ...], ...]
    width: int

    def position(self, num_rows: int) -> list[int]:
        """Give, for each row, where it lies among the gathered ones."""
        where = [0] * num_rows
        for rank, mine in enumerate(self.rows):
            for index, row in enumerate(mine):
                where[row] = rank * self.width + index
        return where


def place_rows(phase: Phase, visible: Sequence[frozenset[str]]) -> Placement:
    """Deal out the rows of a phase.

    Where every rank sees every shard, neighbouring rows go to one rank and all ranks but the last
    ones have equally many; rows of a phase are equally long, so that balances bytes too.

    Args:
        phase: The phase.
        visible: For each rank, the shards it sees.

    Returns:
        The placement.

    Raises:
        CheckpointError: If a row lies in shards that no single rank sees.
    """
    size, needs = len(visible), [phase.row_files(row) for row in range(phase.num_rows)]
    everything = frozenset().union(*needs)
    if all(everything <= sees for sees in visible):
        width = -(-phase.num_rows // size)
        rows = tuple(
            tuple(range(rank * width, min((rank + 1) * width, phase.num_rows)))
            for rank in range(size)
        )
        return Placement(rows, width)
    dealt: list[list[int]] = [[] for _ in range(size)]
    for row, need in enumerate(needs):
        able = [rank for rank in range(size) if need <= visible[rank]]
        if not able:
            raise CheckpointError(f"no rank sees all of {', '.join(sorted(need))}")
        dealt[min(able, key=lambda rank: (len(dealt[rank]), rank))].append(row)
    return Placement(tuple(map(tuple, dealt)), max(map(len, dealt)))
