"""Starting ranks: under torchrun, or one by one where a test looks at how each rank ends."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SEC = 90.0
MESSAGE = "dist-consolidate: error: "
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
# Set by a launcher around the tests; a new launch must not take them for its own.
INHERITED = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Ended:
    """How one command ended.

    Attributes:
        returncode: Exit code; below zero where a signal ended it.
        stdout: What it wrote to standard output.
        stderr: What it wrote to standard error.
        duration_sec: From the start to the end.
    """

    returncode: int
    stdout: str
    stderr: str
    duration_sec: float

    def __str__(self) -> str:
        """Everything a failed test should show."""
        head = f"ended with {self.returncode} after {self.duration_sec:.1f} s"
        return f"{head}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def ok(self) -> Ended:
        """Fail the test, with all output, unless the command succeeded."""
        assert self.returncode == 0, str(self)
        return self


class Running(Protocol):
    """A rank that runs, started or forked (:mod:`tests.zygote`).

    Attributes:
        pid: Its process.
    """

    pid: int

    def ends_before(self, deadline: float) -> bool:
        """Wait for its end until a time of the monotonic clock."""

    def has_ended(self) -> bool:
        """Tell whether it has ended."""

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""

    def kill(self) -> None:
        """End it and all that it started, if it still runs."""

    def ended(self) -> Ended:
        """Give how it ended, once it has."""


class Start(Protocol):
    """A way to start a rank, which is ended with the block."""

    def __call__(
        self, module: str, arguments: Sequence[str | Path], env: Mapping[str, str]
    ) -> contextlib.AbstractContextManager[Running]:
        """Start a module as ``python -m`` does, with variables on top of the usual ones."""


def run_ranks(
    num_ranks: int,
    arguments: Sequence[str | Path],
    *,
    module: str = "dist_consolidate",
    script: Path | None = None,
    timeout_sec: float = TIMEOUT_SEC,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Run a module or a script under torchrun, on a port of its own.

    Args:
        num_ranks: Number of processes.
        arguments: For the module or script.
        module: What to run with ``-m``; ignored where there is a script.
        script: A file to run.
        timeout_sec: After this everything is killed and the test fails.
        env: Variables to set on top of the usual ones.

    Returns:
        How torchrun ended; its output holds that of all ranks.

    Raises:
        AssertionError: If it took too long; with all output.
    """
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += ["-m", module] if script is None else [str(script)]
    return run_python([*command, *map(str, arguments)], timeout_sec=timeout_sec, env=env)


