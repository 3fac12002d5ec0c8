"""Nodes without a shared disk, each with network, mounts and a host name of its own.

Every node shows only its own shards, under one path. Run as a module, this file is what each rank
does there (see :func:`main`).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_consolidate import consolidate
from dist_consolidate.errors import ConsolidateError
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.node_namespaces import (
    Node,
    finish,
    nodes,
    require_namespaces,
    start_steps,
    start_torchrun,
)
from tests.special import State, edit
from tests.synthetic import Param, Spec, write
from tests.test_swapped import swapped_out
from tests.test_visibility import BUFFERS, PARAMS
from tests.torchrun import messages, show

pytestmark = pytest.mark.dist

MODULE = "tests.test_nodes"
NAMES = ("node-a", "node-b", "node-c")
TAG = "global_step3"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
BOUND_SEC = 60.0


@dataclasses.dataclass
class Disks:
    """What each node has on its own disk, all under one path.

    Attributes:
        root: Where the test sees the nodes' disks.
        at: Where each node sees its own.
    """

    root: Path
    at: Path

    def of(self, node: str) -> Path:
        """Give a node's disk, as the test sees it."""
        return self.root / node

    def put(self, run: str, source: Path, home: Callable[[str], Sequence[str]]) -> None:
        """Lay a run folder out over the disks.

        Args:
            run: Its name there.
            source: The whole run folder.
            home: Gives the nodes that have a file, by its path in the run folder.
        """
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            name = path.relative_to(source).as_posix()
            for node in home(name):
                target = self.of(node) / run / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    require_namespaces()
    found = Disks(tmp_path / "disks", tmp_path / "disk")
    for name in NAMES:
        found.of(name).mkdir(parents=True)
    found.at.mkdir()
    return found


@pytest.fixture
def cluster(disks: Disks, tmp_path: Path) -> Iterator[list[Node]]:
    """Three nodes that see their own disk only."""
    with nodes(NAMES, tmp_path) as found:
        for node in found:
            node.bind(disks.of(node.name), disks.at)
            node.hide(disks.root)
        yield found


def as_saved_locally(first: str, homes: Mapping[str, Sequence[int]]) -> Callable[[str], list[str]]:
    """Say which node has which file, as node-local storage leaves it.

    Args:
        first: The node of the run's first rank, which alone has ``latest``.
        homes: By node, the ranks that saved there.
    """

    def home(name: str) -> list[str]:
        if "zero_pp_rank_" in name:
            rank = int(name.split("zero_pp_rank_")[1].split("_")[0])
            return [node for node, ranks in homes.items() if rank in ranks]
        return [first] if name == "latest" else list(homes)

    return home


def saved_by_another(path: Path) -> None:
    """Make model states what another node's local rank 0 saves: no ties, other random states."""

    def change(state: State) -> None:
        state["shared_params"] = {}
        state["random_state"] = torch.arange(path.stat().st_size % 50 + 9)

    edit(path, change)


TWO = {"node-a": (0, 1), "node-b": (2, 3)}
# The run's first rank was on the second node, and each rank elsewhere than it is now.
ROTATED = {"node-b": (0, 1), "node-c": (2,), "node-a": (3,)}
SPEC = {
    2: Spec(stage=2, world=4, params=PARAMS, buffers=BUFFERS),
    3: Spec(stage=3, world=4, params=PARAMS, buffers=BUFFERS, sub_group_numel=100),
}


def put_locally(
    disks: Disks, run: str, spec: Spec, homes: Mapping[str, Sequence[int]]
) -> Mapping[str, torch.Tensor]:
    """Write a run as node-local storage leaves it; gives the truth."""
    whole = disks.root.parent / f"whole_{run}"
    truth = write(whole, spec)
    first, *others = homes
    disks.put(run, whole, as_saved_locally(first, homes))
    for node in others:
        path = disks.of(node) / run / TAG / MODEL
        if path.exists():
            saved_by_another(path)
    return truth.fp32


def outputs(disks: Disks, name: str) -> list[str]:
    """Name the nodes on which something of an output folder is."""
    found = []
    for node in NAMES:
        at = (disks.of(node) / name).parent
        if at.is_dir() and any(name.rpartition("/")[2] in path.name for path in at.iterdir()):
            found.append(node)
    return found


# One command on every node.


