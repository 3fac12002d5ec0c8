"""The control plane: how ranks keep step and how one rank's failure ends all of them.

Weights never pass here, and nothing that moves weights is entered before every rank has said
that it is ready: a slow disk is waited for on this CPU group, with a timeout of its own, and not
inside an NCCL collective that a watchdog would kill.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dist_consolidate import doing
from dist_consolidate.errors import Caught, ConsolidateError, LostError, RankError, ResourceError
from dist_consolidate.runtime.roll import named_ranks, stuck_text
from dist_consolidate.units import format_duration

if TYPE_CHECKING:
    from dist_consolidate.runtime.watch import Watch

_T = TypeVar("_T")

TIMEOUT_SEC = 30 * 60.0

# How often ranks tell each other that they live while they work, at least.
_MAX_BEAT_SEC = 0.5
# What a thread gets to finish what it has begun when the run has failed.
_GRACE_SEC = 10.0
# How gloo's words for that look; any other error of a collective is told as it is.
_LOST_WORDS = re.compile(r"connect|timed? ?out|broken pipe|peer|socket|closed|reset", re.I)


class Control:
    """Keeps the ranks of one run in step; with one rank it does nothing.

    Attributes:
        rank: This process.
        size: Number of processes.
        hosts: Each rank's host.
        watch: Who ends this process where the main thread cannot; ``None`` in somebody else's.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: Any = None,  # noqa: ANN401
        *,
        timeout_sec: float = TIMEOUT_SEC,
        watch: Watch | None = None,
    ) -> None:
        """Wrap a CPU process group (gloo); ``None`` where there is one rank only."""
        self.rank, self.size, self.watch = rank, size, watch
        self._group, self._timeout_sec = group, timeout_sec
        self.hosts: list[str] = self.exchange(socket.gethostname())
        self._pending: collections.deque[tuple[Any, Any]] = collections.deque()
        self._lag = 0

    def exchange(self, value: Any) -> list[Any]:  # noqa: ANN401 - anything picklable
        """Give every rank's value to every rank.

        Args:
            value: Anything that can be pickled; small.

        Returns:
            The values in rank order.

        Raises:
            RankError: If another rank is gone.
        """
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:  # noqa: ANN401 - anything picklable
        """Give one rank's value to every rank.

        Args:
            value: Anything that can be pickled; only that rank's counts.
            source: The rank.

        Returns:
            That rank's value.

        Raises:
            RankError: If another rank is gone.
        """
        if self.size == 1:
            return value
        import torch.distributed as dist

        values = [value]
        try:
            dist.broadcast_object_list(values, src=source, group=self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return values[0]

    def part(self) -> None:
        """Leave together: no rank ends before all have come here, if all of them still can."""
        with contextlib.suppress(RankError):
            self.exchange(None)

    def gather(self, value: Any, target: int = 0) -> list[Any]:  # noqa: ANN401 - anything picklable
        """Give every rank's value to one rank.

        Args:
            value: Anything that can be pickled.
            target: The rank that gets them.

        Returns:
            On that rank the values in rank order; elsewhere nothing.

        Raises:
            RankError: If another rank is gone.
        """
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size if self.rank == target else []
        try:
            dist.gather_object(value, values or None, dst=target, group=self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return values

    def clean_up_with(self, action: Callable[[], None]) -> None:
        """Name what removes everything half-made, should this process have to end at once."""
        if self.watch is not None:
            self.watch.clean_up = action

    def tell_with(self, action: Callable[[], str]) -> None:
        """Name what says, should the run fail, what people can do with what it leaves."""
        if self.watch is not None:
            self.watch.advice = action

    def clear_up(self) -> None:
        """Note that this process clears up; see :meth:`Watch.clear_up`."""
        if self.watch is not None:
            self.watch.clear_up()

    def why(self, error: RankError) -> Exception:
        """Find out why contact with another rank was lost; see :meth:`Watch.settle`."""
        return error if self.watch is None else self.watch.settle(error)

    def finish(self) -> None:
        """Note that the result is in place; see :meth:`Watch.finish`."""
        if self.watch is not None:
            self.watch.finish()

    def agree(self, error: Exception | None) -> None:
        """Wait for all ranks; raise on every one of them if any brings an error.

        Args:
            error: What went wrong here, or ``None``.

        Raises:
            ConsolidateError: This rank's own error, if it is the only one with a single rank.
            RankError: The failing ranks and their reasons, the same on all ranks.
        """
        self.beat(error)
        self.flush()

    def beat(self, error: Exception | None = None, lag: int = 0) -> None:
        """Take part in one round; every rank beats equally often.

        Args:
            error: What went wrong here since the last beat, or ``None``.
            lag: How many rounds a rank may be ahead of the slowest one. It learns of another's
                failure that much later, and does not wait before.

        Raises:
            ConsolidateError: As :meth:`agree`.
        """
        if self.size == 1:
            if error is not None:
                raise explained(error)
            return
        self._lag = lag
        self._issue(error)
        while len(self._pending) > (0 if error is not None else lag):
            self._wait(error)

    def flush(self) -> None:
        """Wait for all rounds that were issued (see :meth:`beat`)."""
        while self._pending:
            self._wait(None)

    def together(
        self, action: Callable[[], _T], stop: Callable[[], None], progress: Callable[[], int]
    ) -> _T:
        """Do something long on every rank; once one of them fails, all of them end soon.

        No rank waits inside a collective for another's disk: while the work is done in a thread,
        all ranks beat several times a second, those that are done as well.

        Args:
            action: The work.
            stop: Asks the work to end early; called on the other ranks when one has failed.
            progress: A number that changes while the work gets on.

        Returns:
            What this rank's work gave.

        Raises:
            ConsolidateError: As :meth:`agree`; also if work has not got on for the time that
                ranks wait for each other.
        """
        if self.size == 1:
            with (caught := Caught()):
                return action()
            assert caught.error is not None
            raise explained(caught.error)
        work = _Background(action)
        started = since = time.monotonic()
        last = progress()
        try:
            while True:
                # Short runs must not wait for the last beat, and long ones need few.
                pause_sec = (time.monotonic() - started) / 32 + 0.005
                work.thread.join(min(_MAX_BEAT_SEC, pause_sec))
                if progress() != last:
                    last, since = progress(), time.monotonic()
                busy, error = work.thread.is_alive(), work.caught.error
                if busy and time.monotonic() - since > self._timeout_sec:
                    error = self._stuck()
                if not self._anyone(busy, error):
                    return work.result
        except BaseException:  # a signal's, too: no thread may outlive the run
            stop()
            work.thread.join(_GRACE_SEC)
            raise

    def _stuck(self) -> ConsolidateError | None:
        """Say that work does not get on; where somebody watches over that, it is theirs to say."""
        if self.watch is not None:
            return None
        what = str(next(doing.under_way(), "the work"))
        return ConsolidateError(stuck_text(self._timeout_sec, what))

    def _lost(self, error: Exception) -> RankError:
        line = _first_line(error)
        if _LOST_WORDS.search(line) is None:
            return RankError(f"the ranks cannot talk: {line}")
        return LostError(
            "contact with another rank was lost: it was killed, it did nothing for "
            f"{format_duration(self._timeout_sec)} (--timeout), or its node or network is gone "
            f"({line})"
        )

    def _anyone(self, busy: bool, error: Exception | None) -> bool:
        """Tell whether any rank is busy; raise if any has failed."""
        import torch
        import torch.distributed as dist

        flags = torch.tensor([error is not None, busy], dtype=torch.int32)
        try:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as lost:
            raise self._lost(lost) from lost
        failed, anyone = flags.tolist()
        if failed:
            self._raise_all(error)
        return bool(anyone)

    def _issue(self, error: Exception | None) -> None:
        import torch
        import torch.distributed as dist

        flag = torch.tensor([error is not None], dtype=torch.int32)
        try:
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        except RuntimeError as lost:
            raise self._lost(lost) from lost
        self._pending.append((work, flag))

    def _wait(self, error: Exception | None) -> None:
        flag = self._oldest()
        if not flag:
            return
        # Every rank sees the flag in this round, and may have issued up to `lag` rounds behind it
        # before. All issue that many, so that the next collective here meets its like.
        while len(self._pending) < self._lag:
            self._issue(None)
        while self._pending:
            self._oldest()
        self._raise_all(error)

    def _oldest(self) -> bool:
        work, flag = self._pending.popleft()
        try:
            work.wait()
        except RuntimeError as lost:
            raise self._lost(lost) from lost
        return bool(flag.item())

    def _raise_all(self, error: Exception | None) -> None:
        mine = None if error is None else (describe(error), exit_code(error))
        found = [(rank, what) for rank, what in enumerate(self.exchange(mine)) if what]
        by_message: dict[str, list[int]] = {}
        for rank, (message, _) in found:
            by_message.setdefault(message, []).append(rank)
        lines = [f"{named_ranks(ranks, self.hosts)}: {text}" for text, ranks in by_message.items()]
        failure = RankError("\n".join(lines), max(code for _, (_, code) in found))
        failure.agreed = True
        raise failure from error


class _Background(Generic[_T]):
    """Work in a thread that does not keep the process alive."""

    result: _T

    def __init__(self, action: Callable[[], _T]) -> None:
        self.caught = Caught()
        self.thread = threading.Thread(
            target=self._run, args=(action,), name="consolidate-work", daemon=True
        )
        self.thread.start()

    def _run(self, action: Callable[[], _T]) -> None:
        with self.caught:
            self.result = action()


def explained(error: Exception) -> Exception:
    """Turn what the operating system or an allocator says into an error of ours.

    Args:
        error: Anything.

    Returns:
        A :class:`ConsolidateError` with the file's name, where there is one to be made; otherwise
        the error itself.
    """
    if isinstance(error, OSError):
        text = f"{error.filename or 'a file'}: {error.strerror or error}"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return ResourceError(f"{text}; each shard is one: allow more with ulimit -n")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
        return ResourceError(text) if full else ConsolidateError(text)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        first = _first_line(error) or "out of memory"
        return ResourceError(f"{first}; use a smaller --bucket-size")
    return error


def describe(error: Exception) -> str:
    """Put an error into words for another rank; a mistake of this program's with where it is."""
    error = explained(error)
    if isinstance(error, ConsolidateError):
        return str(error)
    return f"{error!r}\n{''.join(traceback.format_exception(error)).rstrip()}"


def exit_code(error: Exception) -> int:
    """Tell the exit code that an error ends the program with."""
    error = explained(error)
    return error.exit_code if isinstance(error, ConsolidateError) else 1


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
