"""The exchange of ``--transport allgather`` without the tool around it, timed.

    torchrun --nproc_per_node=2 -m tests.bench.bare_collective NUM_BYTES DEVICE [OPTION...]

Gathers as many bytes on every rank, in buckets of the size that a run takes and two in flight, as
there: with the backend's own all-gather, or with ``--exchange`` as the transport does it, which on
CPUs is another way. Nothing is read, assembled or written.

With ``--beside NUM_BYTES OUTPUT_DIR SHARD...`` each rank reads its shards meanwhile and rank 0
writes that many bytes, each in a thread of its own that waits for nobody: what is left between that
time and a run's is the run's own overhead.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_consolidate.runtime.budget import Wanted, make_budget
from dist_consolidate.runtime.placement import Placement
from dist_consolidate.runtime.transport import AllGather, Transport, make_transport
from dist_consolidate.runtime.world import World, join_world
from dist_consolidate.runtime.writeback import start_writeback
from dist_consolidate.units import parse_size
from tests.bench import page_cache
from tests.bench.self_proc import memory_bytes, tell

_IN_FLIGHT = 2
_CHUNK_BYTES = 4 << 20


def exchange_all(world: World, transport: Transport, num_bytes: int, bucket_bytes: int) -> None:
    """Exchange that many bytes, all ranks together."""
    on_device = world.device.type != "cpu" and world.data_group_carries_device
    device = world.device if on_device else torch.device("cpu")
    row_bytes = max(bucket_bytes // world.size, 1)
    tables = [
        torch.ones((world.size, row_bytes), dtype=torch.uint8, device=device)
        for _ in range(_IN_FLIGHT)
    ]
    placement = Placement(tuple((rank,) for rank in range(world.size)), 1)
    flying: list[list[Any]] = [[] for _ in tables]
    mine_bytes = -(-num_bytes // world.size)
    for index, at in enumerate(range(0, mine_bytes, row_bytes)):
        length = min(row_bytes, mine_bytes - at)
        turn = index % _IN_FLIGHT
        _wait(flying[turn])
        table = tables[turn].view(-1)[: world.size * length].view(world.size, length)
        flying[turn] = transport.start(table, world.rank, placement, range(world.size))
    for works in flying:
        _wait(works)
    if on_device:
        torch.accelerator.synchronize(device)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def write_all(folder: Path, num_bytes: int) -> None:
    """Write that many bytes into one file and bring them to the disk."""
    buffer = memoryview(bytes(b"x" * _CHUNK_BYTES))
    folder.mkdir()
    descriptor = os.open(folder / "copy", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.truncate(descriptor, num_bytes)
    for at in range(0, num_bytes, _CHUNK_BYTES):
        os.pwrite(descriptor, buffer[: min(_CHUNK_BYTES, num_bytes - at)], at)
        start_writeback(descriptor, at, _CHUNK_BYTES)
    for each in (descriptor, os.open(folder, os.O_RDONLY)):
        os.fsync(each)


@contextlib.contextmanager
def beside(world: World, arguments: Sequence[str]) -> Iterator[None]:
    """Read and write in threads during the block; it ends when they have."""
    tasks: list[Callable[[], None]] = []
    if arguments:
        shards = [Path(text) for text in arguments[2:]][world.rank :: world.size]
        tasks.append(lambda: page_cache.warm(shards))
        if world.rank == 0:
            tasks.append(lambda: write_all(Path(arguments[1]), int(arguments[0])))
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def main(arguments: Sequence[str]) -> None:
    """Join the other ranks, exchange, and print the seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("num_bytes", type=int)
    parser.add_argument("device")
    parser.add_argument("--bucket-size", type=parse_size)
    parser.add_argument("--exchange", action="store_true")
    parser.add_argument("--beside", nargs="+", default=[])
    asked = parser.parse_args(arguments)
    with join_world(asked.device, launch=True) as world:
        if world.size < 2:
            raise SystemExit("bare_collective: needs at least two ranks")
        bucket_bytes = make_budget(world, Wanted(asked.bucket_size)).budget.bucket_bytes
        transport = (
            make_transport("allgather", world) if asked.exchange else AllGather(world.data_group)
        )
        exchange_all(world, transport, world.size, world.size)  # opens the connections
        dist.barrier(world.data_group)
        started = time.perf_counter()
        with beside(world, asked.beside):
            exchange_all(world, transport, asked.num_bytes, bucket_bytes)
        dist.barrier(world.data_group)
        took_sec = time.perf_counter() - started
    tell(
        {
            "moving_sec": took_sec,
            "peak_bytes": memory_bytes("VmHWM"),
            "ranks": [{"stages": [["exchange", asked.num_bytes, took_sec]]}],
        }
    )


if __name__ == "__main__":
    main(sys.argv[1:])
