"""Which ranks live, and why a run ends: decided in one place, from what the ranks say.

Pure: no sockets, no clock. What happened first is the reason; what happens right after it, and is
of the same kind, stands in the same message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from dist_consolidate.units import format_duration, numbers_text

# What dies together is named together: the ranks of a node.
_SETTLE_SEC = 0.2
_MAX_HOSTS = 8
KILLED = (
    "ended without a word: it was killed (by hand, or because memory ran out), or it crashed; the "
    "system log of its host may tell"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Why all ranks end.

    Attributes:
        text: For people.
        code: What every rank ends with.
        is_mine_to_tell: Whether this rank is the one that says it.
    """

    text: str
    code: int
    is_mine_to_tell: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Cause:
    kind: str
    text: str
    code: int


def named_ranks(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Name ranks with their hosts: ``ranks 0, 1 (on node1) and 2 (on node2)``.

    Args:
        ranks: The ranks.
        hosts: Each rank's host; empty where nobody knows.

    Returns:
        The words.
    """
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank] if hosts else "", []).append(rank)
    parts = [
        numbers_text(mine) + (f" (on {host})" if host else "") for host, mine in by_host.items()
    ]
    several = sum(map(len, by_host.values())) > 1
    more = f" and {len(parts) - _MAX_HOSTS} more hosts" if len(parts) > _MAX_HOSTS else ""
    return f"{'ranks' if several else 'rank'} {' and '.join(parts[:_MAX_HOSTS])}{more}"


def silent_text(timeout_sec: float, last: str) -> str:
    """Say that a rank is not heard of any more."""
    work = f"; it was {last}" if last else ""
    return (
        f"not heard of for {format_duration(timeout_sec)} (--timeout): it is stopped, or its "
        f"node or network is gone{work}"
    )


def stuck_text(timeout_sec: float, doing: str) -> str:
    """Say that a file system does not answer."""
    return (
        f"{doing} has not ended for {format_duration(timeout_sec)} (--timeout): a disk or file "
        "system hangs"
    )


def unconnected_text(rank: int, host: str, timeout_sec: float) -> str:
    """Say that the ranks have met, but did not all get connected."""
    return (
        f"rank {rank} (on {host}): has met the others, but not all of them were "
        f"connected within {format_duration(timeout_sec)} (--rendezvous-timeout): one was killed, "
        "or its node or network is gone"
    )


class Roll:
    """The roll call of all ranks.

    Attributes:
        verdict: Why the run ends, once that is known.
        is_told: Whether the other ranks have told that already.
    """

    def __init__(self, hosts: Sequence[str], timeout_sec: float) -> None:
        """Expect all ranks.

        Args:
            hosts: Each rank's host.
            timeout_sec: How long a rank may be silent.
        """
        self._hosts, self._timeout_sec = hosts, timeout_sec
        self._silent_sec = [0.0] * len(hosts)
        self._last = [""] * len(hosts)
        self._gone: set[int] = set()
        self._causes: dict[int, _Cause] = {}
        self._since_first_sec = 0.0
        self.verdict: Verdict | None = None
        self.is_told = False

    def heard(self, rank: int, doing: str) -> None:
        """Note that a rank lives, and what it does."""
        self._silent_sec[rank], self._last[rank] = 0.0, doing

    def left(self, rank: int) -> None:
        """Note that a rank went in order."""
        self._gone.add(rank)

    def closed(self, rank: int) -> None:
        """Note that a rank's connection is closed: without a word, unless it went before."""
        if rank not in self._gone:
            work = f"; it was {self._last[rank]}" if self._last[rank] else ""
            self.failed(rank, "lost", f"{KILLED}{work}", 1)
            self._gone.add(rank)

    def failed(self, rank: int, kind: str, text: str, code: int) -> None:
        """Note a reason to end.

        Args:
            rank: Where it is.
            kind: What is of one kind, and comes at one time, is told together.
            text: What to say behind the rank's name.
            code: The exit code.
        """
        first = next(iter(self._causes.values()), None)
        if first is None or first.kind == kind:
            self._causes.setdefault(rank, _Cause(kind, text, code))

    def deserted(self, text: str) -> None:
        """Note that a rank has left because it heard nothing from here, and has said so."""
        if self.verdict is None:
            self.verdict, self.is_told = Verdict(text, 1), True

    def settle(self) -> None:
        """Decide now, where there is a reason to end: nobody will listen any more."""
        self._since_first_sec += _SETTLE_SEC
        self.tick(0.0)

    def tick(self, elapsed_sec: float) -> None:
        """Let time pass.

        Args:
            elapsed_sec: Time in which silence would have been noticed: where this process itself
                was stopped, the others are not to blame.
        """
        for rank in range(len(self._hosts)):
            self._silent_sec[rank] += elapsed_sec
            if rank not in self._gone and self._silent_sec[rank] > self._timeout_sec:
                text = silent_text(self._timeout_sec, self._last[rank])
                self.failed(rank, "silent", text, 1)
        if self._causes and self.verdict is None:
            self._since_first_sec += elapsed_sec
            if self._since_first_sec >= _SETTLE_SEC or len(self._causes) == len(self._hosts):
                self.verdict = Verdict(self._text(), max(c.code for c in self._causes.values()))

    @property
    def is_settling(self) -> bool:
        """Whether a verdict is near."""
        return bool(self._causes) and self.verdict is None

    def _text(self) -> str:
        by_text: dict[str, list[int]] = {}
        for rank, cause in sorted(self._causes.items()):
            by_text.setdefault(cause.text, []).append(rank)
        return "\n".join(
            f"{named_ranks(ranks, self._hosts)}: {text}" for text, ranks in by_text.items()
        )
