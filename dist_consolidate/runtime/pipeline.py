"""The pipeline: read ahead, exchange, assemble and cast, write behind.

Threads read rows into tables, the main thread starts the exchanges and makes output of what has
arrived, and threads write. Buffers go round and are given back by whoever is last to use them, so
that memory is constant and nobody runs ahead of the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.crc_pieces import ReadCrcs
from dist_consolidate.errors import Caught, LostError
from dist_consolidate.plan.buckets import Phase
from dist_consolidate.plan.owners import Owners
from dist_consolidate.plan.ranges import Finished
from dist_consolidate.runtime.assemble import Assembler, Moved, RowOrder
from dist_consolidate.runtime.budget import Budget
from dist_consolidate.runtime.buffers import Pool, Table
from dist_consolidate.runtime.clock import Clock
from dist_consolidate.runtime.collector import collector_paused
from dist_consolidate.runtime.digests import Digests
from dist_consolidate.runtime.earlier import Earlier, LookBack
from dist_consolidate.runtime.exchange import Exchange
from dist_consolidate.runtime.journal import Journal, JournalPlace
from dist_consolidate.runtime.loader import Load, Loader
from dist_consolidate.runtime.numa import kept_near
from dist_consolidate.runtime.ownership import Ownership, Place
from dist_consolidate.runtime.placement import Placement, place_rows
from dist_consolidate.runtime.results import MoveResult
from dist_consolidate.runtime.staging import Staging
from dist_consolidate.runtime.transport import Transport
from dist_consolidate.runtime.world import World
from dist_consolidate.runtime.writer import Writer


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What is to be moved; the same on every rank.

    Attributes:
        folder: All folders the shards lie in.
        file_bytes: Size of each shard.
        phases: Buckets.
        tensors: What the assembler must know, by index in the plan.
        files: Output files, created with their full size.
        places: For each tensor, every place its bytes go to.
        writers: Ranks that write.
        owners: Which of them writes which ranges of the files.
        checksums: Note a CRC-32 of everything that is written.
        visible: For each rank, the shards it sees.
        digests: Told of everything that is written here.
        journals: Where to claim what is written, and what an earlier run has finished.
        checks_source: Note a CRC-32 of everything that is read.
    """

    folder: Path | Sequence[Path]
    file_bytes: Mapping[str, int]
    phases: Sequence[Phase]
    tensors: Sequence[Moved]
    files: Sequence[Path]
    places: Sequence[Sequence[Place]]
    writers: Sequence[int]
    owners: Owners
    checksums: bool
    visible: Sequence[frozenset[str]]
    digests: Digests | None = None
    journals: JournalPlace | None = None
    checks_source: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Lane:
    """What is the same for all buckets of a phase, found out once.

    Attributes:
        phase: The phase.
        placement: Which rank has which rows.
        order: Where the rows of all lie in a table.
        first: Where this rank's rows begin in its tables.
        num_rows: Rows of this rank's tables.
    """

    phase: Phase
    placement: Placement
    order: RowOrder
    first: int
    num_rows: int

    @property
    def table_bytes(self) -> int:
        """What a table holds of a bucket."""
        return self.num_rows * self.phase.row_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One round: the bucket, and who write of it."""

    lane: _Lane
    bucket: int
    writers: tuple[int, ...]


# A bucket and where its rows are.
_Held = tuple[_Step, Table]


@dataclasses.dataclass(frozen=True, slots=True)
class _Tools:
    """What a rank moves with."""

    tables: Pool[Table]
    loader: Loader
    exchange: Exchange
    writer: Writer | None
    assembler: Assembler | None


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
def _undisturbed() -> Iterator[None]:
    """Let torch copy in this thread alone, and keep the garbage collector still.

    The readers and the writers want the other cores: torch's helper threads would spin at the end
    of every copy, and on a busy machine be waited for.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with collector_paused():
            yield
    finally:
        torch.set_num_threads(num_threads)


def _kept_near(world: World) -> contextlib.AbstractContextManager[None]:
    """Keep this thread, and those that it starts, on the cores near the rank's device."""
    if not world.has_accelerator:
        return contextlib.nullcontext()
    from dist_consolidate.runtime.device_memory import device_cpus

    return kept_near(device_cpus(world.device))


