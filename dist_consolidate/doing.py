"""What this process's threads are doing to which file right now.

Whoever calls on a file system says so here, so that a call that never comes back can be told by
the file it was made for. It costs a microsecond.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

# While this is under way, a run is ended only when there is no other way.
PUBLISHING = "publishing"

_stacks: dict[int, list[Doing]] = {}


class Doing:
    """A block that may wait for a file system: ``with Doing("reading", path):``.

    Attributes:
        what: A verb in its -ing form.
        path: The file or folder.
        waited_sec: How long it has been under way; kept by whoever watches.
    """

    __slots__ = ("path", "waited_sec", "what")

    def __init__(self, what: str, path: Path | str) -> None:
        """Say nothing yet."""
        self.what, self.path, self.waited_sec = what, path, 0.0

    def __enter__(self) -> Doing:
        """Begin."""
        _stacks.setdefault(threading.get_ident(), []).append(self)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """End."""
        thread = threading.get_ident()
        stack = _stacks[thread]
        stack.pop()
        if not stack:
            del _stacks[thread]

    def __str__(self) -> str:
        """Put it into words."""
        return f"{self.what} {self.path}"


def under_way() -> Iterator[Doing]:
    """Give what each thread is doing; of blocks inside blocks the innermost."""
    for stack in list(_stacks.values()):
        # The thread may end it meanwhile.
        yield from stack[-1:]


def is_publishing(max_sec: float) -> bool:
    """Tell whether a result is being put in place, and not for longer than some time by now."""
    return any(
        item.what == PUBLISHING and stack[-1].waited_sec <= max_sec
        for stack in [list(stack) for stack in list(_stacks.values())]
        for item in stack
    )
