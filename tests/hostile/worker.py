"""The command line run many times in one process that watches itself, for inputs of strangers.

As a program it reads jobs, one JSON list of arguments a line, and answers each with a line. The
class :class:`Worker` is the other end: what takes too long, or kills the process, it tells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# A guard of the machine; what is allowed is compared with the peak of each input.
_ADDRESS_SPACE_BYTES = 24 << 30


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run did.

    Attributes:
        code: Exit code; negative where the process died or had to be killed.
        text: What it wrote to the terminal, all of it.
        seconds: Processor time it took (other tests may keep the machine busy).
        peak_bytes: Memory it took beyond what the process held before.
    """

    code: int
    text: str
    seconds: float
    peak_bytes: int


class Worker:
    """One process that runs the command line again and again."""

    def __init__(self, limit_sec: float = 120) -> None:
        self._limit_sec = limit_sec
        self._process: subprocess.Popen[str] | None = None

    def run(self, *arguments: str | Path) -> Outcome:
        """Run the command line with some arguments."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        start = time.monotonic()
        process.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], self._limit_sec)
        line = process.stdout.readline() if ready else ""
        if not line:
            text = "died" if ready else "hangs"
            self.close()
            return Outcome(-1, text, time.monotonic() - start, 0)
        return Outcome(**json.loads(line))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI"))}
        environment["PYTHONPATH"] = str(ROOT)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


def run_once(arguments: Sequence[str]) -> dict[str, Any]:
    """Run the command line in this process and measure it."""
    from dist_consolidate.cli import main

    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    out = io.StringIO()
    start = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    seconds = time.process_time() - start
    peak = max(_status("VmHWM") - before, 0)
    return {"code": code, "text": out.getvalue(), "seconds": seconds, "peak_bytes": peak}


def _serve() -> None:
    import torch  # noqa: F401 - some layouts need it, and its import would count as theirs

    # Whatever is printed by mistake must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        print(json.dumps(run_once(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
