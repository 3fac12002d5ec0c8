"""Any number of ranks, transport, bucket size and writers: the same bytes, and the right ones.

Run as a module under torchrun, this file is also what each rank does (see :func:`main`): many
consolidations in one initialized process group, because starting the processes takes longest.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dist_consolidate import consolidate
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.synthetic import Buffer, Param, Spec, write
from tests.torchrun import run_ranks

pytestmark = pytest.mark.dist

RANKS = (2, 4)
TRANSPORTS = ("direct", "allgather", "gather")
FORMATS = ("safetensors", "bin")
WRITERS: tuple[int | str, ...] = (1, "all", 2)
AUTO = "auto"
SETTINGS_PER_TRANSPORT = 3  # of each checkpoint

GROUPS = (
    Param("emb.weight", (23, 7)),
    Param("a.weight", (13, 11)),
    Param("a.bias", (13,), group=1),
    Param("base.weight", (9, 5), kind="frozen"),
    Param("b.weight", (1, 29)),
    Param("scale", (), group=1),
    Param("tiny", (1,), group=2),
    Param("head.weight", (23, 7), tie_of="emb.weight"),
)
BUFFERS = (
    Buffer("ids", torch.arange(5) + 2**40),
    Buffer("mask", torch.tensor([True, False, True])),
    Buffer("strided", torch.randn(6, 35, generator=torch.Generator().manual_seed(1)).t()),
    Buffer("mean", torch.tensor([1.5, -2.25, 3.0], dtype=torch.bfloat16)),
)
GIANT = (Param("a", (7,)), Param("giant", (300, 401)), Param("b", (33, 5), group=1))

# Name of the checkpoint: how it was trained, and the largest file and smallest bucket to ask for.
SPECS: Mapping[str, tuple[Spec, str, int]] = {
    "z1_frozen_in_module": (Spec(stage=1, world=2, params=GROUPS, buffers=BUFFERS), "1KB", 333),
    "z2_three_shards": (
        Spec(
            stage=2,
            world=3,
            params=GROUPS,
            buffers=BUFFERS,
            alignment_padding=True,
            round_robin=True,
        ),
        "none",
        97,
    ),
    "z3_three_shards": (
        Spec(
            stage=3,
            world=3,
            params=GROUPS,
            buffers=BUFFERS,
            sub_group_numel=150,
            packed_fragments=True,
        ),
        "1KB",
        97,
    ),
    "z2_one_giant": (Spec(stage=2, world=2, params=GIANT), "100KB", 40_009),
    "z3_one_giant": (Spec(stage=3, world=3, params=GIANT), "none", 40_009),
    "z2_two_tensors": (
        Spec(stage=2, world=2, params=[Param("a", (3,)), Param("b", (2, 2))]),
        "none",
        1,
    ),
    "z3_two_tensors": (
        Spec(stage=3, world=5, params=[Param("a", (3,)), Param("b", (2, 2))]),
        "1",
        1,
    ),
}
REAL: Mapping[str, tuple[str, int]] = {
    "ds0.6.1_gpt2_z2_w2": ("20KB", 1_511),
    "ds0.6.1_t5real_z3_w2": ("none", 2_003),
    "kitchen_z2_groups_w4": ("2KB", 333),
    "kitchen_z3_bf16_w2": ("none", 333),
    "noncontig_z2_w2": ("1KB", 101),
    "shared_layers_z2_w3": ("none", 1_009),
    "tied_frozen_z3_w2": ("1KB", 333),
    "z0_bf16_w2": ("none", 997),
    "z1_bf16opt_groups_w4": ("2KB", 97),
}


@dataclasses.dataclass(frozen=True)
class Given:
    """One checkpoint to consolidate in many ways.

    Attributes:
        ckpt: The run folder.
        fp32: What must come out.
        max_shard_size: The largest file to ask for.
        tiny_bucket: A small and odd bucket size in bytes.
    """

    ckpt: Path
    fp32: Mapping[str, Tensor]
    max_shard_size: str
    tiny_bucket: int


@dataclasses.dataclass(frozen=True)
class Job:
    """One consolidation that every rank takes part in.

    Attributes:
        name: Name of the checkpoint, and of the folder with what one process makes of it.
        ckpt: The run folder.
        out: Where the result goes.
        options: Further arguments of :func:`consolidate`.
    """

    name: str
    ckpt: str
    out: str
    options: Mapping[str, Any]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Given]:
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for name, (spec, max_shard_size, tiny) in SPECS.items():
        truth = write(folder / name, spec)
        made[name] = Given(folder / name, truth.fp32, max_shard_size, tiny)
    for name, (max_shard_size, tiny) in REAL.items():
        case = CASES[name]
        made[name] = Given(case.ckpt, expected_fp32(case), max_shard_size, tiny)
    return made


@pytest.fixture(scope="module")
def alone(given: Mapping[str, Given], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each checkpoint consolidated by one plain process with default settings, and checked."""
    folder = tmp_path_factory.mktemp("alone")
    for name, format in itertools.product(given, FORMATS):
        out = folder / format / name
        one = given[name]
        consolidate(one.ckpt, out, format=format, max_shard_size=one.max_shard_size)
        assert_same_bits(load_output(out), one.fp32)
    return folder


