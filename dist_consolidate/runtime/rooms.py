"""Memory with an end to it: what limits it, who shares it, and what one rank may take of it.

Pure: what ranks have read about their machines goes in, what each may take comes out, the same on
every rank.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from dist_consolidate.errors import ResourceError, listing
from dist_consolidate.units import Amount, format_bytes, plural, ranks_text

Kind = Literal["host", "device"]
OPTIONS: dict[Kind, str] = {"host": "--host-memory", "device": "--device-memory"}
# Of what is free, leave the rest to the page cache, to fragmentation and to NCCL's own buffers.
_SHARE = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """Memory that somebody has set a limit to.

    Attributes:
        source: What says so: a file, a resource limit or a device.
        key: Equal on all ranks that share it; no two rooms of one rank have the same.
        limit_bytes: All there is.
        free_bytes: What of it is left for those who share it.
    """

    source: str
    key: str
    limit_bytes: int
    free_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What one rank has found out about its machine.

    Attributes:
        host: The machine's name.
        machine: Equal on all ranks that run on one kernel, whatever their containers are named.
        pid: The rank's process.
        num_cores: Cores that it may run on.
        host_rooms: Every limit that its memory is under.
        device_room: Its device's memory; ``None`` where it uses none.
    """

    host: str
    machine: str
    pid: int
    num_cores: int
    host_rooms: tuple[Room, ...]
    device_room: Room | None = None

    def rooms(self, kind: Kind) -> tuple[Room, ...]:
        """Give the limits of one kind of memory."""
        if kind == "host":
            return self.host_rooms
        return () if self.device_room is None else (self.device_room,)


@dataclasses.dataclass(frozen=True, slots=True)
class Allowance:
    """What one rank may take of one kind of memory.

    Attributes:
        kind: ``host`` or ``device``.
        usual_bytes: What it takes if it need not take more.
        most_bytes: What it can take at all.
        room: The limit that counts; ``None`` where none could be read.
        num_sharing: Ranks that share it.
        option: What the user asked for, as written; empty for nothing.
    """

    kind: Kind
    usual_bytes: int
    most_bytes: int
    room: Room | None
    num_sharing: int = 1
    option: str = ""

    def text(self) -> str:
        """Say how much it is, and why."""
        most, option = f"{format_bytes(self.most_bytes)} of {self.kind} memory", OPTIONS[self.kind]
        if self.option and not self.option.endswith("%"):
            return f"{most} ({option} {self.option})"
        room = self.room
        assert room is not None
        part = f"{option} {self.option} of " if self.option else ""
        shared = f", shared by {plural(self.num_sharing, 'rank')}" if self.num_sharing > 1 else ""
        free = f"{format_bytes(room.free_bytes)} free of {format_bytes(room.limit_bytes)}"
        return f"{most} ({part}{free}{shared}: {room.source})"


def allowances(
    readings: Sequence[Reading], kind: Kind, asked: Amount | None, num_active: int
) -> list[Allowance | None]:
    """Tell what each rank may take.

    Args:
        readings: By rank.
        kind: Which memory.
        asked: What the user allows each rank; ``None`` for a usual share of what is free.
        num_active: Ranks that take any: the first ones.

    Returns:
        By rank; ``None`` for those that take none, and where no limit could be read.
    """
    active = readings[:num_active]
    lowest: dict[str, Room] = {}
    sharing: collections.Counter[str] = collections.Counter()
    for room in (room for reading in active for room in reading.rooms(kind)):
        sharing[room.key] += 1
        # Read by each a moment later than by another: the least counts for all of them.
        lowest[room.key] = min(lowest.get(room.key, room), room, key=lambda one: one.free_bytes)
    found = [
        _allowance(kind, asked, [lowest[room.key] for room in reading.rooms(kind)], sharing)
        for reading in active
    ]
    return [*found, *([None] * (len(readings) - len(active)))]


