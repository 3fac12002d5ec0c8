"""One consolidation from end to end: plan, create files, move bytes, publish."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dist_consolidate._version import __version__
from dist_consolidate.doing import Doing
from dist_consolidate.errors import Caught, RankError, UsageError
from dist_consolidate.likeness import check_alike
from dist_consolidate.moving import Moving, make_moving
from dist_consolidate.options import Options
from dist_consolidate.output.crc import CrcLedger
from dist_consolidate.output.index import MANIFEST_NAME, index_file_name, index_json
from dist_consolidate.output.layout import FileLayout, layout_for
from dist_consolidate.output.manifest import manifest_json
from dist_consolidate.output.parents import check_reachable, missing_parents, remove_parents
from dist_consolidate.output.publish import (
    Publication,
    check_free_space,
    check_output,
    prepare,
)
from dist_consolidate.output_place import OutputPlace, find_place, look_for
from dist_consolidate.plan.outputs import OutputFile
from dist_consolidate.plan.plan import Plan, PlannedTensor
from dist_consolidate.planning import Planned, on_rank, on_rank_0, plan_together
from dist_consolidate.quotas import check_quota
from dist_consolidate.report import RankReport, Report, peak_memory_bytes
from dist_consolidate.runtime.results import MoveResult
from dist_consolidate.runtime.world import World

_T = TypeVar("_T")

# The options that shape the result.
_SHAPING = (
    "format", "dtype", "max_shard_size", "tie", "allow_missing", "exclude_frozen", "strip_prefix",
    "rename", "include", "pipeline_names", "trust_masters", "tp_rules",
    "tensor_parallel", "hf_config", "allow_16bit",
)  # fmt: skip


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
    clock = [time.monotonic()]
    check_alike(options, output_dir, world.control)
    place = _find_place(options, world)
    planned = plan_together(checkpoint_dir, options, world.control, place.hosts)
    run = _Run(planned, options, world, place)
    target = output_dir or run.on_publisher(
        lambda: _default_target(checkpoint_dir, planned.folder.tag, place)
    )
    # Before anything is made: that there is too little memory shows here.
    run.choose()
    clock.append(time.monotonic())
    if options.dry_run:
        return run.forecast(target, clock)
    try:
        publication = run.on_publisher(lambda: run.prepare(target))
        run.look(publication)
        run.create_files(publication)
        result = run.move(publication)
        clock.append(time.monotonic())
        ranks, notes = run.finish(publication, result)
    except BaseException:
        run.abandon()
        raise
    clock.append(time.monotonic())
    return run.report(publication.output_dir, ranks, notes, clock)


def _find_place(options: Options, world: World) -> OutputPlace:
    """Settle which rank publishes; of a request that cannot be met, one rank tells."""
    caught = Caught()
    with caught:
        return find_place(options.output_node, world.control.hosts)
    # Every rank found the same; rank 0's words are enough.
    on_rank_0(world.control, caught.raise_if_any)
    raise AssertionError("rank 0 had the error, too")


def _default_target(checkpoint_dir: Path, tag: str, place: OutputPlace) -> Path:
    """Give ``consolidated/TAG``; a checkpoint must not lead elsewhere by a symbolic link."""
    target = checkpoint_dir / "consolidated" / tag
    if not checkpoint_dir.is_dir():
        raise UsageError(
            f"{checkpoint_dir}: is not there on {place.host} (rank {place.publisher}), where the "
            "result goes; name the output folder, or choose a node that has it with --output-node"
        )
    if not target.resolve().is_relative_to(checkpoint_dir.resolve()):
        raise UsageError(f"{target}: lies outside {checkpoint_dir}; name the output folder")
    return target


class _Run:
    moving: Moving
    # On the rank that publishes, once they are there.
    made: Publication | None = None
    made_parents: Sequence[Path] = ()
    published: tuple[tuple[RankReport, ...], tuple[str, ...]] | None = None

    def __init__(
        self, planned: Planned, options: Options, world: World, place: OutputPlace
    ) -> None:
        self.planned, self.options, self.world, self.place = planned, options, world, place
        self.plan: Plan = planned.plan
        # Made on rank 0 alone: a layout is as large as the headers of all files.
        self.layouts: tuple[FileLayout, ...] = on_rank_0(
            world.control,
            lambda: tuple(layout_for(options.format, file) for file in self.plan.files),
        )

    def on_publisher(self, action: Callable[[], _T]) -> _T:
        """Run something on the rank that publishes (see :func:`on_rank`)."""
        return on_rank(self.world.control, self.place.publisher, action)

    def choose(self) -> None:
        """Settle how the bytes move, by the ranks that can write."""
        self.moving = make_moving(self.planned, self.layouts, self.options, self.world, self.place)

    def look(self, publication: Publication) -> None:
        """Find out which ranks see the work folder, and do without those that do not."""
        if len(self.moving.writers) == 1:
            return
        seen = look_for(self.place, publication.work_dir, self.world.control)
        if seen != self.place:
            self.place = seen
            self.choose()

    @property
    def names(self) -> tuple[str, ...]:
        """All files of the result; the ones that loaders look for first come last."""
        weights = tuple(file.name for file in self.plan.files)
        return (*weights, *self.last)

    @property
    def last(self) -> tuple[str, ...]:
        return (MANIFEST_NAME, *self._indexes())

    def _indexes(self) -> dict[str, list[OutputFile]]:
        """Give the indexes to write, the weights' last, each with the files it lists."""
        by_state: dict[str, list[OutputFile]] = {}
        for file in sorted(self.plan.files, key=lambda file: not file.state):
            by_state.setdefault(file.state, []).append(file)
        return {
            index_file_name(self.options.format, state): files
            for state, files in by_state.items()
            if len(files) > 1
        }

    def prepare(self, target: Path) -> Publication:
        """Make the work folder (on the rank that publishes)."""
        total = sum(layout.num_bytes for layout in self.layouts)
        check_reachable(target)
        check_free_space(target, total, overwrite=self.options.overwrite)
        check_quota(target, total)
        self.made_parents = missing_parents(target)
        token = f"{self.plan.digest[:8]}-{time.time_ns():x}"
        self.made = prepare(target, self.names, token, overwrite=self.options.overwrite)
        self.world.control.clean_up_with(self.abandon)
        return self.made

    def abandon(self) -> None:
        """Remove what this rank has made, as far as it is not in place."""
        if self.made is not None:
            self.made.abandon()
        remove_parents(self.made_parents)

    def create_files(self, publication: Publication) -> None:
        """Make all files at their full size."""

        def create() -> None:
            for file, layout in zip(self.plan.files, self.layouts, strict=True):
                path = publication.create_file(file.name, layout.num_bytes)
                if not self.moving.writes_literals:
                    _write_blocks(path, layout.blocks)

        self.on_publisher(create)

    def move(self, publication: Publication) -> MoveResult:
        """Move all bytes."""
        paths = [publication.work_dir / file.name for file in self.plan.files]
        self._check_output_visible(paths)
        return self.moving.move(paths)

    def _check_output_visible(self, paths: Sequence[Path]) -> None:
        error = None
        if self.world.rank in self.moving.writers and not all(p.is_file() for p in paths):
            error = UsageError(
                f"{paths[0].parent}: cannot be seen from here, but this rank was to write into "
                "it; put the output on a shared file system or use --writers 1"
            )
        self.world.control.agree(error)

    def finish(
        self, publication: Publication, result: MoveResult
    ) -> tuple[tuple[RankReport, ...], tuple[str, ...]]:
        """Write what needs the checksums, and publish.

        Returns:
            What each rank did, and the notes on the result.
        """
        results = self.world.control.gather((result, peak_memory_bytes()), self.place.publisher)

        def publish() -> tuple[tuple[RankReport, ...], tuple[str, ...]]:
            moved = [item for item, _ in results]
            notes = (*self.plan.notes, *self._overflows(moved))
            ledgers = self._ledgers(moved)
            for file, layout, ledger in zip(self.plan.files, self.layouts, ledgers, strict=True):
                if layout.needs_crc:
                    crcs = ledger.tensor_crcs(file.tensors)
                    path = publication.work_dir / file.name
                    _write_blocks(path, layout.finishing_blocks(crcs))
            publication.write_file(MANIFEST_NAME, self._manifest(notes))
            for name, files in self._indexes().items():
                publication.write_file(name, index_json(files))
            default = self.world.size if self.moving.transport == "direct" else None
            wanted = self.options.num_writers(self.world.size) or default
            told = self.place.notes(wanted, publication.output_dir)
            reports = self._rank_reports(results), (*notes, *told)
            publication.publish(self.last)
            self.published = reports
            self.world.control.finish()
            return reports

        try:
            return self.on_publisher(publish)
        except RankError:
            if self.published is None:
                raise
            return self.published  # it is in place, whoever is gone by now

    def _rank_reports(self, results: Sequence[tuple[MoveResult, int]]) -> tuple[RankReport, ...]:
        return tuple(
            dataclasses.replace(
                forecast,
                num_bytes_read=result.num_bytes_read,
                num_bytes_written=result.num_bytes_written,
                peak_bytes=peak_bytes,
                stages=result.stages,
            )
            for forecast, (result, peak_bytes) in zip(self.moving.forecast(), results, strict=True)
        )

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
        chosen = {name: getattr(self.options, name) for name in _SHAPING}
        facts = {k: v for k, v in self.planned.facts.items() if k != "tag_chosen"}
        return manifest_json(
            version=__version__,
            checkpoint=facts,
            options={**chosen, "ties": self.options.tie_policy},
            plan_digest=self.plan.digest,
            tensors=self._tensor_facts(),
            left_out={name: self._why_left_out(name) for name in self.plan.left_out},
            notes=notes,
            optimizer=self._optimizer_facts(),
        )

    def _why_left_out(self, name: str) -> str:
        reason, old = self.plan.left_out[name], self.plan.renamed.get(name)
        return reason if old is None else f"{reason} (in the checkpoint: {old})"

    def _tensor_facts(self) -> dict[str, dict[str, object]]:
        facts: dict[str, dict[str, object]] = {}
        for tensor in self.plan.tensors:
            if not tensor.state:
                facts[tensor.name] = self._facts_of(tensor)
        files = self._written_names()
        for alias, tie in self.plan.ties.items():
            tied = {"tied_to": tie.holder, "tie_found": tie.found}
            file = files.get(alias, facts[tie.holder]["file"])
            facts[alias] = {**facts[tie.holder], "file": file, **tied}
        for name, old in self.plan.renamed.items():
            if name in facts:
                facts[name]["name_in_checkpoint"] = old
        return facts

    def _facts_of(self, tensor: PlannedTensor) -> dict[str, object]:
        return {
            "dtype": tensor.dtype.name,
            "shape": list(tensor.source.shape),
            "file": self.plan.files[tensor.targets[0][0]].name,
            "source": tensor.source.origin,
            "source_dtype": tensor.source.dtype.name,
        }

    def _optimizer_facts(self) -> dict[str, object] | None:
        """Give what the manifest says of the optimizer; ``None`` where nobody asked."""
        if self.plan.optimizer is None:
            return None
        tensors: dict[str, dict[str, dict[str, object]]] = {}
        for tensor in self.plan.tensors:
            if tensor.state:
                tensors.setdefault(tensor.state, {})[tensor.name] = self._facts_of(tensor)
        return {**self.plan.optimizer, "tensors": tensors}

    def _written_names(self) -> dict[str, str]:
        """Give each name in the result its file; dropped ties are not among them."""
        return {
            name: file.name
            for file in self.plan.files
            if not file.state
            for stored in file.tensors
            for name in stored.names
        }

    def forecast(self, target: Path, clock: Sequence[float]) -> Report:
        """Say what would be done; checks of the output folder that write nothing are made."""
        total = sum(layout.num_bytes for layout in self.layouts)

        def check() -> Path:
            check_reachable(target)
            check_free_space(target, total, overwrite=self.options.overwrite)
            check_quota(target, total)
            return check_output(target, self.names, overwrite=self.options.overwrite)

        output_dir = self.on_publisher(check)
        ranks = self.moving.forecast()
        report = self.report(output_dir, ranks, self.plan.notes, [*clock, clock[-1], clock[-1]])
        return dataclasses.replace(report, is_dry_run=True)

    def report(
        self,
        output_dir: Path,
        ranks: tuple[RankReport, ...],
        notes: tuple[str, ...],
        clock: Sequence[float],
    ) -> Report:
        """Say what was done."""
        planning_sec, moving_sec, publishing_sec = (
            after - before for before, after in itertools.pairwise(clock)
        )
        return Report(
            output_dir=output_dir,
            files=tuple(file.name for file in self.plan.files),
            num_tensors=len(self._written_names()),
            num_bytes=self.plan.num_bytes,
            ties={alias: tie.holder for alias, tie in self.plan.ties.items()},
            left_out=self.plan.left_out,
            # What was done about memory is this run's matter; the manifest speaks of the result.
            notes=(*notes, *self.moving.notes),
            facts=self.planned.facts,
            transport=self.moving.transport,
            num_bytes_read=sum(rank.num_bytes_read for rank in ranks),
            duration_sec=clock[-1] - clock[0],
            planning_sec=planning_sec,
            moving_sec=moving_sec,
            publishing_sec=publishing_sec,
            ranks=ranks,
        )


def _write_blocks(path: Path, blocks: Sequence[tuple[int, bytes]]) -> None:
    with Doing("writing", path), path.open("r+b") as stream:
        for offset_bytes, data in blocks:
            stream.seek(offset_bytes)
            stream.write(data)