@pytest.mark.parametrize(
    ("start", "stage", "output_node", "writer"),
    [
        (start_torchrun, 3, ["--output-node", "node-b"], "node-b"),
        (start_steps, 2, [], "node-a"),
    ],
)
def test_one_command_on_two_nodes(
    start: Callable[..., Any],
    stage: int,
    output_node: list[str],
    writer: str,
    disks: Disks,
    cluster: list[Node],
) -> None:
    truth = put_locally(disks, "run", SPEC[stage], TWO)
    arguments = ["-m", "dist_consolidate", disks.at / "run", *output_node]
    ended = finish(start(cluster[:2], 2, arguments), 90)
    assert [command.returncode for command in ended] == [0] * len(ended), show(ended)
    said = "".join(command.stdout for command in ended)
    assert said.count("done in") == 1, show(ended)
    assert ("is on node-b (rank 2)" in said) == bool(output_node), said
    assert outputs(disks, f"run/consolidated/{TAG}") == [writer]
    assert_same_bits(load_output(disks.of(writer) / f"run/consolidated/{TAG}"), truth)


# Many requests, one after another, within one process group.


@dataclasses.dataclass(frozen=True)
class Job:
    """One consolidation that every rank takes part in.

    Attributes:
        run: The run folder.
        out: The output folder; ``None`` for the default.
        options: Further arguments of :func:`consolidate`.
        expects: The transport that must be chosen; of a request that is refused, nothing.
        says: What the report's notes, or the error, must say.
        unsaid: What they must not.
    """

    run: str
    out: str | None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expects: str = ""
    says: Sequence[str] = ()
    unsaid: Sequence[str] = ()


def do_together(disks: Disks, cluster: Sequence[Node], jobs: Sequence[Job]) -> None:
    """Let one rank on each node do jobs, and fail where something is not as a job says."""
    text = json.dumps([dataclasses.asdict(job) for job in jobs])
    for node in NAMES:
        (disks.of(node) / "jobs.json").write_text(text)
    ended = finish(start_steps(cluster, 1, ["-m", MODULE, "jobs", disks.at]), 120)
    assert [command.returncode for command in ended] == [0] * len(ended), show(ended)


def test_every_way_gives_the_truth_where_it_was_asked_for(
    disks: Disks, cluster: list[Node]
) -> None:
    truths = {
        "z2": put_locally(disks, "z2", SPEC[2], ROTATED),
        "z3": put_locally(disks, "z3", SPEC[3], ROTATED),
    }
    ways: list[tuple[str, dict[str, Any], str, str]] = [
        ("auto", {"format": "bin"}, "gather", "node-a"),
        ("gather", {"bucket_size": 333, "output_node": 2, "resume": True}, "gather", "node-c"),
        ("allgather", {"bucket_size": 333, "output_node": "node-b"}, "allgather", "node-b"),
        (
            "gather",
            {"writers": "all", "output_node": "node-b.cluster", "resume": True},
            "gather",
            "node-b",
        ),
    ]
    jobs, homes = [], {}
    for run in truths:
        for number, (transport, options, expects, home) in enumerate(ways):
            says = ["is not seen by ranks 0, 2"] if "writers" in options else []
            if run == "z2":
                says.append(f"{MODEL}: is on several nodes")
            given = {"transport": transport, **options}
            jobs.append(Job(run, f"out/{run}_{number}", given, expects, says))
            homes[jobs[-1].out] = home
    # Another node's folder under another path; and no output folder given.
    shutil.move(disks.of("node-c") / "z3", disks.of("node-c") / "elsewhere")
    for number, job in enumerate(jobs):
        if job.run == "z3":
            given = {**job.options, "search_dir": [str(disks.at / "elsewhere")]}
            jobs[number] = dataclasses.replace(job, options=given)
    jobs.append(Job("z2", None, {"output_node": "node-c"}, "gather"))
    do_together(disks, cluster, jobs)
    for job in jobs[:-1]:
        assert job.out is not None
        home = homes[job.out]
        assert outputs(disks, job.out) == [home], job
        assert_same_bits(load_output(disks.of(home) / job.out), truths[job.run])
    assert outputs(disks, f"z2/consolidated/{TAG}") == ["node-c"]
    assert_same_bits(load_output(disks.of("node-c") / f"z2/consolidated/{TAG}"), truths["z2"])


