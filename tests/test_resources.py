"""Too little of something: space, rights, file descriptors. The reason is told, nothing is left."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dist_consolidate import ResourceError, consolidate, quotas
from dist_consolidate.checkpoint.layout import find_tag
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.requirements import require
from tests.synthetic import Param, Spec, write

ROOT = Path(__file__).resolve().parents[1]
CASE = CASES["kitchen_z3_bf16_w2"]
COMMAND = f"'{sys.executable}' -m dist_consolidate"


def shell(script: str, *, wrapped: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a script in which ``consolidate`` is the command line."""
    text = f'consolidate() {{ {COMMAND} "$@"; }}\n{script}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*wrapped, "bash", "-c", text],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=environment,
    )


def refused(ended: subprocess.CompletedProcess[str], code: int, *texts: str) -> None:
    """Check that a run ended with one error of the tool's own, in these words."""
    assert ended.returncode == code, ended
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.startswith("dist-consolidate: error: "), ended.stderr
    for text in texts:
        assert text in ended.stderr, ended.stderr


def below(folder: Path) -> list[str]:
    """Name everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def small_disk(options: str, script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script with a file system in memory mounted at ``$DISK``, seen by nobody else."""
    mounting = ("unshare", "--mount") if shutil.which("unshare") else ()
    probe = shell(f"mount -t tmpfs tmpfs '{folder}'", wrapped=mounting)
    require("netns", bool(mounting) and not probe.returncode, "nothing can be mounted here")
    mount = f"set -e; export DISK='{folder}'; mount -t tmpfs -o {options} tmpfs \"$DISK\"; set +e"
    return shell(f"{mount}\n{script}", wrapped=mounting)


LISTED = 'code=$?; find "$DISK" -mindepth 1 >&1; exit $code'


def test_a_full_disk_before_the_first_byte(tmp_path: Path) -> None:
    larger = CASES["z0_bf16_w2"].ckpt
    ended = small_disk("size=4k", f"consolidate '{larger}' $DISK/a/b/out; {LISTED}", tmp_path)
    refused(ended, 4, "free some space", "bytes) free")
    assert ended.stdout == ""


def test_a_disk_that_is_full_midway(tmp_path: Path) -> None:
    """The weights fit to the byte; what stands beside them does not."""
    consolidate(CASE.ckpt, tmp_path / "once")
    pages = -(-(tmp_path / "once" / "model.safetensors").stat().st_size // 4096)
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"consolidate '{CASE.ckpt}' $DISK/a/b/out; {LISTED}"
    ended = small_disk(f"size={4 * pages}k", script, disk)
    refused(ended, 4, "No space left on device", "/a/b/.out.consolidating-")
    assert ended.stdout == ""


def test_no_room_for_another_file(tmp_path: Path) -> None:
    """The root folder and two more: the result's own has no inode left."""
    ended = small_disk("nr_inodes=2", f"consolidate '{CASE.ckpt}' $DISK/out; {LISTED}", tmp_path)
    refused(ended, 4, "No space left on device")
    assert ended.stdout == ""


def test_a_read_only_output(tmp_path: Path) -> None:
    script = f"""mount -o remount,ro "$DISK"
        consolidate '{CASE.ckpt}' $DISK/a/out; {LISTED}"""
    ended = small_disk("size=1m", script, tmp_path)
    refused(ended, 2, "Read-only file system")
    assert ended.stdout == ""


def test_a_read_only_checkpoint(tmp_path: Path) -> None:
    """Nothing is written there, unless the result goes there by default."""
    script = f"""cp -r '{CASE.ckpt}' $DISK/ckpt; mount -o remount,ro "$DISK"
        consolidate $DISK/ckpt '{tmp_path}/out' >&2 || exit 9
        consolidate $DISK/ckpt"""
    disk = tmp_path / "disk"
    disk.mkdir()
    ended = small_disk("size=8m", script, disk)
    assert ended.returncode == 2, ended
    assert "Read-only file system" in ended.stderr
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(CASE))


