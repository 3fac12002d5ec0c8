"""Ranks that hang or are told to end: all of them end soon, and one message says why.

What dies, or is stopped for long, is a matter of ``test_fault_matrix``.

Run as a module, this file is a rank with a fault in it (see :func:`main`).
"""

from __future__ import annotations

import ctypes
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

from dist_consolidate import cli
from tests.cases import assert_same_bits, load_output
from tests.faults import at_opening_of_a_shard, fill_disk, once, strike
from tests.synthetic import Param, Spec, Truth, write
from tests.test_failures import assert_refused, leftovers
from tests.torchrun import Ended, run_python, show
from tests.zygote import fork_ranks

pytestmark = pytest.mark.dist

MODULE = "tests.test_cluster_failures"
FAULT, PIDS = "CONSOLIDATE_TEST_FAULT", "CONSOLIDATE_TEST_PIDS"
PARAMS = [Param(f"layer.{number}.weight", (100, 161)) for number in range(12)]
BUCKET = ["--bucket-size", "25KB"]
# Long enough for a machine that is busy otherwise; what hangs, hangs for much longer.
TIMEOUT_SEC, HANG_SEC = 5.0, 300.0
TIMEOUT = ["--timeout", f"{TIMEOUT_SEC}s"]
HOST = socket.gethostname()
MIDDLE = 5


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    folder = tmp_path_factory.mktemp("checkpoints") / "z3"
    return write(folder, Spec(stage=3, world=2, params=PARAMS))


@pytest.fixture(scope="module")
def ckpt(truth: Truth) -> Path:
    return truth.tag_dir.parent


def start(fault: str, arguments: Sequence[str | Path], out: Path) -> list[Ended]:
    """Start two ranks of which one has a fault: ``KIND:PLACE:RANK``."""
    env = {FAULT: fault, PIDS: str(out.parent)}
    return fork_ranks(2, arguments, module=MODULE, timeout_sec=90.0, env=env)


