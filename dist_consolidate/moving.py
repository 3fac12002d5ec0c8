"""Choosing how the bytes move, and what each rank has to do for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dist_consolidate.errors import Caught, UsageError
from dist_consolidate.options import Options
from dist_consolidate.output.layout import FileLayout
from dist_consolidate.output_place import OutputPlace, by_rank
from dist_consolidate.plan.direct import FileMap, Share
from dist_consolidate.plan.owners import Owned, Owners, deal_out
from dist_consolidate.planning import Planned, on_rank_0
from dist_consolidate.report import RankReport
from dist_consolidate.runtime.direct import DirectMove, DirectWork, widest_cast
from dist_consolidate.runtime.results import MoveResult
from dist_consolidate.runtime.world import World

if TYPE_CHECKING:
    import torch

    from dist_consolidate.plan.buckets import Phase
    from dist_consolidate.runtime.budget import Budget
    from dist_consolidate.runtime.pipeline import Work

# What the threads of a rank hold together, output bytes, if there are as many as there may be.
_DIRECT_BYTES = 32 * 2**20
_MAX_THREADS = 4


class Moving(Protocol):
    """A way to move the bytes.

    Attributes:
        transport: Its name.
        writers: Ranks that write, the one that publishes first.
        writes_literals: Whether it writes headers as well, or they must be there before.
    """

    transport: str
    writers: tuple[int, ...]
    writes_literals: bool

    def forecast(self) -> tuple[RankReport, ...]:
        """Say what each rank would do; the same on every rank."""

    def move(self, paths: Sequence[Path]) -> MoveResult:
        """Move all bytes into files that exist with their full size.

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
        # One rank has nobody to gather from.
        return "allgather" if asked == "gather" and world.size == 1 else asked
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
        self._checksums = any(layout.needs_crc for layout in layouts)
        dealt = deal_out([layout.num_bytes for layout in layouts], len(self.writers))
        self._owned = by_rank(dealt, self.writers, world.size)
        self._ratio = widest_cast(self._plan)

    def _share(self, owned: Sequence[Owned]) -> Share:
        room = (self._options.bucket_bytes or _DIRECT_BYTES) // _MAX_THREADS
        return Share(self._plan, self._maps, owned, int(room / max(self._ratio, 1)))

    def forecast(self) -> tuple[RankReport, ...]:
        """Say what each rank would do (see :class:`Moving`)."""
        return tuple(
            self._forecast(self._share(owned)) if rank in self.writers else RankReport(0, 0, 0, 0)
            for rank, owned in enumerate(self._owned)
        )

    def _forecast(self, share: Share) -> RankReport:
        threads = min(_num_threads(self._world.local_size), share.num_buckets)
        memory_bytes = int(threads * share.max_bucket_bytes * (1 + self._ratio))
        return RankReport(share.num_read_bytes, share.num_bytes, share.num_buckets, memory_bytes)

    def move(self, paths: Sequence[Path]) -> MoveResult:
        """Move all bytes (see :class:`Moving`)."""
        owned = self._owned[self._world.rank]
        work = DirectWork(
            folder=self._planned.folder.folders,
            file_bytes={shard.name: shard.num_bytes for shard in self._planned.folder.shards},
            plan=self._plan,
            share=self._share(owned),
            files=paths,
            checksums=self._checksums,
            io=self._options.io,
            num_threads=_num_threads(self._world.local_size),
        )
        move = DirectMove(work)
        return self._world.control.together(move.run, move.stop, move.progress)


def _num_threads(local_size: int) -> int:
    """Two at least keep a disk busy; more of them than cores only wait for each other."""
    cores = len(os.sched_getaffinity(0))
    return max(2, min(cores // local_size, _MAX_THREADS))


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
        self._budget = self._agreed_budget()

    def _agreed_budget(self) -> Budget:
        from dist_consolidate.runtime.budget import make_budget

        with (caught := Caught()):
            budget = make_budget(self._world, self._options.bucket_bytes)
        self._world.control.agree(caught.error)
        return budget

    def _phases(self) -> list[Phase]:
        from dist_consolidate.plan.scattered import phases_for

        return phases_for(self._plan, self._budget.bucket_bytes, self._planned.visible)

    def forecast(self) -> tuple[RankReport, ...]:
        """Say what each rank would do (see :class:`Moving`)."""
        from dist_consolidate.runtime.placement import place_rows

        phases = self._phases()
        placed = [place_rows(phase, self._planned.visible) for phase in phases]
        size, num_buckets = self._world.size, sum(phase.num_buckets for phase in phases)
        pairs = list(zip(phases, placed, strict=True))
        table_bytes = max((p.row_bytes * where.width * size for p, where in pairs), default=0)
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
                )
            )
        return tuple(found)

    def move(self, paths: Sequence[Path]) -> MoveResult:
        """Move all bytes (see :class:`Moving`)."""
        from dist_consolidate.runtime.pipeline import move
        from dist_consolidate.runtime.transport import make_transport

        transport = make_transport(self.transport, self._world)
        return move(self._work(paths), self._world, transport, self._budget)

    def _work(self, paths: Sequence[Path]) -> Work:
        from dist_consolidate.runtime.assemble import Moved
        from dist_consolidate.runtime.ownership import Place
        from dist_consolidate.runtime.pipeline import Work

        return Work(
            folder=self._planned.folder.folders,
            file_bytes={shard.name: shard.num_bytes for shard in self._planned.folder.shards},
            phases=self._phases(),
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
        )


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
