"""What to look at when ranks do not find each other: the settings that count, as they are here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

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


def ranks_text(ranks: Sequence[int]) -> str:
    """Write ranks for people: ``rank 3``, ``ranks 0 to 3, 8``, long lists cut short."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{a}" if a == b else f"{a} {'to' if b - a > 1 else 'and'} {b}" for a, b in spans]
    more = f" and {len(texts) - 8} more" if len(texts) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts[:8])}{more}"
