"""How much memory direct work takes on a rank: threads, and the size of their buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dist_consolidate.plan.direct import step_bytes
from dist_consolidate.plan.owners import Owned
from dist_consolidate.runtime.budget import OVERHEAD_BYTES, Wanted
from dist_consolidate.runtime.bypass import WORTH_TRYING_BYTES
from dist_consolidate.runtime.outfiles import ALIGNMENT_BYTES
from dist_consolidate.runtime.rooms import (
    Allowance,
    Lack,
    Reading,
    allowances,
    beyond_notes,
    lack_error,
    rank_texts,
)
from dist_consolidate.units import format_bytes, plural

# What the threads of a rank hold together, output bytes, if there are as many as there may be.
_BYTES = 32 * 2**20
MAX_THREADS = 4
# Shorter ranges are not copied by the kernel.
_LEAST_BUCKET_BYTES = 2**20


class Crew(NamedTuple):
    """What one rank works with.

    Attributes:
        bucket_bytes: The most output bytes in a bucket.
        num_threads: Threads; each holds one bucket.
        memory_bytes: What all of it takes.
    """

    bucket_bytes: int
    num_threads: int
    memory_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class DirectNeeds:
    """What decides how much memory direct work takes.

    Attributes:
        owned: By rank, what of the files it fills.
        cast_ratio: Source bytes held for an output byte at most; 0 where nothing is cast.
        io: ``auto``, ``buffered`` or ``direct``.
    """

    owned: Sequence[Sequence[Owned]]
    cast_ratio: float
    io: str

    def crew(self, rank: int, bucket_bytes: int, num_threads: int) -> Crew:
        """Tell what a rank takes with buckets of some size.

        Args:
            rank: The rank.
            bucket_bytes: The most output bytes in a bucket.
            num_threads: Threads, if there are as many buckets.
        """
        step, parts = step_bytes(bucket_bytes), self.owned[rank]
        longest = max((part.stop_bytes - part.start_bytes for part in parts), default=0)
        room = min(step, longest)
        each = int(room * (1 + self.cast_ratio))
        if self._may_bypass(parts):
            each += int(room * max(self.cast_ratio, 1)) + 2 * ALIGNMENT_BYTES
        num_buckets = sum(_num_windows(part, step) for part in parts)
        num_threads = max(min(num_threads, num_buckets), 1)
        return Crew(bucket_bytes, num_threads, num_threads * each)

    def _may_bypass(self, parts: Sequence[Owned]) -> bool:
        total = sum(part.stop_bytes - part.start_bytes for part in parts)
        return self.io == "direct" or (self.io == "auto" and total >= WORTH_TRYING_BYTES)


def _num_windows(part: Owned, step: int) -> int:
    if part.stop_bytes <= part.start_bytes:
        return 0
    return (part.stop_bytes - 1) // step - part.start_bytes // step + 1


class DirectSettled(NamedTuple):
    """What all ranks have agreed on.

    Attributes:
        crews: By rank that writes.
        limits: By rank, what its memory is bounded by.
        notes: What people should hear of.
    """

    crews: tuple[Crew, ...]
    limits: tuple[tuple[Allowance, ...], ...]
    notes: tuple[str, ...]


def settle_direct(
    needs: DirectNeeds, wanted: Wanted, readings: Sequence[Reading], num_threads: Sequence[int]
) -> DirectSettled:
    """Choose threads and buckets for every rank.

    Args:
        needs: What there is to do.
        wanted: What the user asked for.
        readings: By rank.
        num_threads: By rank, the threads that keep it busy.

    Returns:
        The choice, the same on every rank.

    Raises:
        ResourceError: If a rank cannot have the memory; every rank raises.
    """
    num_writers, given = len(needs.owned), wanted.bucket_bytes
    allowed = allowances(readings, "host", wanted.host, num_writers)
    crews, lacks, short = [], [], []
    for rank in range(num_writers):
        sizes = list(_sizes(needs, given, num_threads[rank]))
        candidates = [needs.crew(rank, *size) for size in sizes]
        crew, allowance = _first_fit(candidates, allowed[rank]), allowed[rank]
        if crew is None:
            assert allowance is not None
            least = candidates[-1]
            purpose = f"{_purpose(least)} and what goes with it"
            lacks.append(Lack(rank, least.memory_bytes + OVERHEAD_BYTES, purpose, allowance))
            continue
        crews.append(crew)
        if crew != candidates[0]:
            short.append(rank)
    if lacks:
        raise lack_error(lacks, readings, given=given is not None)
    limits = tuple(() if one is None else (one,) for one in allowed)
    notes = [*_notes(short, crews, allowed, readings)]
    notes += beyond_notes(readings, wanted.host, num_writers)
    return DirectSettled(tuple(crews), limits, tuple(notes))


def _purpose(crew: Crew) -> str:
    return f"{plural(crew.num_threads, 'bucket')} of {format_bytes(crew.bucket_bytes)}"


def _sizes(needs: DirectNeeds, given: int | None, num_threads: int) -> Iterator[tuple[int, int]]:
    """Give sizes of buckets and numbers of threads, from the best to the smallest."""
    # A size that was asked for holds for the bytes of a bucket that are most: the source's, too.
    bucket = int((given or _BYTES) // MAX_THREADS / max(needs.cast_ratio, 1))
    yield bucket, num_threads
    if given is not None:
        return
    while bucket > _LEAST_BUCKET_BYTES:
        bucket = max(bucket // 2, _LEAST_BUCKET_BYTES)
        yield bucket, num_threads
    for fewer in range(num_threads - 1, 0, -1):
        yield bucket, fewer


def _first_fit(candidates: Sequence[Crew], allowance: Allowance | None) -> Crew | None:
    if allowance is None:
        return candidates[0]
    # One size that was asked for is not refused because it is more than usual.
    limits = (allowance.usual_bytes, allowance.most_bytes)[-1 if len(candidates) == 1 else 0 :]
    for limit in limits:
        for crew in candidates:
            if crew.memory_bytes + OVERHEAD_BYTES <= limit:
                return crew
    return None


def _notes(
    short: Sequence[int],
    crews: Sequence[Crew],
    allowed: Sequence[Allowance | None],
    readings: Sequence[Reading],
) -> Iterator[str]:
    by_text: dict[tuple[str, str], list[int]] = {}
    for rank in short:
        allowance = allowed[rank]
        assert allowance is not None
        what = f"{_purpose(crews[rank])} at a time; it can have {allowance.text()}"
        by_text.setdefault((readings[rank].host, what), []).append(rank)
    for (_, what), ranks in by_text.items():
        yield f"host memory is short: {rank_texts(ranks, readings)} works with {what}"