class _Mover:
    def __init__(self, work: Work, world: World, transport: Transport, budget: Budget) -> None:
        self.work, self.world, self.transport, self.budget = work, world, transport, budget
        self.writes = world.rank in work.writers
        self.lanes = [self._lane(phase) for phase in work.phases]
        finished = Finished() if work.journals is None else work.journals.finished
        self.earlier = Earlier(finished, work.phases, work.tensors, work.places)
        num_buckets = sum(phase.num_buckets for phase in work.phases)
        self.num_steps = num_buckets - len(self.earlier.buckets)
        self.clock = Clock(world.device)
        self.crcs = ReadCrcs() if work.checks_source else None
        self.ownership = Ownership(
            work.owners,
            work.writers,
            world.rank,
            work.places,
            [moved.output_dtype.itemsize for moved in work.tensors],
        )
        self.look_back = LookBack(
            self.earlier,
            self.ownership,
            work.tensors,
            work.files,
            checksums=work.checksums,
        )

    def _lane(self, phase: Phase) -> _Lane:
        placement = place_rows(phase, self.work.visible)
        order = RowOrder(placement.position(phase.num_rows), self.world.device)
        width = placement.width
        if self.transport.receives(self.writes):
            size = len(placement.rows)
            return _Lane(phase, placement, order, self.world.rank * width, size * width)
        return _Lane(phase, placement, order, 0, width)

    def _steps(self) -> Iterator[_Step]:
        """Give the rounds, the same on every rank but for its own lanes."""
        buckets = (
            (lane, bucket)
            for index, lane in enumerate(self.lanes)
            for bucket in range(lane.phase.num_buckets)
            if (index, bucket) not in self.earlier.buckets
        )
        for lane, bucket in buckets:
            yield _Step(lane, bucket, self.ownership.writers(lane.phase.pieces(bucket)))

    def run(self) -> MoveResult:
        caught = Caught()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_undisturbed())
            # Before anything is allocated: pages lie on the node of whoever touches them first.
            stack.enter_context(_kept_near(self.world))
            with caught:
                tools = self._open(stack)
            self.world.control.agree(caught.error)
            self._look_back()
            try:
                self._run_steps(tools)
            except LostError:
                tools.exchange.is_lost = True
                raise
            writer, assembler = tools.writer, tools.assembler
            return MoveResult(
                tools.loader.num_bytes_read,
                writer.num_bytes_written if writer else 0,
                (*(writer.checksums if writer else ()), *self.look_back.checksums),
                frozenset(self.look_back.overflowed).union(
                    assembler.overflowed if assembler else ()
                ),
                self.clock.totals(),
                read_crcs=self.crcs.ranges() if self.crcs else {},
            )

    def _look_back(self) -> None:
        """Find out of what is left out what is told of the rest."""
        look = self.look_back
        if look.is_needed:
            action = look.run if self.writes else _nothing
            self.world.control.together(action, look.stop, lambda: look.num_done)

    def _open(self, stack: contextlib.ExitStack) -> _Tools:
        """Allocate all memory and start the threads; the stack ends them."""
        budget, device = self.budget, self.world.device
        table_bytes = max((lane.table_bytes for lane in self.lanes), default=0)
        num_tables = budget.num_tables(table_bytes, self.num_steps)
        tables = Pool(Table(table_bytes, device) for _ in range(num_tables))
        writer = assembler = None
        if self.writes:
            journals, files = self.work.journals, self.work.files
            journal = None if journals is None else Journal(journals, self.world.rank, files)
            writer = Writer(
                self.work.files,
                self.work.places,
                ownership=self.ownership,
                checksums=self.work.checksums,
                num_threads=_num_writers(
                    budget.num_threads, len(self.work.files), checksums=self.work.checksums
                ),
                device=device,
                clock=self.clock,
                digests=self.work.digests,
                journal=journal,
            )
            stack.callback(writer.close)
            assembler = self._make_assembler(writer)
        loader = self._make_loader(tables)
        stack.callback(loader.stop)
        exchange = Exchange(self.transport, device, self.clock)
        stack.callback(exchange.drain)
        return _Tools(tables, loader, exchange, writer, assembler)

    def _make_assembler(self, writer: Writer) -> Assembler:
        budget, device = self.budget, self.world.device
        staging = Staging(budget.num_staging, budget.staging_bytes, device, self.clock)
        sorting = (lane.table_bytes for lane in self.lanes if not lane.order.is_plain)
        return Assembler(
            self.work.tensors,
            staging,
            writer.submit,
            concerns=self.ownership.concerns,
            sorting_bytes=max(sorting, default=0),
            clock=self.clock,
        )

    def _make_loader(self, tables: Pool[Table]) -> Loader:
        work, rank = self.work, self.world.rank
        loads = (
            Load(
                step.lane.phase,
                step.bucket,
                step.lane.placement.rows[rank],
                step.lane.first * step.lane.phase.row_bytes,
            )
            for step in self._steps()
        )
        files = {
            file
            for lane in self.lanes
            for row in lane.placement.rows[rank]
            for file in lane.phase.row_files(row)
        }
        return Loader(
            lambda: ShardReader(work.folder, work.file_bytes, self.crcs),
            loads,
            tables,
            num_threads=_num_readers(self.budget.num_threads, len(files)),
            device=self.world.device,
            clock=self.clock,
        )

    def _run_steps(self, tools: _Tools) -> None:
        """Go through all rounds; an error here is told in the next one and ends every rank.

        While one bucket waits for the word that all ranks have theirs, the one before it travels
        and the one before that is made into output. An exchange is started on every rank or on
        none: between that word and the start nothing can fail for a disk's or a buffer's sake.
        """
        control, caught = self.world.control, Caught()
        ready: _Held | None = None
        flying: _Held | None = None
        for step in self._steps():
            with caught:
                table = tools.loader.next()
            if caught.error is not None:
                self._keep_up(ready, tools)
            control.beat(caught.error, lag=1)
            with caught:
                self._advance(ready, flying, tools)
            ready, flying = (step, table), ready
        control.flush()
        with caught:
            self._advance(ready, flying, tools)
            self._advance(None, ready, tools)
            if tools.assembler and tools.writer:
                tools.assembler.flush()
                tools.writer.finish()
        control.agree(caught.error)

    def _keep_up(self, ready: _Held | None, tools: _Tools) -> None:
        """Start what the other ranks start before they hear of an error here."""
        self.world.control.flush()
        with Caught():
            self._advance(ready, None, tools)

    def _advance(self, ready: _Held | None, flying: _Held | None, tools: _Tools) -> None:
        """Start one bucket's exchange, then wait for another's."""
        if ready:
            self._start(*ready, tools)
        if flying:
            self._land(*flying, tools)

    def _start(self, step: _Step, table: Table, tools: _Tools) -> None:
        lane = step.lane
        rows = table.rows(lane.num_rows, lane.phase.row_bytes)
        tools.exchange.start(table, rows, lane.first, lane.placement, step.writers)

    def _land(self, step: _Step, table: Table, tools: _Tools) -> None:
        """Wait for a bucket's exchange; its writer makes output of it."""
        tools.exchange.finish(table)
        give_back = functools.partial(self._give_back, tools.tables, table)
        if self.world.rank in step.writers and tools.assembler:
            phase = step.lane.phase
            pieces = phase.pieces(step.bucket)
            tools.assembler.take(table, phase.row_bytes, step.lane.order, pieces, give_back)
        else:
            give_back()

    def _give_back(self, tables: Pool[Table], table: Table) -> None:
        if table.view is None:
            table.released.record(torch.accelerator.current_stream(self.world.device))
        tables.give_back(table)


def _nothing() -> None:
    """Do nothing: what a rank does that writes nothing."""


def _num_writers(wanted: int, num_files: int, *, checksums: bool) -> int:
    """Only one where there is one file: the kernel lets one thread at a time write into a file.

    A second one would spend a core on waiting for the first, unless it has checksums to compute.
    """
    return wanted if checksums else max(1, min(wanted, num_files))


def _num_readers(wanted: int, num_files: int) -> int:
    """Fewer where so many shards are read that every thread's descriptors would be too many."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(wanted, limit // (2 * max(num_files, 1))))
