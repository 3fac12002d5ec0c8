"""How a bucket's rows reach the rank that writes them.

One interface, three ways. A transport is entered only when every rank has said that its rows are
on its device and, for the writer, that there is room for the result.

Legend: ``W`` rows at most on a rank (the placement's width), ``B`` bytes per row, ``M`` ranks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from dist_consolidate.runtime.placement import Placement
from dist_consolidate.runtime.world import World

_GLOO_SLICE_BYTES = 512 << 10


class Transport(Protocol):
    """Moves the rows of one bucket.

    Attributes:
        lanes: Whether ranks exchange rows (buckets are cut along shards), or each rank reads what
            it writes.
    """

    lanes: bool

    def exchange(
        self, rows: torch.Tensor, out: torch.Tensor, placement: Placement, writer: int
    ) -> torch.Tensor | None:
        """Move one bucket.

        Args:
            rows: This rank's rows, uint8, shape ``(W, B)``; rows it does not have hold anything.
            out: Room for the gathered rows, uint8, at least ``M * W * B`` bytes on the writer.
            placement: Which rank has which rows.
            writer: The rank that needs the result.

        Returns:
            On the writer the gathered rows, shape ``(M * W, B)``; elsewhere ``None``.
        """

    def needs_room(self, is_writer: bool) -> bool:
        """Tell whether this rank must bring ``out``."""


class Direct:
    """Shards and output are seen by everyone: the writer of a bucket reads it; nothing is sent."""

    lanes = False

    def exchange(
        self, rows: torch.Tensor, out: torch.Tensor, placement: Placement, writer: int
    ) -> torch.Tensor | None:
        """Give the rows back (see :class:`Transport`)."""
        return rows

    def needs_room(self, is_writer: bool) -> bool:
        """Tell that no room is needed."""
        return False


class AllGather:
    """Every rank receives all rows: one all-gather of equal slices (NCCL on GPUs).

    On the CPU, gloo copies what it gathers several times over; there a bucket goes in small
    slices, which only the writer keeps.
    """

    lanes = True

    def __init__(self, rank: int, device: torch.device, group: Any) -> None:  # noqa: ANN401
        """Remember who this is, and the process group to talk over."""
        self._rank, self._group = rank, group
        self._in_slices = device.type == "cpu"
        self._slices = torch.empty(_GLOO_SLICE_BYTES if self._in_slices else 0, dtype=torch.uint8)

    def exchange(
        self, rows: torch.Tensor, out: torch.Tensor, placement: Placement, writer: int
    ) -> torch.Tensor | None:
        """All-gather (see :class:`Transport`)."""
        import torch.distributed as dist

        if len(placement.rows) == 1 and not dist.is_initialized():
            return rows
        size, mine = len(placement.rows), rows.reshape(-1)
        if self._in_slices:
            self._gather_slices(size, mine, out if self._rank == writer else None)
        else:
            _all_gather(out[: size * mine.numel()], mine, self._group)
        if self._rank != writer:
            return None
        return out[: size * mine.numel()].view(-1, rows.shape[1])

    def _gather_slices(self, size: int, mine: torch.Tensor, out: torch.Tensor | None) -> None:
        step = max(self._slices.numel() // size, 1)
        for start in range(0, mine.numel(), step):
            part = mine[start : start + step]
            slices = self._slices[: size * part.numel()]
            _all_gather(slices, part, self._group)
            if out is not None:
                table = out[: size * mine.numel()].view(size, -1)
                table[:, start : start + part.numel()] = slices.view(size, -1)

    def needs_room(self, is_writer: bool) -> bool:
        """Tell who keeps what arrives: with NCCL everyone receives into it."""
        return is_writer or not self._in_slices


def _all_gather(out: torch.Tensor, part: torch.Tensor, group: Any) -> None:  # noqa: ANN401
    import torch.distributed as dist

    # all_gather_into_tensor is deprecated in favour of all_gather_single from torch 2.13 on.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=group)


class Gather:
    """Only the writer receives: point-to-point messages, which gloo moves far faster."""

    lanes = True

    def __init__(self, rank: int, group: Any) -> None:  # noqa: ANN401 - a process group
        """Remember who this is, and the process group to talk over."""
        self._rank, self._group = rank, group

    def exchange(
        self, rows: torch.Tensor, out: torch.Tensor, placement: Placement, writer: int
    ) -> torch.Tensor | None:
        """Send to the writer (see :class:`Transport`)."""
        import torch.distributed as dist

        mine = len(placement.rows[self._rank])
        if self._rank != writer:
            if mine:
                self._run([dist.P2POp(dist.isend, rows[:mine].reshape(-1), writer, self._group)])
            return None
        num_bytes = rows.shape[1]
        table = out[: len(placement.rows) * placement.width * num_bytes].view(-1, num_bytes)
        receives = []
        for rank, held in enumerate(placement.rows):
            place = table[rank * placement.width :][: len(held)]
            if rank == writer:
                place.copy_(rows[:mine])
            elif held:
                receives.append(dist.P2POp(dist.irecv, place.view(-1), rank, self._group))
        self._run(receives)
        return table

    def needs_room(self, is_writer: bool) -> bool:
        """Tell that only a writer receives."""
        return is_writer

    @staticmethod
    def _run(operations: list[torch.distributed.P2POp]) -> None:
        import torch.distributed as dist

        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


class ViaHost:
    """Carries a device's rows over a CPU group, where ranks share a device and NCCL cannot."""

    lanes = True

    def __init__(self, inner: Transport) -> None:
        """Wrap a transport that moves host memory."""
        self._inner = inner
        self._room = torch.empty(0, dtype=torch.uint8)

    def exchange(
        self, rows: torch.Tensor, out: torch.Tensor, placement: Placement, writer: int
    ) -> torch.Tensor | None:
        """Move through host memory (see :class:`Transport`)."""
        need = len(placement.rows) * rows.numel()
        if self._room.numel() < need:
            self._room = torch.empty(need, dtype=torch.uint8)
        table = self._inner.exchange(rows.cpu(), self._room, placement, writer)
        return None if table is None else table.to(rows.device)

    def needs_room(self, is_writer: bool) -> bool:
        """Tell that the room is on the host, here."""
        return False


def make_transport(name: str, world: World) -> Transport:
    """Make a transport.

    Args:
        name: ``direct``, ``allgather`` or ``gather``.
        world: This rank.

    Returns:
        The transport, over the group that can carry the device's memory.
    """
    if name == "direct":
        return Direct()
    carried = world.device if world.data_group_carries_device else torch.device("cpu")
    inner: Transport
    if name == "allgather":
        inner = AllGather(world.rank, carried, world.data_group)
    else:
        inner = Gather(world.rank, world.data_group)
    return inner if carried == world.device else ViaHost(inner)
