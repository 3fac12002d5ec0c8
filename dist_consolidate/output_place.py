"""Which rank makes the output folder, and which ranks may write into it.

Nodes need not share a disk: one rank creates the result and publishes it, and only ranks that see
its work folder can help it to write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from dist_consolidate.errors import UsageError
from dist_consolidate.runtime.control import Control
from dist_consolidate.units import ranks_text

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class OutputPlace:
    """Where the result is made; the same on every rank.

    Attributes:
        publisher: The rank that creates the output files and publishes them.
        hosts: The host of each rank.
        seeing: Ranks that see the output folder, the publisher first.
    """

    publisher: int
    hosts: tuple[str, ...]
    seeing: tuple[int, ...]

    @property
    def host(self) -> str:
        """The host that the result is written on."""
        return self.hosts[self.publisher]

    def writers(self, wanted: int) -> tuple[int, ...]:
        """Give the ranks that write: as many as wanted, as far as there are any that can."""
        return self.seeing[:wanted]

    def notes(self, wanted: int | None, output_dir: Path) -> list[str]:
        """Say what the user may not expect.

        Args:
            wanted: How many ranks were asked to write, if that was asked.
            output_dir: The output folder.
        """
        notes = []
        blind = [rank for rank in range(len(self.hosts)) if rank not in self.seeing]
        if wanted is not None and wanted > len(self.seeing):
            notes.append(
                f"{output_dir}: is not seen by {ranks_text(blind)}, which therefore did not write; "
                f"{ranks_text(sorted(self.seeing))} did"
            )
        if self.host != self.hosts[0]:
            notes.append(f"{output_dir}: is on {self.host} ({ranks_text([self.publisher])})")
        return notes

    def forecast(self, writers: Sequence[int], output_dir: Path) -> list[str]:
        """Say what shows only when the folder is made.

        Args:
            writers: The ranks that are to write.
            output_dir: The output folder, which need not be there yet.
        """
        others = [rank for rank in writers if self.hosts[rank] != self.host]
        if not others:
            return []
        return [
            f"{output_dir}: will be made on {self.host}; {ranks_text(sorted(others))} on other "
            "hosts will write only if they see it there"
        ]


def find_place(output_node: str | int | None, hosts: Sequence[str]) -> OutputPlace:
    """Settle which rank publishes; the folder is not looked at yet.

    Args:
        output_node: A rank or a host's name; ``None`` for rank 0.
        hosts: The host of each rank.

    Returns:
        The place, as if every rank saw the folder.

    Raises:
        UsageError: If there is no such rank or host; every rank raises the same.
    """
    publisher = 0 if output_node is None else _chosen(str(output_node), hosts)
    others = (rank for rank in range(len(hosts)) if rank != publisher)
    return OutputPlace(publisher, tuple(hosts), (publisher, *others))


def _chosen(text: str, hosts: Sequence[str]) -> int:
    if text.isdecimal():
        if int(text) >= len(hosts):
            raise UsageError(
                f"--output-node {text}: there is no such rank; there are {len(hosts)}, counted "
                "from 0"
            )
        return int(text)
    for same in (_same_name, _same_first_part):
        found = [rank for rank, host in enumerate(hosts) if same(text, host)]
        if found:
            return found[0]
    known = ", ".join(dict.fromkeys(hosts))
    raise UsageError(f"--output-node {text}: no rank runs on such a host; hosts are {known}")


def _same_name(one: str, other: str) -> bool:
    return one.lower() == other.lower()


def _same_first_part(one: str, other: str) -> bool:
    """Whether one of two names is the other without its domain."""
    short = {name.lower().partition(".")[0] for name in (one, other)}
    return len(short) == 1 and ("." in one) != ("." in other)


def look_for(place: OutputPlace, work_dir: Path, control: Control) -> OutputPlace:
    """Find out which ranks see the work folder, whose name no other folder has.

    Args:
        place: The place.
        work_dir: A folder that the publisher has just made.
        control: The control plane.

    Returns:
        The place, with the ranks that see the folder and may write into it.
    """
    sees = control.exchange(_may_write(work_dir))
    seeing = [rank for rank in place.seeing if rank == place.publisher or sees[rank]]
    return dataclasses.replace(place, seeing=tuple(seeing))


def _may_write(work_dir: Path) -> bool:
    # Listing what is above it makes a network file system forget what it remembers of before.
    for folder in (work_dir.parent.parent, work_dir.parent):
        with contextlib.suppress(OSError):
            os.scandir(folder).close()
    return work_dir.is_dir() and os.access(work_dir, os.W_OK | os.X_OK)


def by_rank(dealt: Sequence[list[_T]], writers: Sequence[int], size: int) -> list[list[_T]]:
    """Sort what was dealt out to writers by rank.

    Args:
        dealt: For each writer what is its.
        writers: The ranks that write.
        size: Ranks.

    Returns:
        For each rank what is its; nothing for those that do not write.
    """
    found: list[list[_T]] = [[] for _ in range(size)]
    for rank, mine in zip(writers, dealt, strict=True):
        found[rank] = mine
    return found
