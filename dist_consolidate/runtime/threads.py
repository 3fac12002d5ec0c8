"""Doing the same with many things, in a few threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from dist_consolidate.errors import Caught

_T = TypeVar("_T")


def in_threads(
    action: Callable[[_T], object],
    items: Iterable[_T],
    num_threads: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Do something with each item, in order as far as threads begin with them.

    Args:
        action: What to do; it may run in several threads at once.
        items: What to do it with.
        num_threads: Threads; with one or none it is done in the caller's own.
        is_stopped: Tells whether to begin with no further item.

    Raises:
        Exception: The first one that an action raised; no further item is begun then.
    """
    waiting, lock, caught = iter(items), threading.Lock(), Caught()

    def take() -> list[_T]:
        with lock:
            if caught.error is not None or is_stopped():
                return []
            return list(itertools.islice(waiting, 1))

    def work() -> None:
        while taken := take():
            with caught:
                action(taken[0])

    if num_threads <= 1:
        work()
    else:
        # Daemons: a call to a file system that never comes back must not keep the process alive.
        threads = [
            threading.Thread(target=work, name="consolidate-helper", daemon=True)
            for _ in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    caught.raise_if_any()