@pytest.mark.parametrize(
    ("transport", "place", "rank", "words"),
    [
        ("gather", "planning", 1, "reading {ckpt}/global_step3/bf16_zero_pp_rank_"),
        ("direct", "planning", 0, "reading {ckpt}/global_step3/"),
        ("allgather", "moving", 1, "reading {ckpt}/global_step3/"),
        ("gather", "syncing", 0, "syncing {out}"),
        ("direct", "publishing", 0, "publishing {out}"),
    ],
)
def test_a_file_system_that_hangs_is_told_by_the_file(
    transport: str, place: str, rank: int, words: str, ckpt: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = [ckpt, out, "--transport", transport, *BUCKET, *TIMEOUT]
    ended = start(f"hang:{place}:{rank}", arguments, out)
    message = assert_refused(ended, 1, out)
    assert message.startswith(f"rank {rank} (on {HOST}): "), message
    hidden = f"{tmp_path}/.out.consolidating-"
    want = words.format(ckpt=ckpt, out=hidden if "syncing" in words else out)
    assert want in message, message
    assert "has not ended for 5 s (--timeout): a disk or file system hangs" in message, message


def test_a_file_system_that_hangs_ends_a_single_process(ckpt: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    env = {FAULT: "hang:moving:0", PIDS: str(tmp_path)}
    ended = run_python(["-m", MODULE, ckpt, out, *BUCKET, "--timeout", "2s"], env=env)
    message = assert_refused([ended], 1, out)
    assert message.startswith(f"reading {ckpt}/global_step3/"), message


def test_sigterm_of_a_rank_that_waits_for_another(ckpt: Path, tmp_path: Path) -> None:
    """Rank 0 waits in gloo for rank 1, whose read hangs; rank 0 is told to end."""
    out = tmp_path / "out"
    ended = start("term_other:moving:1", [ckpt, out, "--transport", "gather", *BUCKET], out)
    message = assert_refused(ended, 128 + signal.SIGTERM, out)
    assert message == f"rank 0 (on {HOST}): stopped by SIGTERM"


@pytest.mark.parametrize(("kind", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_while_the_main_thread_cannot_be_reached(
    kind: str, code: int, ckpt: Path, tmp_path: Path
) -> None:
    """As in a read of a file system that hangs: the main thread's call never comes back."""
    out = tmp_path / "out"
    env = {FAULT: f"{kind}:syncing:0", PIDS: str(tmp_path)}
    ended = run_python(["-m", MODULE, ckpt, out, *BUCKET], env=env, timeout_sec=60.0)
    message = assert_refused([ended], code, out)
    assert message == f"this process was stopped by {kind}"


@pytest.mark.parametrize("place", ["planning", "moving"])
def test_ranks_that_torchrun_restarts_begin_anew(
    place: str, ckpt: Path, truth: Truth, tmp_path: Path
) -> None:
    """The agent's store outlives the first attempt, with all that its ranks have left there."""
    out = tmp_path / "out"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    arguments = [ckpt, out, "--transport", "gather", *BUCKET]
    env = {FAULT: f"kill:{place}:1", PIDS: str(tmp_path)}
    ended = run_python([*torchrun, "--max-restarts=1", "-m", MODULE, *arguments], env=env).ok()
    assert "-9" in ended.stderr, ended  # it was killed, and was started again
    assert_same_bits(load_output(out), truth.fp32)
    assert not leftovers(out)


def test_a_rank_that_cannot_be_watched_is_told(ckpt: Path, truth: Truth, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = start("deaf:joining:1", [ckpt, out, "--transport", "gather", *BUCKET], out)
    assert [rank.returncode for rank in ended] == [0, 0], show(ended)
    assert "note: not every rank reaches the port of rank 0" in ended[0].stdout, show(ended)
    assert_same_bits(load_output(out), truth.fp32)


def test_sigterm_before_the_ranks_have_met(ckpt: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # The other rank never comes.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = {
        FAULT: "term_meeting:meeting:0", PIDS: str(tmp_path), "RANK": "0", "WORLD_SIZE": "2",
        "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    ended = run_python(["-m", MODULE, ckpt, out], env=env, timeout_sec=60.0)
    message = assert_refused([ended], 143, out)
    assert message == "this process was stopped by SIGTERM"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_file_system_that_fails_on_another_rank(number: int, ckpt: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [ckpt, out, "--transport", "gather", "--writers", "all", *BUCKET]
    arguments += ["--max-shard-size", "200KB"]
    ended = start(f"fail{number}:writing:1", arguments, out)
    message = assert_refused(ended, 4 if number == errno.ENOSPC else 1, out)
    assert message.startswith(f"rank 1 (on {HOST}): {tmp_path}/.out.consolidating-"), message
    assert "safetensors" in message, message
    assert message.endswith(os.strerror(number)), message


# A rank with a fault.


def main(arguments: Sequence[str]) -> int:
    """Run the command line; the environment says what happens on which rank, and where."""
    kind, place, rank = os.environ[FAULT].split(":")
    me, attempt = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    (Path(os.environ[PIDS]) / f"pid{me}").write_text(str(os.getpid()))
    if me == rank and attempt == "0":
        prepare(place, once(lambda: happen(kind)))
    return cli.main(arguments)


def prepare(place: str, strikes: Callable[..., None]) -> None:
    """Let something happen at a place in the run."""
    if place == "planning":
        at_opening_of_a_shard(strikes)
    elif place == "meeting":
        from dist_consolidate.runtime import rendezvous

        real = rendezvous.meet

        def meet(*arguments: Any, **options: Any) -> Any:
            strikes()
            return real(*arguments, **options)

        rendezvous.meet = meet
    elif place == "joining":
        from dist_consolidate.runtime import watch

        watch._connect = lambda *_: None
    else:
        name = {
            "moving": "preadv", "writing": "pwrite", "syncing": "fsync", "publishing": "rename"
        }[place]  # fmt: skip
        strike(os, name, MIDDLE if place == "moving" else 0, strikes)


def happen(kind: str) -> None:
    """Do what the fault is."""
    if kind == "hang":
        hang()
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "term_other":
        other = int((Path(os.environ[PIDS]) / "pid0").read_text())
        time.sleep(1)  # until it waits
        os.kill(other, signal.SIGTERM)
        hang()
    elif kind == "term_meeting":
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    elif kind.startswith("fail"):
        number = int(kind.removeprefix("fail"))
        if number == errno.ENOSPC:
            fill_disk()
        raise OSError(number, os.strerror(number))
    else:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.Signals[kind])).start()
        hang()


def hang() -> None:
    """Wait as in a call to a file system that never answers: no signal interrupts it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    ctypes.CDLL(None).sleep(int(HANG_SEC))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
