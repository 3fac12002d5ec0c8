"""Speed and memory, side by side: this tool, DeepSpeed's zero_to_fp32, and cp of the same bytes.

    python -m tests.bench.compare                          355M parameters, ZeRO-3, a sensible set
    python -m tests.bench.compare --stage 2 3 --cache warm cold --runs 5 --json raw.json
    python -m tests.bench.compare --dir /dev/shm/bench --only '1 process*' 'loop*'
    python -m tests.bench.compare --device cuda --ranks 1 --transports allgather
    python -m tests.bench.compare --list                   only names the contenders

A synthetic GPT-like checkpoint with a tied head is written (moments as holes), then a finished
result of each kind. Then all contenders run in turn, in an order that is shuffled anew in each
round. Before each run the last output is removed and everything synced; warm, what the run reads
is read once; cold, the whole page cache is dropped, interpreter and libraries included. Free memory
is touched, so that a virtual machine has it from its host. Every clock ends when fsync of every
output file and of its folder has returned.

The tables go to standard output, ready for RESULTS.md. "cp" and "loop" move the bytes of the very
result they are compared with. Ratios to zero_to_fp32 take the faster of its two ways. A last run
of each, which is not timed, counts memory from the interpreter with torch imported, and compares
the bytes of ours with the reference. MB are 10^6 bytes; torchrun's own process is not in the peaks.
A stage's time is added up over threads, and "limit" names the one that was busy longest.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dist_consolidate.errors import UsageError
from dist_consolidate.options import make_options
from dist_consolidate.units import parse_size
from tests.bench import machine, page_cache
from tests.bench.contenders import (
    Choice,
    Contender,
    Kind,
    Place,
    default_kinds,
    select,
    written_kinds,
)
from tests.bench.rounds import Arena, Measured, cache_notes, log
from tests.bench.sizes import Size, size_of
from tests.bench.table_text import Group, render

_MARK = ".dist-consolidate-bench"


def parser() -> argparse.ArgumentParser:
    """Make the parser."""
    made = argparse.ArgumentParser(
        prog="python -m tests.bench.compare",
        usage="%(prog)s [--params N] [--stage S...] [--cache C...] [--runs N] [...]; see --help",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_what(made)
    _add_who(made)
    _add_how(made)
    return made


def _add_what(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("the checkpoint").add_argument
    add("--params", metavar="N", help="parameters, such as 355M (the default) or 2.9B")
    add("--layers", type=_positive, help="instead of --params, with --width")
    add("--width", type=_positive)
    add("--stage", type=int, nargs="+", choices=(1, 2, 3), default=[3])
    add("--shards", type=_positive, default=4)


def _add_who(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("the contenders").add_argument
    add("--plain", action=argparse.BooleanOptionalAction, default=True, help="one plain process")
    add("--ranks", type=_positive, nargs="*", default=[2], help="under torchrun (default: 2)")
    transports = ("direct", "gather", "allgather")
    add("--transports", nargs="+", choices=transports, default=list(transports))
    add("--writers", nargs="+", metavar="N|all", help="default: the transport's own")
    add("--formats", nargs="+", choices=("safetensors", "bin"), default=["safetensors", "bin"])
    add("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    add("--io", nargs="+", metavar="auto|buffered|direct", help="passed on if given")
    add("--digest", nargs="+", metavar="xxh3|none", help="passed on if given")
    add("--bucket-size", metavar="SIZE", help="passed on if given")
    add("--device", choices=("cpu", "cuda"), help="passed on if given")
    add("--max-shard-size", metavar="SIZE", default="5GB", help="of everyone's output files")
    add("--ties", choices=("copy", "drop"), default="copy", help="zero_to_fp32 writes each once")
    add("--all", action="store_true", help="every combination, not only a sensible set")
    add("--null-writer", action="store_true", help="ours write nothing: all before the disk")
    add("--bare-collective", action="store_true", help="the collectives of allgather alone")
    add("--deepspeed", action=argparse.BooleanOptionalAction, default=True, help="zero_to_fp32")
    add("--only", nargs="+", metavar="GLOB", default=[], help="contenders by name")
    add("--list", action="store_true", help="name the contenders and end")


def _add_how(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("the measurement").add_argument
    add("--runs", type=_positive, default=3)
    add("--cache", nargs="+", choices=("warm", "cold"), default=["warm"])
    add("--growth", action=argparse.BooleanOptionalAction, default=True, help="the last runs")
    add("--touch", action=argparse.BooleanOptionalAction, default=True, help="free memory")
    add("--settle-sec", type=float, default=1.0, metavar="SEC", help="pause before each run")
    add("--timeout-sec", type=float, default=1800.0, metavar="SEC", help="of one run")
    add("--dir", type=Path, default=Path("bench_run"), help="new or empty; removed at the end")
    add("--json", type=Path, metavar="FILE", help="all raw numbers")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def size_asked(options: argparse.Namespace) -> Size:
    """Tell the size of the model.

    Raises:
        ValueError: If the options do not name one.
    """
    if (options.layers is None) != (options.width is None):
        raise ValueError("--layers and --width go together")
    if options.layers is None:
        return size_of(options.params or "355M")
    if options.params is not None:
        raise ValueError("--params or --layers and --width, not both")
    return Size(options.layers, options.width)


def choice_asked(options: argparse.Namespace) -> Choice:
    """Tell who takes part.

    Raises:
        UsageError: If what is passed on to ours is wrong.
        ValueError: If a pattern fits nothing.
    """
    for name in ("writers", "io", "digest", "bucket_size", "device", "max_shard_size"):
        given = getattr(options, name)
        for value in given if isinstance(given, list) else filter(None, [given]):
            make_options({name: value})
    formats, dtypes = _unique(options.formats), _unique(options.dtypes)
    every = tuple(Kind(*pair) for pair in itertools.product(formats, dtypes))
    extra: list[str] = []
    for name in ("bucket_size", "device", "max_shard_size", "ties"):
        if (value := getattr(options, name)) is not None:
            extra += [f"--{name.replace('_', '-')}", value]
    size = options.bucket_size
    return Choice(
        kinds=every if options.all else default_kinds(formats, dtypes),
        ranks=tuple(_unique(options.ranks)),
        plain=options.plain,
        transports=tuple(_unique(options.transports)),
        writers=tuple(_unique(options.writers or (("1", "all") if options.all else (None,)))),
        io=tuple(_unique(options.io or (None,))),
        digest=tuple(_unique(options.digest or (None,))),
        everything=options.all,
        extra=tuple(extra),
        null_writer=options.null_writer,
        deepspeed=options.deepspeed,
        bare_collective=options.bare_collective,
        device=options.device or "auto",
        bucket_bytes=None if size in (None, "auto") else parse_size(size),
        max_shard_size=options.max_shard_size,
        only=tuple(options.only),
    )


def _unique(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def check(options: argparse.Namespace, contenders: Sequence[Contender], size: Size) -> None:
    """Refuse what cannot work before anything is written.

    Raises:
        ValueError: Saying what and why.
    """
    folder = options.dir
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--dir {folder}: is no folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARK).exists():
        raise ValueError(f"--dir {folder}: is not empty, and it would be removed; name a new one")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ValueError(f"--json {options.json}: its folder does not exist")
    if any(item.family == "zero_to_fp32" for item in contenders) and not _has("deepspeed"):
        raise ValueError("DeepSpeed is not installed; --no-deepspeed leaves zero_to_fp32 out")
    if options.null_writer and not any(item.discards for item in contenders):
        raise ValueError("--null-writer: none of the contenders writes through it")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if "cold" in options.cache:
        reason = page_cache.why_not_droppable(machine.file_system(existing))
        if reason is not None:
            raise ValueError(f"--cache cold: {reason}")
    _check_space(existing, contenders, size)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _check_space(existing: Path, contenders: Sequence[Contender], size: Size) -> None:
    results = [size.result_bytes(kind.dtype) for kind in written_kinds(contenders)]
    need = size.checkpoint_bytes + sum(results) + size.result_bytes("fp32")
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    if need > free:
        raise ValueError(
            f"--dir: needs about {need / 1e9:.1f} GB for the checkpoint and its results, but its "
            f"file system has {free / 1e9:.1f} GB free"
        )


@dataclasses.dataclass(frozen=True)
class Session:
    """Everything one call of the benchmark measures, and the checkpoint's size."""

    size: Size
    groups: dict[tuple[int, str], Group]


