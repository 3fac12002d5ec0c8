"""Ranks without their 3 seconds of imports: a process that has done those forks one for each run.

A forked rank is a process of its own session, with its own environment, arguments, standard output
and standard error; it is forked while there is one thread and no socket, process group, signal
handler or open file of the package, and it runs the same ``main``. What differs from a started one:
torch is imported also where a single process would do without, ``sys.stdout`` has the encoding of
the process that forked, and the interpreter is not taken down at the end (threads that would keep
it alive are waited for, though). Tests that use this run a few of their cases with started ranks,
too.

Run as a module, this file is the process that forks: it reads a line of JSON for each rank to fork,
and writes one when that is done and one when it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import math
import os
import pkgutil
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.torchrun import ENVIRONMENT, INHERITED, ROOT, TIMEOUT_SEC, Ended, start_ranks

# One thread for everything, or else it would not be alone when it forks.
_ALONE = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_START_SEC = 120.0


class Forked:
    """A rank that was forked; looks like the processes of :mod:`tests.torchrun`."""

    def __init__(self, files: tuple[Path, Path]) -> None:
        """Wait to be told of it."""
        self._files, self._started = files, time.monotonic()
        self.pid, self._returncode, self._duration_sec = 0, 0, math.nan
        self.is_forked, self._end = threading.Event(), threading.Event()

    def tell(self, message: Mapping[str, int]) -> None:
        """Take what the process that forks says of it."""
        if "pid" in message:
            self.pid = message["pid"]
            self.is_forked.set()
        if "returncode" in message:
            self._returncode = message["returncode"]
            self._duration_sec = time.monotonic() - self._started
            self._end.set()

    def ends_before(self, deadline: float) -> bool:
        """Wait for its end until a time of the monotonic clock."""
        return self._end.wait(max(deadline - time.monotonic(), 0.1))

    def has_ended(self) -> bool:
        """Tell whether it has ended."""
        return self._end.is_set()

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and all of its session, if it still runs."""
        if not self.has_ended():
            for pid in session_of(self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._end.wait(10)

    def ended(self) -> Ended:
        """Give how it ended, once it has."""
        stdout, stderr = (file.read_text(errors="replace") for file in self._files)
        return Ended(self._returncode, stdout, stderr, self._duration_sec)


class Zygote:
    """The process that forks, as seen by whoever wants ranks; several threads may use it."""

    def __init__(self) -> None:
        """Start it, and wait until it has imported all it needs."""
        self._folder = tempfile.TemporaryDirectory(prefix="zygote-")
        inherited = {k: v for k, v in os.environ.items() if k not in INHERITED}
        self.environment = {**inherited, **ENVIRONMENT, **_ALONE}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote"],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._lock, self._forked = threading.Lock(), dict[int, Forked]()
        self._is_ready = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self._is_ready.wait(_START_SEC), "the process that forks did not come up"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "ready" in message:
                self._is_ready.set()
            else:
                self._forked[message["number"]].tell(message)

    @contextlib.contextmanager
    def started(
        self, module: str, arguments: Sequence[str | Path], env: Mapping[str, str]
    ) -> Iterator[Forked]:
        """Fork a rank; at the end of the block nothing of it is left.

        Args:
            module: Its ``main`` is called.
            arguments: With these.
            env: Variables on top of the usual ones.
        """
        assert self._process.stdin is not None
        with self._lock:
            number = len(self._forked)
            files = tuple(Path(self._folder.name, f"{number}.{name}") for name in ("out", "err"))
            for file in files:
                file.touch()  # it may be killed before it can do that
            forked = self._forked[number] = Forked((files[0], files[1]))
            request = {
                "number": number,
                "module": module,
                "arguments": [str(argument) for argument in arguments],
                "env": {**self.environment, **env},
                "files": [str(file) for file in files],
            }
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        try:
            assert forked.is_forked.wait(30), "not forked"
            yield forked
        finally:
            forked.kill()
            for file in files:
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """End it, and with it all that it has forked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._listener.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()


@functools.cache
def shared() -> Zygote:
    """Give the one that all tests of this process share."""
    zygote = Zygote()
    atexit.register(zygote.close)
    return zygote


def fork_ranks(
    num_ranks: int,
    arguments: Sequence[str | Path],
    *,
    module: str = "dist_consolidate",
    timeout_sec: float = TIMEOUT_SEC,
    env: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Do as :func:`tests.torchrun.start_ranks`, with forked ranks."""
    return start_ranks(
        num_ranks,
        arguments,
        module=module,
        timeout_sec=timeout_sec,
        env=env,
        start=shared().started,
    )


def fork_together(
    num_ranks: int,
    arguments: Sequence[str | Path],
    *,
    module: str = "dist_consolidate",
    timeout_sec: float = TIMEOUT_SEC,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Do as :func:`tests.torchrun.run_ranks`, with forked ranks, which all come to their own end.

    Returns:
        How the first one ended that failed, or else the first; with the output of all.
    """
    ended = fork_ranks(num_ranks, arguments, module=module, timeout_sec=timeout_sec, env=env)
    return Ended(
        next((rank.returncode for rank in ended if rank.returncode), 0),
        "".join(rank.stdout for rank in ended),
        "".join(rank.stderr for rank in ended),
        max(rank.duration_sec for rank in ended),
    )


def session_of(pid: int) -> list[int]:
    """Give every process of the session that a rank leads, zombies not counted.

    Args:
        pid: The rank, which may be gone.

    Returns:
        Their numbers.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Behind the name, which may hold anything: state, parent, group, session.
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == pid and state not in "ZX":
                found.append(int(path.parent.name))
    return found


# The process that forks.


class _Server:
    def __init__(self) -> None:
        # Prints of whatever is imported must not end up among the answers.
        self._requests, self._answers = os.dup(0), os.dup(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        self._buffer = b""
        self._children: dict[int, tuple[int, int]] = {}  # by pidfd: number and pid

    def serve(self) -> None:
        _import_all()
        gc.freeze()  # nobody looks at these objects again, so that their pages stay shared
        self._answer({"ready": 1})
        while True:
            readable, _, _ = select.select([self._requests, *self._children], [], [])
            for descriptor in readable:
                if descriptor == self._requests:
                    if not self._read():
                        return self._end_all()
                else:
                    self._reap(descriptor)

    def _answer(self, message: Mapping[str, int]) -> None:
        os.write(self._answers, json.dumps(message).encode() + b"\n")

    def _read(self) -> bool:
        data = os.read(self._requests, 1 << 16)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._fork(json.loads(line))
        return bool(data)

    def _fork(self, request: Mapping[str, Any]) -> None:
        threads = os.listdir("/proc/self/task")  # noqa: PTH208 - as cheap as can be
        assert len(threads) == 1, f"{len(threads)} threads: {threading.enumerate()}"
        pid = os.fork()
        if pid == 0:
            for descriptor in (self._requests, self._answers, *self._children):
                os.close(descriptor)
            _be(request)
        self._children[os.pidfd_open(pid)] = request["number"], pid
        self._answer({"number": request["number"], "pid": pid})

    def _reap(self, descriptor: int) -> None:
        number, pid = self._children.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._answer({"number": number, "returncode": os.waitstatus_to_exitcode(status)})

    def _end_all(self) -> None:
        for _, leader in self._children.values():
            for pid in session_of(leader):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for _, leader in self._children.values():
            os.waitpid(leader, 0)


def _import_all() -> None:
    for name in ("numpy", "torch", "torch.distributed", "tests.faults"):
        importlib.import_module(name)
    package = importlib.import_module("dist_consolidate")
    for module in pkgutil.walk_packages(package.__path__, "dist_consolidate."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _be(request: Mapping[str, Any]) -> None:
    """Be the rank, from its first to its last breath."""
    code = 1
    try:
        os.setsid()
        for target, path in zip((1, 2), request["files"], strict=True):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = [request["module"], *request["arguments"]]
        code = _run(request["module"], request["arguments"])
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.main_thread():
                thread.join()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001 - shown as the interpreter would
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


def _run(module: str, arguments: list[str]) -> int:
    """Run a module as ``python -m`` would; one that is imported already does not run twice."""
    main = getattr(sys.modules.get(module), "main", None)
    if main is not None:
        return int(main(arguments))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    _Server().serve()
