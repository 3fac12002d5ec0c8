"""Planning at scale: 1,024 shards and 100,000 tensors, without a byte on disk.

    python -m tests.bench.plan_scale --stage 3 [--shards 1024] [--tensors 100000]

The typed states of such a checkpoint are made in memory, as the reader would give them; then the
census, the layout, the tie map, the plan and the buckets are computed as for a real one. Printed
as JSON: seconds of each step, peak resident memory, and the elements that the sampled buckets hold.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.extents import TensorSpan, contiguous_stride
from dist_consolidate.checkpoint.jobs import Finding, Job
from dist_consolidate.checkpoint.layout import ShardFile, TagFolder
from dist_consolidate.checkpoint.reader import read_checkpoint
from dist_consolidate.checkpoint.states import ModelState, ModuleEntry, OptimState, Shapes
from dist_consolidate.checkpoint.unpickle import StorageRef, TensorRef
from dist_consolidate.dtypes import BFLOAT16, FLOAT32
from dist_consolidate.options import Options
from dist_consolidate.plan.buckets import Phase, make_phases
from dist_consolidate.planning import plan_here

TENSORS_PER_SUB_GROUP = 1000
SAMPLED_BUCKETS = 16
BUCKET_BYTES = 1 << 30


def shapes(count: int) -> Shapes:
    """Name and shape a model: about 3 million elements each, in sizes that do not divide."""
    return {
        f"model.layers.{i // 100}.mlp.w{i % 100}.weight": (1021 + i % 7, 3 * 1024)
        for i in range(count)
    }


class States:
    """Makes the states of a checkpoint, as the reader's jobs ask for them."""

    def __init__(self, stage: int, shards: int, shapes: Shapes) -> None:
        self.stage, self.shards, self.shapes = stage, shards, shapes
        names = list(shapes)
        width = TENSORS_PER_SUB_GROUP if stage == 3 else len(names)
        self.groups = [
            {name: shapes[name] for name in names[start : start + width]}
            for start in range(0, len(names), width)
        ]
        self.part_numel = [self._part_numel(group) for group in self.groups]
        self.module = {
            name: self._entry(i, shape) for i, (name, shape) in enumerate(self.shapes.items())
        }

    def _part_numel(self, group: Shapes) -> int:
        sizes = [math.prod(shape) for shape in group.values()]
        if self.stage == 3:
            return sum(-(-size // self.shards) for size in sizes)
        unit = 2 * self.shards
        return -(-sum(sizes) // unit) * unit // self.shards

    def _entry(self, index: int, shape: tuple[int, ...]) -> ModuleEntry:
        held = (0,) if self.stage == 3 else shape
        storage = StorageRef(str(index), BFLOAT16, math.prod(held))
        stride = contiguous_stride(held)
        ref = TensorRef(storage, BFLOAT16, 0, held, stride)
        return ModuleEntry(ref, TensorSpan("model", 0, BFLOAT16, held, stride))

    def folder(self) -> TagFolder:
        """Name the shards."""
        model = (
            "zero_pp_rank_{}_mp_rank_00_model_states.pt"
            if self.stage == 3
            else "mp_rank_00_model_states.pt"
        )
        count = self.shards if self.stage == 3 else 1
        models = [
            ShardFile(model.format(r), "model", r if self.stage == 3 else None, 0, "", 1 << 30)
            for r in range(count)
        ]
        optim = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
        optims = [
            ShardFile(optim.format(r), "optim", r, 0, "bf16_", 1 << 40) for r in range(self.shards)
        ]
        return TagFolder(Path("nowhere"), "global_step1", "made", (*models, *optims))

    def run(self, _folder: TagFolder, jobs: Sequence[Job]) -> list[Finding]:
        """Answer the reader's jobs."""
        return [self._answer(job) for job in jobs]

    def _answer(self, job: Job) -> Finding:
        if job.kind == "step":
            return 1
        if job.kind == "model":
            return self._model(job.shard)
        spans = [
            TensorSpan(job.shard.name, 64, FLOAT32, (numel,), (1,)) for numel in self.part_numel
        ]
        return OptimState(
            shard=job.shard,
            striped=self.stage == 3,
            zero_stage=self.stage,
            partition_counts=(self.shards,),
            parts=tuple(spans),
            param_shapes=None,
            alignment_paddings=None,
            step=1,
            ds_version="0",
        )

    def _model(self, shard: ShardFile) -> ModelState:
        facts: dict[str, Any] = {
            "frozen_shapes": {},
            "frozen": {},
            "shared_params": {},
            "optimizer": None,
            "flat_masters": False,
            "zero_stage": self.stage,
            "zenflow": False,
            "global_steps": 1,
            "dp_world_size": self.shards,
            "mp_world_size": 1,
            "ds_version": "0",
        }
        return ModelState(shard, self.module, {}, frozenset(), tuple(self.groups), **facts)


def sampled_numel(phases: Sequence[Phase]) -> Iterator[int]:
    """Ask for pieces and reads of evenly spread buckets; give the elements in them."""
    for phase in phases:
        for bucket in range(0, phase.num_buckets, -(-phase.num_buckets // SAMPLED_BUCKETS)):
            for row in range(phase.num_rows):
                assert all(read.at_bytes < phase.row_bytes for read in phase.reads(bucket, row))
            yield sum(piece.num_rows * piece.num_numel for piece in phase.pieces(bucket))


def main() -> None:
    """Parse the command line, plan, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3, choices=(2, 3))
    parser.add_argument("--shards", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=100_000)
    options = parser.parse_args()
    states = States(options.stage, options.shards, shapes(options.tensors))
    marks = [time.monotonic()]
    checkpoint = read_checkpoint(states.folder(), states.run)
    marks.append(time.monotonic())
    plan = plan_here(checkpoint, Options(ties="drop"))
    marks.append(time.monotonic())
    numel = sum(sampled_numel(make_phases(plan, BUCKET_BYTES, 1)))
    marks.append(time.monotonic())
    names = ("census_and_layout_sec", "ties_and_plan_sec", "buckets_sec")
    found: dict[str, object] = {
        name: round(after - before, 2)
        for name, before, after in zip(names, marks, marks[1:], strict=False)
    }
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["output_bytes"], found["sampled_numel"] = plan.num_bytes, numel
    print(json.dumps(found))


if __name__ == "__main__":
    main()
