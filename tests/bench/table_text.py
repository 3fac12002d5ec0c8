"""The tables, in Markdown: seconds and ratios, memory and reading, and the stages."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.bench.contenders import Contender, Family, Kind
from tests.bench.rounds import Measured

# As dist_consolidate.runtime.stages.STAGES, in the order that bytes pass them.
STAGES = ("read", "h2d", "exchange", "assemble", "d2h", "copy", "write", "digest", "sync")
PARTS = ("planning_sec", "moving_sec", "publishing_sec")
NOTHING = "–"  # noqa: RUF001 - a dash for the eye

Row = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Group:
    """All runs of one checkpoint with one state of the cache.

    Attributes:
        contenders: In the order of the table's rows.
        runs: Timed runs.
        growth: Runs for memory alone.
        fp32_bytes: Size of the fp32 partitions.
    """

    contenders: Sequence[Contender]
    runs: Sequence[Measured]
    growth: Sequence[Measured]
    fp32_bytes: int

    def of(self, contender: Contender) -> list[Measured]:
        """Give a contender's timed runs."""
        return [run for run in self.runs if run.contender == contender.name]

    def best(
        self, family: Family, kind: Kind | None, take: Callable[[Measured], float | None]
    ) -> float | None:
        """Give the smallest median in a family: the yardstick that flatters least."""
        found = [
            median(take(run) for run in self.of(item))
            for item in self.contenders
            if item.family == family and item.kind == kind
        ]
        return min((value for value in found if value is not None), default=None)


def whole_sec(run: Measured) -> float:
    """Give the seconds of the whole process."""
    return run.whole_sec


def moving_sec(run: Measured) -> float | None:
    """Give the seconds of moving the bytes, for those who tell."""
    value = run.lead.get("moving_sec")
    return None if value is None else float(value)


def conversion_sec(run: Measured) -> float | None:
    """Give the seconds of zero_to_fp32's conversion, its files on disk."""
    if "convert_sec" not in run.lead:
        return None
    return float(run.lead["convert_sec"] + run.lead["sync_sec"])


def placing_sec(run: Measured) -> float | None:
    """Give the seconds from the first byte moved until the result is in place and on disk."""
    together = _sum_of(run, ("moving_sec", "publishing_sec"))
    return conversion_sec(run) if together is None else together


def all_parts_sec(run: Measured) -> float | None:
    """Give the seconds of planning, moving and publishing together."""
    return _sum_of(run, PARTS)


def _sum_of(run: Measured, names: Iterable[str]) -> float | None:
    parts: list[Any] = [run.lead.get(name) for name in names]
    return None if None in parts else float(sum(parts))


def median(values: Iterable[float | None]) -> float | None:
    """Give the median of what is known; ``None`` if nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def render(group: Group) -> str:
    """Put everything about a group into tables."""
    makers = (seconds_table, parts_lines, ratio_table, exchange_lines, memory_table, stage_table)
    sections = [make(group) for make in makers]
    return "\n\n".join(section for section in sections if section)


def seconds_table(group: Group) -> str:
    """Make the table of seconds."""
    head = ("contender", "whole process, s", "min..max", "plan, s", "move, s", "publish, s")
    rows = []
    for contender in group.contenders:
        runs = group.of(contender)
        whole = [run.whole_sec for run in runs]
        parts = [median(run.lead.get(name) for run in runs) for name in PARTS]
        ends = f"{min(whole):.2f}..{max(whole):.2f}"
        rows.append((contender.name, _sec(median(whole)), ends, *map(_sec, parts)))
    return _table(head, rows)


def ratio_table(group: Group) -> str:
    """Make the table of ratios, for those that make a result and keep it."""
    head = (
        *("contender: ratio", "move + publish to cp --reflink=never", "to cp", "to loop"),
        *("whole process to zero_to_fp32", "move to its conversion", "plan + move + publish to it"),
    )
    families = ("ours", "zero_to_fp32")
    rows = [
        _ratio_row(group, item)
        for item in group.contenders
        if item.family in families and not item.discards
    ]
    return _table(head, rows) if rows else ""


def _ratio_row(group: Group, contender: Contender) -> Row:
    runs, kind = group.of(contender), contender.kind
    placing = median(map(placing_sec, runs))
    cells = [
        contender.name,
        _ratio(placing, group.best("cp", kind, whole_sec)),
        _ratio(placing, group.best("plain cp", kind, whole_sec)),
        _ratio(placing, group.best("loop", kind, moving_sec)),
    ]
    # Half the bytes in half the time would be no merit.
    if contender.family != "ours" or kind is None or kind.dtype != "fp32":
        return [*cells, NOTHING, NOTHING, NOTHING]
    theirs = Kind("bin", "fp32")
    conversion = group.best("zero_to_fp32", theirs, conversion_sec)
    return [
        *cells,
        _ratio(median(map(whole_sec, runs)), group.best("zero_to_fp32", theirs, whole_sec)),
        _ratio(median(map(moving_sec, runs)), conversion),
        _ratio(median(map(all_parts_sec, runs)), conversion),
    ]


def parts_lines(group: Group) -> str:
    """Say what zero_to_fp32's seconds are made of."""
    lines = []
    for contender in group.contenders:
        if contender.family == "zero_to_fp32":
            runs = group.of(contender)
            names = ("import_sec", "convert_sec", "sync_sec")
            parts = [_sec(median(run.lead.get(name) for run in runs)) for name in names]
            text = "import {} s, conversion {} s, fsync {} s".format(*parts)
            lines.append(f"* {contender.name}: {text}")
    return "\n".join(lines)


