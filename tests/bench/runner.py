"""One consolidation in a measured process: the command line, and what it took.

    python -m tests.bench.runner [FLAG...] CKPT_DIR OUTPUT_DIR [OPTION...]
    torchrun --nproc_per_node=2 -m tests.bench.runner [FLAG...] CKPT_DIR OUTPUT_DIR [OPTION...]

The arguments are those of ``dist-consolidate``; flags of this module's own may stand before them:

* ``--growth``: import torch first, and count memory from there;
* ``--null-writer``: throw away what is written into the output (:mod:`tests.bench.null_writer`);
* ``--device-budget``: tell the budget of device memory too.

Nothing is imported before the command line would import it, torch least of all, so the time of the
whole process is that of ``python -m dist_consolidate``. Each rank prints one line of JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_consolidate import cli
from tests.bench.null_writer import NullWriter
from tests.bench.self_proc import memory_bytes, read_bytes, start_peak, tell

if TYPE_CHECKING:
    from dist_consolidate.consolidation import Report

FLAGS = ("--growth", "--null-writer", "--device-budget")
SECONDS = ("planning_sec", "moving_sec", "publishing_sec", "duration_sec")


def main(arguments: Sequence[str]) -> int:
    """Run the command line and print what it took.

    Args:
        arguments: Flags of :data:`FLAGS`, then those for ``dist-consolidate``.

    Returns:
        Its exit code.
    """
    rest, flags = list(arguments), set()
    while rest and rest[0] in FLAGS:
        flags.add(rest.pop(0))
    base_bytes = _import_torch() if "--growth" in flags else None
    started, read_before = time.monotonic(), read_bytes()
    null = NullWriter(Path(rest[1])) if "--null-writer" in flags else None
    if null is not None:
        null.install()
    budgets: list[Any] = _keep_budgets() if "--device-budget" in flags else []
    reports = _keep_reports()
    code = cli.main(rest)
    peak_bytes = memory_bytes("VmHWM")
    if code == 0 and not reports:
        raise SystemExit("runner: the command line made no report; it calls cli.run no more")
    tell(
        {
            "returncode": code,
            "peak_bytes": peak_bytes,
            "peak_growth_bytes": None if base_bytes is None else peak_bytes - base_bytes,
            "base_bytes": base_bytes,
            "own_read_bytes": read_bytes() - read_before,
            "seconds": round(time.monotonic() - started, 3),
            "discarded_bytes": None if null is None else null.discarded_bytes,
            "device_budget_bytes": budgets[0].budget.device_bytes if budgets else None,
            **_device_facts(),
            **(_report_facts(reports[0]) if reports else {"shard_read_bytes": None}),
        }
    )
    return code


def _import_torch() -> int:
    """Import torch, so that it counts as the interpreter's, and start counting there."""
    import torch.distributed

    assert torch.distributed.is_available()
    return start_peak()


def _keep_reports() -> list[Report]:
    """Keep what the command line only prints."""
    reports: list[Report] = []
    run: Any = getattr(cli, "run")  # noqa: B009

    def keep(*arguments: Any, **values: Any) -> Report:
        reports.append(run(*arguments, **values))
        return reports[-1]

    setattr(cli, "run", keep)  # noqa: B010
    return reports


def _keep_budgets() -> list[Any]:
    from dist_consolidate import moving

    budgets: list[Any] = []
    make: Any = getattr(moving, "make_budget")  # noqa: B009

    def keep(*arguments: Any, **values: Any) -> Any:
        budgets.append(make(*arguments, **values))
        return budgets[-1]

    setattr(moving, "make_budget", keep)  # noqa: B010
    return budgets


def _report_facts(report: Report) -> dict[str, Any]:
    ranks = getattr(report, "ranks", ())
    return {
        "shard_read_bytes": report.num_bytes_read,
        "num_bytes": report.num_bytes,
        "transport": report.transport,
        **{name: getattr(report, name, None) for name in SECONDS},
        "ranks": [_rank_facts(rank) for rank in ranks],
    }


def _rank_facts(rank: Any) -> dict[str, Any]:
    names = ("num_bytes_read", "num_bytes_written", "peak_bytes")
    stages = getattr(rank, "stages", ())
    return {
        **{name: getattr(rank, name, None) for name in names},
        "stages": [list(stage) for stage in stages],
    }


def _device_facts() -> dict[str, Any]:
    """Say what was taken of an accelerator, if one was used; torch is not imported for this."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return {}
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    if not module.is_initialized():
        return {}
    indices = range(torch.accelerator.device_count())
    return {
        "device_name": module.get_device_name(),
        "device_peak_bytes": max(module.max_memory_allocated(index) for index in indices),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