def measure(
    options: argparse.Namespace, contenders: Sequence[Contender], arena: Arena, size: Size
) -> Session:
    """Go through all stages, caches and rounds."""
    groups = {}
    for stage in _unique(options.stage):
        log(f"stage {stage}: writing {size.num_params / 1e6:.1f}M parameters")
        place = arena.make_checkpoint(stage, options.shards, size.layers, size.width)
        extra = ("--max-shard-size", options.max_shard_size, "--ties", options.ties)
        place = arena.make_references(place, written_kinds(contenders), extra)
        caches = _unique(options.cache)
        runs = list(_rounds(options, contenders, arena, place, stage))
        growth = _growth(contenders, arena, place, stage) if options.growth else []
        for cache in caches:
            timed = [run for run in runs if run.cache == cache]
            groups[stage, cache] = Group(contenders, timed, growth, place.fp32_bytes)
        shutil.rmtree(place.checkpoint)
        shutil.rmtree(place.reference)
    return Session(size, groups)


def _rounds(
    options: argparse.Namespace,
    contenders: Sequence[Contender],
    arena: Arena,
    place: Place,
    stage: int,
) -> list[Measured]:
    runs = []
    for number, cache in itertools.product(range(options.runs), _unique(options.cache)):
        log(f"stage {stage}, {cache}, round {number + 1} of {options.runs}")
        runs += arena.run_round(place, contenders, stage=stage, cache=cache, number=number)
    return runs


