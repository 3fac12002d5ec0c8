"""How a bucket's rows reach the rank that writes them.

One interface, three ways. A transport is entered only when every rank has said that its rows are
on its device and, for the writer, that there is room for the result.

Legend: ``W`` rows at most on a rank (the placement's width), ``B`` bytes per row, ``M`` ranks.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dist_consolidate.runtime.placement import Placement


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
    """Every rank receives all rows: one all-gather of equal slices (NCCL on GPUs)."""

    lanes = True

    def __init__(self, rank: int) -> None:
        """Remember who this is."""
        self._rank = rank

    def exchange(
        self, rows: torch.Tensor, out: torch.Tensor, placement: Placement, writer: int
    ) -> torch.Tensor | None:
        """All-gather (see :class:`Transport`)."""
        import torch.distributed as dist

        gathered = out[: len(placement.rows) * rows.numel()]
        if len(placement.rows) == 1 and not dist.is_initialized():
            return rows
        # all_gather_into_tensor is deprecated in favour of all_gather_single from torch 2.13 on.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, rows.reshape(-1))
        return gathered.view(-1, rows.shape[1]) if self._rank == writer else None

    def needs_room(self, is_writer: bool) -> bool:
        """Tell that everyone receives."""
        return True


class Gather:
    """Only the writer receives: point-to-point messages, which gloo moves far faster."""

    lanes = True

    def __init__(self, rank: int) -> None:
        """Remember who this is."""
        self._rank = rank

    def exchange(
        self, rows: torch.Tensor, out: torch.Tensor, placement: Placement, writer: int
    ) -> torch.Tensor | None:
        """Send to the writer (see :class:`Transport`)."""
        import torch.distributed as dist

        mine = len(placement.rows[self._rank])
        if self._rank != writer:
            if mine:
                self._run([dist.P2POp(dist.isend, rows[:mine].reshape(-1), writer)])
            return None
        num_bytes = rows.shape[1]
        table = out[: len(placement.rows) * placement.width * num_bytes].view(-1, num_bytes)
        receives = []
        for rank, held in enumerate(placement.rows):
            place = table[rank * placement.width :][: len(held)]
            if rank == writer:
                place.copy_(rows[:mine])
            elif held:
                receives.append(dist.P2POp(dist.irecv, place.view(-1), rank))
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


def make_transport(name: str, rank: int) -> Transport:
    """Make a transport by name: ``direct``, ``allgather`` or ``gather``."""
    if name == "direct":
        return Direct()
    return AllGather(rank) if name == "allgather" else Gather(rank)