def test_layouts_of_many_files_over_nodes(disks: Disks, cluster: list[Node]) -> None:
    """Experts, pipeline layers, universal folders and swapped-out masters, file by file."""
    names = ["moe_z2_bf16_w2", "universal_kitchen_z3_bf16_w2", "kitchen_z3_bf16_w2"]
    names += ["frozen_half_z1_w2", "kitchen_z2_groups_w4", "lora_z2_exclude_w2", "tp2_z1_fp32_w2"]

    def scattered(name: str) -> list[str]:
        return [NAMES[sum(name.encode()) % len(NAMES)]]

    for name in names:
        disks.put(name, CASES[name].ckpt, scattered)
    case, _, _ = swapped_out("kitchen_z3_bf16_w2", disks.root.parent)
    disks.put("swapped", disks.root.parent / "ckpt", scattered)
    do_together(
        disks,
        cluster,
        [
            Job(run, f"out/{run}", {"output_node": "node-b"}, "gather")
            for run in [*names, "swapped"]
        ],
    )
    for name in names:
        got = load_output(disks.of("node-b") / "out" / name)
        assert_same_bits(got, expected_fp32(CASES[name]))
    assert_same_bits(load_output(disks.of("node-b") / "out" / "swapped"), expected_fp32(case))


def test_what_nodes_do_not_agree_on_is_named(disks: Disks, cluster: list[Node]) -> None:
    """One launch for all refusals; each names hosts, and nothing is written."""
    jobs = [
        *missing(disks),
        *torn(disks),
        *contradicting(disks),
        *wrong_requests(disks),
    ]
    do_together(disks, cluster, jobs)
    for node in NAMES:
        assert not list(disks.of(node).glob("out/*")), node
        assert not list(disks.of(node).glob("**/.*consolidating*")), node


def missing(disks: Disks) -> list[Job]:
    put_locally(disks, "no_shard", SPEC[3], ROTATED)
    (disks.of("node-c") / "no_shard" / TAG / OPTIM.format(2)).unlink()
    put_locally(disks, "damaged", SPEC[2], TWO)
    path = disks.of("node-b") / "damaged" / TAG / OPTIM.format(3)
    path.write_bytes(path.read_bytes()[:-300])
    put_locally(disks, "lost", SPEC[2], TWO)
    for node in TWO:
        (disks.of(node) / "lost" / TAG / MODEL).unlink()
    return [
        Job(
            "no_shard",
            "out/x",
            says=[
                f"{OPTIM.format(2)}: is missing (rank 2 of 4)",
                "node-a (rank 0) has model states of saved rank 3, optimizer states of saved rank",
                "node-b (rank 1) has model states of saved ranks 0, 1, optimizer states of saved",
                "node-c (rank 2) has model states of saved rank 2",
            ],
        ),
        Job("damaged", "out/x", says=[f"{OPTIM.format(3)}: truncated", "(on node-b, rank 1)"]),
        Job("lost", "out/x", says=[f"{MODEL}: is missing", "node-c (rank 2) has no shard"]),
        Job("nowhere", "out/x", says=["/nowhere: does not exist"], unsaid=["node-"]),
    ]


def torn(disks: Disks) -> list[Job]:
    put_locally(disks, "torn", SPEC[2], TWO)
    for node, tag in (("node-b", "global_step2"), ("node-c", "global_step2")):
        at = disks.of(node) / "torn"
        at.mkdir(exist_ok=True)
        (at / "latest").write_text(tag)
    newer = dataclasses.replace(SPEC[2], global_step=9)
    put_locally(disks, "half", SPEC[3], ROTATED)
    put_locally(disks, "newer", newer, {"node-b": (0, 1, 2, 3)})
    for name in (OPTIM.format(0), OPTIM.format(1)):
        source = disks.of("node-b") / "newer" / "global_step9" / name
        shutil.copy(source, disks.of("node-b") / "half" / TAG / name)
    return [
        Job(
            "torn",
            "out/x",
            says=[
                "`latest` names different tags on different nodes",
                "node-a (rank 0): `latest` names 'global_step3'",
                "node-b (rank 1): `latest` names 'global_step2'",
                "--tag",
            ],
        ),
        # Where the tag is named, each node serves what it has of it.
        Job("torn", None, {"tag": TAG, "dry_run": True}, "gather"),
        Job("half", "out/x", says=["step", "different saves", "node-b (rank 1) has"]),
    ]