def run_python(
    arguments: Sequence[str | Path],
    *,
    timeout_sec: float = TIMEOUT_SEC,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Run this interpreter once, outside any launch.

    Args:
        arguments: For the interpreter.
        timeout_sec: After this everything is killed and the test fails.
        env: Variables to set on top of the usual ones.

    Returns:
        How it ended.

    Raises:
        AssertionError: If it took too long; with all output.
    """
    with _started(arguments, env or {}) as process:
        if not process.ends_before(time.monotonic() + timeout_sec):
            process.kill()
            raise AssertionError(f"took too long: {process.ended()}")
        return process.ended()


def start_ranks(
    num_ranks: int,
    arguments: Sequence[str | Path],
    *,
    module: str = "dist_consolidate",
    timeout_sec: float = TIMEOUT_SEC,
    env: Mapping[str, str] | None = None,
    start: Start | None = None,
) -> list[Ended]:
    """Start each rank as torchrun would, but let each come to its own end.

    torchrun ends all ranks as soon as one has failed; here each has to notice by itself.

    Args:
        num_ranks: Number of processes.
        arguments: For the module.
        module: What to run with ``-m``.
        timeout_sec: After this, counted for all together, they are killed and the test fails.
        env: Variables to set on top of the usual ones.
        start: How; by default each is a new interpreter.

    Returns:
        How each rank ended, in rank order.

    Raises:
        AssertionError: If one took too long; with the output of all.
    """
    with running_ranks(num_ranks, arguments, module=module, env=env, start=start) as ranks:
        deadline = time.monotonic() + timeout_sec
        if not all([rank.ends_before(deadline) for rank in ranks]):
            for rank in ranks:
                rank.kill()
            raise AssertionError(f"took too long: {show([rank.ended() for rank in ranks])}")
        return [rank.ended() for rank in ranks]


@contextlib.contextmanager
def running_ranks(
    num_ranks: int,
    arguments: Sequence[str | Path],
    *,
    module: str = "dist_consolidate",
    env: Mapping[str, str] | None = None,
    start: Start | None = None,
) -> Iterator[list[Running]]:
    """Start each rank as torchrun would; at the end of the block none is left.

    Args:
        num_ranks: Number of processes.
        arguments: For the module.
        module: What to run with ``-m``.
        env: Variables to set on top of the usual ones.
        start: How; by default each is a new interpreter.

    Yields:
        The ranks.
    """
    # The store lives here, as it lives in torchrun's agent: no rank's end takes it down, and
    # nobody else can have taken its port.
    store = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        timeout=datetime.timedelta(seconds=60),
        wait_for_workers=False,
    )
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                (start or _start_module)(
                    module, arguments, {**_variables(r, num_ranks, store.port), **(env or {})}
                )
            )
            for r in range(num_ranks)
        ]


def messages(ended: Sequence[Ended]) -> list[str]:
    """The error messages of all ranks together, without the program's name.

    Args:
        ended: How the ranks ended.

    Returns:
        The messages, those of several lines whole; what torch logs is not among them.
    """
    return [part.strip() for rank in ended for part in rank.stderr.split(MESSAGE)[1:]]


def show(ended: Sequence[Ended]) -> str:
    """Everything a failed test should show of several ranks."""
    return "\n".join(f"rank {number} {rank}" for number, rank in enumerate(ended))


class _Process:
    """A running command, its output going to files, which no full pipe can stop."""

    def __init__(
        self, arguments: Sequence[str | Path], env: Mapping[str, str], files: tuple[IO[str], ...]
    ) -> None:
        """Start it."""
        self._started, self._files = time.monotonic(), files
        self._duration_sec = math.nan
        inherited = {k: v for k, v in os.environ.items() if k not in INHERITED}
        self._process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env={**inherited, **ENVIRONMENT, **env},
            stdout=files[0],
            stderr=files[1],
            start_new_session=True,
        )

    def ends_before(self, deadline: float) -> bool:
        """Wait for its end until a time of the monotonic clock."""
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            return False
        self._duration_sec = time.monotonic() - self._started
        return True

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Tell whether it has ended."""
        return self._process.poll() is not None

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it and all that it started, if it still runs."""
        if self._process.poll() is None:
            for pid in (*_descendants(self._process.pid), self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def ended(self) -> Ended:
        """Give how it ended, once it has."""
        for file in self._files:
            file.seek(0)
        stdout, stderr = (file.read() for file in self._files)
        return Ended(self._process.returncode, stdout, stderr, self._duration_sec)


@contextlib.contextmanager
def _started(arguments: Sequence[str | Path], env: Mapping[str, str]) -> Iterator[_Process]:
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2)
        ]
        process = _Process(arguments, env, tuple(files))
        stack.callback(process.kill)
        yield process


def _start_module(
    module: str, arguments: Sequence[str | Path], env: Mapping[str, str]
) -> contextlib.AbstractContextManager[_Process]:
    return _started(["-m", module, *arguments], env)


def _variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _descendants(pid: int) -> list[int]:
    """Every process below one; torchrun puts its workers into sessions of their own."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name may hold spaces and brackets: the parent's id is the second field behind it.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, waiting = [], [pid]
    while waiting:
        above = waiting.pop()
        below = [child for child, parent in parents.items() if parent == above]
        found += below
        waiting += below
    return found
