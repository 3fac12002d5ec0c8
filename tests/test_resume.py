"""Going on from what an earlier run has left: the same bytes as in one go, or all anew.

Run as a module, this file is a rank that claims what it writes at once, and that kills itself, or
is told to end, before one of its calls on the file system.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_consolidate import (
    CheckpointError,
    ConsolidateError,
    ResourceError,
    UsageError,
    cli,
    consolidate,
)
from dist_consolidate.output.work import identity_digest
from dist_consolidate.report import Report
from dist_consolidate.runtime import journal
from tests.cases import assert_same_bits, load_output
from tests.children import die_before, end_of, start_child
from tests.synthetic import Buffer, Param, Spec, Truth, write
from tests.torchrun import messages, run_python, show, start_ranks

MODULE = "tests.test_resume"
FAULT = "CONSOLIDATE_TEST_RESUME"
# What a kill may come before; reading is not among them, because it leaves nothing.
CALLS = (
    "pwrite", "copy_file_range", "write", "fdatasync", "fsync", "rename", "unlink", "mkdir", "link",
    "rmdir",
)  # fmt: skip
PARAMS = [
    Param("emb.weight", (120, 64)),
    *(Param(f"layer.{number}.weight", (60, 71)) for number in range(6)),
    Param("head.weight", (120, 64), tie_of="emb.weight"),
]
# Beyond what fp16 can hold, which the result's notes tell.
BUFFERS = [Buffer("large", torch.full((3000,), 1e6))]


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Truth]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        stage: write(
            folder / f"z{stage}", Spec(stage=stage, world=3, params=PARAMS, buffers=BUFFERS)
        )
        for stage in (2, 3)
    }


@pytest.fixture(autouse=True)
def _claims_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_CLAIM_BYTES", 1)
    monkeypatch.setattr(journal, "_CLAIM_SEC", 0.01)
    monkeypatch.setattr(journal, "_PAUSE_SEC", 0.0)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file of a result."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def visible(folder: Path) -> dict[str, bytes]:
    """Every file of a result that is not hidden."""
    return {name: data for name, data in bytes_of(folder).items() if name[0] != "."}


def left_by(out: Path) -> list[Path]:
    """Whatever runs have left for an output, hidden as it is."""
    return [path for at in (out.parent, out) if at.is_dir() for path in at.glob(".*consolidating*")]


def work_folder(out: Path) -> Path:
    (found,) = (path for path in left_by(out) if path.is_dir())
    return found


def ckpt_of(truth: Truth) -> Path:
    return truth.tag_dir.parent


def broken_off(
    monkeypatch: pytest.MonkeyPatch, ckpt: Path, out: Path, after: int, **options: Any
) -> ConsolidateError:
    """Run until the disk is full, after some writes; give the error."""
    real, count, num_before = os.pwrite, itertools.count(), num_journals(out)

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if next(count) >= after:
            wait_for_claims(out, num_before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(ResourceError) as caught:
            consolidate(ckpt, out, io="buffered", **options)
    return caught.value


def num_journals(out: Path) -> int:
    """How many journals claim something."""
    return sum(path.stat().st_size > 0 for home in left_by(out) for path in home.glob("journal-*"))


def wait_for_claims(out: Path, num_before: int) -> None:
    """Let the journal's thread take its turn, where there is one."""
    deadline = time.monotonic() + (30 if resumable(out) else 0)
    before = -1
    # Until one has come, and a second look shows no more: the first may claim a header alone.
    while time.monotonic() < deadline:
        size = sum(p.stat().st_size for home in left_by(out) for p in home.glob("journal-*"))
        if num_journals(out) != num_before and size == before:
            return
        before = size
        time.sleep(0.1)


def resumable(out: Path) -> list[Path]:
    return [path for path in left_by(out) if (path / "identity.json").exists()]


def resumed_note(report: Report) -> list[str]:
    return [note for note in report.notes if note.startswith(("resumed", "--resume"))]


SHAPES: Mapping[str, dict[str, Any]] = {
    "plain": {"max_shard_size": "60KB"},
    "one": {"max_shard_size": "none"},
    "bin": {"format": "bin", "max_shard_size": "60KB"},
    "fp16": {"dtype": "fp16", "max_shard_size": "40KB"},
    "bin16": {"dtype": "fp16", "format": "bin", "ties": "copy"},
    "states": {"include": ["optimizer"], "max_shard_size": "60KB"},
}


