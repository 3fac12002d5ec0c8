"""One consolidation from end to end: plan, create files, move bytes, publish."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dist_consolidate.describing import describe_result, written_names
from dist_consolidate.digesting import file_facts, rest_digest
from dist_consolidate.doing import Doing
from dist_consolidate.errors import (
    Caught,
    CheckpointError,
    DifferenceError,
    RankError,
    UsageError,
)
from dist_consolidate.likeness import check_alike
from dist_consolidate.moving import Moving, make_moving
from dist_consolidate.options import Options
from dist_consolidate.output.crc import CrcLedger
from dist_consolidate.output.index import (
    MANIFEST_NAME,
    STATES_FOLDER,
    index_file_name,
    index_json,
    is_entry_point,
)
from dist_consolidate.output.layout import FileLayout, layout_for
from dist_consolidate.output.parents import check_reachable, missing_parents, remove_parents
from dist_consolidate.output.publish import (
    Publication,
    check_free_space,
    check_output,
    prepare,
)
from dist_consolidate.output.work import Identity, allocated_bytes
from dist_consolidate.output_place import OutputPlace, find_place, look_for
from dist_consolidate.plan.outputs import OutputFile
from dist_consolidate.plan.plan import Plan
from dist_consolidate.planning import Planned, on_rank, on_rank_0, plan_together
from dist_consolidate.quotas import check_quota
from dist_consolidate.report import RankReport, Report, peak_memory_bytes
from dist_consolidate.resuming import (
    identify,
    kept_text,
    look_at_shards,
    open_journals,
    resumed_notes,
)
from dist_consolidate.runtime.journal import JournalPlace, has_claims
from dist_consolidate.runtime.results import MoveResult
from dist_consolidate.runtime.world import World
from dist_consolidate.source_check import SourceCheck, check_source

_T = TypeVar("_T")


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
    run = _Run(checkpoint_dir, planned, options, world, place)
    target = output_dir or run.on_publisher(
        lambda: _default_target(checkpoint_dir, planned.folder.tag, place)
    )
    # Before anything is made: that there is too little memory shows here.
    run.choose()
    clock.append(time.monotonic())
    if options.dry_run:
        return run.forecast(target, clock)
    try:
        publication = run.make(target)
        if publication.is_done:
            ranks, notes = run.done(publication)
            clock.append(time.monotonic())
        else:
            run.look(publication)
            run.create_files(publication)
            run.open_journals(publication)
            result = run.move(publication)
            run.check_source(result)
            clock.append(time.monotonic())
            ranks, notes = run.finish(publication, result)
    except BaseException as error:
        world.control.clear_up()
        run.abandon(error)
        run.advise(error)
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
    source = SourceCheck()
    # On the rank that publishes, once they are there.
    made: Publication | None = None
    identity: Identity | None = None
    # On every rank, where work may be left for a later run.
    home: Path | None = None
    journals: JournalPlace | None = None
    made_parents: Sequence[Path] = ()
    published: tuple[tuple[RankReport, ...], tuple[str, ...]] | None = None

    def __init__(
        self,
        checkpoint_dir: Path,
        planned: Planned,
        options: Options,
        world: World,
        place: OutputPlace,
    ) -> None:
        self.checkpoint_dir = checkpoint_dir
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
        """All files of the result."""
        weights = (file.name for file in self.plan.files)
        return tuple(dict.fromkeys((*weights, MANIFEST_NAME, *self._indexes())))

    @property
    def last(self) -> tuple[str, ...]:
        """What is put in place after all others: the weights' entry point comes last."""
        entries = [file.name for file in self.plan.files if is_entry_point(file.name)]
        entries += self._indexes()
        ordered = sorted(entries, key=lambda name: STATES_FOLDER not in name)
        num_states = sum(STATES_FOLDER in name for name in ordered)
        return (*ordered[:num_states], MANIFEST_NAME, *ordered[num_states:])

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

    def make(self, target: Path) -> Publication:
        """Make the work folder, or take an earlier one over."""
        control = self.world.control
        if self.options.resume:
            seen = look_at_shards(self.planned, control, self.place.publisher)
            if seen:
                shaping = self.options.shaping
                self.identity = identify(self.planned, self.layouts, shaping, seen)
        publication = self.on_publisher(lambda: self.prepare(target))
        if publication.may_resume:
            self.home = home = publication.home
            control.tell_with(lambda: kept_text(home))
        return publication

    def prepare(self, target: Path) -> Publication:
        """Make the work folder (on the rank that publishes)."""
        total = sum(layout.num_bytes for layout in self.layouts)
        check_reachable(target)
        check_free_space(target, total, overwrite=self.options.overwrite)
        check_quota(target, total, num_there_bytes=allocated_bytes(target.resolve()))
        self.made_parents = missing_parents(target)
        token = f"{self.plan.digest[:8]}-{time.time_ns():x}"
        publication = prepare(
            target,
            self.names,
            token,
            overwrite=self.options.overwrite,
            identity=self.identity,
        )
        if not publication.is_done:
            self.made = publication
            self.world.control.clean_up_with(self.abandon)
        return publication

    def abandon(self, error: BaseException | None = None) -> None:
        """Remove what this rank has made, as far as it is not in place and nobody will need it."""
        if self.made is None:
            return
        # Of a checkpoint that is found wrong, nothing is kept that was made of it.
        is_wrong = getattr(error, "exit_code", 0) == CheckpointError.exit_code
        if self.made.may_resume and has_claims(self.made.home) and not is_wrong:
            self.made.leave()
        else:
            self.made.abandon()
        remove_parents(self.made_parents)

    def advise(self, error: BaseException) -> None:
        """Say in an error what can be done with what is left."""
        advice = "" if self.home is None else kept_text(self.home)
        if advice:
            error.add_note(advice)

    def open_journals(self, publication: Publication) -> None:
        """Find out what earlier runs have finished, and be ready to say what this one has."""
        if publication.may_resume:
            sizes = [layout.num_bytes for layout in self.layouts]

            def open_here() -> JournalPlace:
                assert self.identity is not None, "identified on the rank that publishes"
                return open_journals(publication, self.identity, sizes)

            self.journals = self.on_publisher(open_here)

    def done(self, publication: Publication) -> tuple[tuple[RankReport, ...], tuple[str, ...]]:
        """Report a result that an earlier run has made (see :meth:`finish`)."""
        nothing = tuple(RankReport(0, 0, 0, 0) for _ in range(self.world.size))
        return nothing, (*self.plan.notes, *publication.notes)

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
        return self.moving.move(paths, self.journals)

    def check_source(self, result: MoveResult) -> None:
        """Check that what was read is what was saved, and that no shard was changed meanwhile."""
        control, publisher = self.world.control, self.place.publisher
        policy = self.options.check_crc
        if policy != "never" and self.journals is not None and self.journals.finished:
            # What an earlier run has read nobody has checked yet.
            policy = "always"
        self.source = check_source(self.planned, policy, control, publisher, result.read_crcs)

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

        def complete() -> tuple[tuple[RankReport, ...], tuple[str, ...]]:
            moved = [item for item, _ in results]
            notes = (*self.plan.notes, *self._overflows(moved))
            digests = [digest for item in moved for digest in item.digests]
            ledgers, rests = self._ledgers(moved), {}
            for file, layout, ledger in zip(self.plan.files, self.layouts, ledgers, strict=True):
                crcs = ledger.tensor_crcs(file.tensors) if layout.needs_crc else ()
                blocks = layout.finishing_blocks(crcs)
                if blocks:
                    _write_blocks(publication.work_dir / file.name, blocks)
                rests[file.name] = self._rest_digest(layout, blocks)
            indexes = {name: index_json(files) for name, files in self._indexes().items()}
            for name, content in indexes.items():
                publication.write_file(name, content)
            facts = file_facts(self.options, publication.work_dir, rests, indexes)
            manifest = describe_result(self.planned, self.options, digests, facts, notes)
            publication.write_file(MANIFEST_NAME, manifest)
            default = self.world.size if self.moving.transport == "direct" else None
            wanted = self.options.num_writers(self.world.size) or default
            told = [*self.place.notes(wanted, publication.output_dir), *publication.notes]
            if self.journals is not None:
                total = sum(layout.num_bytes for layout in self.layouts)
                told += resumed_notes(publication, self.journals, total)
            return self._rank_reports(results), (*notes, *told)

        reports = self.on_publisher(complete)
        reports = reports[0], (*reports[1], *self.compare_resumed(publication))

        def publish() -> tuple[tuple[RankReport, ...], tuple[str, ...]]:
            publication.publish(self.last)
            self.published = reports
            if not self.options.verify:
                self.world.control.finish()
            return reports

        try:
            return self.on_publisher(publish)
        except RankError as error:
            if self.published is None:
                raise
            # It is in place, whoever is gone by now.
            ranks, notes = self.published
            return ranks, (*notes, f"with the result in place, {self.world.control.why(error)}")

    def compare_resumed(self, publication: Publication) -> tuple[str, ...]:
        """Compare what an earlier run has left, and this one has finished, with the shards.

        Nobody knows what has happened to those bytes, or what was read for them, in between.

        Returns:
            Notes for the report.

        Raises:
            CheckpointError: If they differ; every rank raises, and nothing of it is kept.
        """
        if self.journals is None or not self.journals.finished:
            return ()
        from dist_consolidate.verifying.after import verify_folder

        tag = str(self.planned.facts["tag"])
        options = dataclasses.replace(self.options, tag=tag)
        try:
            found = verify_folder(
                publication.work_dir, self.checkpoint_dir, options, self.world.control
            )
        except UsageError as error:  # nodes that share no disk
            return (f"what the earlier run had left was not compared with the shards: {error}",)
        try:
            found.raise_if_different("what an earlier run had left is not what the shards hold")
        except DifferenceError as error:
            known = CheckpointError(f"{error}\nNothing was published or kept; start again.")
            known.agreed = True
            raise known from error
        return ()

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

    def _rest_digest(self, layout: FileLayout, blocks: Sequence[tuple[int, bytes]]) -> str:
        return "" if self.options.digest == "none" else rest_digest(layout, blocks)

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
        place = self.place.notes(None, output_dir)
        place += self.place.forecast(self.moving.writers, output_dir)
        notes = (*self.plan.notes, *place)
        report = self.report(output_dir, ranks, notes, [*clock, clock[-1], clock[-1]])
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
            num_tensors=len(written_names(self.plan)),
            num_bytes=self.plan.num_bytes,
            ties={alias: tie.holder for alias, tie in self.plan.ties.items()},
            left_out=self.plan.left_out,
            # Memory and network are this run's matter; the manifest speaks of the result.
            notes=(*notes, *self.moving.notes, *self.source.notes, *self.world.notes),
            facts=self.planned.facts,
            lost={name: f"{loss.what}: {loss.why}" for name, loss in self.planned.lost.items()},
            transport=self.moving.transport,
            num_bytes_read=sum(rank.num_bytes_read for rank in ranks),
            num_bytes_checked=self.source.num_bytes,
            duration_sec=clock[-1] - clock[0],
            planning_sec=planning_sec,
            moving_sec=moving_sec,
            publishing_sec=publishing_sec,
            ranks=ranks,
            num_bytes_resumed=0 if self.journals is None else self.journals.finished.num_bytes,
        )


def _write_blocks(path: Path, blocks: Sequence[tuple[int, bytes]]) -> None:
    with Doing("writing", path), path.open("r+b") as stream:
        for offset_bytes, data in blocks:
            stream.seek(offset_bytes)
            stream.write(data)
