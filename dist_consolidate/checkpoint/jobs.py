"""Files to read, handed out as jobs: which process reads which file is left to the caller.

Several ranks can so share the work, each reading what it sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from dist_consolidate.checkpoint.archive import scan_integer
from dist_consolidate.checkpoint.expert_masters import ExpertOptimState, read_expert_optim
from dist_consolidate.checkpoint.layout import ShardFile, TagFolder
from dist_consolidate.checkpoint.model_states import read_model_state, read_param, read_tensors
from dist_consolidate.checkpoint.optim_states import read_optim_state
from dist_consolidate.checkpoint.optimizer import BaseOptimizer, read_base_optimizer
from dist_consolidate.checkpoint.records import Record, damaged_records
from dist_consolidate.checkpoint.states import ModelState, OptimState, ParamState, TensorsState
from dist_consolidate.doing import Doing
from dist_consolidate.errors import Caught, CheckpointError

Finding = (
    ModelState
    | OptimState
    | TensorsState
    | BaseOptimizer
    | ExpertOptimState
    | ParamState
    | tuple[Record, ...]
    | int
    | None
    | CheckpointError
)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One file to read, and what for: states, a state dict, a parameter, an optimizer, a step.

    Or its damaged records, among those that ``spans`` (first byte, behind the last) lie in.
    """

    kind: Literal["model", "optim", "tensors", "optimizer", "expert-optim", "param", "step", "crc"]
    shard: ShardFile
    spans: tuple[tuple[int, int], ...] = ()


Runner = Callable[[TagFolder, Sequence[Job]], list[Finding]]


def run_job(folder: TagFolder, job: Job) -> Finding:
    """Read one file; whatever goes wrong is the result, to be raised with the others."""
    path = folder.file(job.shard.name)
    # A shard's name may lead into a folder of the tag folder.
    base = path.parents[len(Path(job.shard.name).parts) - 1]
    finding: Finding = None
    with (caught := Caught()), Doing("reading", path):
        if job.kind == "model":
            finding = read_model_state(base, job.shard)
        elif job.kind == "optim":
            finding = read_optim_state(base, job.shard)
        elif job.kind == "tensors":
            finding = read_tensors(base, job.shard)
        elif job.kind == "optimizer":
            finding = read_base_optimizer(base, job.shard)
        elif job.kind == "expert-optim":
            finding = read_expert_optim(base, job.shard)
        elif job.kind == "param":
            finding = read_param(base, job.shard)
        elif job.kind == "crc":
            finding = damaged_records(path, job.spans)
        else:
            finding = scan_integer(path, "global_steps")
    error = caught.error
    if error is None or isinstance(error, CheckpointError):
        return error or finding
    if isinstance(error, OSError):
        return CheckpointError(f"{path}: cannot be read: {error.strerror or error}")
    kind = type(error).__name__
    return CheckpointError(f"{path}: holds what DeepSpeed does not write ({kind}: {error})")


def run_here(folder: TagFolder, jobs: Sequence[Job]) -> list[Finding]:
    """Read all files in this process."""
    return [run_job(folder, job) for job in jobs]
