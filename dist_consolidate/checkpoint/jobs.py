"""Files to read, handed out as jobs: which process reads which file is left to the caller.

Several ranks can so share the work, each reading what it sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from dist_consolidate.checkpoint.archive import scan_integer
from dist_consolidate.checkpoint.layout import ShardFile, TagFolder
from dist_consolidate.checkpoint.states import (
    ModelState,
    OptimState,
    ParamState,
    TensorsState,
    read_model_state,
    read_optim_state,
    read_param,
    read_tensors,
)
from dist_consolidate.errors import Caught, CheckpointError

Finding = ModelState | OptimState | TensorsState | ParamState | int | None | CheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One file to read, and what for: states, a bare state dict, a parameter, or the step."""

    kind: Literal["model", "optim", "tensors", "param", "step"]
    shard: ShardFile


Runner = Callable[[TagFolder, Sequence[Job]], list[Finding]]


def run_job(folder: TagFolder, job: Job) -> Finding:
    """Read one file; whatever goes wrong is the result, to be raised with the others."""
    path = folder.path / job.shard.name
    finding: Finding = None
    with (caught := Caught()):
        if job.kind == "model":
            finding = read_model_state(folder.path, job.shard)
        elif job.kind == "optim":
            finding = read_optim_state(folder.path, job.shard)
        elif job.kind == "tensors":
            finding = read_tensors(folder.path, job.shard)
        elif job.kind == "param":
            finding = read_param(folder.path, job.shard)
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
