"""Planning over ranks: one plans, the others read metadata of the shards they see.

Only metadata travels here. That rank hands out files to read, in rounds; every rank answers with
what it found; in the end it sends the plan, or the error that all ranks then raise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dist_consolidate.checkpoint.jobs import Finding, Job, run_job
from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Checkpoint, Loss
from dist_consolidate.checkpoint.reader import read_checkpoint
from dist_consolidate.checkpoint.request import Request
from dist_consolidate.checkpoint.tensor_settle import merging_from
from dist_consolidate.errors import Caught, CheckpointError, ConsolidateError, RankError
from dist_consolidate.finding import find_together, settle
from dist_consolidate.nodes import Nodes, look_together
from dist_consolidate.options import Options
from dist_consolidate.output.index import shard_file_names
from dist_consolidate.plan.losses import losses
from dist_consolidate.plan.names import Names, output_names
from dist_consolidate.plan.plan import Plan, make_plan
from dist_consolidate.plan.resolve import Resolution, resolve
from dist_consolidate.plan.states import with_states
from dist_consolidate.runtime.control import Control, describe, exit_code, explained
from dist_consolidate.searching import search_together

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """What one rank decided; the same on every rank.

    Attributes:
        nodes: Who sees which shards.
        facts: Tag, step, stage and releases, for the report and the manifest.
        plan: What is written, and from where.
        lost: By name in the output, what a damaged checkpoint lacks (``--salvage``).
    """

    nodes: Nodes
    facts: dict[str, str | int | None]
    plan: Plan
    lost: dict[str, Loss]

    @property
    def folder(self) -> TagFolder:
        """The shards."""
        return self.nodes.folder

    @property
    def visible(self) -> tuple[frozenset[str], ...]:
        """For each rank, the shards it serves."""
        return self.nodes.visible

    @property
    def all_visible(self) -> bool:
        """Whether every rank sees every shard."""
        return self.nodes.all_visible


def resolved(checkpoint: Checkpoint, options: Options) -> tuple[Resolution, Names]:
    """Find what holds the data of each key, and what the output calls it."""
    resolution = resolve(
        checkpoint,
        user_ties=options.tie_pairs,
        allow_missing=options.allow_missing,
        exclude_frozen=options.exclude_frozen,
    )
    return resolution, output_names(resolution, options.strip_prefix, options.rename_pairs)


def plan_here(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan from metadata (see :func:`dist_consolidate.plan.plan.make_plan`)."""
    resolution, names = resolved(checkpoint, options)
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


def plan_together(
    checkpoint_dir: Path, options: Options, control: Control, hosts: Sequence[str]
) -> Planned:
    """Read the metadata with all ranks and plan on one of them.

    Args:
        checkpoint_dir: The folder the user named.
        options: The options.
        control: The control plane.
        hosts: The host of each rank.

    Returns:
        The plan and what it rests on.

    Raises:
        ConsolidateError: On the rank that plans, what is wrong with the checkpoint or the request.
        RankError: The same on all other ranks.
    """
    views = find_together(checkpoint_dir, options.tag, hosts, control)
    found = on_rank_0(control, lambda: settle(checkpoint_dir, options.tag, views))
    if options.search_dir:
        found = search_together(found, options.search_dir, control)
    nodes = look_together(found, hosts, control)
    reading = _SharedReading(control, nodes)
    if control.rank != nodes.planner:
        reading.serve()

    def plan() -> Planned:
        try:
            checkpoint = read_checkpoint(nodes.folder, reading.run, request_for(options))
        except CheckpointError as error:
            if nodes.all_visible:
                raise
            raise type(error)(f"{error}\n{nodes.inventory()}") from error
        finally:
            reading.end()
        plan = plan_here(checkpoint, options)
        return Planned(nodes, _facts(checkpoint), plan, losses(checkpoint.lost, plan))

    return on_rank(control, nodes.planner, plan)


def request_for(options: Options) -> Request:
    """Say how a checkpoint is to be read."""
    return Request(
        claims=options.tie_pairs,
        trust_masters=options.trust_masters,
        allow_16bit=options.allow_16bit,
        include_optimizer="optimizer" in options.include,
        salvage=options.salvage,
        pipeline_names=options.pipeline_names,
        merging=merging_from(options.tp_rules, options.hf_config, options.tensor_parallel),
    )


def on_rank_0(control: Control, action: Callable[[], _T]) -> _T:
    """Run something on rank 0 (see :func:`on_rank`)."""
    return on_rank(control, 0, action)


def on_rank(control: Control, rank: int, action: Callable[[], _T]) -> _T:
    """Run something on one rank and give every rank its result, or its error.

    Args:
        control: The control plane.
        rank: The rank.
        action: What to run; ignored on other ranks.

    Returns:
        That rank's result.

    Raises:
        ConsolidateError: The rank's own error, on that rank.
        RankError: The same, on other ranks.
    """
    outcome: _T | None = None
    caught = Caught()
    if control.rank == rank:
        with caught:
            outcome = action()
    error = caught.error
    told = None if error is None else (describe(error), exit_code(error))
    result, failed = control.broadcast((outcome, told), rank)
    if error is None and failed is None:
        return result  # type: ignore[no-any-return]
    raised = explained(error) if error is not None else RankError(*failed)
    if isinstance(raised, ConsolidateError):
        raised.agreed = True
    raise raised


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

    def __init__(self, control: Control, nodes: Nodes) -> None:
        self._control, self._nodes, self._visible = control, nodes, nodes.visible
        self._planner = nodes.planner

    def run(self, folder: TagFolder, jobs: Sequence[Job]) -> list[Finding]:
        """Hand the jobs out, where is planned (a :data:`~.checkpoint.reader.Runner`)."""
        owners = self._owners(jobs)
        dealt: list[list[Job]] = [[] for _ in self._visible]
        for job, owner in zip(jobs, owners, strict=True):
            dealt[owner].append(job)
        self._control.broadcast(dealt, self._planner)
        mine = [run_job(folder, job) for job in dealt[self._planner]]
        answers = self._control.gather(mine, self._planner)
        streams = [iter(answer) for answer in answers]
        return [self._placed(next(streams[owner]), owner) for owner in owners]

    def serve(self) -> None:
        """Do what is handed out, until nothing is left."""
        folder = self._nodes.folder
        while (dealt := self._control.broadcast(None, self._planner)) is not None:
            mine = dealt[self._control.rank]
            self._control.gather([run_job(folder, job) for job in mine], self._planner)

    def end(self) -> None:
        """Tell the other ranks that nothing more will be handed out."""
        self._control.broadcast(None, self._planner)

    def _placed(self, finding: Finding, rank: int) -> Finding:
        """Add to what is wrong with a file where that file is, if nodes see different ones."""
        if not isinstance(finding, CheckpointError) or self._nodes.all_visible:
            return finding
        return type(finding)(f"{finding} (on {self._nodes.hosts[rank]}, rank {rank})")

    def _owners(self, jobs: Sequence[Job]) -> list[int]:
        load = [0] * len(self._visible)
        owners = []
        for job in jobs:
            able = [r for r, names in enumerate(self._visible) if job.shard.name in names]
            owner = min(able, key=lambda rank: (load[rank], rank))
            load[owner] += 1
            owners.append(owner)
        return owners