@pytest.mark.parametrize(
    ("stage", "shape", "first", "then"),
    [
        (2, "plain", ("direct", 4000), ("direct", 4000)),
        (2, "plain", ("direct", 4000), ("gather", 3000)),
        (3, "plain", ("gather", 4000), ("direct", 1000)),
        (3, "bin", ("direct", 4000), ("allgather", 5000)),
        (2, "bin", ("gather", 9000), ("direct", 7000)),
        (2, "bin16", ("direct", 4000), ("direct", 4000)),
        (3, "fp16", ("gather", 4000), ("direct", 5000)),
        (3, "bin16", ("direct", 8000), ("gather", 3000)),
        (2, "states", ("direct", 9000), ("direct", 6000)),
        (3, "states", ("gather", 9000), ("gather", 6000)),
        (3, "one", ("gather", 9000), ("gather", 9000)),
    ],
)
def test_another_way_goes_on_where_one_was_broken_off(
    stage: int,
    shape: str,
    first: tuple[str, int],
    then: tuple[str, int],
    truths: Mapping[int, Truth],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ckpt, out, shapes = ckpt_of(truths[stage]), tmp_path / "out", SHAPES[shape]
    whole = consolidate(ckpt, tmp_path / "whole", **shapes)
    options = {"transport": first[0], "bucket_size": first[1], "resume": True, **shapes}
    error = broken_off(monkeypatch, ckpt, out, 30, **options)
    assert "the same command with --resume goes on" in "".join(error.__notes__)
    assert not out.exists()
    options |= {"transport": then[0], "bucket_size": then[1]}
    report = consolidate(ckpt, out, **options)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    assert not left_by(out)
    assert report.num_bytes_resumed > 0
    (note,) = resumed_note(report)
    assert note.startswith("resumed: "), note
    assert note.endswith(" were there"), note
    assert set(whole.notes) == set(report.notes) - {note}
    if first == then:
        written = sum(rank.num_bytes_written for rank in report.ranks)
        assert written < sum(rank.num_bytes_written for rank in whole.ranks)
        assert report.num_bytes_read < whole.num_bytes_read


def test_several_broken_runs_one_after_another(
    truths: Mapping[int, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt, out = ckpt_of(truths[2]), tmp_path / "out"
    consolidate(ckpt, tmp_path / "whole", **SHAPES["bin"])
    there = []
    for transport in ("direct", "gather", "direct", "gather"):
        broken_off(
            monkeypatch, ckpt, out, 8, transport=transport, bucket_size=5000, resume=True,
            **SHAPES["bin"],
        )  # fmt: skip
        there.append(sum(path.stat().st_size for path in work_folder(out).glob("journal-*")))
    assert there == sorted(set(there))
    report = consolidate(ckpt, out, resume=True, io="direct", **SHAPES["bin"])
    assert len(resumed_note(report)) == 1
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("shape", ["plain", "bin16"])
def test_nothing_is_read_where_all_was_there(
    shape: str, truths: Mapping[int, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt, out = ckpt_of(truths[3]), tmp_path / "out"
    whole = consolidate(ckpt, tmp_path / "whole", **SHAPES[shape])

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("dist_consolidate.output.publish.mark", refuse)
        with pytest.raises(ConsolidateError):
            consolidate(ckpt, out, resume=True, **SHAPES[shape])
    for transport in ("direct", "gather"):
        shutil.copytree(tmp_path, tmp_path / transport / "copy", ignore=lambda *_: {"copy"})
        at = tmp_path / transport / "copy" / "out"
        report = consolidate(ckpt, at, resume=True, transport=transport, **SHAPES[shape])
        assert report.num_bytes_read == 0
        assert set(whole.notes) == set(report.notes) - set(resumed_note(report))
        assert bytes_of(at) == bytes_of(tmp_path / "whole")


def test_what_the_kernel_copies_is_claimed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = write(tmp_path / "ckpt", Spec(stage=2, world=2, params=[Param("big", (1500, 1024))]))
    out, copied = tmp_path / "out", []
    real = os.copy_file_range

    def copy(*arguments: Any) -> int:
        copied.append(real(*arguments))
        return copied[-1]

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", copy)
        patch.setattr("dist_consolidate.output.publish.mark", refuse)
        with pytest.raises(ConsolidateError):
            consolidate(tmp_path / "ckpt", out, resume=True)
    if not sum(copied):
        pytest.skip("the kernel copies nothing on this file system")
    report = consolidate(tmp_path / "ckpt", out, resume=True)
    assert report.num_bytes_read == 0
    assert_same_bits(load_output(out), truth.fp32)


# What does not fit is not taken over.


def change_shard(ckpt: Path) -> None:
    """Save one value otherwise: size and place of everything stay."""
    path = max((ckpt / "global_step3").glob("*optim_states.pt"))
    state = torch.load(path, weights_only=False)
    groups = state["optimizer_state_dict"]
    key = next(key for key in groups if key.startswith(("fp32_flat", "single_partition")))
    groups[key][0].mul_(3)
    torch.save(state, path)


def touch(ckpt: Path) -> None:
    path = max((ckpt / "global_step3").glob("*optim_states.pt"))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def replace_by_a_copy(ckpt: Path) -> None:
    path = max((ckpt / "global_step3").glob("*optim_states.pt"))
    shutil.copy2(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


@pytest.mark.parametrize("change", [touch, replace_by_a_copy])
def test_a_changed_checkpoint_is_begun_anew(
    change: Callable[[Path], None],
    truths: Mapping[int, Truth],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ckpt = shutil.copytree(ckpt_of(truths[2]), tmp_path / "ckpt")
    out = tmp_path / "out"
    broken_off(monkeypatch, ckpt, out, 20, bucket_size=4000, resume=True)
    change(ckpt)
    report = consolidate(ckpt, out, resume=True)
    (note,) = resumed_note(report)
    assert note.startswith("--resume: started anew: the checkpoint has changed"), note
    assert "rank_2_mp_rank_00_optim_states.pt" in note
    assert report.num_bytes_resumed == 0
    assert_same_bits(load_output(out), truths[2].fp32)
    assert not left_by(out)


def test_other_values_of_the_same_size_are_never_mixed(
    truths: Mapping[int, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another step of the same run, under the same names: as if training had gone on."""
    spec = Spec(stage=2, world=3, params=PARAMS, buffers=BUFFERS)
    ckpt = tmp_path / "ckpt"
    write(ckpt, spec)
    out = tmp_path / "out"
    broken_off(monkeypatch, ckpt, out, 20, bucket_size=4000, resume=True)
    shutil.rmtree(ckpt)
    other = write(ckpt, dataclasses.replace(spec, seed=7))
    report = consolidate(ckpt, out, resume=True)
    assert_same_bits(load_output(out), other.fp32)
    assert "started anew: the checkpoint has changed" in resumed_note(report)[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bf16"}, "an earlier run had other options: --dtype"),
        ({"max_shard_size": "30KB"}, "an earlier run had other options: --max-shard-size"),
        ({"rename": ["layer=block"]}, "an earlier run had other options: --rename"),
    ],
)
def test_other_options_are_begun_anew(
    options: dict[str, Any],
    reason: str,
    truths: Mapping[int, Truth],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ckpt, out = ckpt_of(truths[2]), tmp_path / "out"
    broken_off(monkeypatch, ckpt, out, 20, bucket_size=4000, resume=True)
    report = consolidate(ckpt, out, resume=True, **options)
    assert resumed_note(report) == [f"--resume: started anew: {reason}"]
    consolidate(ckpt, tmp_path / "whole", **options)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    assert not left_by(out)


def lose_a_file(home: Path) -> str:
    min((home / "result").glob("*.safetensors")).unlink()
    return "an earlier run's files are gone or cut short"


def cut_a_file(home: Path) -> str:
    os.truncate(max((home / "result").glob("*.safetensors")), 100)
    return "an earlier run's files are gone or cut short"


def be_another_version(home: Path) -> str:
    path = home / "identity.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": "0.0.1"}))
    return "an earlier run was one of version 0.0.1"


def have_no_identity(home: Path) -> str:
    path = home / "identity.json"
    path.write_bytes(path.read_bytes()[:-3])
    return "an earlier run has kept no journal"


@pytest.mark.parametrize("harm", [lose_a_file, cut_a_file, be_another_version, have_no_identity])
def test_a_work_folder_that_is_not_whole_is_begun_anew(
    harm: Callable[[Path], str],
    truths: Mapping[int, Truth],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ckpt, out = ckpt_of(truths[2]), tmp_path / "out"
    broken_off(monkeypatch, ckpt, out, 20, bucket_size=4000, resume=True, max_shard_size="60KB")
    reason = harm(work_folder(out))
    report = consolidate(ckpt, out, resume=True, max_shard_size="60KB")
    assert resumed_note(report)[0].startswith(f"--resume: started anew: {reason}")
    assert_same_bits(load_output(out), truths[2].fp32)


def test_files_of_full_size_claim_nothing(
    truths: Mapping[int, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is reserved, and what is written but not claimed, is done again."""
    ckpt, out = ckpt_of(truths[2]), tmp_path / "out"
    broken_off(monkeypatch, ckpt, out, 20, bucket_size=4000, resume=True)
    for path in work_folder(out).glob("journal-*"):
        os.truncate(path, path.stat().st_size // 2)
    for path in (work_folder(out) / "result").rglob("*"):
        size = path.stat().st_size
        os.truncate(path, size // 3)
        os.truncate(path, size)
    for path in work_folder(out).glob("journal-*"):
        path.write_bytes(b"")
    report = consolidate(ckpt, out, resume=True)
    assert report.num_bytes_resumed == 0
    assert_same_bits(load_output(out), truths[2].fp32)


@pytest.mark.parametrize("shape", ["plain", "bin16"])
def test_claimed_bytes_that_are_not_the_shards_any_more_are_not_published(
    shape: str, truths: Mapping[int, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a bad disk, a bad read in the first run, or somebody's hand."""
    ckpt, out = ckpt_of(truths[3]), tmp_path / "out"
    options = {**SHAPES[shape], "bucket_size": 4000, "resume": True}
    broken_off(monkeypatch, ckpt, out, 20, **options)
    home = work_folder(out)
    records = b"".join(path.read_bytes() for path in home.glob("journal-*")).splitlines()
    file, low, high, _ = max(map(bytes.split, records), key=lambda r: int(r[2]) - int(r[1]))
    path = sorted((home / "result").glob("*model*"))[int(file)]
    data = bytearray(path.read_bytes())
    data[(int(low) + int(high)) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is not what the shards hold"):
        consolidate(ckpt, out, **options)
    assert not out.exists()
    assert not left_by(out)
    consolidate(ckpt, out, **options)
    consolidate(ckpt, tmp_path / "whole", **SHAPES[shape])
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


# What stays, and what does not.


def test_without_the_option_nothing_stays_and_nothing_is_taken_over(
    truths: Mapping[int, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt, out = ckpt_of(truths[2]), tmp_path / "out"
    error = broken_off(monkeypatch, ckpt, out, 20, bucket_size=4000)
    assert not hasattr(error, "__notes__")
    assert not left_by(out)
    broken_off(monkeypatch, ckpt, out, 20, bucket_size=4000, resume=True)
    report = consolidate(ckpt, out)
    assert resumed_note(report) == []
    assert not left_by(out)
    assert_same_bits(load_output(out), truths[2].fp32)


def test_a_failure_before_the_first_claim_leaves_nothing(
    truths: Mapping[int, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt, out = ckpt_of(truths[2]), tmp_path / "out"
    real = os.fdatasync
    monkeypatch.setattr(journal, "_CLAIM_SEC", 60.0)
    monkeypatch.setattr(journal, "_CLAIM_BYTES", 1 << 40)
    monkeypatch.setattr("tests.test_resume.wait_for_claims", lambda *_: None)
    error = broken_off(monkeypatch, ckpt, out, 5, bucket_size=4000, resume=True)
    assert os.fdatasync is real
    assert not hasattr(error, "__notes__")
    assert not left_by(out)
    assert not out.exists()


def test_what_is_there_already_needs_no_further_space(
    truths: Mapping[int, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt, out = ckpt_of(truths[2]), tmp_path / "out"
    broken_off(monkeypatch, ckpt, out, 20, bucket_size=4000, resume=True)

    class Full:
        f_bavail, f_frsize = 4, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(ResourceError):
        consolidate(ckpt, tmp_path / "other")
    consolidate(ckpt, out, resume=True)
    assert_same_bits(load_output(out), truths[2].fp32)


def test_an_existing_folder_is_filled_and_overwritten(
    truths: Mapping[int, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt, out = ckpt_of(truths[2]), tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    for options in ({"dtype": "bf16"}, {"overwrite": True}):
        before = bytes_of(out)
        broken_off(monkeypatch, ckpt, out, 20, bucket_size=4000, resume=True, **options)
        assert work_folder(out).parent == out
        assert visible(out) == before
        report = consolidate(ckpt, out, resume=True, **options)
        assert report.num_bytes_resumed > 0
    assert_same_bits(load_output(out), truths[2].fp32)
    assert set(bytes_of(out)) == {"config.json", "consolidation.json", "model.safetensors"}


def test_the_output_folder_was_made_meanwhile(
    truths: Mapping[int, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt, out = ckpt_of(truths[2]), tmp_path / "out"
    broken_off(monkeypatch, ckpt, out, 20, bucket_size=4000, resume=True)
    out.mkdir()
    report = consolidate(ckpt, out, resume=True)
    assert report.num_bytes_resumed > 0
    assert not left_by(out)
    assert_same_bits(load_output(out), truths[2].fp32)


@pytest.mark.parametrize("resume", [False, True])
def test_of_two_runs_at_once_the_second_is_told(
    resume: bool, truths: Mapping[int, Truth], tmp_path: Path
) -> None:
    ckpt, out = ckpt_of(truths[2]), tmp_path / "out"
    go_on = tmp_path / "go on"

    def slowly() -> None:
        real = os.pwrite

        def pwrite(*arguments: Any) -> int:
            while not go_on.exists():
                time.sleep(0.01)
            return real(*arguments)

        os.pwrite = pwrite
        consolidate(ckpt, out, io="buffered", resume=True)

    child = start_child(slowly)
    deadline = time.monotonic() + 60
    while not [path for path in left_by(out) if path.is_dir()]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = sorted(left_by(out))
    with pytest.raises(UsageError, match=f"another run is writing .*: process {child} on "):
        consolidate(ckpt, out, resume=resume)
    assert sorted(left_by(out)) == before
    go_on.touch()
    assert end_of(child) == 0
    assert_same_bits(load_output(out), truths[2].fp32)
    assert not left_by(out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_says_how_to_go_on(
    number: signal.Signals, truths: Mapping[int, Truth], tmp_path: Path
) -> None:
    ckpt, out = ckpt_of(truths[2]), tmp_path / "out"
    arguments = [ckpt, out, "--bucket-size", "4KB", "--io", "buffered", "--resume"]
    env = {FAULT: f"{number.name}:0:60"}
    ended = run_python(["-m", MODULE, *arguments], env=env, timeout_sec=60)
    assert ended.returncode == 128 + number, ended
    assert f"note: what has been written is kept in {work_folder(out)}; the same" in ended.stderr
    assert [path.is_dir() for path in left_by(out)] == [True]  # nobody holds it
    ended = run_python(["-m", "dist_consolidate", *arguments]).ok()
    assert "note: resumed: " in ended.stdout, ended
    assert_same_bits(load_output(out), truths[2].fp32)


# kill -9.


def garble(choose: random.Random, ckpt: Path, out: Path) -> None:
    """Put anything where nothing is claimed: after a power loss, that may be what is there."""
    for home in resumable(out):
        identity = json.loads((home / "identity.json").read_text())
        names = list(identity["files"])
        place = journal.read_journals(
            home, identity_digest(identity), list(identity["files"].values())
        )
        for name, claimed in zip(names, place.finished.by_file, strict=True):
            path = home / "result" / name
            if path.is_file():
                kept = path.read_bytes()
                garbled = bytearray(choose.randbytes(len(kept)))
                for low, high in claimed:
                    garbled[low:high] = kept[low:high]
                path.write_bytes(garbled)


def random_run(choose: random.Random, truths: Mapping[int, Truth], folder: Path) -> str:
    """Kill a run one or several times at random, let it go on each time, and compare exactly.

    Args:
        choose: Chance.
        truths: Checkpoints.
        folder: Is made, and removed.

    Returns:
        What was done.
    """
    truth, shape = truths[choose.choice((2, 3))], choose.choice(sorted(SHAPES))
    place = choose.choice(("new", "empty", "old"))
    ckpt, out, options = ckpt_of(truth), folder / "out", {**SHAPES[shape], "io": "buffered"}
    consolidate(ckpt, folder / "whole", **SHAPES[shape])
    whole, old = bytes_of(folder / "whole"), {}
    if place != "new":
        out.mkdir()
    if place == "old":
        consolidate(ckpt, out, max_shard_size="90KB", dtype="bf16")
        old = bytes_of(out)
    options |= {"resume": True, "overwrite": place == "old"}
    said = [f"stage {truth.tag_dir.parent.name}, {shape}, {place}"]
    for _ in range(choose.choice((1, 1, 2, 4))):
        at, bucket_size = choose.randrange(220), choose.choice((2000, 4000, 9000))

        def die() -> None:
            die_before(CALLS, at)  # noqa: B023
            consolidate(ckpt, out, bucket_size=bucket_size, **options)  # noqa: B023

        code = end_of(start_child(die))
        said.append(f"before call {at}: {code}")
        found = visible(out)
        if place == "new":
            assert found in ({}, whole), said
        for name, data in found.items():
            assert data in (old.get(name), whole.get(name)), (name, said)
        if code == 0 or found == whole:
            break
        assert code == -signal.SIGKILL, said
        if choose.random() < 0.5 and not any(
            (p / "publishing.json").exists() for p in left_by(out)
        ):
            garble(choose, ckpt, out)
    try:
        consolidate(ckpt, out, bucket_size=choose.choice((3000, 8000)), **options)
    except UsageError as error:  # the last one came as far as that all was in place
        assert "--overwrite" in str(error), said
    assert visible(out) == whole, said
    # Killed while it cleared up, what is hidden stays until the next run.
    consolidate(ckpt, out, **{**options, "overwrite": True})
    assert bytes_of(out) == whole, said
    assert not left_by(out), said
    shutil.rmtree(folder)
    return "; ".join(said)


@pytest.mark.parametrize("seed", range(15))
def test_killed_at_random_it_goes_on(
    seed: int, truths: Mapping[int, Truth], tmp_path: Path
) -> None:
    random_run(random.Random(seed), truths, tmp_path / "run")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("transport", "killed", "shape", "then"),
    [("gather", 1, "bin", "direct"), ("direct", 0, "states", "allgather")],
)
def test_of_two_ranks_one_is_killed(
    transport: str,
    killed: int,
    shape: str,
    then: str,
    truths: Mapping[int, Truth],
    tmp_path: Path,
) -> None:
    """The next run has one rank, and another transport."""
    ckpt, out = ckpt_of(truths[3]), tmp_path / "out"
    consolidate(ckpt, tmp_path / "whole", **SHAPES[shape])
    kill_a_rank(ckpt, out, shape, transport, killed, 40)
    assert not out.exists()
    report = consolidate(ckpt, out, transport=then, resume=True, **SHAPES[shape])
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    assert report.num_bytes_resumed > 0
    assert not left_by(out)


def kill_a_rank(
    ckpt: Path, out: Path, shape: str, transport: str, killed: int, at: int
) -> list[int]:
    """Run two ranks, all of which write, and kill one; give how they ended."""
    arguments: list[str | Path] = [ckpt, out, "--transport", transport, "--io", "buffered"]
    arguments += ["--writers", "all", "--bucket-size", "4KB", "--resume", *flags(shape)]
    env = {FAULT: f"SIGKILL:{killed}:{at}"}
    ended = start_ranks(2, arguments, module=MODULE, env=env)
    codes = [rank.returncode for rank in ended]
    if codes[killed] == -signal.SIGKILL:
        assert codes[1 - killed] in (0, 1), show(ended)
        assert len(messages(ended)) == codes[1 - killed], show(ended)
    return codes


def flags(shape: str) -> list[str]:
    """Write options as the command line has them."""
    found = []
    for name, value in SHAPES[shape].items():
        text = value[0] if isinstance(value, list) else value
        found += ["--" + name.replace("_", "-"), text]
    return found


def main(arguments: Sequence[str]) -> int:
    """Be a rank that claims at once; the environment says which one gets a signal, and when."""
    kind, rank, at = os.environ[FAULT].split(":")
    journal._CLAIM_BYTES, journal._CLAIM_SEC, journal._PAUSE_SEC = 1, 0.01, 0.0
    if os.environ.get("RANK", "0") == rank:
        die_before(CALLS, int(at), signal.Signals[kind])
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