def _growth(
    contenders: Sequence[Contender], arena: Arena, place: Place, stage: int
) -> list[Measured]:
    able = [item for item in contenders if item.growth is not None]
    log(f"stage {stage}: memory of {len(able)} contenders")
    return [arena.run_growth(place, item, stage=stage) for item in able]


def report(session: Session, command: str, facts: dict[str, str]) -> str:
    """Put everything into Markdown."""
    size, parts = session.size, [f"`{command}`", f"Machine: {machine.as_line(facts)}."]
    parts[0] += f": {size.num_params / 1e6:.1f}M parameters ({size.layers} layers of {size.width})."
    for (stage, cache), group in session.groups.items():
        parts += [f"#### ZeRO-{stage}, {cache}", render(group)]
        parts += [f"* Note: {note}" for note in _notes(group)]
    return "\n\n".join(parts)


def _notes(group: Group) -> list[str]:
    others = max(run.other_cores for run in group.runs)
    text = f"other processes and the kernel's write-back used up to {others:.1f} cores meanwhile"
    names = {rank.get("device_name") for run in group.runs for rank in run.ranks}
    devices = sorted(name for name in names if name)
    return [text, *(f"device {name}" for name in devices), *cache_notes(group.runs)]


def raw(session: Session, command: str, facts: dict[str, str]) -> dict[str, object]:
    """Give all numbers for the JSON file."""
    groups = session.groups.values()
    # The runs for memory are the same for each cache of a stage.
    growth = {run.stage: group.growth for group in groups for run in group.growth}
    return {
        "command": command,
        "machine": facts,
        "model": {**dataclasses.asdict(session.size), "num_params": session.size.num_params},
        "runs": [dataclasses.asdict(run) for group in groups for run in group.runs],
        "growth_runs": [dataclasses.asdict(run) for runs in growth.values() for run in runs],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, and print the tables."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    made = parser()
    options = made.parse_args(given)
    try:
        size, contenders = size_asked(options), select(choice_asked(options))
        if options.list:
            print("\n".join(item.name for item in contenders))
            return
        check(options, contenders, size)
    except (UsageError, ValueError) as error:
        made.error(str(error))
    folder = options.dir.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
    facts = machine.describe(folder)
    command = shlex.join(["python", "-m", "tests.bench.compare", *given])
    try:
        arena = Arena(folder, options.settle_sec, options.timeout_sec, options.touch)
        session = measure(options, contenders, arena, size)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json is not None:
        options.json.write_text(json.dumps(raw(session, command, facts), indent=1) + "\n")
    print(report(session, command, facts))


if __name__ == "__main__":
    main()
