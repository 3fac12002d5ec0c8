"""Direct work that fails: on one rank of several, in one of its threads, in the kernel's copies.

Run as a module, this file is a rank with a fault in it (see :func:`main`).
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dist_consolidate import ConsolidateError, cli, consolidate
from dist_consolidate.runtime import outfiles
from tests.cases import assert_same_bits, load_output
from tests.faults import strike
from tests.synthetic import Param, Spec, Truth, write
from tests.test_failures import FAULT, assert_refused, leftovers, published
from tests.torchrun import Ended, run_python, show, start_ranks

MODULE = "tests.test_direct_failures"
# Eight fragments of 1.2 MB on each of two ranks, which the kernel copies; 20 MB in all.
PARAMS = [Param(f"layer.{number}.weight", (601, 1001)) for number in range(8)]
# Room for a whole fragment in each of four threads.
ARGUMENTS = ["--transport", "direct", "--ties", "drop", "--max-shard-size", "5MB"]
IN_MEMORY = ["--io", "buffered", "--bucket-size", "2MB"]
MIDDLE = 5
WAIT_SEC, HANG_SEC, NAP_SEC = 2.0, 60.0, 0.5
TIMEOUT = ["--timeout", f"{WAIT_SEC}s"]
COPIES_OF = 64 << 10


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    folder = tmp_path_factory.mktemp("checkpoints")
    return write(folder / "z3", Spec(stage=3, world=2, params=PARAMS, sub_group_numel=1))


@pytest.fixture
def ckpt(truth: Truth) -> Path:
    return truth.tag_dir.parent


def start(fault: str, arguments: Sequence[str | Path]) -> list[Ended]:
    """Start two ranks, one of them with a fault; the others' ends are waited for half a minute."""
    env = {FAULT: fault}
    return start_ranks(2, [*arguments, *ARGUMENTS], module=MODULE, timeout_sec=45.0, env=env)


# Several ranks.


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "number", "failing", "code", "named"),
    [
        ("copy", errno.ENOSPC, 0, 4, "safetensors"),
        ("copy_midway", errno.EINVAL, 1, 1, "safetensors"),
        ("read", errno.EIO, 1, 3, "optim_states.pt"),
        ("sync", errno.EIO, 1, 1, "safetensors"),
    ],
)
def test_what_fails_on_one_rank_ends_all_with_one_message(
    kind: str, number: int, failing: int, code: int, named: str, ckpt: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = [] if kind.startswith("copy") else IN_MEMORY
    ended = start(f"{kind}:{failing}:{number}", [ckpt, out, *options])
    message = assert_refused(ended, code, out)
    assert message.startswith(f"rank {failing} (on {socket.gethostname()}): "), message
    assert named in message, message
    assert message.endswith(os.strerror(number)), message
    assert max(rank.duration_sec for rank in ended) - min(rank.duration_sec for rank in ended) < 5


@pytest.mark.dist
def test_one_rank_whose_kernel_cannot_copy_reads_and_writes(
    ckpt: Path, truth: Truth, tmp_path: Path
) -> None:
    ended = start(f"copy:1:{errno.EINVAL}", [ckpt, tmp_path / "out"])
    assert [rank.returncode for rank in ended] == [0, 0], show(ended)
    assert "struck" in ended[1].stderr, show(ended)
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)


@pytest.mark.dist
def test_a_read_that_hangs_ends_all_ranks_when_the_time_is_up(ckpt: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = start("hang:1:0", [ckpt, out, *IN_MEMORY, *TIMEOUT])
    message = assert_refused(ended, 1, out)
    assert message.startswith(f"rank 1 (on {socket.gethostname()}): reading "), message
    assert "has not ended for 2 s (--timeout)" in message, message
    assert all(rank.duration_sec < HANG_SEC / 2 for rank in ended), show(ended)


@pytest.mark.dist
def test_a_slow_disk_does_not_hang(ckpt: Path, truth: Truth, tmp_path: Path) -> None:
    # It takes longer than what a hang is told by, but something is done all the time.
    ended = start("slow:1:0", [ckpt, tmp_path / "out", *IN_MEMORY, *TIMEOUT])
    assert [rank.returncode for rank in ended] == [0, 0], show(ended)
    slept = float(ended[1].stderr.rpartition("slept ")[2].split()[0])
    assert slept > 1.5 * WAIT_SEC, show(ended)
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)


