"""One consolidation from end to end: plan, create files, move bytes, publish."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dist_consolidate._version import __version__
from dist_consolidate.errors import Caught, UsageError
from dist_consolidate.options import Options
from dist_consolidate.output.crc import CrcLedger
from dist_consolidate.output.index import MANIFEST_NAME, index_file_name, index_json
from dist_consolidate.output.layout import FileLayout, layout_for
from dist_consolidate.output.manifest import manifest_json
from dist_consolidate.output.publish import Publication, check_free_space, prepare
from dist_consolidate.plan.buckets import make_phases
from dist_consolidate.plan.plan import Plan
from dist_consolidate.planning import Planned, on_rank_0, plan_together
from dist_consolidate.runtime.assemble import Moved
from dist_consolidate.runtime.budget import make_budget
from dist_consolidate.runtime.pipeline import MoveResult, Work, move
from dist_consolidate.runtime.transport import make_transport
from dist_consolidate.runtime.world import World
from dist_consolidate.runtime.writer import Place


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What a consolidation did; the same on every rank.

    Attributes:
        output_dir: The published folder.
        files: Weight files in it.
        num_tensors: Names in the weight files; of tied ones all, unless they were dropped.
        num_bytes: Bytes of tensor data in the result.
        ties: Alias to the name that holds its data.
        left_out: Keys that are not in the result, with reasons.
        notes: What was assumed, inferred or not followed.
        facts: Tag, how it was chosen, step, stage, world size and DeepSpeed version.
        transport: The transport used.
        num_bytes_read: Bytes read from shards by all ranks, metadata not counted.
        duration_sec: Wall time.
    """

    output_dir: Path
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    ties: dict[str, str]
    left_out: dict[str, str]
    notes: tuple[str, ...]
    facts: dict[str, str | int | None]
    transport: str
    num_bytes_read: int
    duration_sec: float


def run_consolidation(
    checkpoint_dir: Path, output_dir: Path | None, options: Options, world: World
) -> Report:
    """Consolidate a checkpoint on all ranks of a world.

    Args:
        checkpoint_dir: Run folder or tag folder.
        output_dir: Where the result goes; by default ``consolidated/TAG`` in ``checkpoint_dir``.
        options: The options.
        world: This rank.

    Returns:
        The report, on every rank.

    Raises:
        ConsolidateError: If anything is wrong; every rank raises and nothing is published.
    """
    started = time.monotonic()
    planned = plan_together(checkpoint_dir, options, world.control)
    target = output_dir or _default_target(checkpoint_dir, planned.folder.tag)
    decided = on_rank_0(world.control, lambda: _decide(planned, options, world))
    run = _Run(planned, options, world, decided)
    publication = on_rank_0(world.control, lambda: run.prepare(target))
    try:
        result = run.move(publication)
        totals, notes = run.finish(publication, result)
    except BaseException:
        if world.rank == 0:
            publication.abandon()
        raise
    duration_sec = time.monotonic() - started
    return run.report(publication, totals, notes, duration_sec)


def _default_target(checkpoint_dir: Path, tag: str) -> Path:
    """Give ``consolidated/TAG``; a checkpoint must not lead elsewhere by a symbolic link."""
    target = checkpoint_dir / "consolidated" / tag
    if not target.resolve().is_relative_to(checkpoint_dir.resolve()):
        raise UsageError(f"{target}: lies outside {checkpoint_dir}; name the output folder")
    return target


@dataclasses.dataclass(frozen=True, slots=True)
class _Decided:
    """What rank 0 decides once the plan is there.

    Attributes:
        layouts: Byte layout of each output file.
        transport: Name of the transport.
        num_writers: Ranks that write: the first ones.
    """

    layouts: tuple[FileLayout, ...]
    transport: str
    num_writers: int


def _decide(planned: Planned, options: Options, world: World) -> _Decided:
    layouts = tuple(layout_for(options.format, file) for file in planned.plan.files)
    transport = _choose_transport(planned, options, world)
    default = world.size if transport == "direct" else 1
    return _Decided(layouts, transport, options.num_writers(world.size) or default)


