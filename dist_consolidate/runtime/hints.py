"""What to look at when ranks do not find each other: the settings that count, as they are here."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dist_consolidate.runtime.interfaces import GLOO, NCCL
from dist_consolidate.runtime.launched import Launched

_FIREWALLS = "do firewalls let all hosts reach port {port} of {place}, and each other on any port?"


def advice(text: str, launched: Launched, environ: Mapping[str, str] = os.environ) -> str:
    """Add to a message what to look at.

    Args:
        text: What has happened.
        launched: This rank.
        environ: The environment.

    Returns:
        The message, one line for each hint.
    """
    by = f" ({', '.join(launched.variables)})" if launched.variables else ""
    chosen = " and ".join(
        f"{name} is {environ[name]!r}" if environ.get(name) else f"{name} is not set"
        for name in (GLOO, NCCL)
    )
    place = str(launched.address)
    nearby = place.startswith("127.") or place in ("localhost", "::1")
    hints = [
        f"has every rank started? {launched.launcher}'s variables{by} say that there are "
        f"{launched.size}; --launcher settles a wrong guess",
        *([] if nearby else [_FIREWALLS.format(port=launched.port, place=place)]),
        f"do all hosts share the network that is used? {chosen}",
        "do some start much later than others? give --rendezvous-timeout more time",
    ]
    return "\n".join([text, *(f"  - {hint}" for hint in hints)])
