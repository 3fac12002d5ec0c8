"""One run at a time for one output, whatever the file system can."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_consolidate.errors import UsageError
from dist_consolidate.output import lock as locks
from dist_consolidate.output.letter_case import check_letter_case, clashes
from dist_consolidate.output.lock import HeldError, OutputLock, refuse_if_held, take
from dist_consolidate.output.publish import prepare

HOLDER = """
import sys, time
from pathlib import Path
from dist_consolidate.output import lock
if sys.argv[2] == "without":
    def refuse(*_):
        raise OSError(37, "no locks")
    lock.fcntl.flock = refuse
lock.take(Path(sys.argv[1]), Path("out"))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["with", "without"])
def flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a file system that can lock, and on one that says that it cannot."""
    if request.param == "without":
        forbid_flock(monkeypatch)
    return str(request.param)


def forbid_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "_SETTLE_SEC", 0.01)


@contextlib.contextmanager
def holder(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a lock."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", HOLDER, str(path), how]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_lock_leaves_nothing(tmp_path: Path, flock: str) -> None:
    lock = take(tmp_path / "lock", tmp_path)
    assert names(tmp_path) == ["lock"]
    assert lock.is_held()
    lock.release()
    lock.release()
    assert names(tmp_path) == []
    take(tmp_path / "lock", tmp_path).release()


def test_a_process_that_lives_is_told_and_one_that_is_dead_is_followed(
    tmp_path: Path, flock: str
) -> None:
    path = tmp_path / "lock"
    with holder(path, flock) as process:
        for _ in range(2):
            with pytest.raises(HeldError) as caught:
                take(path, tmp_path / "out")
            assert f"{tmp_path / 'out'}: another run is writing" in str(caught.value)
            assert f"process {process.pid} on " in str(caught.value)
        # One that is stopped lives.
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(HeldError):
            refuse_if_held(path, tmp_path / "out")
        process.kill()
        process.wait()
        assert names(tmp_path) == ["lock"]
        take(path, tmp_path / "out").release()
        assert names(tmp_path) == []


def test_of_many_at_once_exactly_one_has_it(tmp_path: Path, flock: str) -> None:
    path, found, told = tmp_path / "lock", list[OutputLock](), list[UsageError]()
    start = threading.Barrier(8)

    def run() -> None:
        start.wait()
        try:
            found.append(take(path, tmp_path))
        except HeldError as error:
            told.append(error)

    for _ in range(10):
        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(found), len(told)) == (1, 7)
        found.pop().release()
        told.clear()
    assert names(tmp_path) == []


def of_another_host(path: Path, **more: Any) -> None:
    facts = {**locks._machine(), "host": "node-b", "boot": "b", "pid": 1, "started": "1", **more}
    path.write_text(json.dumps(facts))


@pytest.mark.parametrize("content", ["other", "other container", "torn"])
def test_a_lock_of_another_host_is_followed_only_once_it_is_silent(
    tmp_path: Path, flock: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_WATCH_SEC", 0.5)
    path, over = tmp_path / "lock", threading.Event()
    of_another_host(path)
    if content == "other container":
        of_another_host(path, **{**locks._machine(), "pids": "pid:[1]"})
    if content == "torn":
        path.write_text('{"host": ')

    def beat() -> None:
        while not over.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(HeldError):
        take(path, tmp_path)
    over.set()
    thread.join()
    # The clocks of hosts may differ: how old the file seems counts for nothing.
    os.utime(path, (time.time() + 1e6, time.time() + 1e6))
    lock = take(path, tmp_path)
    assert lock.is_held()
    lock.release()


def test_a_holder_renews_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_BEAT_SEC", 0.02)
    lock = take(tmp_path / "lock", tmp_path)
    before = (tmp_path / "lock").stat().st_mtime_ns
    deadline = time.monotonic() + 20
    while (tmp_path / "lock").stat().st_mtime_ns == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lock.release()


def test_a_file_system_without_links(
    tmp_path: Path, flock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    lock = take(tmp_path / "lock", tmp_path)
    with pytest.raises(HeldError):
        take(tmp_path / "lock", tmp_path)
    lock.release()
    assert names(tmp_path) == []


def test_who_lost_its_lock_does_not_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a long stop on another host, on a file system that cannot lock."""
    forbid_flock(monkeypatch)
    monkeypatch.setattr(locks, "_WATCH_SEC", 0.1)
    out = tmp_path / "out"
    first = prepare(out, ("a",), "t1")
    first.write_file("a", b"first")
    monkeypatch.setattr(locks, "_machine", lambda: {"host": "node-b", "boot": "b", "pids": "p"})
    second = prepare(out, ("a",), "t2")
    assert not first.work_dir.exists()
    with pytest.raises(UsageError, match="another one took it for dead"):
        first.publish()
    first.abandon()
    second.write_file("a", b"second")
    second.publish()
    assert (out / "a").read_bytes() == b"second"
    assert names(tmp_path) == ["out"]


def test_the_other_place_is_looked_at(tmp_path: Path) -> None:
    """A run that began before the output folder was there holds its lock beside it."""
    out = tmp_path / "out"
    first = prepare(out, ("a",), "t1")
    out.mkdir()
    with pytest.raises(UsageError, match="another run is writing"):
        prepare(out, ("a",), "t2")
    first.abandon()
    prepare(out, ("a",), "t2").abandon()
    assert names(tmp_path) == ["out"]
    assert names(out) == []


def test_names_that_differ_in_case_alone(tmp_path: Path) -> None:
    assert clashes(["a/x", "b"], ["A/y", "c"]) == []
    assert clashes(["s/Exp", "s/exp"], ["MODEL", "S/EXP"]) == [
        "s/Exp and s/exp",
        "s/Exp and S/EXP, which is there",
    ]
    put_in = tmp_path / "result"
    put_in.mkdir()
    out = tmp_path / "out"
    out.mkdir()
    (out / "Model.safetensors").write_bytes(b"theirs")
    check_letter_case(put_in, out, ["model.safetensors"])
    # A second name for one folder is what such a file system shows.
    (tmp_path / "RESULT").symlink_to(put_in)
    check_letter_case(put_in, out, ["pytorch_model.bin"])
    with pytest.raises(UsageError, match=r"model\.safetensors and Model\.safetensors, which is"):
        check_letter_case(put_in, out, ["model.safetensors"])


def test_what_a_run_leaves_that_dies_while_it_takes_the_lock_is_cleared(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / f".out.consolidating.lock-{'0' * 32}").write_bytes(b"")
    mine = [f".out.consolidating.lock-{'0' * 31}", ".out.consolidating.lockX"]
    for name in mine:
        (tmp_path / name).write_bytes(b"")
    prepare(out, ("a",), "t1").abandon()
    assert names(tmp_path) == sorted(mine)


@pytest.mark.parametrize("pid", ["[" * 4000, 10**30, True, None, "x"])
def test_whatever_stands_in_a_lock_is_no_mistake_of_this_program(
    pid: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_WATCH_SEC", 0.2)
    facts = {**locks._machine(), "pid": pid, "started": "1"}
    text = pid if isinstance(pid, str) and pid[0] == "[" else json.dumps(facts)
    path = tmp_path / "lock"
    path.write_text(text)
    take(path, tmp_path / "out").release()
