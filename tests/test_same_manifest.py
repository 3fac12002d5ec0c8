"""The whole result, digests included, is the same however many ranks wrote it, and in which way.

Run as a module, this file is what each rank does (see :func:`main`).
"""

from __future__ import annotations

import errno
import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_consolidate import ConsolidateError, consolidate
from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.runtime import digests
from dist_consolidate.runtime.outfiles import OutputFiles
from tests.cases import bits, load_output
from tests.synthetic import Buffer, Param, Spec, write
from tests.zygote import fork_together

PARAMS = (
    Param("emb.weight", (300, 501)),  # several stripes and buckets long
    Param("a.weight", (77, 130)),
    Param("a.bias", (17,), group=1),
    Param("base.weight", (50, 99), kind="frozen"),
    Param("scale", (), group=1),
    Param("head.weight", (300, 501), tie_of="emb.weight"),
)
BUFFERS = (Buffer("ids", torch.arange(3000)), Buffer("none", torch.zeros(0)))
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "files": {"max_shard_size": "700KB", "include": ["optimizer"], "sha256": True},
    "bin": {"format": "bin", "ties": "copy", "max_shard_size": "none"},
    "bf16": {"dtype": "bf16", "max_shard_size": "300KB"},
}
# Buckets of a few kilobytes: tensors come in hundreds of pieces, many of them out of order.
WAYS: tuple[Mapping[str, Any], ...] = (
    {"transport": "gather", "bucket_size": 10_000},
    {"transport": "gather", "writers": "all", "bucket_size": 100_000},
    {"transport": "allgather", "writers": 2, "bucket_size": 30_000},
    {"transport": "allgather"},
    {"transport": "direct", "writers": 1, "bucket_size": 8192},
    {"transport": "direct", "bucket_size": 8192},
    {"transport": "direct", "io": "direct"},
)


def tree(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Every result of one process in its own way; stage 3 cuts each tensor over the ranks."""
    root = tmp_path_factory.mktemp("root")
    for stage in (2, 3):
        write(root / f"z{stage}", Spec(stage=stage, world=3, params=PARAMS, buffers=BUFFERS))
        for shape, options in SHAPES.items():
            consolidate(root / f"z{stage}", root / f"{stage}-{shape}", **options)
    trees = {f"{s}-{shape}": tree(root / f"{s}-{shape}") for s in (2, 3) for shape in SHAPES}
    return {**trees, "root": {"": str(root).encode()}}


def root_of(wanted: Mapping[str, Mapping[str, bytes]]) -> Path:
    return Path(wanted["root"][""].decode())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("number", range(len(WAYS)))
def test_one_process(stage, number, wanted, tmp_path):
    for shape, options in SHAPES.items():
        consolidate(root_of(wanted) / f"z{stage}", tmp_path / shape, **options, **WAYS[number])
        assert tree(tmp_path / shape) == wanted[f"{stage}-{shape}"]


@pytest.mark.dist
def test_ranks(wanted, tmp_path):
    """Rank by rank other parts of one tensor are written; one of them digests it all."""
    root = root_of(wanted)
    jobs = [
        (str(root / f"z{stage}"), str(tmp_path / f"{stage}-{shape}-{number}"), {**options, **way})
        for stage in (2, 3)
        for shape, options in SHAPES.items()
        for number, way in enumerate(WAYS)
        if (stage + number + len(shape)) % 2  # half of them, each way with each stage or shape
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    fork_together(3, [tmp_path / "jobs.json"], module="tests.test_same_manifest").ok()
    for _, out, options in jobs:
        assert tree(Path(out)) == wanted[Path(out).name.rpartition("-")[0]], options


def test_the_values_change_only_the_digests(tmp_path):
    """Of a tensor that was trained further, and of nothing else."""
    for seed in (0, 1):
        params = [Param("a", (5, 7)), Param("b", (3,), kind="frozen")]
        write(tmp_path / f"ckpt{seed}", Spec(stage=2, params=params, seed=seed))
        consolidate(tmp_path / f"ckpt{seed}", tmp_path / f"out{seed}")
    first, second = (
        json.loads((tmp_path / f"out{seed}" / "consolidation.json").read_text())["tensors"]
        for seed in (0, 1)
    )
    values = [load_output(tmp_path / f"out{seed}") for seed in (0, 1)]
    for name in ("a", "b"):
        same = torch.equal(*(bits(tensors[name]) for tensors in values))
        assert (first[name]["xxh3_128"] == second[name]["xxh3_128"]) == same
        assert first[name] == {**second[name], "xxh3_128": first[name]["xxh3_128"]}


def test_threads_do_not_wait_for_one_that_has_failed(wanted, tmp_path, monkeypatch):
    """Whichever read or write fails, the run ends at once, although threads take turns."""
    chance, calls = random.Random(0), iter(range(10**9))
    scatter, write_out = ShardReader.scatter, OutputFiles.write
    last = 0

    def failing(action):
        def call(self, *arguments, **options):
            # The loop below sets both anew.
            if next(calls) == last:
                raise OSError(errno.EIO, "Input/output error")
            time.sleep(chance.random() / 5000)
            return action(self, *arguments, **options)

        return call

    monkeypatch.setattr(ShardReader, "scatter", failing(scatter))
    monkeypatch.setattr(OutputFiles, "write", failing(write_out))
    options = {"transport": "direct", "bucket_size": 4096 * 4, "io": "buffered"}
    for number in range(40):
        calls, last = iter(range(10**9)), chance.randrange(100)
        started = time.monotonic()
        with pytest.raises(ConsolidateError, match="Input/output error"):
            consolidate(root_of(wanted) / "z3", tmp_path / str(number), **options)
        # A thread that waits in vain would go on after some seconds.
        assert time.monotonic() - started < digests._PATIENCE_SEC


def main(path: Path) -> None:
    """Do all jobs in one process group.

    Args:
        path: The jobs as JSON.
    """
    dist.init_process_group("gloo")
    for ckpt, out, options in json.loads(path.read_text()):
        consolidate(ckpt, out, **options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
