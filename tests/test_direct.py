"""Direct work from end to end: whichever way bytes go, the same folder comes out.

Run as a module, this file is what each rank does (see :func:`main`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dist_consolidate import cli, consolidate
from dist_consolidate.errors import UsageError
from dist_consolidate.runtime import bypass
from tests.cases import assert_same_bits, load_output
from tests.synthetic import Buffer, Param, Spec, Truth, write
from tests.torchrun import run_python
from tests.unit.test_outfiles import direct_calls, is_direct
from tests.zygote import fork_together

# Two fragments of 1.4 MB, which the kernel may copy; the others are too short for that.
LARGE = Param("emb.weight", (700, 1001))
PARAMS = (
    LARGE,
    Param("a.weight", (301, 500)),
    Param("a.bias", (17,), group=1),
    Param("base.weight", (250, 999), kind="frozen"),
    Param("scale", (), group=1),
    Param("mid.weight", (700, 1001), tie_of="emb.weight"),
    Param("head.weight", (700, 1001), tie_of="emb.weight"),
)
BUFFERS = (
    Buffer("ids", torch.arange(1000) + 2**40),
    Buffer("mask", torch.tensor([True, False, True])),
    Buffer("mean", torch.tensor([1.5, -2.25, 3.0], dtype=torch.bfloat16)),
    Buffer("none", torch.zeros(0)),
)
SPECS: Mapping[str, Spec] = {
    "z2": Spec(stage=2, world=2, params=PARAMS, buffers=BUFFERS),
    "z3": Spec(stage=3, world=2, params=PARAMS, buffers=BUFFERS, sub_group_numel=100_000),
}
# Two or more files where tied names are written in full, some with two of them.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "files": {"max_shard_size": "6MB"},
    "one_file": {"max_shard_size": "none", "ties": "drop"},
    "bin": {"format": "bin", "ties": "copy", "max_shard_size": "3MB"},
    "bf16": {"dtype": "bf16", "max_shard_size": "3MB"},
}
IO = ("auto", "buffered", "direct")


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Truth]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write(folder / name, spec) for name, spec in SPECS.items()}


def ckpt_of(truth: Truth) -> Path:
    return truth.tag_dir.parent


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def expected(truth: Truth, shape: str) -> dict[str, Tensor]:
    """The tensors that must come out, by torch's own casts."""
    want = dict(truth.fp32)
    if SHAPES[shape].get("ties") == "drop":
        del want["mid.weight"], want["head.weight"]
    if SHAPES[shape].get("dtype") == "bf16":
        want = {n: t.bfloat16() if t.is_floating_point() else t for n, t in want.items()}
    return want