def _allowance(
    kind: Kind, asked: Amount | None, rooms: Sequence[Room], sharing: collections.Counter[str]
) -> Allowance | None:
    room = min(rooms, key=lambda one: one.free_bytes // sharing[one.key], default=None)
    if asked is not None and asked.num_bytes is not None:
        return Allowance(kind, asked.num_bytes, asked.num_bytes, room, 1, asked.text)
    if room is None:
        return None
    share = room.free_bytes // sharing[room.key]
    if asked is None:
        return Allowance(kind, int(share * _SHARE), share, room, sharing[room.key])
    part = int(share * asked.fraction)
    return Allowance(kind, part, part, room, sharing[room.key], asked.text)


def rank_texts(ranks: Iterable[int], readings: Sequence[Reading]) -> str:
    """Name ranks and where they run: ``ranks 0 to 3 on node1``."""
    chosen = sorted(ranks)
    hosts = dict.fromkeys(readings[rank].host for rank in chosen)
    return f"{ranks_text(chosen)} on {', '.join(hosts)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Lack:
    """Memory that a rank needs and cannot have.

    Attributes:
        rank: The rank.
        need_bytes: What it needs at least.
        purpose: What for.
        allowance: What it may take.
        users: Who else uses the memory; empty where nobody is known.
        is_option: Whether it was asked for by name, and not by what there is to do.
    """

    rank: int
    need_bytes: int
    purpose: str
    allowance: Allowance
    users: str = ""
    is_option: bool = False

    @property
    def advice(self) -> str:
        """What the user can do about it by an option on memory; empty for nothing."""
        option = OPTIONS[self.allowance.kind]
        if self.is_option:
            return f"ask for less by {option}"
        return f"allow more by {option}" if self.allowance.option else ""

    def text(self) -> str:
        """Say it without naming the rank."""
        users = f"; {self.users}" if self.users else ""
        need = f"needs {format_bytes(self.need_bytes)} for {self.purpose}"
        return f"{need}, but can have {self.allowance.text()}{users}"


def lack_error(lacks: Sequence[Lack], readings: Sequence[Reading], *, given: bool) -> ResourceError:
    """Make the error that all ranks raise.

    Args:
        lacks: At least one.
        readings: By rank.
        given: Whether the user chose the size of buckets.

    Returns:
        The error, with who needs what and why there is less.
    """
    by_text: dict[tuple[str, str], list[int]] = {}
    for lack in lacks:
        by_text.setdefault((readings[lack.rank].host, lack.text()), []).append(lack.rank)
    items = [
        f"{rank_texts(ranks, readings)}: {'each ' if len(ranks) > 1 else ''}{text}"
        for (_, text), ranks in by_text.items()
    ]
    advice = ["use a smaller --bucket-size"] if given else []
    advice += sorted({lack.advice for lack in lacks if lack.advice})
    if any(lack.allowance.num_sharing > 1 for lack in lacks):
        advice.append("start fewer ranks on a node")
    if any(not lack.allowance.option for lack in lacks):
        kinds = {lack.allowance.kind for lack in lacks if not lack.allowance.option}
        advice.append(f"run where more {' and '.join(sorted(kinds))} memory is free")
    error = ResourceError(listing("not enough memory", items, _either(advice)))
    error.agreed = True
    return error


def _either(ways: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))


def beyond_notes(
    readings: Sequence[Reading], asked: Amount | None, num_active: int
) -> Iterator[str]:
    """Say where the user allows more host memory than seems to be free; it is taken at its word.

    Args:
        readings: By rank.
        asked: Host memory for each rank.
        num_active: Ranks that take any.

    Yields:
        A note for each host.
    """
    if asked is None or asked.num_bytes is None:
        return
    by_text: dict[tuple[str, str], list[int]] = {}
    for rank, real in enumerate(allowances(readings, "host", None, num_active)):
        if real is not None and real.most_bytes < asked.num_bytes:
            by_text.setdefault((readings[rank].host, real.text()), []).append(rank)
    for (_, text), ranks in by_text.items():
        who = rank_texts(ranks, readings)
        each = "each " if len(ranks) > 1 else ""
        yield f"--host-memory {asked.text} is taken at its word, but {who} {each}can have {text}"
