"""How much memory a run may use: the size of a bucket and how many are read ahead."""

from __future__ import annotations

import collections
import dataclasses
import socket

import torch

from dist_consolidate.errors import ResourceError
from dist_consolidate.runtime.world import World
from dist_consolidate.units import format_bytes

CPU_BUCKET_BYTES = 32 * 10**6
_MIN_GPU_BUCKET_BYTES, _MAX_GPU_BUCKET_BYTES = 16 * 2**20, 2**30
# Of what is free on the device, leave the rest to fragmentation and to NCCL's own buffers.
_GPU_SHARE = 0.5
_CPU_STAGING_BYTES, _GPU_STAGING_BYTES = 8 * 2**20, 32 * 2**20
NUM_STAGING = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Memory limits of this run, the same on every rank.

    Attributes:
        bucket_bytes: What one round moves, all ranks together.
        staging_bytes: Size of one staging buffer in front of the writer.
        device_bytes: Bytes of device memory that rows and buckets may take, or ``None`` on the
            CPU, where the read-ahead is one bucket.
    """

    bucket_bytes: int
    staging_bytes: int
    device_bytes: int | None

    def num_slots(self, slot_bytes: int, gathered_bytes: int, num_buckets: int) -> int:
        """Tell how many buckets' rows to hold at once: all of them, where the device has room.

        Args:
            slot_bytes: Rows of one bucket on this rank.
            gathered_bytes: A gathered bucket on this rank.
            num_buckets: Buckets in the run.

        Returns:
            At least 2: one being moved, one being read.
        """
        if self.device_bytes is None or not slot_bytes:
            return 2
        room = self.device_bytes - gathered_bytes - NUM_STAGING * self.staging_bytes
        return max(2, min(room // slot_bytes, num_buckets))


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
    chosen = bucket_bytes or max(_MIN_GPU_BUCKET_BYTES, min(usable // 8, _MAX_GPU_BUCKET_BYTES))
    # A bucket is held as rows twice, gathered once, and stands in front of the writer in part.
    need = 3 * chosen + NUM_STAGING * _GPU_STAGING_BYTES
    if need > free_bytes:
        raise ResourceError(
            f"a bucket of {format_bytes(chosen)} needs {format_bytes(need)} of device memory, but "
            f"only {format_bytes(free_bytes)} are free on some rank; use a smaller --bucket-size"
        )
    return Budget(chosen, _GPU_STAGING_BYTES, usable)


def _free_device_bytes(device: torch.device) -> int:
    module = torch.get_device_module(device)
    free_bytes, _total = module.mem_get_info(device)
    return int(free_bytes)
