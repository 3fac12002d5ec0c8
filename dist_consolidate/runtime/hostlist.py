"""SLURM's short forms: lists of hosts (``rack[0-1]n[08-10],b7``) and of counts (``2(x3),1``).

Written after what ``scontrol show hostnames`` makes of them
(https://slurm.schedmd.com/scontrol.html). Pure; a malformed list is a ``ValueError``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

# A name with any number of brackets, up to a comma outside of them or the end.
_ENTRY = re.compile(r"(?:[^][,\s]|\[[^][\s]*\])+")
_BRACKETS = re.compile(r"\[([^]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
# No cluster is larger; a typing error must not fill the memory.
_MAX_ENTRIES = 1_000_000


def expand_hosts(text: str) -> list[str]:
    """Write out a list of hosts.

    Args:
        text: The short form.

    Returns:
        The names in the order of the list; of several brackets, the last counts fastest.

    Raises:
        ValueError: If it is malformed or names nobody.
    """
    hosts: list[str] = []
    for entry in _split(text):
        # Every other part is what stands in brackets.
        parts = _BRACKETS.split(entry)
        choices = [list(_numbers(part)) if at % 2 else [part] for at, part in enumerate(parts)]
        if len(hosts) + math.prod(map(len, choices)) > _MAX_ENTRIES:
            raise ValueError(f"more than {_MAX_ENTRIES} hosts")
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return hosts


def expand_counts(text: str) -> list[int]:
    """Write out a list of counts, one for each node.

    Args:
        text: The short form.

    Returns:
        The counts.

    Raises:
        ValueError: If it is malformed or empty.
    """
    counts: list[int] = []
    for entry in text.split(","):
        found = _COUNT.fullmatch(entry.strip())
        if found is None:
            raise ValueError(f"{entry!r} is no count")
        count, times = int(found[1]), int(found[2] or 1)
        if len(counts) + times > _MAX_ENTRIES:
            raise ValueError(f"more than {_MAX_ENTRIES} nodes")
        counts += [count] * times
    return counts


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    entries, at = [], 0
    text = text.strip()
    while True:
        found = _ENTRY.match(text, at)
        if found is None:
            raise ValueError(f"no host name at {text[at:]!r}")
        entries.append(found[0])
        at = found.end()
        if at == len(text):
            return entries
        if text[at] != ",":
            raise ValueError(f"unexpected {text[at:]!r}")
        at += 1


def _numbers(text: str) -> Iterator[str]:
    """Write out what stands in brackets; numbers keep the leading zeros of the first one."""
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"{part!r} is no number and no range")
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last < first + _MAX_ENTRIES:
            raise ValueError(f"{part!r} is no range")
        width = len(found[1])
        yield from (f"{number:0{width}}" for number in range(first, last + 1))
