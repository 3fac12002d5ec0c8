"""Planning over ranks: rank 0 plans, the others read metadata of the shards they see.

Only metadata travels here. Rank 0 hands out files to read, in rounds; every rank answers with what
it found; in the end rank 0 sends the plan, or the error that all ranks then raise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dist_consolidate.checkpoint.jobs import Finding, Job, run_job
from dist_consolidate.checkpoint.layout import ShardFile, TagFolder, find_tag, in_order
from dist_consolidate.checkpoint.model import Checkpoint
from dist_consolidate.checkpoint.reader import read_checkpoint
from dist_consolidate.checkpoint.request import Request
from dist_consolidate.checkpoint.search import shards_in
from dist_consolidate.checkpoint.tensor_settle import merging_from
from dist_consolidate.doing import Doing
from dist_consolidate.errors import Caught, ConsolidateError, RankError
from dist_consolidate.options import Options
from dist_consolidate.output.index import shard_file_names
from dist_consolidate.plan.names import output_names
from dist_consolidate.plan.plan import Plan, make_plan
from dist_consolidate.plan.resolve import resolve
from dist_consolidate.plan.states import with_states
from dist_consolidate.runtime.control import Control, describe, exit_code, explained
from dist_consolidate.searching import search_together

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """What rank 0 decided; the same on every rank.

    Attributes:
        folder: The shards.
        facts: Tag, step, stage and releases, for the report and the manifest.
        plan: What is written, and from where.
        visible: For each rank, the shards it sees.
    """

    folder: TagFolder
    facts: dict[str, str | int | None]
    plan: Plan
    visible: tuple[frozenset[str], ...]

    @property
    def all_visible(self) -> bool:
        """Whether every rank sees every shard."""
        return len(set(self.visible)) == 1


def plan_here(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan from metadata (see :func:`dist_consolidate.plan.plan.make_plan`)."""
    resolution = resolve(
        checkpoint,
        user_ties=options.tie_pairs,
        allow_missing=options.allow_missing,
        exclude_frozen=options.exclude_frozen,
    )
    names = output_names(resolution, options.strip_prefix, options.rename_pairs)
    plan = make_plan(
        checkpoint,
        resolution,
        dtype=options.dtype,
        ties=options.tie_policy,
        max_shard_bytes=options.max_shard_bytes,
        file_names=lambda count: shard_file_names(options.format, count),
        names=names,
    )
    if checkpoint.optimizer is None:
        return plan
    return with_states(
        plan,
        checkpoint,
        resolution,
        names,
        max_shard_bytes=options.max_shard_bytes,
        file_names=lambda count, state: shard_file_names(options.format, count, state),
    )


def plan_together(checkpoint_dir: Path, options: Options, control: Control) -> Planned:
    """Read the metadata with all ranks and plan on rank 0.

    Args:
        checkpoint_dir: The folder the user named.
        options: The options.
        control: The control plane.

    Returns:
        The plan and what it rests on.

    Raises:
        ConsolidateError: On rank 0, what is wrong with the checkpoint or the request.
        RankError: The same on all other ranks.
    """
    found = on_rank_0(control, lambda: _find_tag(checkpoint_dir, options.tag))
    if options.search_dir:
        found = search_together(found, options.search_dir, control)
    with Doing("listing", found.folders[0]):
        seen_here = shards_in(found.folders)
    shards = control.exchange(seen_here)
    folder = dataclasses.replace(found, shards=_union(shards))
    # Another node may have saved model states of its own under the same name; the first count.
    sizes = {shard.name: shard.num_bytes for shard in folder.shards}
    visible = tuple(
        frozenset(shard.name for shard in seen if shard.num_bytes == sizes[shard.name])
        for seen in shards
    )
    reading = _SharedReading(control, visible)
    if control.rank:
        reading.serve(folder)

    def plan() -> Planned:
        try:
            checkpoint = read_checkpoint(folder, reading.run, _request(options))
        finally:
            reading.end()
        return Planned(folder, _facts(checkpoint), plan_here(checkpoint, options), visible)

    return on_rank_0(control, plan)


