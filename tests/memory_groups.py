"""A control group of a test's own, where this machine lets one be made."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Either version's: a limit, and what is in use.
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


class NoGroup(Exception):
    """Why none could be made."""


@dataclass(frozen=True)
class MemoryGroup:
    """A group below the one that the tests run in.

    Attributes:
        folder: Where it is.
        limit: The file with its limit.
        usage: The file with what is in use.
    """

    folder: Path
    limit: Path
    usage: Path


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Make a group and remove it again; nothing may run in it by then.

    Raises:
        NoGroup: Why it cannot be made.
    """
    folder = _own_folder() / f"dist-consolidate-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoGroup(f"{folder.parent}: {error.strerror}") from error
    # Undone in the opposite order.
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, folder)
        yield _group(folder, stack)


def _own_folder() -> Path:
    """Find this process's group in the hierarchy that limits memory."""
    own = Path("/proc/self/cgroup").read_text()
    mounts = Path("/proc/self/mountinfo").read_text()
    for path, kind, controller in (
        (re.search(r"^\d+:(?:\S*,)?memory(?:,\S*)?:(.*)$", own, re.M), "cgroup", "memory"),
        (re.search(r"^0::(.*)$", own, re.M), "cgroup2", ""),
    ):
        pattern = rf"^\S+ \S+ \S+ / (\S+) .* - {kind} \S+ (\S+)$"
        for point, options in re.findall(pattern, mounts, re.M):
            if path and (not controller or controller in options.split(",")):
                return Path(point) / path[1].lstrip("/")
    raise NoGroup("no mounted hierarchy of control groups limits memory")


def _group(folder: Path, stack: contextlib.ExitStack) -> MemoryGroup:
    control = folder.parent / "cgroup.subtree_control"
    if control.exists() and "memory" not in control.read_text().split():
        try:
            control.write_text("+memory")
        except OSError as error:  # a group with processes in it has no limits below
            raise NoGroup(f"{control}: {error.strerror}") from error
        stack.callback(control.write_text, "-memory")
    for limit, usage in _FILES:
        if os.access(folder / limit, os.W_OK):
            return MemoryGroup(folder, folder / limit, folder / usage)
    raise NoGroup(f"{folder}: no limit of memory can be set")


def _remove(folder: Path) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.05)  # a process that has just ended may still be counted
    raise AssertionError(f"{folder}: something still runs in it")