@pytest.fixture(scope="module")
def wanted(truths: Mapping[str, Truth], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every result as another transport writes it, checked."""
    folder = tmp_path_factory.mktemp("wanted")
    for name, truth in truths.items():
        for shape, options in SHAPES.items():
            out = folder / name / shape
            consolidate(ckpt_of(truth), out, transport="allgather", **options)
            assert_same_bits(load_output(out), expected(truth, shape))
    return folder


# One process.


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SPECS)
def test_the_way_of_reading_and_writing_changes_nothing(
    name: str, shape: str, io: str, truths: Mapping[str, Truth], wanted: Path, tmp_path: Path
) -> None:
    report = consolidate(ckpt_of(truths[name]), tmp_path / "out", io=io, **SHAPES[shape])
    assert report.transport == "direct"
    assert contents(tmp_path / "out") == contents(wanted / name / shape)


@pytest.mark.parametrize("bucket_size", [4 * 4096, 4 * 70_000, "64MB"])
@pytest.mark.parametrize("io", IO)
def test_the_size_of_buckets_changes_nothing(
    io: str, bucket_size: int | str, truths: Mapping[str, Truth], wanted: Path, tmp_path: Path
) -> None:
    ckpt, out = ckpt_of(truths["z3"]), tmp_path / "out"
    consolidate(ckpt, out, io=io, bucket_size=bucket_size, **SHAPES["files"])
    assert contents(out) == contents(wanted / "z3" / "files")


@pytest.mark.parametrize("dtype", ["fp16", "keep"])
def test_other_types_are_torchs(dtype: str, truths: Mapping[str, Truth], tmp_path: Path) -> None:
    truth = truths["z3"]
    consolidate(ckpt_of(truth), tmp_path / "out", dtype=dtype, bucket_size="300KB")
    kinds = {n: k if dtype == "keep" or not k.is_floating_point else torch.float16
             for n, k in truth.native.items()}  # fmt: skip
    assert_same_bits(
        load_output(tmp_path / "out"), {n: t.to(kinds[n]) for n, t in truth.fp32.items()}
    )


def count_copies(monkeypatch: pytest.MonkeyPatch, refused: range = range(0)) -> list[int]:
    """Note what each kernel copy gave; some are refused."""
    real, given, number = os.copy_file_range, [], iter(range(1000))

    def copy(*arguments: int) -> int:
        if next(number) in refused:
            given.append(0)
            raise OSError(18, os.strerror(18))  # EXDEV
        given.append(real(*arguments))
        return given[-1]

    monkeypatch.setattr(os, "copy_file_range", copy)
    return given


@pytest.mark.parametrize("name", SPECS)
def test_large_fragments_are_copied_by_the_kernel(
    name: str, truths: Mapping[str, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = count_copies(monkeypatch)
    report = consolidate(ckpt_of(truths[name]), tmp_path / "out", **SHAPES["one_file"])
    # All of the large tensor; in stage 2 what lies behind it in the same shard may go along.
    assert sum(given) >= 4 * LARGE.numel
    if name == "z3":
        assert sum(given) == 4 * LARGE.numel
    stages = {stage.name: stage.num_bytes for stage in report.ranks[0].stages}
    assert stages["copy"] == sum(given)
    assert stages["copy"] + stages["write"] == report.ranks[0].num_bytes_written
    assert stages["copy"] + stages["read"] == report.num_bytes_read


@pytest.mark.parametrize(
    ("shape", "io"),
    [("one_file", "buffered"), ("one_file", "direct"), ("bin", "auto"), ("bf16", "auto")],
)
def test_what_the_kernel_may_not_copy(
    shape: str,
    io: str,
    truths: Mapping[str, Truth],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = count_copies(monkeypatch)
    consolidate(ckpt_of(truths["z3"]), tmp_path / "out", io=io, **SHAPES[shape])
    assert given == []


@pytest.mark.parametrize("refused", [range(1000), range(1), range(1, 1000)])
def test_where_the_kernel_cannot_copy_bytes_are_read_and_written(
    refused: range,
    truths: Mapping[str, Truth],
    wanted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = count_copies(monkeypatch, refused)
    out = tmp_path / "out"
    report = consolidate(ckpt_of(truths["z3"]), out, **SHAPES["one_file"])
    # Not asked again: the file is one bucket, and so one thread's.
    assert given == [0] if 0 in refused else [2 * LARGE.numel, 0]
    assert contents(out) == contents(wanted / "z3" / "one_file")
    size = sum((out / file).stat().st_size for file in report.files)
    assert report.ranks[0].num_bytes_written == size


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("shape", ["files", "bf16"])
def test_a_trial_in_the_middle_changes_nothing(
    shape: str,
    reads: bool,
    writes: bool,
    truths: Mapping[str, Truth],
    wanted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, number in (("WORTH_TRYING_BYTES", 1), ("_TRIAL_BYTES", 500_000)):
        monkeypatch.setattr(bypass, name, number)
    monkeypatch.setattr(bypass, "_MIN_READ_BYTES", 1)
    outcome, calls, real = {"read": reads, "write": writes}, [], os.pwrite

    def pays(choice: bypass.IoChoice, name: str) -> bool:
        spent = choice._spent[name, True], choice._spent[name, False]
        assert all(num_bytes >= 500_000 and seconds > 0 for num_bytes, seconds in spent)
        return outcome[name]

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(is_direct(descriptor))
        return real(descriptor, data, offset)

    monkeypatch.setattr(bypass.IoChoice, "_pays", pays)
    monkeypatch.setattr(os, "pwrite", pwrite)
    ckpt, out = ckpt_of(truths["z3"]), tmp_path / "out"
    consolidate(ckpt, out, bucket_size=4 * 65_536, **SHAPES[shape])
    assert contents(out) == contents(wanted / "z3" / shape)
    assert True in calls and False in calls
    # Once decided, all go one way; but for what is not aligned, at the ends of files and ties.
    tail = calls[-20:]
    assert (sum(tail) > 5) == writes, tail


def test_direct_writes_really_bypass_the_cache(
    truths: Mapping[str, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = direct_calls(monkeypatch)
    report = consolidate(ckpt_of(truths["z3"]), tmp_path / "out", io="direct", **SHAPES["one_file"])
    # All but the last page of the file, which is one bucket.
    assert sum(length for _, length in found) == report.ranks[0].num_bytes_written // 4096 * 4096


@pytest.mark.parametrize("name", SPECS)
def test_tied_names_are_read_once(name: str, truths: Mapping[str, Truth], tmp_path: Path) -> None:
    truth = truths[name]
    report = consolidate(ckpt_of(truth), tmp_path / "out", bucket_size="300KB", **SHAPES["files"])
    assert len(report.files) > 1
    sizes = {n: t.numel() * truth.native[n].itemsize for n, t in truth.fp32.items()}
    assert report.num_bytes_read == sum(sizes.values()) - 2 * sizes["emb.weight"]


# Without torch.


def test_torch_is_not_imported(truths: Mapping[str, Truth], tmp_path: Path) -> None:
    code = """
import sys
from dist_consolidate import consolidate
ckpt, out = sys.argv[1:]
for number, options in enumerate((
    {"dry_run": True},
    {},
    {"io": "direct", "max_shard_size": "3MB"},
    {"dtype": "bf16"},
    {"dtype": "keep"},
    {"format": "bin", "max_shard_size": "3MB"},
    {"format": "bin", "dtype": "bf16"},
)):
    consolidate(ckpt, f"{out}/{number}", **options)
    assert "torch" not in sys.modules, options
"""
    run_python(["-c", code, ckpt_of(truths["z3"]), tmp_path]).ok()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "4", "5", "6"]
    fp32 = dict(truths["z3"].fp32)
    bf16 = expected(truths["z3"], "bf16")
    kept = {n: t.to(truths["z3"].native[n]) for n, t in fp32.items()}
    for number, want in enumerate((fp32, fp32, bf16, kept, fp32, bf16), 1):
        assert_same_bits(load_output(tmp_path / str(number)), want)


# Dry runs.


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder, folders included, with size and time of change."""
    found = {path: path.lstat() for path in (folder, *folder.rglob("*"))}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_dry_run_writes_nothing_and_says_what_the_run_then_does(
    shape: str, truths: Mapping[str, Truth], tmp_path: Path
) -> None:
    ckpt, out = ckpt_of(truths["z3"]), tmp_path / "new" / "out"
    before = tree(tmp_path), tree(ckpt)
    told = consolidate(ckpt, out, dry_run=True, **SHAPES[shape])
    assert (tree(tmp_path), tree(ckpt)) == before
    did = consolidate(ckpt, out, **SHAPES[shape])
    assert (told.is_dry_run, did.is_dry_run) == (True, False)
    assert said(told) == said(did)
    assert told.ranks[0].num_bytes_written == sum(moved_bytes(out / file) for file in did.files)


def test_a_dry_run_says_what_one_bucket_holds(truths: Mapping[str, Truth], tmp_path: Path) -> None:
    ckpt, out = ckpt_of(truths["z3"]), tmp_path / "out"
    told = consolidate(ckpt, out, dry_run=True, **SHAPES["one_file"]).ranks[0]
    did = consolidate(ckpt, out, **SHAPES["one_file"])
    size = (out / did.files[0]).stat().st_size
    # The file, and half as much for the 16-bit source of what is cast.
    assert (told.num_buckets, told.memory_bytes) == (1, size + size // 2)


def moved_bytes(path: Path) -> int:
    """A file's bytes, but for what can be written only once all others are: a zip's directory."""
    if path.suffix != ".bin":
        return path.stat().st_size
    with ZipFile(path) as archive:
        return archive.start_dir


def said(report: Any) -> dict[str, Any]:
    """What a dry run must say as the run does; how much memory is free is not the same twice."""
    facts = dataclasses.asdict(report)
    varying = {"peak_bytes": 0, "stages": (), "memory_limits": ()}
    ranks = [{**r, **varying} for r in facts.pop("ranks")]
    done = {name for name in facts if name.endswith("_sec")} | {"is_dry_run", "num_bytes_checked"}
    return {"ranks": ranks, **{name: fact for name, fact in facts.items() if name not in done}}


def test_a_dry_run_of_the_command(
    truths: Mapping[str, Truth], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt = ckpt_of(truths["z3"])
    before = tree(ckpt)
    assert cli.main([str(ckpt), "--dry-run"]) == 0
    assert tree(ckpt) == before
    text = capsys.readouterr().out
    assert "would be" in text, text
    assert "nothing was written" in text, text
    assert "rank 0: reads" in text, text
    assert "done in" not in text, text


def test_a_dry_run_refuses_what_the_run_would_refuse(
    truths: Mapping[str, Truth], tmp_path: Path
) -> None:
    ckpt, out = ckpt_of(truths["z3"]), tmp_path / "out"
    consolidate(ckpt, out)
    before = tree(out)
    with pytest.raises(UsageError, match="--overwrite"):
        consolidate(ckpt, out, dry_run=True)
    assert consolidate(ckpt, out, dry_run=True, overwrite=True).is_dry_run
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="not a folder"):
        consolidate(ckpt, tmp_path / "file", dry_run=True)
    assert tree(out) == before


# Several ranks.


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "name"), [(2, "z3"), (3, "z2")])
def test_ranks_give_the_same_bytes_and_do_what_they_said(
    num_ranks: int, name: str, truths: Mapping[str, Truth], wanted: Path, tmp_path: Path
) -> None:
    jobs = []
    for number, (shape, options) in enumerate(SHAPES.items()):
        for turn, writers in enumerate((1, 2, "all")):
            how = {"writers": writers, "io": IO[(number + turn) % len(IO)]}
            out, want = tmp_path / f"{shape}-{writers}", wanted / name / shape
            jobs.append((str(ckpt_of(truths[name])), str(out), str(want), {**options, **how}))
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    fork_together(num_ranks, [tmp_path / "jobs.json"], module="tests.test_direct").ok()
    for _, out, want, options in jobs:
        assert contents(Path(out)) == contents(Path(want)), options
    copied = json.loads((tmp_path / "copied.json").read_text())
    may = [o["io"] == "auto" and o.get("ties") == "drop" for *_, o in jobs]
    assert any(may)
    assert all(num_bytes > 0 for num_bytes, can in zip(copied, may, strict=True) if can), copied


def main(path: Path) -> None:
    """Do all jobs in one process group, each of them dry before.

    Args:
        path: The jobs as JSON; rank 0 puts beside it what the kernel copied in each.
    """
    dist.init_process_group("gloo")
    copied = []
    for ckpt, out, _, options in json.loads(path.read_text()):
        told = consolidate(ckpt, out, transport="direct", dry_run=True, **options)
        dist.barrier()
        assert not Path(out).exists()
        assert not list(Path(out).parent.glob(".*consolidating*"))
        dist.barrier()
        did = consolidate(ckpt, out, transport="direct", **options)
        assert said(told) == said(did), (options, told, did)
        stages = [stage for rank in did.ranks for stage in rank.stages]
        copied.append(sum(stage.num_bytes for stage in stages if stage.name == "copy"))
        writers = [rank.num_bytes_written > 0 for rank in did.ranks]
        many = len(writers) if options["writers"] == "all" else options["writers"]
        assert writers == [rank < many for rank in range(len(writers))], writers
    if dist.get_rank() == 0:
        path.with_name("copied.json").write_text(json.dumps(copied))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
