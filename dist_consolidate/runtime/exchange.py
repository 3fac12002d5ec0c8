"""Exchanges in flight: a bucket travels while the one before it is made into output."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Sequence
from typing import Any

import torch

from dist_consolidate.runtime.buffers import Table
from dist_consolidate.runtime.clock import Clock
from dist_consolidate.runtime.placement import Placement
from dist_consolidate.runtime.transport import Transport

_DRAIN_TIMEOUT = datetime.timedelta(minutes=1)
# Where a rank is gone, what it was to send never comes.
_LOST_TIMEOUT = datetime.timedelta(seconds=1)


class Exchange:
    """Starts exchanges and waits for them, in order.

    On the CPU they run in the process group's own threads. On an accelerator they are put on a
    stream of their own, behind the copies that brought the rows, and only streams wait.

    Attributes:
        is_lost: Set where contact with another rank is lost.
    """

    def __init__(self, transport: Transport, device: torch.device, clock: Clock) -> None:
        """Wrap a transport.

        Args:
            transport: How rows travel.
            device: Where they are.
            clock: Told of the exchanges; on the CPU of the time that they are waited for.
        """
        self._transport, self._device, self._clock = transport, device, clock
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._works: dict[Table, list[Any]] = {}
        self.is_lost = False

    def start(
        self,
        table: Table,
        rows: torch.Tensor,
        first: int,
        placement: Placement,
        writers: Sequence[int],
    ) -> None:
        """Start to exchange a table's rows; every rank must, once all are ready.

        Args:
            table: The table.
            rows: What of it is exchanged (see :meth:`Transport.start`).
            first: Where this rank's own rows begin.
            placement: Which rank has which rows.
            writers: The ranks that need the result.
        """
        if self._stream is None:
            with self._clock.host("exchange", rows.numel()):
                self._works[table] = self._transport.start(rows, first, placement, writers)
            return
        self._stream.wait_event(table.arrived)
        with self._stream, self._clock.device("exchange", rows.numel()):
            for work in self._transport.start(rows, first, placement, writers):
                work.wait()  # this stream, not the host
        table.gathered.record(self._stream)

    def finish(self, table: Table) -> None:
        """Wait until a table is exchanged: the current stream does, on an accelerator."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_event(table.gathered)
            return
        with self._clock.host("exchange", 0):
            for work in self._works.pop(table):
                work.wait()

    def drain(self) -> None:
        """Wait for what is in flight when the run has failed, so that the group stays usable.

        It was started on every rank, unless one could not even do that: then it never comes.
        """
        for works in self._works.values():
            for work in works:
                with contextlib.suppress(RuntimeError):
                    work.wait(_LOST_TIMEOUT if self.is_lost else _DRAIN_TIMEOUT)
        self._works.clear()
