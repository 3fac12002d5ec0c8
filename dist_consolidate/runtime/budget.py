"""How much memory a run may use: the size of a bucket, and how many are held at once.

Nothing is taken on trust: what is free is read on every rank, ranks that share it share what is
left, and too little is said before anything is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dist_consolidate.errors import Caught, ConsolidateError
from dist_consolidate.runtime.host_memory import read_host
from dist_consolidate.runtime.rooms import (
    Allowance,
    Kind,
    Lack,
    Reading,
    allowances,
    beyond_notes,
    lack_error,
    rank_texts,
)
from dist_consolidate.runtime.world import World
from dist_consolidate.units import Amount, format_bytes

CPU_BUCKET_BYTES = 16 * 10**6
# What one thread reads at a time: large enough for a disk, small enough to keep several at work.
CHUNK_BYTES = 4 << 20
_MIN_GPU_BUCKET_BYTES, _MAX_GPU_BUCKET_BYTES = 16 * 2**20, 2**28
# Smaller ones cost more in calls than they save.
_LEAST_BUCKET_BYTES = _LEAST_STAGING_BYTES = 10**6
_CPU_STAGING_BYTES, _GPU_STAGING_BYTES = 4 * 2**20, 16 * 2**20
_CPU_TABLES = 5
_MIN_TABLES = 4  # one being read, one read, one exchanged, one made into output
_CPU_THREADS, _GPU_THREADS = 2, 4
# Beside the buffers: stacks, working arrays, headers, what torch and gloo allocate as they go.
OVERHEAD_BYTES = 12 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asks for.

    Attributes:
        bucket_bytes: Size of a bucket; ``None`` for a choice.
        device: Device memory for each rank; ``None`` for a choice.
        host: Host memory for each rank; ``None`` for a choice.
    """

    bucket_bytes: int | None = None
    device: Amount | None = None
    host: Amount | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Memory limits of this run, the same on every rank.

    Attributes:
        bucket_bytes: What one round moves, all ranks together.
        staging_bytes: Size of one staging buffer in front of the writer.
        device_bytes: Bytes of device memory that buckets may take, or ``None`` on the CPU, where
            a few buckets are held.
        host_bytes: Bytes of host memory that buffers may take, or ``None`` for as many as need be.
        is_via_host: Whether buckets of a device are exchanged through host memory.
    """

    bucket_bytes: int
    staging_bytes: int
    device_bytes: int | None
    host_bytes: int | None = None
    is_via_host: bool = False

    @property
    def num_threads(self) -> int:
        """Threads that read, and threads that write."""
        return _CPU_THREADS if self.device_bytes is None else _GPU_THREADS

    @property
    def num_staging(self) -> int:
        """Staging buffers: one for each writing thread, one being filled, one to spare."""
        return self.num_threads + 2

    @property
    def _all_staging_bytes(self) -> int:
        return self.num_staging * self.staging_bytes

    def num_tables(self, table_bytes: int, num_buckets: int) -> int:
        """Tell how many buckets to hold at once: all of them, where the device has room.

        Args:
            table_bytes: What a rank holds of one bucket.
            num_buckets: Buckets in the run.

        Returns:
            At least 4.
        """
        most = _CPU_TABLES if self.device_bytes is None else num_buckets
        limit = self.host_bytes if self.device_bytes is None else self.device_bytes
        if limit is None or not table_bytes:
            return _CPU_TABLES
        # One more may be needed to sort rows in.
        room = limit - self._all_staging_bytes - table_bytes
        if self.device_bytes is None:
            room -= OVERHEAD_BYTES
        return max(_MIN_TABLES, min(room // table_bytes, most))

    def held_bytes(self, table_bytes: int, num_buckets: int) -> int:
        """Tell what buckets and staging buffers take together, on device and host.

        Args:
            table_bytes: What a rank holds of one bucket.
            num_buckets: Buckets in the run.
        """
        tables = self.num_tables(table_bytes, num_buckets) * table_bytes
        on_host = 0 if self.device_bytes is None else self._pinned_bytes(table_bytes)
        return tables + self._all_staging_bytes + on_host

    def need_bytes(self, kind: Kind, table_bytes: int) -> int:
        """Tell what a rank needs at least.

        Args:
            kind: Of which memory.
            table_bytes: What a rank holds of one bucket.
        """
        buckets = (_MIN_TABLES + 1) * table_bytes + self._all_staging_bytes
        if kind == "device":
            return buckets
        return OVERHEAD_BYTES + (
            buckets if self.device_bytes is None else self._pinned_bytes(table_bytes)
        )

    def _pinned_bytes(self, table_bytes: int) -> int:
        """Host memory beside a device: what is read, what is written, what is exchanged."""
        read = 2 * self.num_threads * CHUNK_BYTES
        return read + self._all_staging_bytes + (table_bytes if self.is_via_host else 0)


class Settled(NamedTuple):
    """What all ranks have agreed on.

    Attributes:
        budget: The budget.
        limits: By rank, what its memory is bounded by.
        notes: What people should hear of.
    """

    budget: Budget
    limits: tuple[tuple[Allowance, ...], ...]
    notes: tuple[str, ...]


def read_all(world: World, *, with_device: bool) -> list[Reading]:
    """Read what every rank's machine has.

    Args:
        world: This rank.
        with_device: Whether weights pass through its device.

    Returns:
        By rank, the same on every rank.

    Raises:
        ConsolidateError: If a device cannot be asked; every rank raises.
    """
    with (caught := Caught()):
        reading = read_host()
        if with_device:
            from dist_consolidate.runtime.device_memory import device_room

            room = device_room(world.device, reading.machine)
            reading = dataclasses.replace(reading, device_room=room)
    world.control.agree(caught.error)
    return world.control.exchange(reading)


def make_budget(
    world: World, wanted: Wanted, table_bytes: Callable[[int], int] = lambda size: size
) -> Settled:
    """Agree on the memory limits.

    Args:
        world: This rank.
        wanted: What the user asked for.
        table_bytes: Tells what a rank holds at most of a bucket of some size.

    Returns:
        The budget, equal on every rank.

    Raises:
        ResourceError: If a device or a host has too little memory; every rank raises.
    """
    readings = read_all(world, with_device=world.has_accelerator)
    with (caught := Caught()):
        return _Fitting(world, wanted, table_bytes, readings).settled()
    error = caught.error
    if not (isinstance(error, ConsolidateError) and error.agreed):
        world.control.agree(error)
    assert error is not None
    raise error


class _Fitting:
    def __init__(
        self,
        world: World,
        wanted: Wanted,
        table_bytes: Callable[[int], int],
        readings: Sequence[Reading],
    ) -> None:
        self._world, self._wanted, self._readings = world, wanted, readings
        self._table_bytes = table_bytes
        size = len(readings)
        self._kinds: tuple[Kind, ...] = ("device", "host") if world.has_accelerator else ("host",)
        asked = {"device": wanted.device, "host": wanted.host}
        self._allowed = {
            kind: allowances(readings, kind, asked[kind], size) for kind in self._kinds
        }
        self._users = [""] * size

    def settled(self) -> Settled:
        """Choose the largest buckets that fit, or say why none do."""
        lacks = self._unreal()
        if not lacks:
            for usual in (True, False) if self._wanted.bucket_bytes is None else (False,):
                for budget in self._candidates():
                    lacks = self._lacks(budget, usual=usual)
                    if not lacks:
                        return self._done(budget)
        self._ask_who({lack.rank for lack in lacks if lack.allowance.kind == "device"})
        lacks = [
            dataclasses.replace(lack, users=self._users[lack.rank])
            if lack.allowance.kind == "device"
            else lack
            for lack in lacks
        ]
        given = self._wanted.bucket_bytes is not None
        raise lack_error(lacks, self._readings, given=given)

    def _limits(self, kind: Kind, *, usual: bool) -> list[tuple[int, Allowance, int]]:
        """Give each limited rank, its allowance and the bytes that it may take."""
        return [
            (rank, one, one.usual_bytes if usual else one.most_bytes)
            for rank, one in enumerate(self._allowed.get(kind, ()))
            if one is not None
        ]

    def _least(self, kind: Kind) -> int | None:
        return min((limit for _, _, limit in self._limits(kind, usual=True)), default=None)

    def _unreal(self) -> list[Lack]:
        """Find ranks that are allowed more of their device than there is."""
        asked, found = self._wanted.device, []
        if asked is None or asked.num_bytes is None or "device" not in self._kinds:
            return []
        size = len(self._readings)
        for rank in range(size):
            real = allowances(self._readings, "device", None, size)[rank]
            if real is not None and real.most_bytes < asked.num_bytes:
                purpose = f"--device-memory {asked.text}"
                found.append(Lack(rank, asked.num_bytes, purpose, real, is_option=True))
        return found

    def _first_bytes(self) -> int:
        device = self._least("device")
        if device is None:
            return CPU_BUCKET_BYTES
        if not self._world.data_group_carries_device:
            return _MIN_GPU_BUCKET_BYTES
        return max(_MIN_GPU_BUCKET_BYTES, min(device // 8, _MAX_GPU_BUCKET_BYTES))

    def _candidates(self) -> Iterator[Budget]:
        """Give budgets, from the best to the smallest."""
        given = self._wanted.bucket_bytes
        on_device = self._world.has_accelerator
        staging = _GPU_STAGING_BYTES if on_device else _CPU_STAGING_BYTES
        bucket = given or self._first_bytes()
        while True:
            yield self._budget(bucket, staging)
            if given is not None:
                if staging == _LEAST_STAGING_BYTES:
                    return
                staging = _LEAST_STAGING_BYTES
                continue
            if bucket == _LEAST_BUCKET_BYTES:
                return
            bucket = max(bucket // 2, _LEAST_BUCKET_BYTES)
            staging = max(min(staging, bucket), _LEAST_STAGING_BYTES)

    def _budget(self, bucket_bytes: int, staging_bytes: int) -> Budget:
        device = self._least("device") or 0
        return Budget(
            bucket_bytes,
            staging_bytes,
            device if self._world.has_accelerator else None,
            self._least("host"),
            is_via_host=not self._world.data_group_carries_device,
        )

    def _lacks(self, budget: Budget, *, usual: bool) -> list[Lack]:
        table = self._table_bytes(budget.bucket_bytes)
        purpose = f"buckets of {format_bytes(budget.bucket_bytes)} and what goes with them"
        found = []
        for kind in self._kinds:
            need = budget.need_bytes(kind, table)
            for rank, allowance, limit in self._limits(kind, usual=usual):
                if need > limit:
                    found.append(Lack(rank, need, purpose, allowance))
        return found

    def _done(self, budget: Budget) -> Settled:
        low = {
            rank
            for rank, _, limit in self._limits("device", usual=True)
            if limit // 8 < _MAX_GPU_BUCKET_BYTES and self._wanted.device is None
        }
        self._ask_who(low)
        limits = tuple(
            tuple(one for kind in self._kinds if (one := self._allowed[kind][rank]) is not None)
            for rank in range(len(self._readings))
        )
        beyond = beyond_notes(self._readings, self._wanted.host, len(self._readings))
        notes = (*self._shrunk(budget), *self._low_notes(low), *beyond)
        return Settled(budget, limits, notes)

    def _shrunk(self, budget: Budget) -> Iterator[str]:
        first = self._first_bytes()
        if self._wanted.bucket_bytes is None and budget.bucket_bytes < first:
            yield (
                f"memory is short: buckets of {format_bytes(budget.bucket_bytes)} instead of "
                f"{format_bytes(first)}; {self._tightest()}"
            )

    def _tightest(self) -> str:
        """Say of each kind of memory which rank has least."""
        texts = []
        for kind in self._kinds:
            limits = self._limits(kind, usual=False)
            if limits:
                rank, allowance, _ = min(limits, key=lambda item: item[2])
                where = rank_texts([rank], self._readings)
                texts.append(f"{where} can have {allowance.text()}")
        return ", ".join(texts)

    def _low_notes(self, low: set[int]) -> Iterator[str]:
        for rank in sorted(low):
            allowance = self._allowed["device"][rank]
            if allowance is not None and self._users[rank]:
                yield (
                    f"little device memory is free: {rank_texts([rank], self._readings)} can have "
                    f"{allowance.text()}; {self._users[rank]}"
                )

    def _ask_who(self, ranks: set[int]) -> None:
        """Learn who else uses the devices of some ranks; all ranks take part."""
        if not ranks:
            return
        text = ""
        if self._world.rank in ranks:
            from dist_consolidate.runtime.device_memory import device_users

            machine = self._readings[self._world.rank].machine
            pids = {reading.pid for reading in self._readings if reading.machine == machine}
            text = device_users(self._world.device, pids)
        self._users = self._world.control.exchange(text)