def exchange_lines(group: Group) -> str:
    """Say how moving with allgather compares with the exchanges without the tool around them."""
    lines = []
    for ours in group.contenders:
        if ours.family != "ours" or " allgather" not in ours.name:
            continue
        took = median(map(moving_sec, group.of(ours)))
        for item in group.contenders:
            if item.family == "collective" and item.num_ranks == ours.num_ranks:
                ratio = _ratio(took, median(map(moving_sec, group.of(item))))
                lines.append(f"* {ours.name}: moving takes {ratio} times {item.name}")
    return "\n".join(lines)


def memory_table(group: Group) -> str:
    """Make the table of memory and of bytes read."""
    head = (
        *("contender", "peak of each rank, MB", "growth over torch, MB"),
        *("read, of the fp32 partitions", "device peak / budget, MB"),
    )
    rows = []
    for contender in group.contenders:
        runs = group.of(contender)
        if any("peak_bytes" in run.lead for run in runs):
            rows.append(_memory_row(group, contender, runs))
    return _table(head, rows) if rows else ""


def _memory_row(group: Group, contender: Contender, runs: Sequence[Measured]) -> Row:
    growth = [run for run in group.growth if run.contender == contender.name]
    shards = median(run.lead.get("shard_read_bytes") for run in runs)
    read = NOTHING if shards is None else f"{shards / group.fp32_bytes:.4f}"
    device = NOTHING
    peaks = [rank["device_peak_bytes"] for run in runs for rank in run.ranks if _on_device(rank)]
    if peaks:
        budget = runs[0].lead.get("device_budget_bytes")
        device = f"{max(peaks) / 1e6:.0f} / {_mb(budget)}"
    return (
        contender.name,
        _per_rank(runs, "peak_bytes"),
        _per_rank(growth, "peak_growth_bytes"),
        read,
        device,
    )


def _on_device(rank: dict[str, Any]) -> bool:
    return rank.get("device_peak_bytes") is not None


def _per_rank(runs: Sequence[Measured], name: str) -> str:
    """Give the largest value of each rank over all runs."""
    columns = zip(*(run.ranks for run in runs), strict=True)
    values = [max((rank.get(name) or 0 for rank in column), default=0) for column in columns]
    return " / ".join(_mb(value) for value in values) if any(values) else NOTHING


def stage_table(group: Group) -> str:
    """Make the table of stages, from the run of each contender that took the median time."""
    rows = []
    for contender in group.contenders:
        runs = sorted(group.of(contender), key=whole_sec)
        run = runs[(len(runs) - 1) // 2]
        ranks = [rank["stages"] for rank in run.lead.get("ranks", ()) if rank["stages"]]
        if ranks:
            limit = limiting_stage(ranks) if contender.family == "ours" else NOTHING
            rows.append((contender.name, *(_stage_cell(ranks, name) for name in STAGES), limit))
    head = ("contender: busy s (GB/s)", *STAGES, "limit")
    return _table(head, rows) if rows else ""


def limiting_stage(ranks: Sequence[Sequence[Sequence[Any]]]) -> str:
    """Name the stage that was busy longest on any rank."""
    name, _, _ = max((stage for stages in ranks for stage in stages), key=lambda stage: stage[2])
    return str(name)


def _stage_cell(ranks: Sequence[Sequence[Sequence[Any]]], name: str) -> str:
    """Give the busiest rank's seconds, and the bytes of all ranks over their seconds together."""
    found = [stage for stages in ranks for stage in stages if stage[0] == name]
    if not found:
        return NOTHING
    num_bytes = sum(stage[1] for stage in found)
    busy_sec = sum(stage[2] for stage in found)
    rate = f" ({num_bytes / busy_sec / 1e9:.2f})" if num_bytes and busy_sec else ""
    return f"{max(stage[2] for stage in found):.2f}{rate}"


def _sec(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _ratio(value: float | None, base: float | None) -> str:
    return NOTHING if value is None or not base else f"{value / base:.2f}"


def _mb(value: int | None) -> str:
    return NOTHING if value is None else f"{value / 1e6:.0f}"


def _table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
