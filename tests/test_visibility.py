"""Nodes that see different shards of one checkpoint.

Each rank works in the folder of its node and is given the same relative path, under which every
node has other files. Run as a module, this file is what each rank does (see :func:`main`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_consolidate import cli, consolidate
from dist_consolidate.errors import ConsolidateError
from tests.cases import assert_same_bits, load_output
from tests.synthetic import Buffer, Param, Spec, Truth, write
from tests.torchrun import messages, show
from tests.zygote import fork_ranks, fork_together

pytestmark = pytest.mark.dist

MODULE = "tests.test_visibility"
PARAMS = (
    Param("emb.weight", (31, 9)),
    Param("a.weight", (17, 6)),
    Param("a.bias", (17,), group=1),
    Param("base.weight", (8, 3), kind="frozen"),
    Param("scale", (), group=1),
    Param("head.weight", (31, 9), tie_of="emb.weight"),
)
BUFFERS = (Buffer("ids", torch.arange(7)), Buffer("mean", torch.tensor([0.5, -1.25])))
SPECS: Mapping[str, Spec] = {
    "z1": Spec(stage=1, world=4, params=PARAMS, buffers=BUFFERS),
    "z2": Spec(stage=2, world=4, params=PARAMS, buffers=BUFFERS),
    "z3": Spec(stage=3, world=4, params=PARAMS, buffers=BUFFERS, sub_group_numel=100),
}
# Which of the four training ranks' files lie on which node. DeepSpeed writes model states of
# stages 1 and 2 on the first node only, or with node-local storage on each.
LAYOUTS: Mapping[str, tuple[Sequence[int], Sequence[int]]] = {
    "halves": ((0, 1), (2, 3)),
    "interleaved": ((0, 2), (1, 3)),
    "overlapping": ((0, 1, 2), (1, 2, 3)),
    "all_on_first": ((0, 1, 2, 3), ()),
    "optimizer_elsewhere": ((), (0, 1, 2, 3)),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One consolidation that every rank takes part in.

    Attributes:
        name: Of the checkpoint and of the way it lies on the nodes.
        nodes: For each rank the folder to work in.
        out: Where the result goes.
        options: Further arguments of :func:`consolidate`.
        expects: The transport that must be chosen.
    """

    name: str
    nodes: Sequence[str]
    out: str
    options: Mapping[str, Any]
    expects: str


def split(source: Path, nodes: Path, layout: str) -> tuple[Path, Path]:
    """Lay a checkpoint out over two nodes; each gets ``ckpt`` in a folder of its own.

    Args:
        source: The whole checkpoint.
        nodes: Gets the nodes' folders.
        layout: One of ``LAYOUTS``.

    Returns:
        The two folders.
    """
    folders = nodes / "node0", nodes / "node1"
    for number, (folder, ranks) in enumerate(zip(folders, LAYOUTS[layout], strict=True)):
        for path in sorted(source.rglob("*")):
            if path.is_file() and _is_on(path.name, number, ranks):
                target = folder / "ckpt" / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        folder.mkdir(exist_ok=True)
    return folders


def _is_on(name: str, node: int, ranks: Sequence[int]) -> bool:
    if "zero_pp_rank_" not in name or (name.endswith("model_states.pt") and not ranks):
        return node == 0
    return int(name.split("zero_pp_rank_")[1].split("_")[0]) in ranks


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Truth]:
    folder = tmp_path_factory.mktemp("whole")
    return {name: write(folder / name, spec) for name, spec in SPECS.items()}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_no_node_sees_whole_comes_out_exact(
    num_ranks: int, truths: Mapping[str, Truth], tmp_path: Path
) -> None:
    jobs = [
        job
        for name in SPECS
        for layout in LAYOUTS
        for job in _jobs(truths[name], f"{name}_{layout}", layout, num_ranks, tmp_path)
    ]
    (tmp_path / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
    fork_together(num_ranks, ["jobs", tmp_path / "jobs.json"], module=MODULE).ok()
    for job in jobs:
        got = load_output(Path(job.out))
        assert_same_bits(got, truths[job.name.split("_")[0]].fp32)


def _jobs(truth: Truth, name: str, layout: str, num_ranks: int, folder: Path) -> list[Job]:
    """Every transport that crosses the network; the ranks of a node are neighbours."""
    nodes = split(truth.tag_dir.parent, folder / name, layout)
    per_rank = [str(nodes[rank * 2 // num_ranks]) for rank in range(num_ranks)]
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("auto", "gather", {"format": "bin"}),
        ("gather", "gather", {"bucket_size": 333, "writers": "all"}),
        ("allgather", "allgather", {"bucket_size": 333}),
    ]
    return [
        Job(name, per_rank, str(folder / f"out_{name}_{t}"), {"transport": t, **o}, expects)
        for t, expects, o in asked
    ]


def test_direct_is_refused_in_words(truths: Mapping[str, Truth], tmp_path: Path) -> None:
    nodes = split(truths["z3"].tag_dir.parent, tmp_path, "halves")
    arguments: list[str | Path] = ["ckpt", tmp_path / "out", "--transport", "direct"]
    ended = fork_ranks(2, ["cli", *nodes, *arguments], module=MODULE)
    assert [rank.returncode for rank in ended] == [2, 2], show(ended)
    (message,) = messages(ended)
    assert "--transport direct" in message, message
    assert "see" in message, message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["z2", "z3"])
def test_a_shard_that_no_node_has_is_named(
    name: str, truths: Mapping[str, Truth], tmp_path: Path
) -> None:
    nodes = split(truths[name].tag_dir.parent, tmp_path, "halves")
    (lost,) = (nodes[1] / "ckpt").rglob("*zero_pp_rank_2_*optim_states.pt")
    lost.unlink()
    ended = fork_ranks(2, ["cli", *nodes, "ckpt", tmp_path / "out"], module=MODULE)
    assert [rank.returncode for rank in ended] == [3, 3], show(ended)
    (message,) = messages(ended)
    assert lost.name in message, message
    assert "missing (rank 2 of 4)" in message, message
    (missing,) = [line for line in message.splitlines() if "is missing" in line]
    assert lost.name in missing, message
    assert "Traceback" not in show(ended), show(ended)
    assert not (tmp_path / "out").exists()


# What each rank does.


def main(arguments: Sequence[str]) -> int:
    """Do what a test asks for, in this rank's node.

    Args:
        arguments: ``jobs`` and a file, or ``cli``, a folder for each rank and a command line.

    Returns:
        The exit code.
    """
    if arguments[0] == "jobs":
        return _do_jobs(Path(arguments[1]))
    folders = arguments[1 : 1 + int(os.environ["WORLD_SIZE"])]
    os.chdir(folders[int(os.environ["RANK"])])
    return cli.main(arguments[1 + len(folders) :])


def _do_jobs(path: Path) -> int:
    jobs = [Job(**values) for values in json.loads(path.read_text())]
    dist.init_process_group("gloo")
    for job in jobs:
        os.chdir(job.nodes[dist.get_rank()])
        try:
            report = consolidate("ckpt", job.out, **job.options)
        except ConsolidateError as error:
            raise AssertionError(f"{job}: {error}") from error
        assert report.transport == job.expects, (job, report.transport)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
