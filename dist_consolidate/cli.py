"""The command line. torch is imported only after the arguments have been found good."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_consolidate._version import __version__
from dist_consolidate.api import run
from dist_consolidate.errors import Caught, ConsolidateError, UsageError
from dist_consolidate.options import CHOICES, Options, load_config, make_options
from dist_consolidate.runtime.control import exit_code
from dist_consolidate.units import format_bytes, plural

if TYPE_CHECKING:
    from dist_consolidate.report import RankReport, Report

_DESCRIPTION = """\
Consolidate the ZeRO shards of a DeepSpeed run into safetensors or .bin files with every key of
the model. Start one process, or one per GPU with torchrun:

    torchrun --nproc_per_node=4 -m dist_consolidate CKPT_DIR [OUTPUT_DIR]
"""
_EPILOG = """\
exit codes: 0 done, 2 usage, 3 checkpoint incomplete or unreadable, 4 not enough disk or memory,
1 anything else
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dist-consolidate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("ckpt_dir", metavar="CKPT_DIR", help="folder DeepSpeed saved into, or a tag folder")
    add("output_dir", metavar="OUTPUT_DIR", nargs="?", help="default: CKPT_DIR/consolidated/TAG")
    add("-t", "--tag", metavar="TAG", help="default: what `latest` names, else the newest step")
    add("--format", choices=CHOICES["format"], help="default: safetensors")
    add(
        "--dtype",
        choices=CHOICES["dtype"],
        help="element type of floating tensors; keep: that of the most precise copy in the "
        "checkpoint (default: fp32)",
    )
    add("--max-shard-size", metavar="SIZE", help="upper bound of a file, or none (default: 5GB)")
    add(
        "--ties",
        choices=CHOICES["ties"],
        help="tied names: copy (in full; default for safetensors), drop (keep one name), alias "
        "(share a storage; bin only, its default)",
    )
    add("--tie", metavar="NAME=SOURCE", action="append", help="a tie to add (repeatable)")
    add(
        "--allow-missing",
        metavar="GLOB",
        action="append",
        help="keys that may be left out if they have no data (repeatable)",
    )
    add(
        "--exclude-frozen",
        "--exclude-frozen-parameters",
        action="store_true",
        help="leave frozen parameters out",
    )
    add(
        "--allow-16bit",
        action="store_true",
        help="where all optimizer states of ZeRO-1 or 2 are gone, take the 16-bit weights",
    )
    add(
        "--transport",
        choices=CHOICES["transport"],
        help="default: allgather on GPUs; on CPUs direct where every rank sees every shard, else "
        "gather",
    )
    add("--writers", metavar="N|all", help="ranks that write (default: 1; with direct: all)")
    add(
        "--bucket-size",
        metavar="SIZE",
        help="what one round moves, all ranks together (default: auto)",
    )
    add("--device", choices=CHOICES["device"], help="default: auto")
    add(
        "--io",
        choices=CHOICES["io"],
        help="direct transport: buffered (through the page cache), direct (past it), auto: "
        "buffered, copied by the kernel where it can, or as the first part of a large result "
        "turns out (default: auto)",
    )
    add("--dry-run", action="store_true", help="say what would be written; write nothing")
    add("--overwrite", action="store_true", help="replace weight files in OUTPUT_DIR")
    add("--config", metavar="FILE.toml", help="options from a file; the command line wins")
    add("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def _hyphenated(argument: str) -> str:
    """Accept ``--max_shard_size`` for ``--max-shard-size``; values are left alone."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def parse(arguments: Sequence[str]) -> tuple[str, str | None, Options]:
    """Parse a command line.

    Args:
        arguments: Without the program's name.

    Returns:
        Checkpoint folder, output folder (``None`` for the default) and options.

    Raises:
        UsageError: If a value is wrong, or the configuration file is.
        SystemExit: From argparse, for ``--help`` and unknown options.
    """
    given: dict[str, Any] = vars(
        _parser().parse_intermixed_args([_hyphenated(a) for a in arguments])
    )
    ckpt_dir, output_dir = given.pop("ckpt_dir"), given.pop("output_dir", None)
    config = given.pop("config", None)
    values = load_config(Path(config)) if config is not None else {}
    return ckpt_dir, output_dir, make_options({**values, **given})


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
    # RANK alone, without a world, is somebody else's variable.
    leads = os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ
    for stream in (sys.stdout, sys.stderr):
        # Names may hold what the terminal's encoding does not.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # argparse writes for itself, on every rank alike; one rank's words are enough.
    silence = contextlib.ExitStack()
    if not leads:
        silence.enter_context(contextlib.redirect_stderr(io.StringIO()))
        silence.enter_context(contextlib.redirect_stdout(io.StringIO()))
    with silence:
        try:
            ckpt_dir, output_dir, options = parse(sys.argv[1:] if arguments is None else arguments)
        except UsageError as error:
            print(f"dist-consolidate: error: {error}", file=sys.stderr)
            return error.exit_code
    # A batch system's request to stop ends the program in order: nothing half-written is left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _allow_many_files()
    told: list[Exception] = []

    def tell(error: Exception) -> None:
        told.append(error)
        _tell(error, leads)

    try:
        with (caught := Caught()):
            report = run(ckpt_dir, output_dir, options, launch=True, tell=tell)
    except KeyboardInterrupt:
        return 130
    if caught.error is not None:
        if not told:
            tell(caught.error)
        return exit_code(caught.error)
    if leads:
        for line in _summary(report):
            print(line)
    return 0


def _tell(error: Exception, leads: bool) -> None:
    """Say what went wrong, to people and to torchrun: once, where all ranks know the same."""
    known = isinstance(error, ConsolidateError)
    text = str(error) if known else "".join(traceback.format_exception(error))
    shared = isinstance(error, ConsolidateError) and error.agreed
    # What is wrong with a machine is told once for each of them.
    local = isinstance(error, UsageError) and os.environ.get("LOCAL_RANK", "0") != "0"
    if not leads and (shared or local):
        return
    print(f"dist-consolidate: error: {text}", file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # torchrun ends with a summary of its own; with this file the reason stands in it.
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        message = {"message": {"message": text, "extraInfo": extra}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(message), encoding="utf-8")


def _summary(report: Report) -> list[str]:
    facts, verb = report.facts, "would be " if report.is_dry_run else ""
    found = f"tag {facts['tag']} ({facts['tag_chosen']}), ZeRO stage {facts['stage']}"
    lines = [
        f"{found}, {plural(int(facts['world_size'] or 1), 'rank')}, step {facts['step']}",
        f"{plural(report.num_tensors, 'tensor')}, {format_bytes(report.num_bytes)} in "
        f"{plural(len(report.files), 'file')} {verb}at {report.output_dir}",
    ]
    if report.ties:
        pairs = [f"{alias} = {holder}" for alias, holder in report.ties.items()]
        more = f" and {len(pairs) - 5} more" if len(pairs) > 5 else ""
        lines.append(f"ties: {', '.join(pairs[:5])}{more}")
    lines += [f"note: {note}" for note in report.notes]
    lines += _left_out(report)
    return lines + (_forecast(report) if report.is_dry_run else _times(report))


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
    works = [_work_text(work) for work in report.ranks]
    for text, group in itertools.groupby(range(len(works)), key=lambda rank: works[rank]):
        ranks = list(group)
        several = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        lines.append(f"{several}: each {text}" if len(ranks) > 1 else f"{several}: {text}")
    return lines


def _work_text(work: RankReport) -> str:
    return (
        f"reads {format_bytes(work.num_bytes_read)}, writes "
        f"{format_bytes(work.num_bytes_written)}, {plural(work.num_buckets, 'bucket')}, holds "
        f"{format_bytes(work.memory_bytes)} of weights at most"
    )


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