def contradicting(disks: Disks) -> list[Job]:
    def other_value(state: State) -> None:
        state["module"]["a.weight"] = state["module"]["a.weight"].clone() + 1

    def other_step(state: State) -> None:
        state["global_steps"] += 1

    for run, change in (("values", other_value), ("steps", other_step)):
        put_locally(disks, run, SPEC[2], TWO)
        edit(disks.of("node-b") / run / TAG / MODEL, change)
    put_locally(disks, "stale", SPEC[3], TWO)
    put_locally(disks, "stale_source", dataclasses.replace(SPEC[3], global_step=4), TWO)
    name = OPTIM.format(0)
    source = disks.of("node-a") / "stale_source" / "global_step4" / name
    target = disks.of("node-c") / "stale" / TAG / name
    target.parent.mkdir(parents=True)
    shutil.copy(source, target)
    assert target.stat().st_size == (disks.of("node-a") / "stale" / TAG / name).stat().st_size
    both = ["node-a (rank 0)", "node-b (rank 1)"]
    return [
        Job("values", "out/x", says=[MODEL, *both, "the values of 'a.weight'"]),
        Job("steps", "out/x", says=[MODEL, *both, "global_steps is 3 in one and 4 in the other"]),
        Job("stale", "out/x", says=[name, "node-a (rank 0)", "another file on node-c (rank 2)"]),
    ]


def wrong_requests(disks: Disks) -> list[Job]:
    put_locally(disks, "good", SPEC[3], TWO)
    good = disks.at / "good"
    return [
        Job(
            "good",
            "out/x",
            {"transport": "direct"},
            says=["--transport direct", "node-c (rank 2) has no", "and 7 more"],
        ),
        Job("good", None, {"output_node": "2"}, says=[f"{good}: is not there on node-c (rank 2)"]),
        Job("good", "out/x", {"output_node": 3}, says=["--output-node 3: there is no such rank"]),
        Job("good", "out/x", {"output_node": "node-d"}, says=["node-d", ", ".join(NAMES)]),
    ]


# A node is lost in the middle.


@pytest.mark.parametrize("how", ["cut_off", "killed"])
def test_a_lost_node_ends_all_others(how: str, disks: Disks, cluster: list[Node]) -> None:
    params = [Param(f"layer.{number}.weight", (256, 256)) for number in range(16)]
    homes = {"node-a": (0,), "node-b": (1,), "node-c": (2,)}
    put_locally(disks, "run", Spec(stage=3, world=3, params=params), homes)
    cluster[2].slow_down("1mbit")
    arguments = [disks.at / "run", disks.at / "out/x", "--bucket-size", "48KB", "--timeout", "4s"]
    running = start_steps(cluster, 1, ["-m", "dist_consolidate", *arguments])
    deadline = time.monotonic() + 60
    work = disks.of("node-a") / "out"
    while not (work.is_dir() and list(work.glob(".x.consolidating-*/result/*.safetensors"))):
        assert time.monotonic() < deadline, "no output was begun"
        time.sleep(0.05)
    before = cluster[2].num_bytes_sent()
    while cluster[2].num_bytes_sent() < before + 150_000:
        assert time.monotonic() < deadline, "nothing was sent"
        time.sleep(0.05)
    if how == "cut_off":
        cluster[2].cut_off()
    else:
        running[2].close()
        cluster[2].kill_all()
    ended = finish(running[:2], BOUND_SEC)
    running[2].close()
    assert all(command.returncode == 1 for command in ended), show(ended)
    (message,) = messages(ended)
    assert "node-c" in message and "rank 2" in message, message
    assert "node-b" not in message and "node-a" not in message, message
    assert "Traceback" not in show(ended), show(ended)
    assert not outputs(disks, "out/x")


# What each rank does.


def main(arguments: Sequence[str]) -> int:
    """Do what a test asks for.

    Args:
        arguments: ``jobs`` and this node's disk.

    Returns:
        The exit code.
    """
    disk = Path(arguments[1])
    dist.init_process_group("gloo")
    jobs = [Job(**values) for values in json.loads((disk / "jobs.json").read_text())]
    wrong = [text for job in jobs if (text := do_one(disk, job))]
    dist.destroy_process_group()
    assert not wrong, "\n".join(wrong)
    return 0


def do_one(disk: Path, job: Job) -> str:
    """Do a job; say what is not as it should be."""
    out = None if job.out is None else disk / job.out
    try:
        report = consolidate(disk / job.run, out, **job.options)
    except ConsolidateError as error:
        chosen, told = "", str(error)
    else:
        chosen, told = report.transport, "\n".join(report.notes)
    wrong = [f"lacks {text!r}" for text in job.says if text not in told]
    wrong += [f"has {text!r}" for text in job.unsaid if text in told]
    wrong += [] if chosen == job.expects else [f"transport {chosen!r}"]
    return f"{job}: {wrong}: {told}" if wrong else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