def _choose_transport(planned: Planned, options: Options, world: World) -> str:
    asked, shared = options.transport, planned.all_visible
    if asked == "direct" and not shared:
        raise UsageError(
            "--transport direct: some ranks do not see all shards, so that they cannot read "
            "what they would write; use gather or allgather"
        )
    if asked != "auto":
        # One rank has nobody to gather from.
        return "allgather" if asked == "gather" and world.size == 1 else asked
    if world.device.type != "cpu":
        return "allgather"
    return "direct" if shared else "gather"


class _Run:
    def __init__(self, planned: Planned, options: Options, world: World, decided: _Decided) -> None:
        self.planned, self.options, self.world = planned, options, world
        self.plan: Plan = planned.plan
        self.layouts, self.transport = decided.layouts, decided.transport
        self.num_writers = decided.num_writers

    @property
    def names(self) -> tuple[str, ...]:
        """All files of the result; the ones that loaders look for first come last."""
        weights = tuple(file.name for file in self.plan.files)
        return (*weights, *self.last)

    @property
    def last(self) -> tuple[str, ...]:
        several = len(self.plan.files) > 1
        return (MANIFEST_NAME, *((index_file_name(self.options.format),) if several else ()))

    def prepare(self, target: Path) -> Publication:
        """Make the work folder with all files at their full size (on rank 0)."""
        total = sum(layout.num_bytes for layout in self.layouts)
        check_free_space(target, total, overwrite=self.options.overwrite)
        token = f"{self.plan.digest[:8]}-{time.time_ns():x}"
        publication = prepare(target, self.names, token, overwrite=self.options.overwrite)
        try:
            for file, layout in zip(self.plan.files, self.layouts, strict=True):
                path = publication.create_file(file.name, layout.num_bytes)
                _write_blocks(path, layout.blocks)
        except BaseException:
            publication.abandon()
            raise
        return publication

    def move(self, publication: Publication) -> MoveResult:
        """Move all bytes."""
        paths = [publication.work_dir / file.name for file in self.plan.files]
        self._check_output_visible(paths)
        with (caught := Caught()):
            budget = make_budget(self.world, self.options.bucket_bytes)
        self.world.control.agree(caught.error)
        transport = make_transport(self.transport, self.world)
        work = Work(
            folder=self.planned.folder.path,
            file_bytes={shard.name: shard.num_bytes for shard in self.planned.folder.shards},
            phases=make_phases(
                self.plan,
                budget.bucket_bytes,
                lanes=transport.lanes,
                num_ranks=self.world.size if transport.lanes else 1,
            ),
            tensors=[
                Moved(
                    tensor.source.num_numel,
                    _torch_dtype(tensor.source.dtype.name),
                    _torch_dtype(tensor.dtype.name),
                )
                for tensor in self.plan.tensors
            ],
            files=paths,
            places=self._places(),
            num_writers=self.num_writers,
            checksums=any(layout.needs_crc for layout in self.layouts),
            visible=self.planned.visible,
        )
        return move(work, self.world, transport, budget)

    def _check_output_visible(self, paths: Sequence[Path]) -> None:
        error = None
        if self.world.rank < self.num_writers and not all(path.is_file() for path in paths):
            error = UsageError(
                f"{paths[0].parent}: cannot be seen from here, but this rank was to write into "
                "it; put the output on a shared file system or use --writers 1"
            )
        self.world.control.agree(error)

    def _places(self) -> list[tuple[Place, ...]]:
        return [
            tuple(
                Place(file, index, self.layouts[file].data_offset_bytes[index])
                for file, index in tensor.targets
            )
            for tensor in self.plan.tensors
        ]

    def finish(self, publication: Publication, result: MoveResult) -> tuple[int, tuple[str, ...]]:
        """Write what needs the checksums, and publish.

        Returns:
            The bytes all ranks have read, and the notes on the result.
        """
        results = self.world.control.gather(result)

        def publish() -> tuple[int, tuple[str, ...]]:
            notes = (*self.plan.notes, *self._overflows(results))
            ledgers = self._ledgers(results)
            for file, layout, ledger in zip(self.plan.files, self.layouts, ledgers, strict=True):
                if layout.needs_crc:
                    crcs = ledger.tensor_crcs(file.tensors)
                    path = publication.work_dir / file.name
                    _write_blocks(path, layout.finishing_blocks(crcs))
            publication.write_file(MANIFEST_NAME, self._manifest(notes))
            if len(self.plan.files) > 1:
                publication.write_file(self.last[-1], index_json(self.plan.files))
            publication.publish(self.last)
            return sum(item.num_bytes_read for item in results), notes

        return on_rank_0(self.world.control, publish)

    def _ledgers(self, results: Sequence[MoveResult]) -> list[CrcLedger]:
        """Sort what all ranks noted by file, in one pass."""
        ledgers = [CrcLedger() for _ in self.plan.files]
        for result in results:
            for check in result.checksums:
                ledger = ledgers[check.file]
                ledger.add(check.tensor, check.start_bytes, check.num_bytes, check.crc)
        return ledgers

    def _overflows(self, results: Sequence[MoveResult]) -> list[str]:
        found = frozenset[int]().union(*(result.overflowed for result in results))
        names = [self.plan.tensors[index].name for index in sorted(found)]
        text = f"fp16 ends at 65504; infinities were written in {', '.join(names)}"
        return [text] if names else []

    def _manifest(self, notes: Sequence[str]) -> bytes:
        shaping = ("format", "dtype", "max_shard_size", "tie", "allow_missing", "exclude_frozen")
        chosen = {name: getattr(self.options, name) for name in shaping}
        facts = {k: v for k, v in self.planned.facts.items() if k != "tag_chosen"}
        return manifest_json(
            version=__version__,
            checkpoint=facts,
            options={**chosen, "ties": self.options.tie_policy},
            plan_digest=self.plan.digest,
            tensors=self._tensor_facts(),
            left_out=self.plan.left_out,
            notes=notes,
        )

    def _tensor_facts(self) -> dict[str, dict[str, object]]:
        facts: dict[str, dict[str, object]] = {}
        for tensor in self.plan.tensors:
            facts[tensor.name] = {
                "dtype": tensor.dtype.name,
                "shape": list(tensor.source.shape),
                "file": self.plan.files[tensor.targets[0][0]].name,
                "source": tensor.source.origin,
                "source_dtype": tensor.source.dtype.name,
            }
        files = self._written_names()
        for alias, tie in self.plan.ties.items():
            tied = {"tied_to": tie.holder, "tie_found": tie.found}
            file = files.get(alias, facts[tie.holder]["file"])
            facts[alias] = {**facts[tie.holder], "file": file, **tied}
        return facts

    def _written_names(self) -> dict[str, str]:
        """Give each name in the result its file; dropped ties are not among them."""
        return {
            name: file.name
            for file in self.plan.files
            for stored in file.tensors
            for name in stored.names
        }

    def report(
        self,
        publication: Publication,
        bytes_read: int,
        notes: tuple[str, ...],
        duration_sec: float,
    ) -> Report:
        """Say what was done."""
        return Report(
            output_dir=publication.output_dir,
            files=tuple(file.name for file in self.plan.files),
            num_tensors=len(self._written_names()),
            num_bytes=self.plan.num_bytes,
            ties={alias: tie.holder for alias, tie in self.plan.ties.items()},
            left_out=self.plan.left_out,
            notes=notes,
            facts=self.planned.facts,
            transport=self.transport,
            num_bytes_read=bytes_read,
            duration_sec=duration_sec,
        )


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _write_blocks(path: Path, blocks: Sequence[tuple[int, bytes]]) -> None:
    with path.open("r+b") as stream:
        for offset_bytes, data in blocks:
            stream.seek(offset_bytes)
            stream.write(data)
