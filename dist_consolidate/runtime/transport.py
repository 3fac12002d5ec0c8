"""How a bucket's rows reach the ranks that write them.

One interface, two ways. A transport is entered only when every rank has said that its rows are on
its device and that there is room for what it receives.

Every rank has read its rows into their place in its table, so that nothing is copied before it is
sent or after it is received.

Legend: ``W`` rows at most on a rank (the placement's width), ``B`` bytes per row, ``M`` ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from dist_consolidate.runtime.placement import Placement
from dist_consolidate.runtime.world import World


class Transport(Protocol):
    """Moves the rows of one bucket."""

    def start(
        self, table: torch.Tensor, first: int, placement: Placement, writers: Sequence[int]
    ) -> list[Any]:
        """Start to move one bucket; every rank does so for the same buckets in the same order.

        Args:
            table: Rows, uint8: shape ``(M * W, B)`` where this rank ever receives, with room for
                what comes; else ``(W, B)``, just what it sends.
            first: Where this rank's own rows begin in it; those it does not have hold anything.
            placement: Which rank has which rows.
            writers: The ranks that need the result.

        Returns:
            What to wait for (``torch.distributed.Work``): then the writers' tables are complete,
            and every other rank's free to use again.
        """

    def receives(self, is_writer: bool) -> bool:
        """Tell whether a rank must have room for the rows of all."""


class AllGather:
    """Every rank receives all rows: one all-gather of equal slices (NCCL on GPUs).

    Collectives of one group must be issued in the same order everywhere. A rank that tells of an
    error issues them otherwise than the ranks that hear of it, so the group is not the control
    plane's.
    """

    def __init__(self, group: Any) -> None:  # noqa: ANN401 - a process group
        """Remember the process group to talk over."""
        self._group = group

    def start(
        self, table: torch.Tensor, first: int, placement: Placement, writers: Sequence[int]
    ) -> list[Any]:
        """All-gather in place (see :class:`Transport`)."""
        import torch.distributed as dist

        # all_gather_into_tensor is deprecated in favour of all_gather_single from torch 2.13 on.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        mine = table[first : first + placement.width]
        return [gather(table.view(-1), mine.view(-1), group=self._group, async_op=True)]

    def receives(self, is_writer: bool) -> bool:
        """Tell that all do."""
        return True


class PointToPoint:
    """Each rank sends its rows to all that receive, straight from and into their tables.

    On gloo this takes the place of the all-gather, too. gloo's own goes through a ring and through
    memory of its own; and here a rank waits only for the very rank that it receives from, so that
    all of them notice when one is gone.
    """

    def __init__(self, rank: int, group: Any, *, to_all: bool) -> None:  # noqa: ANN401
        """Set up.

        Args:
            rank: This rank.
            group: The process group to talk over. Messages have no order to keep with
                collectives, so it may be the control plane's.
            to_all: Every rank receives, instead of the writers only.
        """
        self._rank, self._group, self._to_all = rank, group, to_all

    def start(
        self, table: torch.Tensor, first: int, placement: Placement, writers: Sequence[int]
    ) -> list[Any]:
        """Send to all that receive, and receive from all others (see :class:`Transport`)."""
        import torch.distributed as dist

        receivers = range(len(placement.rows)) if self._to_all else writers
        operations = []
        for receiver, (rank, rows) in itertools.product(receivers, enumerate(placement.rows)):
            if not rows or rank == receiver or self._rank not in (rank, receiver):
                continue
            sends = rank == self._rank
            begin = first if sends else rank * placement.width
            message = table[begin : begin + len(rows)].view(-1)
            call, peer = (dist.isend, receiver) if sends else (dist.irecv, rank)
            operations.append(dist.P2POp(call, message, peer, self._group))
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def receives(self, is_writer: bool) -> bool:
        """Tell whether all do, or only writers."""
        return self._to_all or is_writer


class ViaHost:
    """Carries a device's rows over a CPU group, where ranks share a device and NCCL cannot."""

    def __init__(self, inner: Transport) -> None:
        """Wrap a transport that moves host memory."""
        self._inner = inner
        self._room = torch.empty(0, dtype=torch.uint8)

    def start(
        self, table: torch.Tensor, first: int, placement: Placement, writers: Sequence[int]
    ) -> list[Any]:
        """Move through host memory, and wait for it (see :class:`Transport`)."""
        if self._room.numel() < table.numel():
            self._room = torch.empty(table.numel(), dtype=torch.uint8)
        room = self._room[: table.numel()].view(table.shape)
        own = slice(first, first + placement.width)
        room[own].copy_(table[own])
        for work in self._inner.start(room, first, placement, writers):
            work.wait()
        table.copy_(room)
        return []

    def receives(self, is_writer: bool) -> bool:
        """Tell what the inner transport does."""
        return self._inner.receives(is_writer)


def make_transport(name: str, world: World) -> Transport:
    """Make a transport.

    Args:
        name: ``allgather`` or ``gather``.
        world: This rank.

    Returns:
        The transport, over the group that can carry the device's memory.
    """
    to_all = name == "allgather"
    if to_all and world.device.type != "cpu" and world.data_group_carries_device:
        return AllGather(world.data_group)
    inner = PointToPoint(world.rank, world.data_group, to_all=to_all)
    return inner if world.data_group_carries_device else ViaHost(inner)
