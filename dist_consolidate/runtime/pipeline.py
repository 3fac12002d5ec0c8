"""The pipeline: read ahead, exchange, assemble and cast, write behind.

A loader thread reads rows onto the device, the main thread runs the transport and the assembler,
and a writer thread writes. Each hands buffers to the next and gets them back, so that memory is
constant and nobody runs ahead of the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.errors import Caught
from dist_consolidate.plan.buckets import Phase
from dist_consolidate.runtime.assemble import Assembler, Moved
from dist_consolidate.runtime.budget import NUM_STAGING, Budget
from dist_consolidate.runtime.buffers import Slot
from dist_consolidate.runtime.loader import Load, Loader, Row
from dist_consolidate.runtime.placement import Placement, place_rows
from dist_consolidate.runtime.results import MoveResult
from dist_consolidate.runtime.transport import Transport
from dist_consolidate.runtime.world import World
from dist_consolidate.runtime.writer import Place, Writer

# How many buckets a rank may be ahead of the slowest one where nothing is exchanged.
_DIRECT_LAG = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What is to be moved; the same on every rank.

    Attributes:
        folder: The tag folder.
        file_bytes: Size of each shard.
        phases: Buckets.
        tensors: What the assembler must know, by index in the plan.
        files: Output files, created with their full size.
        places: For each tensor, every place its bytes go to.
        num_writers: Ranks that write: the first ones.
        checksums: Note a CRC-32 of everything that is written.
        visible: For each rank, the shards it sees.
    """

    folder: Path
    file_bytes: Mapping[str, int]
    phases: Sequence[Phase]
    tensors: Sequence[Moved]
    files: Sequence[Path]
    places: Sequence[Sequence[Place]]
    num_writers: int
    checksums: bool
    visible: Sequence[frozenset[str]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One round on this rank: the bucket it takes part in (if any), and who writes it."""

    phase: int
    bucket: int
    writer: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Tools:
    """What a rank moves with: its threads and the room for a gathered bucket."""

    reader: ShardReader
    loader: Loader
    out: torch.Tensor
    writer: Writer | None


def move(work: Work, world: World, transport: Transport, budget: Budget) -> MoveResult:
    """Move every byte of the plan.

    Args:
        work: What to move.
        world: This rank.
        transport: How rows travel.
        budget: Memory limits.

    Returns:
        What this rank did.

    Raises:
        ConsolidateError: If any rank failed; every rank raises.
    """
    with (caught := Caught()):
        mover = _Mover(work, world, transport, budget)
    world.control.agree(caught.error)
    return mover.run()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch copy in this thread alone: the loader and the writer want the other cores.

    Its helper threads would spin at the end of every copy, and on a busy machine be waited for.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Mover:
    def __init__(self, work: Work, world: World, transport: Transport, budget: Budget) -> None:
        self.work, self.world, self.transport, self.budget = work, world, transport, budget
        self.placements = [self._place(phase) for phase in work.phases]
        self.positions = [
            placement.position(phase.num_rows)
            for phase, placement in zip(work.phases, self.placements, strict=True)
        ]
        self.steps = list(self._steps())
        self.writes = world.rank < work.num_writers

    def _place(self, phase: Phase) -> Placement:
        if self.transport.lanes:
            return place_rows(phase, self.work.visible)
        rows = tuple(range(phase.num_rows))
        return Placement((rows,), phase.num_rows)

    def _rows(self, phase: int) -> tuple[int, ...]:
        placement = self.placements[phase]
        return placement.rows[self.world.rank if self.transport.lanes else 0]

    def _steps(self) -> Iterator[_Step | None]:
        """Give the rounds; each rank has equally many, some of them idle."""
        numbered = enumerate(
            (index, bucket)
            for index, phase in enumerate(self.work.phases)
            for bucket in range(phase.num_buckets)
        )
        if self.transport.lanes:
            for number, (phase, bucket) in numbered:
                yield _Step(phase, bucket, number % self.work.num_writers)
            return
        mine = [pair for number, pair in numbered if self._is_mine(number)]
        total = sum(phase.num_buckets for phase in self.work.phases)
        for index in range(-(-total // self.work.num_writers)):
            yield _Step(*mine[index], self.world.rank) if index < len(mine) else None

    def _is_mine(self, number: int) -> bool:
        return number % self.work.num_writers == self.world.rank

    def run(self) -> MoveResult:
        caught = Caught()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_one_thread())
            with caught:
                tools = self._open(stack)
            self.world.control.agree(caught.error)
            overflowed = self._run_steps(tools)
            return MoveResult(
                tools.reader.num_bytes_read,
                tools.writer.num_bytes_written if tools.writer else 0,
                tuple(tools.writer.checksums) if tools.writer else (),
                overflowed,
                (),
            )

    def _open(self, stack: contextlib.ExitStack) -> _Tools:
        """Allocate all memory and start the threads; the stack ends them."""
        work, device = self.work, self.world.device
        reader = ShardReader(work.folder, work.file_bytes)
        out = torch.empty(self._room_bytes(), dtype=torch.uint8, device=device)
        writer = None
        if self.writes:
            slots = [Slot(self.budget.staging_bytes, device) for _ in range(NUM_STAGING)]
            writer = Writer(
                work.files, work.places, slots=slots, checksums=work.checksums, device=device
            )
            stack.callback(writer.close)
        loader = self._make_loader(reader)
        stack.callback(loader.stop)
        return _Tools(reader, loader, out, writer)

    def _make_loader(self, reader: ShardReader) -> Loader:
        work = self.work
        sizes = [
            placement.width * phase.row_bytes
            for phase, placement in zip(work.phases, self.placements, strict=True)
        ]
        slot_bytes = max(sizes, default=0)
        loads = (
            Load(work.phases[step.phase], step.bucket, self._rows(step.phase))
            for step in self.steps
            if step is not None
        )
        num_slots = self.budget.num_slots(slot_bytes, self._room_bytes(), len(self.steps))
        return Loader(
            reader, loads, num_slots=num_slots, slot_bytes=slot_bytes, device=self.world.device
        )

    def _room_bytes(self) -> int:
        if not self.transport.needs_room(self.writes):
            return 0
        return max(
            (
                self.world.size * placement.width * phase.row_bytes
                for phase, placement in zip(self.work.phases, self.placements, strict=True)
            ),
            default=0,
        )

    def _run_steps(self, tools: _Tools) -> frozenset[int]:
        """Go through all rounds; an error here is told in the next one and ends every rank."""
        writer, loader = tools.writer, tools.loader
        assembler = Assembler(self.work.tensors, writer.acquire, writer.submit) if writer else None
        control, lag = self.world.control, 0 if self.transport.lanes else _DIRECT_LAG
        caught = Caught()
        for step in self.steps:
            row: Row | None = None
            with caught:
                row = loader.next() if step is not None and caught.error is None else None
            control.beat(caught.error, lag)
            if step is None or row is None:
                continue
            with caught:
                self._move_bucket(step, row, tools.out, assembler)
                loader.give_back(row)
        control.flush()
        with caught:
            if caught.error is None and assembler is not None and writer is not None:
                assembler.flush()
                writer.finish()
        control.agree(caught.error)
        return frozenset(assembler.overflowed if assembler else ())

    def _move_bucket(
        self, step: _Step, row: Row, out: torch.Tensor, assembler: Assembler | None
    ) -> None:
        phase, placement = self.work.phases[step.phase], self.placements[step.phase]
        row.wait()
        num_bytes = placement.width * phase.row_bytes
        rows = row.tensor[:num_bytes].view(-1, phase.row_bytes)
        table = self.transport.exchange(rows, out, placement, step.writer)
        if table is not None and assembler is not None:
            assembler.take(table, self.positions[step.phase], phase.pieces(step.bucket))
