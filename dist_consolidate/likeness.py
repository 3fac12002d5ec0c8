"""Whether all ranks were asked for the same.

Ranks that plan or move by different options would wait for each other without an end, or write
what nobody asked for.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dist_consolidate.errors import UsageError, listing
from dist_consolidate.options import Options
from dist_consolidate.runtime.control import Control
from dist_consolidate.runtime.roll import named_ranks

# Where things are may be another place on each node.
_OF_A_NODE = {"search_dir", "tp_rules", "hf_config", "device"}


def check_alike(options: Options, output_dir: Path | None, control: Control) -> None:
    """Check that all ranks have the same options.

    Args:
        options: This rank's.
        output_dir: Where this rank was told to write.
        control: The control plane.

    Raises:
        UsageError: Naming what differs, and on which ranks; every rank raises.
    """
    mine = {
        field.name: repr(getattr(options, field.name))
        for field in dataclasses.fields(options)
        if field.name not in _OF_A_NODE
    }
    mine["output_dir"] = repr(output_dir and str(output_dir))
    told: list[dict[str, str]] = control.exchange(mine)
    differing = []
    for name in mine:
        by_value: dict[str, list[int]] = {}
        for rank, values in enumerate(told):
            by_value.setdefault(values.get(name, "nothing"), []).append(rank)
        if len(by_value) > 1:
            texts = (f"{v} on {named_ranks(r, control.hosts)}" for v, r in by_value.items())
            differing.append(f"{name}: {', '.join(texts)}")
    if differing:
        headline = "ranks of one run were started with different options"
        error = UsageError(listing(headline, differing, "Start all of them with the same ones."))
        error.agreed = True
        raise error
