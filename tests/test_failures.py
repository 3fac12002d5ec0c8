"""Whatever goes wrong: every rank ends, one message says why, and nothing half-made is left.

Run as a module, this file is a rank with a fault in it (see :func:`main`): at a certain read,
write or message something happens that happens to real runs at an unforeseeable time.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from dist_consolidate import cli, consolidate
from tests.cases import assert_same_bits, load_output
from tests.faults import fill_disk, strike
from tests.special import save_as
from tests.synthetic import Param, Spec, Truth, write
from tests.torchrun import MESSAGE, Ended, messages, run_python, run_ranks, show
from tests.zygote import fork_ranks

pytestmark = pytest.mark.dist

MODULE = "tests.test_failures"
FAULT = "CONSOLIDATE_TEST_FAULT"
# 1.3 MB in fp32, of which a bucket moves a fiftieth.
PARAMS = [Param(f"layer.{number}.weight", (100, 161)) for number in range(20)]
BUCKET = ["--bucket-size", "25KB"]
MANY_FILES = ["--max-shard-size", "500KB"]
TIMEOUT_SEC, HANG_SEC = 3.0, 45.0
MIDDLE = 12  # the read, write or round at which a fault strikes


def optim_name(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def published(out: Path) -> list[str]:
    """Everything that a loader could take for a result."""
    return sorted(str(path.relative_to(out)) for path in out.rglob("*"))


def leftovers(out: Path) -> list[Path]:
    """Work folders and locks beside or in the output folder."""
    return [p for at in (out.parent, out) if at.is_dir() for p in at.glob(".*consolidating*")]


def assert_refused(ended: Sequence[Ended], code: int, out: Path) -> str:
    """Fail unless all ranks ended with a code and one message, and nothing is there; give it."""
    assert [rank.returncode for rank in ended] == [code] * len(ended), show(ended)
    found = messages(ended)
    assert len(found) == 1, show(ended)
    assert "Traceback" not in show(ended), show(ended)
    assert not out.exists(), published(out)
    assert not leftovers(out)
    return found[0]


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Truth]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        stage: write(folder / f"z{stage}", Spec(stage=stage, world=3, params=PARAMS))
        for stage in (2, 3)
    }


@pytest.fixture
def ckpt(truths: Mapping[int, Truth], request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a checkpoint to do harm to; of stage 2 unless a test says otherwise."""
    stage = getattr(request, "param", 2)
    return shutil.copytree(truths[stage].tag_dir.parent, tmp_path / "ckpt")


# Checkpoints that are damaged from the start.


def cut_short(ckpt: Path) -> str:
    path = ckpt / "global_step3" / optim_name(1)
    os.truncate(path, path.stat().st_size - 200)
    return path.name


def remove(ckpt: Path) -> str:
    path = ckpt / "global_step3" / optim_name(1)
    path.unlink()
    return path.name


def leave_surplus(ckpt: Path) -> str:
    folder = ckpt / "global_step3"
    save_as(folder / optim_name(2), folder / optim_name(5))
    return optim_name(5)


def double(ckpt: Path) -> str:
    folder = ckpt / "global_step3"
    (folder / optim_name(1)).unlink()
    twice = optim_name(0).removeprefix("bf16_")
    shutil.copy(folder / optim_name(0), folder / twice)
    return twice


def mix_steps(ckpt: Path) -> str:
    other = write(ckpt.parent / "other", Spec(stage=3, world=3, params=PARAMS, global_step=4))
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    for path in (name, optim_name(1)):
        shutil.copy(other.tag_dir / path, ckpt / "global_step3" / path)
    return name


DAMAGES: Mapping[str, tuple[int, Callable[[Path], str], str]] = {
    "cut_short": (2, cut_short, ""),
    "missing": (2, remove, "missing (rank 1 of 3)"),
    "surplus": (3, leave_surplus, "surplus"),
    "double": (3, double, "missing (rank 1 of 3)"),
    "mixed_steps": (3, mix_steps, "step 4"),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("ckpt", "damage"), [(DAMAGES[name][0], name) for name in DAMAGES], indirect=["ckpt"]
)
def test_a_damaged_checkpoint_is_refused_before_the_first_byte(
    damage: str, ckpt: Path, num_ranks: int, tmp_path: Path
) -> None:
    _, harm, words = DAMAGES[damage]
    name, out = harm(ckpt), tmp_path / "out"
    message = assert_refused(fork_ranks(num_ranks, [ckpt, out]), 3, out)
    assert name in message, message
    assert words in message, message


