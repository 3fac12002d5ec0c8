"""Timing the pipeline's stages, those on a device without waiting for it."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from dist_consolidate.runtime.stages import StageTime, Stopwatch


class _Timed(NamedTuple):
    """Work on a stream, between two events."""

    name: str
    num_bytes: int
    begin: torch.Event
    end: torch.Event


class Clock:
    """Times stages on the host and on a device; any thread may use it.

    Attributes:
        watch: Where the times are added up.
    """

    def __init__(self, device: torch.device) -> None:
        """Start with nothing."""
        self._device = device
        self.watch = Stopwatch()
        self._lock = threading.Lock()
        self._running: collections.deque[_Timed] = collections.deque()
        self._spare: list[tuple[torch.Event, torch.Event]] = []

    def host(self, name: str, num_bytes: int) -> contextlib.AbstractContextManager[None]:
        """Time what the block does on the host (see :class:`Stopwatch`)."""
        return self.watch.timing(name, num_bytes)

    def device(self, name: str, num_bytes: int) -> contextlib.AbstractContextManager[None]:
        """Time what the block does on the device: on the CPU that is the block itself.

        Args:
            name: A stage.
            num_bytes: Bytes that it handles.

        Returns:
            A context; on an accelerator events are put around what the block puts on the current
            stream, and nobody waits for them.
        """
        if self._device.type == "cpu":
            return self.watch.timing(name, num_bytes)
        return self._between_events(name, num_bytes)

    def totals(self) -> tuple[StageTime, ...]:
        """Wait for what is still running on the device, and give all stages."""
        with self._lock:
            for timed in self._running:
                timed.end.synchronize()
            self._collect()
        return self.watch.totals()

    @contextlib.contextmanager
    def _between_events(self, name: str, num_bytes: int) -> Iterator[None]:
        with self._lock:
            self._collect()
            pair = self._spare.pop() if self._spare else self._pair()
        begin, end = pair
        stream = torch.accelerator.current_stream(self._device)
        begin.record(stream)
        yield
        end.record(stream)
        with self._lock:
            self._running.append(_Timed(name, num_bytes, begin, end))

    def _pair(self) -> tuple[torch.Event, torch.Event]:
        return (
            torch.Event(self._device, enable_timing=True),
            torch.Event(self._device, enable_timing=True),
        )

    def _collect(self) -> None:
        """Read out what has ended; its events are used again."""
        while self._running and self._running[0].end.query():
            name, num_bytes, begin, end = self._running.popleft()
            self.watch.add(name, num_bytes, begin.elapsed_time(end) / 1e3)
            self._spare.append((begin, end))