# A single process.


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["SIGTERM", "SIGINT"])
def test_a_process_that_is_stopped_while_the_kernel_copies(
    kind: str, ckpt: Path, truth: Truth, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stop = signal.Signals[kind]
    ended = run_python(
        ["-m", MODULE, ckpt, out, *ARGUMENTS], env={FAULT: f"{kind}:0:0"}, timeout_sec=30.0
    )
    assert ended.returncode == 128 + stop, ended
    want = f"struck\ndist-consolidate: error: this process was stopped by {kind}\n"
    assert ended.stderr == want, ended
    assert not published(out)
    assert not leftovers(out)
    consolidate(ckpt, out, max_shard_size="5MB")
    assert_same_bits(load_output(out), truth.fp32)


def held() -> tuple[list[str], list[str]]:
    """Threads and open files of this process."""
    names = [thread.name for thread in threading.enumerate()]
    files = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sorted(names), sorted(name for name in files if not name.startswith("/proc/"))


def refuse(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def no_memory(*_: object) -> None:
    raise MemoryError("no memory")


@pytest.mark.parametrize("io", ["auto", "buffered", "direct"])
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"format": "bin"}])
def test_a_run_gives_everything_back(io: str, options: Any, ckpt: Path, tmp_path: Path) -> None:
    consolidate(ckpt, tmp_path / "first", io=io, **options)
    before = held()
    consolidate(ckpt, tmp_path / "out", io=io, bucket_size="2MB", **options)
    assert held() == before


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize(
    ("name", "io", "happen", "words"),
    [
        ("copy_file_range", "auto", refuse, "Input/output error"),
        ("preadv", "buffered", refuse, "cannot be read at byte"),
        ("preadv", "direct", refuse, "cannot be read at byte"),
        ("pwrite", "buffered", refuse, "Input/output error"),
        ("pwrite", "direct", refuse, "Input/output error"),
        ("preadv", "buffered", no_memory, "use a smaller --bucket-size"),
    ],
)
def test_a_run_that_fails_gives_everything_back(
    name: str,
    io: str,
    happen: Callable[..., None],
    words: str,
    count: int,
    ckpt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = held()
    monkeypatch.setattr(os, name, getattr(os, name))  # so that it is put back
    strike(os, name, count, happen)
    with pytest.raises(ConsolidateError, match=words):
        consolidate(ckpt, tmp_path / "out", io=io, bucket_size="5MB", max_shard_size="5MB")
    assert held() == before
    assert list(tmp_path.iterdir()) == []


# A rank with a fault.


def main(arguments: Sequence[str]) -> int:
    """Run the command line; the environment says what fails on which rank.

    Args:
        arguments: A command line.

    Returns:
        The exit code.
    """
    kind, rank, number = os.environ[FAULT].split(":")
    if os.environ.get("RANK", "0") == rank:
        prepare_fault(kind, int(number))
    return cli.main(arguments)


def prepare_fault(kind: str, number: int) -> None:
    """Put the fault in place.

    Args:
        kind: What happens.
        number: The system's number of the error.
    """

    def fail(*_: object) -> None:
        print("struck", file=sys.stderr)  # noqa: T201
        raise OSError(number, os.strerror(number))

    def stop(*_: object) -> None:
        if once.acquire(blocking=False):
            print("struck", file=sys.stderr)  # noqa: T201
            os.kill(os.getpid(), signal.Signals[kind])

    def doze(*_: object) -> None:
        time.sleep(NAP_SEC)
        slept.append(NAP_SEC)
        print(f"slept {sum(slept) / 4}", file=sys.stderr)  # noqa: T201

    once, slept = threading.Lock(), []
    if kind == "copy":
        strike(os, "copy_file_range", 0, fail)
    elif kind == "copy_midway":
        outfiles._COPY_BYTES = COPIES_OF
        strike(os, "copy_file_range", MIDDLE, fail)
    elif kind in ("read", "write", "sync"):
        name = {"read": "preadv", "write": "pwrite", "sync": "fsync"}[kind]
        strike(os, name, 0 if kind == "sync" else MIDDLE, fail)
    elif kind == "hang":
        strike(os, "preadv", MIDDLE, lambda *_: time.sleep(HANG_SEC))
    elif kind == "slow":
        strike(os, "preadv", 0, doze)
    else:
        strike(os, "copy_file_range", 1, stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
