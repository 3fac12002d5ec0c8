"""How long each stage of the pipeline was busy, and with how many bytes.

Stages run at the same time, in several threads, so their times do not add up to the run's: the
busiest one is what limits it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# In the order that bytes pass them. "copy" is the kernel's own, from shard to output; "digest" is
# done beside the writing.
STAGES = ("read", "h2d", "exchange", "assemble", "d2h", "copy", "write", "digest", "sync")


class StageTime(NamedTuple):
    """What one stage did.

    Attributes:
        name: One of :data:`STAGES`.
        num_bytes: Bytes that passed it.
        busy_sec: Time spent in it, added up over threads (and ranks, where those are summed).
    """

    name: str
    num_bytes: int
    busy_sec: float


class Stopwatch:
    """Adds up the stages of one rank; any of its threads may report to it."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._lock = threading.Lock()
        self._totals: dict[str, tuple[int, float]] = {}

    @contextlib.contextmanager
    def timing(self, name: str, num_bytes: int) -> Iterator[None]:
        """Count the block's wall time, if it ends well.

        Args:
            name: One of :data:`STAGES`.
            num_bytes: Bytes that it handles.
        """
        started = time.perf_counter()
        yield
        self.add(name, num_bytes, time.perf_counter() - started)

    def add(self, name: str, num_bytes: int, busy_sec: float) -> None:
        """Count something that was timed elsewhere, such as on a device."""
        assert name in STAGES, name
        with self._lock:
            total_bytes, total_sec = self._totals.get(name, (0, 0.0))
            self._totals[name] = (total_bytes + num_bytes, total_sec + busy_sec)

    def totals(self) -> tuple[StageTime, ...]:
        """Give the stages that were passed, in their order."""
        return tuple(StageTime(n, *self._totals[n]) for n in STAGES if n in self._totals)


def summed(ranks: Iterable[Iterable[StageTime]]) -> tuple[StageTime, ...]:
    """Add up the stages of several ranks."""
    watch = Stopwatch()
    for stages in ranks:
        for stage in stages:
            watch.add(*stage)
    return watch.totals()
