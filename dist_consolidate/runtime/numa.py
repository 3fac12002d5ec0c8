"""Keeping threads, and the memory they touch first, on the node that a card is plugged into.

Source: ``numa_node`` and ``local_cpulist`` in the kernel's Documentation/ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

# On fewer cores readers and writers would wait for each other, which costs more than the way.
_MIN_CPUS = 2
_BUS_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.I)


def cpus_near(bus_id: str, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """Tell which cores are on the same node as a card.

    Args:
        bus_id: As the driver writes it: ``0000:65:00.0`` or, with eight digits in front,
            ``00000000:65:00.0``.
        sysfs: Where sysfs is mounted.

    Returns:
        Their numbers; empty where the machine has no nodes or does not say.
    """
    match = _BUS_ID.fullmatch(bus_id)
    if match is None:
        return frozenset()
    domain, bus, device, function = match.groups()
    name = f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()
    folder = sysfs / "bus/pci/devices" / name
    with contextlib.suppress(OSError, ValueError):
        if int((folder / "numa_node").read_text(encoding="ascii")) >= 0:
            return _cpu_list((folder / "local_cpulist").read_text(encoding="ascii"))
    return frozenset()


def _cpu_list(text: str) -> frozenset[int]:
    """Read ``0-15,32-47``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


@contextlib.contextmanager
def kept_near(cpus: frozenset[int]) -> Iterator[None]:
    """Run the block, and the threads that it starts, on some cores; afterwards all is as before.

    Never on a core that this thread might not have run on before: a batch system's choice counts.

    Args:
        cpus: The cores; where too few of them are allowed, nothing is changed.
    """
    before = os.sched_getaffinity(0)
    wanted = before & cpus
    if len(wanted) < _MIN_CPUS or wanted == before:
        yield
        return
    try:
        os.sched_setaffinity(0, wanted)
    except OSError:  # the cores may have been taken away meanwhile; it was only for speed
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)