def choose_jobs(given: Mapping[str, Given], folder: Path) -> list[Job]:
    """Every transport for every checkpoint; over all, every combination of the other settings."""
    others = list(itertools.product(WRITERS, (False, True), FORMATS))
    jobs: list[Job] = []
    for number, (name, one) in enumerate(given.items()):
        for shift, transport in enumerate(TRANSPORTS):
            for turn in range(SETTINGS_PER_TRANSPORT):
                at = SETTINGS_PER_TRANSPORT * number + shift + turn
                writers, tiny, format = others[at % len(others)]
                options = {
                    "transport": transport,
                    "writers": writers,
                    "bucket_size": one.tiny_bucket if tiny else AUTO,
                    "format": format,
                    "max_shard_size": one.max_shard_size,
                }
                jobs.append(Job(name, str(one.ckpt), str(folder / str(len(jobs))), options))
    return jobs


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a result."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("num_ranks", RANKS)
def test_the_bytes_do_not_depend_on_ranks_transport_buckets_or_writers(
    num_ranks: int, given: Mapping[str, Given], alone: Path, tmp_path: Path
) -> None:
    jobs = choose_jobs(given, tmp_path / "out")
    assert len({_varied(job) for job in jobs}) == len(TRANSPORTS) * len(WRITERS) * 2 * len(FORMATS)
    (tmp_path / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
    run_ranks(num_ranks, [tmp_path / "jobs.json"], module="tests.test_torchrun").ok()
    for job in jobs:
        want = contents(alone / job.options["format"] / job.name)
        assert contents(Path(job.out)) == want, job
    work_folders = [p.name for p in (tmp_path / "out").iterdir() if not p.name.isdigit()]
    assert not work_folders


def _varied(job: Job) -> tuple[Any, ...]:
    o = job.options
    return (o["transport"], o["writers"], o["bucket_size"] == AUTO, o["format"])


def test_the_command_under_torchrun_gives_the_same_bytes(
    given: Mapping[str, Given], alone: Path, tmp_path: Path
) -> None:
    name = "ds0.6.1_gpt2_z2_w2"
    size = given[name].max_shard_size
    arguments: list[str | Path] = [
        given[name].ckpt,
        tmp_path / "out",
        "--max_shard_size",
        size,
        "--writers",
        "all",
    ]
    ended = run_ranks(4, arguments).ok()
    assert contents(tmp_path / "out") == contents(alone / "safetensors" / name)
    assert ended.stdout.count("done in") == 1, ended
    assert "dist-consolidate" not in ended.stderr, ended


# What each rank does.


def main(path: str) -> None:
    """Do all jobs in one process group, and check that nothing is left of them.

    Args:
        path: The jobs as JSON.
    """
    jobs = [Job(**values) for values in json.loads(Path(path).read_text())]
    dist.init_process_group("gloo")
    # What the first run sets up once for the whole process is no leak.
    do(jobs[:3], suffix=".first")
    before = resources()
    do(jobs)
    after = resources()
    assert after == before, f"rank {dist.get_rank()}: {before} became {after}"
    dist.destroy_process_group()


def do(jobs: Sequence[Job], suffix: str = "") -> None:
    """Consolidate, and use the group after each.

    Args:
        jobs: The jobs.
        suffix: Put behind the name of each work folder's parent, to do a job twice.
    """
    for job in jobs:
        out = Path(job.out)
        target = out.parent.with_name(out.parent.name + suffix) / out.name
        report = consolidate(job.ckpt, target, **job.options)
        assert report.output_dir == target.resolve()
        assert report.transport == job.options["transport"]
        check_group()


def check_group() -> None:
    """Fail unless the default group is still there and works."""
    assert dist.is_initialized()
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    size = dist.get_world_size()
    assert total.item() == size * (size + 1) // 2


def resources() -> dict[str, int]:
    """Count what a run could forget to give back."""
    dist.barrier()
    return {
        "python threads": threading.active_count(),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "file descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


if __name__ == "__main__":
    main(sys.argv[1])
