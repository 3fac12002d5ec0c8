"""Staging buffers: output bytes on the device, and on their way to the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from dist_consolidate.runtime.buffers import Pool, Slot
from dist_consolidate.runtime.clock import Clock
from dist_consolidate.runtime.ownership import Run
from dist_consolidate.runtime.writer import Filled


class Staging:
    """A ring of staging buffers in front of the writer.

    Attributes:
        device: Where they are.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device, clock: Clock) -> None:
        """Allocate them.

        Args:
            num_slots: Buffers.
            slot_bytes: Size of each.
            device: Where output bytes are made.
            clock: Told of what is copied to the host.
        """
        self.device, self._clock = device, clock
        self._pool = Pool(Slot(slot_bytes, device) for _ in range(num_slots))
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def take(self) -> Slot:
        """Give an empty buffer; blocks until the writer gives one back."""
        slot = self._pool.take()
        assert slot is not None, "never closed"
        slot.used_bytes = 0
        return slot

    def filled(self, slot: Slot, runs: Sequence[Run]) -> Filled:
        """Give what the writer gets of a full buffer; on an accelerator its copy starts here.

        Args:
            slot: From :meth:`take`.
            runs: What was put into it, on the current stream.
        """
        if self._stream is not None:
            slot.filled.record(torch.accelerator.current_stream(self.device))
            self._stream.wait_event(slot.filled)
            used = slice(0, slot.used_bytes)
            with self._stream, self._clock.device("d2h", slot.used_bytes):
                slot.host[used].copy_(slot.tensor[used], non_blocking=True)
            slot.arrived.record(self._stream)
        return Filled(slot.view, runs, slot.arrived, functools.partial(self._pool.give_back, slot))