def as_anyone(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script as somebody for whom access rights hold, even if this is the superuser."""
    if os.geteuid():
        return shell(script)
    require("netns", shutil.which("setpriv") is not None, "setpriv is not installed")
    ignoring = "-dac_override,-dac_read_search"
    return shell(script, wrapped=("setpriv", f"--bounding-set={ignoring}"))


def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o555)
    for output in ("there/out", "there", "there/a/b"):
        ended = as_anyone(f"consolidate '{CASE.ckpt}' '{tmp_path}/{output}'")
        refused(ended, 2, "Permission denied", str(tmp_path / "there"))
        assert below(tmp_path) == ["there"]


def test_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o000)
    ended = as_anyone(f"consolidate '{CASE.ckpt}' '{tmp_path}/there/out'")
    refused(ended, 2, "Permission denied", str(tmp_path / "there"))
    assert below(tmp_path) == ["there"]


@pytest.mark.parametrize("role", ["model_states", "optim_states"])
def test_a_shard_that_may_not_be_read(tmp_path: Path, role: str) -> None:
    ckpt = tmp_path / "ckpt"
    shutil.copytree(CASE.ckpt, ckpt)
    shard = sorted(find_tag(ckpt).path.glob(f"*{role}.pt"))[0]
    shard.chmod(0)
    refused(as_anyone(f"consolidate '{ckpt}' '{tmp_path}/out'"), 3, str(shard), "Permission denied")
    assert below(tmp_path) == ["ckpt", *(f"ckpt/{name}" for name in below(ckpt))]


@pytest.mark.parametrize("what", ["run", "tag", "latest"])
def test_a_checkpoint_that_may_not_be_entered(tmp_path: Path, what: str) -> None:
    ckpt = tmp_path / "ckpt"
    shutil.copytree(CASE.ckpt, ckpt)
    tag = find_tag(ckpt).path
    path = {"run": ckpt, "tag": tag, "latest": ckpt / "latest"}[what]
    path.chmod(0)
    try:
        ended = as_anyone(f"consolidate '{ckpt}' '{tmp_path}/out'")
    finally:
        path.chmod(0o755)
    refused(ended, 3, str(path), "Permission denied")
    assert not (tmp_path / "out").exists()


def test_more_shards_than_file_descriptors(tmp_path: Path) -> None:
    """What the process may raise it raises; where that is too little, the reason is told."""
    params = [Param(f"layer.{index}.weight", (13, 7)) for index in range(9)]
    truth = write(tmp_path / "ckpt", Spec(stage=1, world=80, params=params))
    out = tmp_path / "out"
    run = f"consolidate '{tmp_path}/ckpt' '{out}' --device cpu"
    refused(shell(f"ulimit -n 50; {run}"), 4, "Too many open files", "ulimit -n")
    assert below(tmp_path) == ["ckpt", *(f"ckpt/{name}" for name in below(tmp_path / "ckpt"))]
    ended = shell(f"ulimit -S -n 50; {run}")
    assert ended.returncode == 0, ended
    assert_same_bits(load_output(out), truth.fp32)


def record(hard_blocks: int, used_bytes: int, valid: int = 63) -> bytes:
    return struct.pack("<8QII", hard_blocks, 0, used_bytes, 0, 0, 0, 0, 0, valid, 0)


@pytest.mark.parametrize(
    ("answers", "left"),
    [
        ([None, None], None),
        ([record(0, 5000), None], None),
        ([record(100, 2400, valid=0), None], None),
        ([record(100, 2400), None], 100 * 1024 - 2400),
        ([None, record(3, 1000)], 2072),
        ([record(100, 2400), record(3, 1000)], 2072),
        ([record(3, 10**9), None], 0),
    ],
)
def test_what_quotas_leave(tmp_path: Path, answers: list[bytes | None], left: int | None) -> None:
    """No file system with quotas can be mounted on any machine: the kernel's answers are given."""
    asked = []

    def ask(_descriptor: int, kind: int, number: int) -> bytes | None:
        asked.append((kind, number))
        return answers[kind] if kind < 2 else None

    assert quotas.left_bytes(tmp_path, ask) == left
    assert asked[:2] == [(0, os.geteuid()), (1, os.getegid())]


def test_without_quotas_nothing_is_in_the_way(tmp_path: Path) -> None:
    """Asked of the real kernel, for a folder on disk and one in memory."""
    for folder in (tmp_path, Path("/dev/shm")):
        assert quotas.left_bytes(folder) is None


def test_a_quota_is_looked_at_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "left_bytes", lambda _folder: 100)
    with pytest.raises(ResourceError, match=r"a disk quota leaves 100 B"):
        consolidate(CASE.ckpt, tmp_path / "a" / "out")
    assert below(tmp_path) == []


