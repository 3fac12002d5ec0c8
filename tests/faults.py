"""Things that happen to real runs at an unforeseeable time, made to happen at a known place.

:func:`main` is a rank of the command line with a :class:`Fault` in it, started or forked
(:mod:`tests.zygote`). Only calls to the operating system are tampered with, so that it does not
matter how the package is built; the exception is what the journal calls large, so that small runs
claim as often as large ones do.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dist_consolidate import cli
from dist_consolidate.output.index import is_entry_point
from dist_consolidate.output.work import RESULT
from dist_consolidate.runtime import journal

FAULT = "CONSOLIDATE_TEST_FAULT"
_CLAIM_BYTES, _CLAIM_SEC = 60_000, 0.05
_ANSWER_SEC, _SETTLE_SEC = 20.0, 0.05


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens, where.

    Attributes:
        kind: ``kill``, ``term``, ``stop`` or ``raise``; ``none`` to count the calls that go well;
            ``slow`` to let every read and write last longer, by ``count`` milliseconds.
        place: ``planning`` (a shard's metadata is opened), ``read`` or ``write`` (a call on
            weights), ``sync`` (a written file's), ``rename`` (a file of the result into place, for
            the first time), or ``placed`` (the sync after the last time).
        count: At which read or write, counted from 0.
        victim: The rank that it happens to.
        pacer: The rank that comes by the place; where it is another one, it waits for the victim.
        folder: For the ranks' notes on what has happened.
    """

    kind: str
    place: str = ""
    count: int = 0
    victim: int = 0
    pacer: int = 0
    folder: str = ""

    def to_env(self) -> dict[str, str]:
        """Give the variable that tells a rank of it."""
        return {FAULT: json.dumps(dataclasses.asdict(self))}

    @property
    def struck(self) -> Path:
        """A file that is there once it has happened."""
        return Path(self.folder, "struck")

    @property
    def now(self) -> Path:
        """A file that is there once the pacer waits for the victim."""
        return Path(self.folder, "now")

    def counts(self, rank: int) -> Path:
        """A file that holds a rank's calls once it has ended."""
        return Path(self.folder, f"counts{rank}")


def strike(owner: Any, name: str, count: int, happen: Callable[..., None]) -> None:
    """Let something happen before every call of a function from a certain one on.

    Args:
        owner: A module.
        name: The function in it.
        count: Calls that go well.
        happen: Is given the function's arguments.
    """
    real, calls = getattr(owner, name), iter(range(sys.maxsize))

    def struck(*arguments: Any) -> Any:
        if next(calls) >= count:
            happen(*arguments)
        return real(*arguments)

    setattr(owner, name, struck)


def once(action: Callable[[], None]) -> Callable[..., None]:
    """Let an action happen at the first call only, whichever thread makes it."""
    lock = threading.Lock()

    def act(*_: Any) -> None:
        if lock.acquire(blocking=False):
            action()

    return act


def fill_disk(*_: object) -> None:
    """Fail as a write to a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def at_opening_of_a_shard(action: Callable[[], None]) -> None:
    """Let something happen when this process opens a rank's optimizer states (an audit hook)."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith("optim_states.pt"):
            action()

    sys.addaudithook(hook)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; the environment says what happens on which rank, and where.

    Args:
        arguments: A command line.

    Returns:
        The exit code.
    """
    journal._CLAIM_BYTES, journal._CLAIM_SEC, journal._PAUSE_SEC = _CLAIM_BYTES, _CLAIM_SEC, 0.0
    if FAULT not in os.environ:
        return cli.main(arguments)
    fault, rank = Fault(**json.loads(os.environ[FAULT])), int(os.environ.get("RANK", "0"))
    if fault.kind == "none":
        return _counted(fault, rank, arguments)
    if fault.kind == "slow":
        for name in ("preadv", "pwrite"):
            strike(os, name, 0, lambda *_: time.sleep(fault.count / 1000))
    elif rank == fault.pacer:
        happens = _happen if fault.victim == rank else _make_happen
        _prepare(fault.place, fault.count, once(lambda: happens(fault)))
    elif rank == fault.victim:
        threading.Thread(target=_wait_for_it, args=(fault,), daemon=True).start()
    return cli.main(arguments)


def _counted(fault: Fault, rank: int, arguments: Sequence[str]) -> int:
    counts = {"preadv": 0, "pwrite": 0}
    lock = threading.Lock()

    def counting(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            with lock:
                counts[name] += 1

        return count

    for name in counts:
        strike(os, name, 0, counting(name))
    code = cli.main(arguments)
    fault.counts(rank).write_text(json.dumps([counts["preadv"], counts["pwrite"]]))
    return code


def _prepare(place: str, count: int, strikes: Callable[..., None]) -> None:
    """Let something happen at a place in the run."""
    if place == "planning":
        at_opening_of_a_shard(strikes)
    elif place == "rename":
        strike(os, "rename", 0, lambda source, _: strikes() if _is_of_result(source) else None)
    elif place == "placed":
        is_placed = threading.Event()
        real = os.rename

        def rename(source: Any, target: Any) -> None:
            real(source, target)
            # A new folder as a whole, or the last file of several.
            if _is_of_result(source) and (
                is_entry_point(Path(target).name) or Path(target).is_dir()
            ):
                is_placed.set()

        os.rename = rename  # type: ignore[assignment]
        strike(os, "fsync", 0, lambda *_: strikes() if is_placed.is_set() else None)
    else:
        name = {"read": "preadv", "write": "pwrite", "sync": "fsync"}[place]
        strike(os, name, count, strikes)


def _is_of_result(path: Any) -> bool:
    """Tell whether a path is that of a new file, or of the folder of all new files."""
    return RESULT in Path(path).parts


def _happen(fault: Fault) -> None:
    """Do what the fault is, to this process."""
    fault.struck.touch()
    if fault.kind == "raise":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}[fault.kind]
    os.kill(os.getpid(), number)


def _wait_for_it(fault: Fault) -> None:
    """Let it happen to this rank when the pacer says so, whatever its main thread waits for."""
    while not fault.now.exists():
        time.sleep(0.002)
    _happen(fault)


def _make_happen(fault: Fault) -> None:
    """Let it happen to the victim before this rank goes on."""
    fault.now.touch()
    deadline = time.monotonic() + _ANSWER_SEC
    while not fault.struck.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(_SETTLE_SEC)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
