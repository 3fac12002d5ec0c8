"""Choosing how the bytes move, and what each rank has to do for it."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dist_consolidate.digesting import closing_digests, finish_together, make_digests
from dist_consolidate.errors import UsageError
from dist_consolidate.options import Options
from dist_consolidate.output.layout import FileLayout
from dist_consolidate.output_place import OutputPlace, by_rank
from dist_consolidate.plan.direct import FileMap, Share
from dist_consolidate.plan.owners import Owners, deal_out
from dist_consolidate.plan.ranges import Finished
from dist_consolidate.planning import Planned, on_rank_0
from dist_consolidate.report import RankReport
from dist_consolidate.runtime.budget import Wanted, make_budget, read_all
from dist_consolidate.runtime.digests import Digests
from dist_consolidate.runtime.direct import DirectMove, DirectWork, widest_cast
from dist_consolidate.runtime.direct_budget import (
    MAX_THREADS,
    DirectNeeds,
    DirectSettled,
    settle_direct,
)
from dist_consolidate.runtime.journal import Journal, JournalPlace
from dist_consolidate.runtime.results import MoveResult
from dist_consolidate.runtime.rooms import Reading
from dist_consolidate.runtime.world import World

if TYPE_CHECKING:
    import torch

    from dist_consolidate.plan.buckets import Phase
    from dist_consolidate.runtime.pipeline import Work
    from dist_consolidate.runtime.placement import Placement


class Moving(Protocol):
    """A way to move the bytes.

    Attributes:
        transport: Its name.
        writers: Ranks that write, the one that publishes first.
        writes_literals: Whether it writes headers as well, or they must be there before.
        notes: What people should hear of the memory it takes.
    """

    transport: str
    writers: tuple[int, ...]
    writes_literals: bool
    notes: tuple[str, ...]

    def forecast(self) -> tuple[RankReport, ...]:
        """Say what each rank would do; the same on every rank."""

    def move(self, paths: Sequence[Path], journals: JournalPlace | None = None) -> MoveResult:
        """Move all bytes into files that exist with their full size.

        Args:
            paths: The files.
            journals: Where to claim what is written, and what is there already; ``None`` where
                nobody will ask.

        Raises:
            ConsolidateError: If any rank failed; every rank raises.
        """


def make_moving(
    planned: Planned,
    layouts: Sequence[FileLayout],
    options: Options,
    world: World,
    place: OutputPlace,
) -> Moving:
    """Choose how to move.

    Args:
        planned: The plan.
        layouts: Byte layout of each output file.
        options: The options.
        world: This rank.
        place: Which ranks may write.

    Returns:
        The way; the same on every rank.

    Raises:
        UsageError: If what was asked for cannot be done here.
        ResourceError: If there is not enough memory for it.
    """
    transport = on_rank_0(world.control, lambda: _choose_transport(planned, options, world))
    if transport == "direct":
        return _Direct(planned, layouts, options, world, place)
    return _Exchange(transport, planned, layouts, options, world, place)


def _choose_transport(planned: Planned, options: Options, world: World) -> str:
    asked, shared = options.transport, planned.all_visible
    if asked == "direct" and not shared:
        raise UsageError(
            "--transport direct: some ranks do not see all shards, so that they cannot read "
            f"what they would write ({planned.nodes.missing_on()}); use gather or allgather"
        )
    if asked != "auto":
        return asked
    if world.has_accelerator:
        return "allgather"
    return "direct" if shared else "gather"


class _Direct:
    transport, writes_literals = "direct", True

    def __init__(
        self,
        planned: Planned,
        layouts: Sequence[FileLayout],
        options: Options,
        world: World,
        place: OutputPlace,
    ) -> None:
        self._planned, self._options, self._world = planned, options, world
        self._plan = planned.plan
        self.writers = place.writers(options.num_writers(world.size) or world.size)
        self._maps = [
            FileMap(layout.num_bytes, layout.blocks, layout.data_offset_bytes) for layout in layouts
        ]
        self._layouts = layouts
        self._checksums = any(layout.needs_crc for layout in layouts)
        dealt = deal_out([layout.num_bytes for layout in layouts], len(self.writers))
        self._owned = by_rank(dealt, self.writers, world.size)
        self._settled = self._settle()
        self.notes = (*self._settled.notes, *_unused_device_memory(options))

    def _settle(self) -> DirectSettled:
        """Agree on threads and buckets, by what memory there is."""
        readings = read_all(self._world, with_device=False)
        needs = DirectNeeds(self._owned, widest_cast(self._plan), self._options.io)
        return settle_direct(needs, _wanted(self._options), readings, _num_threads(readings))

    def _share(self, rank: int) -> Share:
        bucket_bytes = self._settled.crews[rank].bucket_bytes
        return Share(self._plan, self._maps, self._owned[rank], bucket_bytes)

    def forecast(self) -> tuple[RankReport, ...]:
        """Say what each rank would do (see :class:`Moving`)."""
        return tuple(
            self._forecast(rank) if rank in self.writers else RankReport(0, 0, 0, 0)
            for rank in range(self._world.size)
        )

    def _forecast(self, rank: int) -> RankReport:
        share, crew = self._share(rank), self._settled.crews[rank]
        limits = tuple(limit.text() for limit in self._settled.limits[rank])
        return RankReport(
            share.num_read_bytes,
            share.num_bytes,
            share.num_buckets,
            crew.memory_bytes,
            memory_limits=limits,
        )

    def move(self, paths: Sequence[Path], journals: JournalPlace | None = None) -> MoveResult:
        """Move all bytes (see :class:`Moving`)."""
        rank = self._world.rank
        if rank not in self.writers:
            share, num_threads = Share(self._plan, self._maps, [], 1), 1
        else:
            share, num_threads = self._share(rank), self._settled.crews[rank].num_threads
        finished = Finished() if journals is None else journals.finished
        # Nobody writes what an earlier run has finished: no thread may wait for it.
        digests = make_digests(
            self._options,
            self._plan,
            self._layouts,
            self._owned[rank],
            paths,
            in_order=not finished,
        )
        work = DirectWork(
            folder=self._planned.folder.folders,
            file_bytes={shard.name: shard.num_bytes for shard in self._planned.folder.shards},
            plan=self._plan,
            share=share,
            files=paths,
            checksums=self._checksums,
            io=self._options.io,
            num_threads=num_threads,
            digests=digests,
            journal=None if journals is None else Journal(journals, rank, paths),
            finished=finished,
            checks_source=self._options.check_crc != "never",
        )
        move, control = DirectMove(work), self._world.control
        with closing_digests(digests):
            result = control.together(move.run, move.stop, move.progress)
            return finish_together(result, digests, control)


def _num_threads(readings: Sequence[Reading]) -> list[int]:
    """Two at least keep a disk busy; more of them than cores only wait for each other."""
    neighbours = collections.Counter(reading.machine for reading in readings)
    return [
        max(2, min(reading.num_cores // neighbours[reading.machine], MAX_THREADS))
        for reading in readings
    ]


def _wanted(options: Options) -> Wanted:
    return Wanted(options.bucket_bytes, options.device_amount, options.host_amount)


def _unused_device_memory(options: Options) -> Sequence[str]:
    asked = options.device_memory
    text = f"--device-memory {asked}: no device is used; weights pass through host memory alone"
    return () if asked == "auto" else (text,)


class _Exchange:
    writes_literals = False

    def __init__(
        self,
        transport: str,
        planned: Planned,
        layouts: Sequence[FileLayout],
        options: Options,
        world: World,
        place: OutputPlace,
    ) -> None:
        self.transport, self._planned, self._layouts = transport, planned, layouts
        self._options, self._world, self._plan = options, world, planned.plan
        self.writers = place.writers(options.num_writers(world.size) or 1)
        dealt = deal_out([layout.num_bytes for layout in layouts], len(self.writers))
        self._dealt = by_rank(dealt, self.writers, world.size)
        self._cut: tuple[int, list[tuple[Phase, Placement]]] = (0, [])
        self._settled = make_budget(world, _wanted(options), self._table_bytes)
        self._budget = self._settled.budget
        unused = () if world.has_accelerator else _unused_device_memory(options)
        self.notes = (*self._settled.notes, *unused)

    def _phases(self) -> list[tuple[Phase, Placement]]:
        """Give the phases and who reads which of their rows."""
        return self._phases_of(self._budget.bucket_bytes)

    def _phases_of(self, bucket_bytes: int) -> list[tuple[Phase, Placement]]:
        from dist_consolidate.plan.scattered import phases_for
        from dist_consolidate.runtime.placement import place_rows

        if self._cut[0] != bucket_bytes:
            phases = phases_for(self._plan, bucket_bytes, self._planned.visible)
            placed = [(phase, place_rows(phase, self._planned.visible)) for phase in phases]
            self._cut = bucket_bytes, placed
        return self._cut[1]

    def _table_bytes(self, bucket_bytes: int) -> int:
        """Tell what a rank that receives holds of a bucket, where ranks see different shards."""
        return _widest(self._phases_of(bucket_bytes), self._world.size)

    def forecast(self) -> tuple[RankReport, ...]:
        """Say what each rank would do (see :class:`Moving`)."""
        pairs = self._phases()
        size, num_buckets = self._world.size, sum(phase.num_buckets for phase, _ in pairs)
        table_bytes = _widest(pairs, size)
        found = []
        for rank in range(size):
            mine = self._dealt[rank]
            lengths = (
                phase.row_bytes * phase.num_buckets * len(w.rows[rank]) for phase, w in pairs
            )
            found.append(
                RankReport(
                    num_bytes_read=sum(lengths),
                    num_bytes_written=sum(part.stop_bytes - part.start_bytes for part in mine),
                    num_buckets=num_buckets,
                    memory_bytes=self._budget.held_bytes(table_bytes, num_buckets),
                    memory_limits=tuple(limit.text() for limit in self._settled.limits[rank]),
                )
            )
        return tuple(found)

    def move(self, paths: Sequence[Path], journals: JournalPlace | None = None) -> MoveResult:
        """Move all bytes (see :class:`Moving`)."""
        from dist_consolidate.runtime.pipeline import move
        from dist_consolidate.runtime.transport import make_transport

        # One rank has nobody to gather from: both move the same bytes in the same way.
        alone = self._world.size == 1
        transport = make_transport("allgather" if alone else self.transport, self._world)
        mine = self._dealt[self._world.rank]
        digests = make_digests(self._options, self._plan, self._layouts, mine, paths)
        with closing_digests(digests):
            work = self._work(paths, digests, journals)
            result = move(work, self._world, transport, self._budget)
            return finish_together(result, digests, self._world.control)

    def _work(
        self, paths: Sequence[Path], digests: Digests | None, journals: JournalPlace | None
    ) -> Work:
        from dist_consolidate.runtime.assemble import Moved
        from dist_consolidate.runtime.ownership import Place
        from dist_consolidate.runtime.pipeline import Work

        return Work(
            folder=self._planned.folder.folders,
            file_bytes={shard.name: shard.num_bytes for shard in self._planned.folder.shards},
            phases=[phase for phase, _ in self._phases()],
            tensors=[
                Moved(
                    tensor.source.num_numel,
                    _torch_dtype(tensor.source.dtype.name),
                    _torch_dtype(tensor.dtype.name),
                )
                for tensor in self._plan.tensors
            ],
            files=paths,
            places=[
                tuple(
                    Place(file, index, self._layouts[file].data_offset_bytes[index])
                    for file, index in tensor.targets
                )
                for tensor in self._plan.tensors
            ],
            writers=self.writers,
            owners=Owners(self._dealt),
            checksums=any(layout.needs_crc for layout in self._layouts),
            visible=self._planned.visible,
            digests=digests,
            journals=journals,
            checks_source=self._options.check_crc != "never",
        )


def _widest(pairs: Sequence[tuple[Phase, Placement]], size: int) -> int:
    return max((phase.row_bytes * where.width * size for phase, where in pairs), default=0)


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