# Where the result goes.


def copied(tmp_path: Path) -> tuple[Path, Path]:
    shutil.copytree(CASE.ckpt, tmp_path / "ckpt")
    return tmp_path / "ckpt", find_tag(tmp_path / "ckpt").path


@pytest.mark.parametrize("where", ["run", "tag", "tag/deeper", "consolidated/other", "default"])
def test_a_result_inside_the_checkpoint(tmp_path: Path, where: str) -> None:
    """It disturbs neither the shards nor the next run, which finds the same."""
    ckpt, tag = copied(tmp_path)
    before = {path: path.read_bytes() for path in ckpt.rglob("*") if path.is_file()}
    places = {
        "run": ckpt, "tag": tag, "tag/deeper": tag / "zero" / "deeper",
        "consolidated/other": ckpt / "consolidated" / "other", "default": None,
    }  # fmt: skip
    report = consolidate(ckpt, places[where])
    assert_same_bits(load_output(report.output_dir), expected_fp32(CASE))
    assert {path: path.read_bytes() for path in before} == before
    consolidate(ckpt, tmp_path / "again")
    assert_same_bits(load_output(tmp_path / "again"), expected_fp32(CASE))
    consolidate(ckpt, places[where], overwrite=True)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("name", ["a shard", "latest"])
def test_a_result_in_the_place_of_a_file(tmp_path: Path, name: str) -> None:
    ckpt, tag = copied(tmp_path)
    path = ckpt / "latest" if name == "latest" else sorted(tag.glob("*.pt"))[0]
    data = path.read_bytes()
    ended = shell(f"consolidate '{ckpt}' '{path}' --overwrite")
    refused(ended, 2, "exists and is not a folder")
    assert path.read_bytes() == data


@pytest.mark.parametrize("output", ["default", "a/b/out"])
def test_a_failure_takes_its_folders_away(tmp_path: Path, output: str) -> None:
    """Midway: a file of the result is larger than this process may write."""
    ckpt, _ = copied(tmp_path)
    before = below(tmp_path)
    target = "" if output == "default" else f"'{tmp_path}/{output}'"
    ended = shell(f"ulimit -f 1; consolidate '{ckpt}' {target}")
    refused(ended, 4, "File too large")
    assert below(tmp_path) == before


# Clocks.

FUTURE, PAST = 4_000_000_000, 1


@pytest.mark.parametrize("order", [(FUTURE, PAST), (PAST, FUTURE)])
def test_the_newest_step_is_no_matter_of_clocks(tmp_path: Path, order: tuple[int, int]) -> None:
    ckpt, tag = copied(tmp_path)
    (ckpt / "latest").unlink()
    shutil.copytree(tag, ckpt / "global_step10")
    shutil.copytree(tag, ckpt / "global_step9")
    for name, time in zip(("global_step9", "global_step10"), order, strict=True):
        for path in (*(ckpt / name).iterdir(), ckpt / name):
            os.utime(path, (time, time))
    assert find_tag(ckpt).tag == "global_step10"


def test_tags_without_a_step_are_told_apart_by_what_they_record(tmp_path: Path) -> None:
    """The later step is in the folder that was written earlier, as clocks say."""
    for name, step in (("first", 8), ("second", 5)):
        write(tmp_path, Spec(stage=1, params=[Param("a", (3,))], tag=name, global_step=step))
    (tmp_path / "latest").unlink()
    os.utime(tmp_path / "first", (PAST, PAST))
    os.utime(tmp_path / "second", (FUTURE, FUTURE))
    found = find_tag(tmp_path)
    assert found.tag == "first"
    assert "step" in found.chosen


def test_shards_from_the_future(tmp_path: Path) -> None:
    ckpt, _ = copied(tmp_path)
    for path in ckpt.rglob("*"):
        os.utime(path, (FUTURE, FUTURE))
    consolidate(ckpt, tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(CASE))
