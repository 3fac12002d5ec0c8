"""What a consolidation did, for people, programs and the benchmark."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from dist_consolidate.runtime.stages import StageTime


@dataclasses.dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did, or would do.

    Attributes:
        num_bytes_read: Bytes read from shards, metadata not counted.
        num_bytes_written: Bytes written to weight files.
        num_buckets: Buckets it took part in.
        memory_bytes: What its buckets take at most, host and device together.
        peak_bytes: The most memory its process ever had resident; 0 in a dry run.
        stages: How long each stage was busy; empty in a dry run.
        memory_limits: What its buckets were fitted into: for the device, if one is used, and the
            host, how much it may take of it, and which limit, option or device says so.
    """

    num_bytes_read: int
    num_bytes_written: int
    num_buckets: int
    memory_bytes: int
    peak_bytes: int = 0
    stages: tuple[StageTime, ...] = ()
    memory_limits: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What a consolidation did, or would do; the same on every rank.

    Attributes:
        output_dir: The published folder.
        files: Weight files in it.
        num_tensors: Names in the weight files; of tied ones all, unless they were dropped.
        num_bytes: Bytes of tensor data in the result.
        ties: Alias to the name that holds its data.
        left_out: Keys that are not in the result, with reasons.
        notes: What was assumed, inferred or not followed.
        facts: Tag, how it was chosen, step, stage, world size and DeepSpeed version.
        transport: The transport used.
        num_bytes_read: Bytes read from shards by all ranks, metadata not counted.
        num_bytes_checked: Of the shards' records, those whose CRC-32 was found right.
        duration_sec: Wall time.
        planning_sec: Of that, until the plan was settled.
        moving_sec: Of that, from creating the files until every byte was on disk.
        publishing_sec: Of that, the rest.
        ranks: What each rank did.
        lost: With ``--salvage``, names that are missing, or not of the most precise copy, and why.
        is_dry_run: Nothing was written; the figures say what would be.
        verified: What ``verify`` found, for people.
        num_bytes_resumed: Bytes of the output files that an earlier run had finished.
    """

    output_dir: Path
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    ties: dict[str, str]
    left_out: dict[str, str]
    notes: tuple[str, ...]
    facts: dict[str, str | int | None]
    transport: str
    num_bytes_read: int
    duration_sec: float
    planning_sec: float
    moving_sec: float
    publishing_sec: float
    ranks: tuple[RankReport, ...]
    is_dry_run: bool = False
    verified: tuple[str, ...] = ()
    num_bytes_resumed: int = 0
    num_bytes_checked: int = 0
    lost: dict[str, str] = dataclasses.field(default_factory=dict)


def peak_memory_bytes() -> int:
    """Give the most memory that this process ever had resident; 0 where the system does not say.

    Source: ``VmHWM`` in proc_pid_status(5); a process starts with one of its own, other than the
    figure of getrusage(2), which a child inherits.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
