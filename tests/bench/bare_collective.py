"""The collectives of ``--transport allgather`` and nothing else, timed.

    torchrun --nproc_per_node=2 -m tests.bench.bare_collective NUM_BYTES DEVICE [BUCKET_BYTES]

All-gathers as many bytes, in buckets of the size that the transport takes, over the same kind of
process group. Nothing is read, assembled or written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dist_consolidate.runtime.budget import make_budget
from dist_consolidate.runtime.world import World, join_world
from tests.bench.self_proc import memory_bytes, tell


def gather_all(world: World, num_bytes: int, bucket_bytes: int) -> float:
    """Gather, and give the seconds of this rank."""
    on_device = world.device.type != "cpu" and world.data_group_carries_device
    device = world.device if on_device else torch.device("cpu")
    mine_bytes = -(-num_bytes // world.size)
    share_bytes = max(bucket_bytes // world.size, 1)
    part = torch.ones(share_bytes, dtype=torch.uint8, device=device)
    out = torch.empty(part.numel() * world.size, dtype=torch.uint8, device=device)
    # all_gather_into_tensor is deprecated in favour of all_gather_single from torch 2.13 on.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out[: world.size], part[:1], group=world.data_group)  # opens the connections
    dist.barrier(world.data_group)
    started = time.perf_counter()
    for at in range(0, mine_bytes, share_bytes):
        length = min(share_bytes, mine_bytes - at)
        gather(out[: length * world.size], part[:length], group=world.data_group)
    if on_device:
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def main(arguments: Sequence[str]) -> None:
    """Join the other ranks, gather, and print the seconds."""
    num_bytes, device = int(arguments[0]), arguments[1]
    asked_bytes = int(arguments[2]) if len(arguments) > 2 else None
    with join_world(device, launch=True) as world:
        if world.size < 2:
            raise SystemExit("bare_collective: needs at least two ranks")
        bucket_bytes = make_budget(world, asked_bytes).bucket_bytes
        took_sec = gather_all(world, num_bytes, bucket_bytes)
    tell(
        {
            "moving_sec": took_sec,
            "peak_bytes": memory_bytes("VmHWM"),
            "ranks": [{"stages": [["exchange", num_bytes, took_sec]]}],
        }
    )


if __name__ == "__main__":
    main(sys.argv[1:])
