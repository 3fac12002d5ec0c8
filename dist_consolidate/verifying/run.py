"""Verifying from end to end, in one process or on many ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dist_consolidate.errors import UsageError, listed
from dist_consolidate.output.index import MANIFEST_NAME
from dist_consolidate.planning import on_rank
from dist_consolidate.runtime.control import Control
from dist_consolidate.runtime.threads import in_threads
from dist_consolidate.verifying.against_manifest import Result, look_at
from dist_consolidate.verifying.against_shards import (
    Asked,
    Comparison,
    Shards,
    missing_shards,
    open_shards,
)
from dist_consolidate.verifying.comparing import Comparer
from dist_consolidate.verifying.findings import Difference, Rounded, VerifyReport
from dist_consolidate.verifying.ranges import RangeCheck

_MAX_THREADS = 4

Item = RangeCheck | Comparison


def run_verify(output_dir: Path, asked: Asked | None, control: Control) -> VerifyReport:
    """Verify a result with all ranks.

    Args:
        output_dir: The result.
        asked: The checkpoint to compare with, if any.
        control: The control plane; every rank calls this.

    Returns:
        What was found, the same on every rank.

    Raises:
        ConsolidateError: If it could not be verified; every rank raises.
    """
    started = time.monotonic()
    seen = control.exchange((output_dir / MANIFEST_NAME).is_file())
    # Where nobody sees it, rank 0 says so.
    leader = seen.index(True) if any(seen) else 0

    def look() -> tuple[Result, Shards | None]:
        result = look_at(output_dir)
        if asked is None or result.manifest is None:
            return result, None
        return result, open_shards(asked, result.manifest, result.contents)

    result, shards = on_rank(control, leader, look)
    able = _able(output_dir, result, shards, control)
    items: list[Item] = [*result.checks, *(shards.comparisons if shards else ())]
    work = _Work(output_dir, shards, _dealt(items, able, control))
    found = control.exchange(control.together(work.run, work.stop, lambda: work.num_bytes_done))
    differences = [*result.differences, *(shards.differences if shards else ())]
    differences += [item for part, _ in found for item in part]
    return VerifyReport(
        output_dir=output_dir,
        differences=tuple(sorted(dict.fromkeys(differences))),
        num_tensors=sum(map(len, result.contents.values())),
        num_bytes=_data_bytes(result),
        num_digests=sum(bool(check.tensor) for check in result.checks),
        num_sha256=sum(check.kind == "sha256" for check in result.checks),
        num_compared=None if shards is None else len(shards.comparisons),
        num_rounded=sum(len(item.copies) for item in shards.comparisons) if shards else 0,
        rounded=tuple(sorted(item for _, part in found for item in part)),
        notes=result.notes,
        duration_sec=time.monotonic() - started,
    )


def _data_bytes(result: Result) -> int:
    """Count the bytes of all tensors, those that share a storage once."""
    return sum(
        length
        for contents in result.contents.values()
        for _, length in {(held.offset_bytes, held.num_bytes) for held in contents.values()}
    )


def _able(
    output_dir: Path, result: Result, shards: Shards | None, control: Control
) -> Sequence[int]:
    """Name the ranks that see everything that is to be read."""
    lacks = [name for name in result.contents if not (output_dir / name).is_file()]
    lacks += missing_shards(shards) if shards else []
    views = control.exchange(lacks)
    able = [rank for rank, lacking in enumerate(views) if not lacking]
    if able:
        return able
    raise UsageError(
        f"{output_dir}: no rank sees both the result and all shards, so that they cannot be "
        f"compared; rank 0 lacks {listed(views[0])}. Verify on a machine that sees all of them"
    )


def _dealt(items: Sequence[Item], able: Sequence[int], control: Control) -> list[Item]:
    """Give this rank its items: the largest first, each to whoever has the least so far."""
    loads, mine = dict.fromkeys(able, 0), []
    for item in sorted(items, key=lambda item: -item.num_bytes):
        rank = min(loads, key=lambda rank: (loads[rank], rank))
        # What has no bytes takes time, too.
        loads[rank] += item.num_bytes + 4096
        if rank == control.rank:
            mine.append(item)
    return mine


class _Work:
    """One rank's part."""

    def __init__(self, output_dir: Path, shards: Shards | None, items: Sequence[Item]) -> None:
        self._dir, self._items = output_dir, items
        self._comparer = None if shards is None else Comparer(output_dir, shards, self._count)
        self._lock, self._stopped = threading.Lock(), False
        self._differences: list[Difference] = []
        self.num_bytes_done = 0

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> tuple[list[Difference], list[Rounded]]:
        num_threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS, len(self._items))
        try:
            in_threads(self._check, self._items, num_threads, lambda: self._stopped)
        finally:
            if self._comparer is not None:
                self._comparer.close()
        return self._differences, self._comparer.rounded if self._comparer else []

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes_done += num_bytes

    def _check(self, item: Item) -> None:
        if isinstance(item, Comparison):
            assert self._comparer is not None
            difference = self._comparer.run(item)
        else:
            difference = item.run(self._dir, self._count)
        if difference is not None:
            with self._lock:
                self._differences.append(difference)
