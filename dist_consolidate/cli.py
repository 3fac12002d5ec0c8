"""The command line. torch is imported only after the arguments have been found good."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dist_consolidate.api import run, run_verify
from dist_consolidate.arguments import parse
from dist_consolidate.errors import (
    Caught,
    CheckpointError,
    ConsolidateError,
    UsageError,
    printable,
)
from dist_consolidate.runtime.launched import Launched, find_launched
from dist_consolidate.runtime.watch import Stopped, Watch
from dist_consolidate.speaking import SAID, parsed
from dist_consolidate.units import format_bytes, plural
from dist_consolidate.verifying.arguments import COMMAND, parse_verify

if TYPE_CHECKING:
    from dist_consolidate.options import Options
    from dist_consolidate.report import RankReport, Report


_Action = Callable[[Watch], tuple[list[str], int]]


def _allow_many_files() -> None:
    """Raise this process's own limit of open files as far as it may: a shard is one each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; ``None`` for those of this process.

    Returns:
        The exit code.
    """
    launched = _launched()
    for stream in (sys.stdout, sys.stderr):
        # Names may hold what the terminal's encoding does not.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    given = sys.argv[1:] if arguments is None else arguments
    try:
        action, options = parsed(lambda: _request(given), launched)
    except UsageError as error:
        return error.exit_code
    _allow_many_files()
    # What its C++ warns of, with pages of frames, is told in words here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    launched = _launched(options.launcher, launched)
    leads = launched.rank == 0
    watch = Watch(
        launched.rank, options.timeout_sec, lambda error: _tell(error, launched, watch.advice)
    )
    # A batch system's request to stop ends the program in order: nothing half-written is left.
    with watch:
        try:
            with (caught := Caught()):
                lines, code = action(watch)
        except Stopped as stop:
            watch.tell(watch.settle(stop))
            return watch.code
        if caught.error is not None:
            watch.tell(caught.error)
            return watch.code
    if leads:
        for line in lines:
            print(printable(line))
    # One rank says so: a launcher ends all others as soon as one has ended that way.
    return code if leads else 0


def _request(arguments: Sequence[str]) -> tuple[_Action, Options]:
    """Give what is to be done, which gives lines for people and an exit code, and the options."""
    if arguments[:1] == [COMMAND]:
        folder, source, chosen = parse_verify(arguments[1:])

        def verify(watch: Watch) -> tuple[list[str], int]:
            report = run_verify(folder, source, chosen, launch=True, watch=watch)
            return report.lines(), 0

        return verify, chosen
    ckpt_dir, output_dir, options = parse(arguments)
    if ckpt_dir == COMMAND:
        raise UsageError(
            f"{COMMAND}: must stand in front of all other arguments to verify a result; a folder "
            f"of that name is reached as ./{COMMAND}"
        )

    def consolidate(watch: Watch) -> tuple[list[str], int]:
        report = run(ckpt_dir, output_dir, options, launch=True, watch=watch)
        return _summary(report), CheckpointError.exit_code if report.lost else 0

    return consolidate, options


def _launched(launcher: str = "auto", otherwise: Launched | None = None) -> Launched:
    """Tell which rank this is; what is wrong with the environment is told later, by every rank."""
    try:
        return find_launched(launcher=launcher)
    except UsageError:
        return otherwise or Launched()


def _tell(error: Exception, launched: Launched, advice: Callable[[], str] | None = None) -> None:
    """Say what went wrong, to people and to torchrun: once, where all ranks know the same."""
    known = isinstance(error, ConsolidateError)
    text = printable(str(error) if known else "".join(traceback.format_exception(error)))
    shared = isinstance(error, ConsolidateError) and error.agreed
    # What is wrong with a machine is told once for each of them.
    local = isinstance(error, UsageError) and bool(launched.local_rank)
    silent = isinstance(error, ConsolidateError) and error.silent
    if not silent and (launched.rank == 0 or not (shared or local)):
        print(f"{SAID}{text}", file=sys.stderr, flush=True)
        more = "" if advice is None else advice()
        if more:
            print(f"dist-consolidate: note: {more}", file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and launched.launcher == "torchrun":
        # torchrun ends with a summary of its own, of the rank that ended first, whichever that
        # was: with this file the reason stands in it.
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        message = {"message": {"message": text, "extraInfo": extra}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(message), encoding="utf-8")


def _summary(report: Report) -> list[str]:
    facts, verb = report.facts, "would be " if report.is_dry_run else ""
    found = f"tag {facts['tag']} ({facts['tag_chosen']}), ZeRO stage {facts['stage']}"
    lines = [
        f"{found}, {_ranks(report)}, step {facts['step']}",
        f"{plural(report.num_tensors, 'tensor')}, {format_bytes(report.num_bytes)} in "
        f"{plural(len(report.files), 'file')} {verb}at {report.output_dir}",
    ]
    if report.ties:
        pairs = [f"{alias} = {holder}" for alias, holder in report.ties.items()]
        more = f" and {len(pairs) - 5} more" if len(pairs) > 5 else ""
        lines.append(f"ties: {', '.join(pairs[:5])}{more}")
    lines += [f"note: {note}" for note in report.notes]
    lines += _left_out(report)
    lines += report.verified
    lines += [f"salvaged: {name}: {what}" for name, what in report.lost.items()]
    if report.lost:
        lines.append(
            f"{plural(len(report.lost), 'tensor')} missing or not of the most precise copy "
            "(--salvage); consolidation.json lists them, too"
        )
    return lines + (_forecast(report) if report.is_dry_run else _times(report))


def _ranks(report: Report) -> str:
    """Say how many ranks of which kind saved it."""
    names = ("world_size", "pipeline_stages", "tensor_ranks")
    ranks, stages, degree = (int(report.facts.get(name) or 1) for name in names)
    if stages == degree == 1:
        return plural(ranks, "rank")
    text = plural(ranks, "data-parallel rank")
    text += f", {plural(stages, 'pipeline stage')}" if stages > 1 else ""
    return text + (f", {plural(degree, 'tensor-parallel rank')}" if degree > 1 else "")


def _times(report: Report) -> list[str]:
    rate = f"{format_bytes(report.num_bytes / max(report.duration_sec, 1e-9))}/s, "
    parts = (
        f"planning {report.planning_sec:.1f}, moving {report.moving_sec:.1f}, "
        f"publishing {report.publishing_sec:.1f}"
    )
    done = f"done in {report.duration_sec:.1f} s"
    return [
        f"{done} ({rate}{parts}; transport {report.transport})"
        if report.duration_sec >= 1
        else f"{done} (transport {report.transport})"
    ]


def _forecast(report: Report) -> list[str]:
    """Say what the ranks would do, neighbours that do the same together."""
    lines = [f"transport {report.transport}; nothing was written (--dry-run)"]
    lines += _by_rank([_work_text(work) for work in report.ranks])
    return lines + _by_rank([_limits_text(work) for work in report.ranks])


def _by_rank(texts: Sequence[str]) -> list[str]:
    """Say something of each rank, of neighbours with the same text together."""
    lines = []
    for text, group in itertools.groupby(range(len(texts)), key=lambda rank: texts[rank]):
        ranks = list(group)
        several = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        if text:
            lines.append(f"{several}: each {text}" if len(ranks) > 1 else f"{several}: {text}")
    return lines


def _work_text(work: RankReport) -> str:
    return (
        f"reads {format_bytes(work.num_bytes_read)}, writes "
        f"{format_bytes(work.num_bytes_written)}, {plural(work.num_buckets, 'bucket')}, holds "
        f"{format_bytes(work.memory_bytes)} of weights at most"
    )


def _limits_text(work: RankReport) -> str:
    limits = " and ".join(work.memory_limits)
    return f"can have {limits}" if limits else ""


def _left_out(report: Report) -> list[str]:
    """Name what is not in the result, reason by reason; long lists stand in the manifest."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in report.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - 5} more (see consolidation.json)" if len(names) > 5 else ""
        lines.append(f"left out: {', '.join(names[:5])}{more}: {reason}")
    return lines
