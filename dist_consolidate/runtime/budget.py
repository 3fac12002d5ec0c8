"""How much memory a run may use: the size of a bucket, and how many are held at once."""

from __future__ import annotations

import collections
import dataclasses
import socket

import torch

from dist_consolidate.errors import ResourceError
from dist_consolidate.runtime.world import World
from dist_consolidate.units import format_bytes

CPU_BUCKET_BYTES = 16 * 10**6
_MIN_GPU_BUCKET_BYTES, _MAX_GPU_BUCKET_BYTES = 16 * 2**20, 2**28
# Of what is free on the device, leave the rest to fragmentation and to NCCL's own buffers.
_GPU_SHARE = 0.5
_CPU_STAGING_BYTES, _GPU_STAGING_BYTES = 4 * 2**20, 16 * 2**20
_CPU_TABLES = 5
_MIN_TABLES = 4  # one being read, one read, one exchanged, one made into output
_CPU_THREADS, _GPU_THREADS = 2, 4


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Memory limits of this run, the same on every rank.

    Attributes:
        bucket_bytes: What one round moves, all ranks together.
        staging_bytes: Size of one staging buffer in front of the writer.
        device_bytes: Bytes of device memory that buckets may take, or ``None`` on the CPU, where
            a few buckets are held.
    """

    bucket_bytes: int
    staging_bytes: int
    device_bytes: int | None

    @property
    def num_threads(self) -> int:
        """Threads that read, and threads that write."""
        return _CPU_THREADS if self.device_bytes is None else _GPU_THREADS

    @property
    def num_staging(self) -> int:
        """Staging buffers: one for each writing thread, one being filled, one to spare."""
        return self.num_threads + 2

    def num_tables(self, table_bytes: int, num_buckets: int) -> int:
        """Tell how many buckets to hold at once: all of them, where the device has room.

        Args:
            table_bytes: What a rank holds of one bucket.
            num_buckets: Buckets in the run.

        Returns:
            At least 4.
        """
        if self.device_bytes is None or not table_bytes:
            return _CPU_TABLES
        room = self.device_bytes - self.num_staging * self.staging_bytes
        return max(_MIN_TABLES, min(room // table_bytes, num_buckets))

    def held_bytes(self, table_bytes: int, num_buckets: int) -> int:
        """Tell what buckets and staging buffers take together.

        Args:
            table_bytes: What a rank holds of one bucket.
            num_buckets: Buckets in the run.
        """
        tables = self.num_tables(table_bytes, num_buckets) * table_bytes
        return tables + self.num_staging * self.staging_bytes


def make_budget(world: World, bucket_bytes: int | None) -> Budget:
    """Agree on the memory limits.

    Args:
        world: This rank.
        bucket_bytes: What the user asked for, or ``None``.

    Returns:
        The budget, equal on every rank.

    Raises:
        ResourceError: If a device has too little memory for the bucket.
    """
    if world.device.type == "cpu":
        return Budget(bucket_bytes or CPU_BUCKET_BYTES, _CPU_STAGING_BYTES, None)
    here = (socket.gethostname(), world.device.index)
    told = world.control.exchange((here, _free_device_bytes(world.device)))
    # Ranks that share a device share what is free on it.
    sharing = collections.Counter(place for place, _ in told)
    free_bytes = min(free // sharing[place] for place, free in told)
    usable = int(free_bytes * _GPU_SHARE)
    if not world.data_group_carries_device:
        bucket_bytes = bucket_bytes or _MIN_GPU_BUCKET_BYTES
    chosen = bucket_bytes or max(_MIN_GPU_BUCKET_BYTES, min(usable // 8, _MAX_GPU_BUCKET_BYTES))
    budget = Budget(chosen, _GPU_STAGING_BYTES, usable)
    need = _MIN_TABLES * chosen + budget.num_staging * _GPU_STAGING_BYTES
    if need > free_bytes:
        raise ResourceError(
            f"a bucket of {format_bytes(chosen)} needs {format_bytes(need)} of device memory, but "
            f"only {format_bytes(free_bytes)} are free on some rank; use a smaller --bucket-size"
        )
    return budget


def _free_device_bytes(device: torch.device) -> int:
    module = torch.get_device_module(device)
    free_bytes, _total = module.mem_get_info(device)
    return int(free_bytes)