def _find_tag(checkpoint_dir: Path, tag: str | None) -> TagFolder:
    with Doing("looking into", checkpoint_dir):
        return find_tag(checkpoint_dir, tag)


def _request(options: Options) -> Request:
    return Request(
        claims=options.tie_pairs,
        trust_masters=options.trust_masters,
        allow_16bit=options.allow_16bit,
        include_optimizer="optimizer" in options.include,
        pipeline_names=options.pipeline_names,
        merging=merging_from(options.tp_rules, options.hf_config, options.tensor_parallel),
    )


def on_rank_0(control: Control, action: Callable[[], _T]) -> _T:
    """Run something on rank 0 and give every rank its result, or its error.

    Args:
        control: The control plane.
        action: What to run; ignored on other ranks.

    Returns:
        Rank 0's result.

    Raises:
        ConsolidateError: Rank 0's own error, on rank 0.
        RankError: The same, on other ranks.
    """
    outcome: _T | None = None
    caught = Caught()
    if control.rank == 0:
        with caught:
            outcome = action()
    error = caught.error
    told = None if error is None else (describe(error), exit_code(error))
    result, failed = control.broadcast((outcome, told))
    if error is None and failed is None:
        return result  # type: ignore[no-any-return]
    raised = explained(error) if error is not None else RankError(*failed)
    if isinstance(raised, ConsolidateError):
        raised.agreed = True
    raise raised


def _union(seen: Sequence[Sequence[ShardFile]]) -> tuple[ShardFile, ...]:
    by_name: dict[str, ShardFile] = {}
    for shards in seen:
        for shard in shards:
            by_name.setdefault(shard.name, shard)
    return in_order(by_name.values())


def _facts(checkpoint: Checkpoint) -> dict[str, str | int | None]:
    return {
        "tag": checkpoint.tag,
        "tag_chosen": checkpoint.chosen,
        "step": checkpoint.step,
        "stage": checkpoint.stage,
        "world_size": checkpoint.world_size,
        "pipeline_stages": checkpoint.pipeline_stages,
        "tensor_ranks": checkpoint.tensor_ranks,
        "deepspeed_version": checkpoint.ds_version,
    }


class _SharedReading:
    """Reads files on whichever rank sees them, as evenly as that allows."""

    def __init__(self, control: Control, visible: Sequence[frozenset[str]]) -> None:
        self._control, self._visible = control, visible

    def run(self, folder: TagFolder, jobs: Sequence[Job]) -> list[Finding]:
        """Hand the jobs out, on rank 0 (a :data:`dist_consolidate.checkpoint.reader.Runner`)."""
        owners = self._owners(jobs)
        dealt: list[list[Job]] = [[] for _ in self._visible]
        for job, owner in zip(jobs, owners, strict=True):
            dealt[owner].append(job)
        self._control.broadcast(dealt)
        answers = self._control.gather([run_job(folder, job) for job in dealt[0]])
        streams = [iter(answer) for answer in answers]
        return [next(streams[owner]) for owner in owners]

    def serve(self, folder: TagFolder) -> None:
        """Do what rank 0 hands out, until it is done."""
        while (dealt := self._control.broadcast(None)) is not None:
            mine = dealt[self._control.rank]
            self._control.gather([run_job(folder, job) for job in mine])

    def end(self) -> None:
        """Tell the other ranks that nothing more will be handed out."""
        self._control.broadcast(None)

    def _owners(self, jobs: Sequence[Job]) -> list[int]:
        load = [0] * len(self._visible)
        owners = []
        for job in jobs:
            able = [r for r, names in enumerate(self._visible) if job.shard.name in names]
            owner = min(able, key=lambda rank: (load[rank], rank))
            load[owner] += 1
            owners.append(owner)
        return owners