def test_under_torchrun_too_there_is_one_message(ckpt: Path, tmp_path: Path) -> None:
    remove(ckpt)
    ended = run_ranks(2, [ckpt, tmp_path / "out"])
    assert ended.returncode != 0, ended
    assert ended.stderr.count(MESSAGE) == 1, ended
    assert "dist_consolidate/" not in ended.stderr, ended  # in no traceback
    assert not (tmp_path / "out").exists()


# What goes wrong in the middle.


def start_with_fault(
    fault: str, num_ranks: int, arguments: Sequence[str | Path], timeout_sec: float = 60.0
) -> list[Ended]:
    """Start ranks of which some have a fault; see :func:`main`."""
    return fork_ranks(
        num_ranks, arguments, module=MODULE, timeout_sec=timeout_sec, env={FAULT: fault}
    )


@pytest.mark.parametrize(
    ("num_ranks", "failing", "transport"),
    [
        (1, 0, "auto"),
        (2, 1, "direct"),
        (2, 1, "gather"),
        (2, 0, "gather"),
        (3, 1, "allgather"),
    ],
)
def test_a_shard_cut_short_while_it_is_read_ends_all_ranks(
    ckpt: Path, num_ranks: int, failing: int, transport: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments: list[str | Path] = [ckpt, out, "--transport", transport, *BUCKET, *MANY_FILES]
    ended = start_with_fault(f"truncate:{failing}:{MIDDLE}", num_ranks, arguments, 30.0)
    message = assert_refused(ended, 3, out)
    # Cut before it was opened, or while it was read.
    assert "optim_states.pt: " in message, message
    assert "it was changed" in message, message
    # With direct, both ranks read every shard, and either may be the one that finds it.
    if num_ranks > 1 and transport != "direct":
        assert f"rank {failing}" in message, message


def test_a_rank_killed_under_torchrun(ckpt: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments: list[str | Path] = [ckpt, out, "--transport", "gather", *BUCKET]
    ended = run_ranks(2, arguments, module=MODULE, env={FAULT: f"kill:1:{MIDDLE}"})
    assert ended.returncode != 0, ended
    assert not published(out)


def test_a_rank_that_hangs_ends_the_others_when_the_time_is_up(ckpt: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments: list[str | Path] = [ckpt, out, "--transport", "gather", *BUCKET]
    arguments += ["--timeout", f"{TIMEOUT_SEC}s"]
    # The rank's read lasts until long after the time is up.
    ended = start_with_fault(f"hang:1:{MIDDLE}", 2, arguments)
    message = assert_refused(ended, 1, out)
    assert message.startswith(f"rank 1 (on {socket.gethostname()}): reading "), message
    assert "optim_states.pt has not ended for 3 s (--timeout)" in message, message
    assert all(rank.duration_sec < HANG_SEC for rank in ended), show(ended)


@pytest.mark.parametrize(("num_ranks", "transport"), [(1, "auto"), (2, "gather"), (2, "direct")])
def test_a_disk_that_fills_up_is_said_and_nothing_is_published(
    ckpt: Path, num_ranks: int, transport: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments: list[str | Path] = [ckpt, out, "--transport", transport, *BUCKET, *MANY_FILES]
    ended = start_with_fault("disk_full:0:1", num_ranks, arguments)
    message = assert_refused(ended, 4, out)
    assert "model-0000" in message, message
    assert os.strerror(errno.ENOSPC) in message, message


def test_a_file_that_may_not_grow_is_said_and_nothing_is_published(
    ckpt: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    message = assert_refused(start_with_fault("file_size:0:0", 1, [ckpt, out]), 4, out)
    assert "model.safetensors" in message, message


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_too_little_space_is_said_before_the_first_byte(
    ckpt: Path, num_ranks: int, tmp_path: Path
) -> None:
    out = tmp_path / "not" / "yet" / "out"
    ended = start_with_fault("no_space:0:0", num_ranks, [ckpt, out])
    message = assert_refused(ended, 4, out)
    assert str(out) in message, message
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("kind", ["SIGTERM", "SIGINT"])
def test_a_single_process_that_is_stopped_publishes_nothing(
    kind: str, ckpt: Path, truths: Mapping[int, Truth], tmp_path: Path
) -> None:
    out, stop = tmp_path / "out", signal.Signals[kind]
    env = {FAULT: f"{kind}:0:{MIDDLE}"}
    ended = run_python(["-m", MODULE, ckpt, out, *BUCKET], env=env, timeout_sec=30.0)
    assert ended.returncode in (-stop, 128 + stop), ended
    assert "Traceback" not in ended.stderr, ended
    assert not published(out)
    consolidate(ckpt, out)
    assert not leftovers(out)
    assert_same_bits(load_output(out), truths[2].fp32)


# Output folders that exist already.


def run_here(*arguments: str | Path) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_an_earlier_result_stays_unless_told_otherwise(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_here(ckpt, out) == 0
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}
    assert run_here(ckpt, out, *MANY_FILES) == 2
    assert "--overwrite" in capsys.readouterr().err
    after = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}
    assert after == before
    assert not leftovers(out)


def test_two_ranks_refuse_an_earlier_result_once(ckpt: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_here(ckpt, out) == 0
    before = published(out)
    ended = fork_ranks(2, [ckpt, out, *MANY_FILES])
    assert [rank.returncode for rank in ended] == [2, 2], show(ended)
    assert len(messages(ended)) == 1, show(ended)
    assert published(out) == before


@pytest.mark.parametrize(
    ("first", "second", "want"),
    [
        (MANY_FILES, [], {"model.safetensors", "consolidation.json"}),
        (
            [],
            MANY_FILES,
            {
                "model-00001-of-00003.safetensors",
                "model-00002-of-00003.safetensors",
                "model-00003-of-00003.safetensors",
                "model.safetensors.index.json",
                "consolidation.json",
            },
        ),
        (MANY_FILES, ["--format", "bin"], {"pytorch_model.bin", "consolidation.json"}),
    ],
)
def test_overwriting_leaves_nothing_stale_and_nothing_foreign_touched(
    first: Sequence[str],
    second: Sequence[str],
    want: set[str],
    ckpt: Path,
    truths: Mapping[int, Truth],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    foreign = {"config.json": b"{}", "notes.safetensors": b"mine", "tokenizer/vocab.txt": b"a b"}
    for name, content in foreign.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    assert run_here(ckpt, out, *first) == 0
    assert run_here(ckpt, out, *second, "--overwrite") == 0
    assert set(published(out)) == want | set(foreign) | {"tokenizer"}, published(out)
    assert {name: (out / name).read_bytes() for name in foreign} == foreign
    (out / "notes.safetensors").unlink()
    assert_same_bits(load_output(out), truths[2].fp32)


def test_a_failed_overwrite_leaves_the_earlier_result(ckpt: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_here(ckpt, out, *MANY_FILES) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    arguments: list[str | Path] = [ckpt, out, *BUCKET, "--overwrite"]
    (ended,) = start_with_fault("disk_full:0:0", 1, arguments)
    assert ended.returncode == 4, ended
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


# A rank with a fault.


def main(arguments: Sequence[str]) -> int:
    """Run the command line; the environment says what happens on which rank, and when.

    Args:
        arguments: A command line.

    Returns:
        The exit code.
    """
    kind, rank, count = os.environ[FAULT].split(":")
    if os.environ.get("RANK", "0") == rank:
        prepare_fault(kind, int(count))
    return cli.main(arguments)


def prepare_fault(kind: str, count: int) -> None:
    """Put the fault in place.

    Only calls to the operating system are tampered with, so that it does not matter how the
    package is built.

    Args:
        kind: What happens.
        count: At which read or write, counted from 0.
    """
    if kind == "hang":
        naps = iter([HANG_SEC])
        strike(os, "preadv", count, lambda *_: time.sleep(next(naps, 0)))
    elif kind == "truncate":
        strike(os, "preadv", count, truncate)
    elif kind in ("kill", "SIGTERM", "SIGINT"):
        number = signal.SIGKILL if kind == "kill" else signal.Signals[kind]
        strike(os, "preadv", count, lambda *_: os.kill(os.getpid(), number))
    elif kind == "disk_full":
        strike(os, "pwrite", count, fill_disk)
    elif kind == "file_size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    elif kind == "no_space":
        setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=4096))  # noqa: B010
    else:
        raise AssertionError(kind)


def truncate(descriptor: int, _buffers: object, offset_bytes: int) -> None:
    """Cut the shard that is to be read three bytes behind where the read begins."""
    path = Path(f"/proc/self/fd/{descriptor}")
    os.truncate(path, min(path.stat().st_size, offset_bytes + 3))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
