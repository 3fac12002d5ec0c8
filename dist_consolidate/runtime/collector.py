"""Python's garbage collector while bytes are moved."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector still in a loop that makes no garbage in cycles.

    A collection in the middle looks at every object that the plan is made of.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
