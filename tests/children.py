"""Processes that are forked off a test, to be killed or to end by themselves."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

from dist_consolidate.errors import UsageError


def die_before(calls: Iterable[str], number: int, kill: int = signal.SIGKILL) -> None:
    """Send this process a signal before its n-th call on the file system from now on.

    Args:
        calls: Functions of :mod:`os` that count.
        number: Which of the calls, counted from 0.
        kill: The signal.
    """
    count = itertools.count()

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(count) == number:
                os.kill(os.getpid(), kill)
            return real(*arguments, **options)

        return call

    for name in calls:
        setattr(os, name, deadly(getattr(os, name)))


def start_child(action: Callable[[], object], *, done: int = 0, failed: int = 1) -> int:
    """Run something in a process of its own; give its number.

    Args:
        action: What to run.
        done: What the process ends with where the action comes to its end.
        failed: What it ends with where the action raises; 2 for a :class:`UsageError`.
    """
    child = os.fork()
    if child == 0:
        code = failed
        try:
            action()
            code = done
        except UsageError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    return child


def end_of(child: int) -> int:
    """Wait for a process; give how it ended, as ``returncode`` has it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
