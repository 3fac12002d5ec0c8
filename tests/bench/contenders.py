"""Who takes part: every contender with the command that it runs."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

Family = Literal["ours", "zero_to_fp32", "cp", "plain cp", "loop", "collective", "start-up"]
# What a contender reads: the optimizer files, all files of the checkpoint, or a finished result.
Reads = Literal["shards", "checkpoint", "reference", "nothing"]

PYTHON = (sys.executable, "-m")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of result; contenders that write the same bytes share it."""

    format: str
    dtype: str

    def __str__(self) -> str:
        """Give the name in the tables."""
        return f"{self.format} {self.dtype}"

    @property
    def options(self) -> tuple[str, ...]:
        """The command line's options for it."""
        return ("--format", self.format, "--dtype", self.dtype)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the user of the benchmark wants compared.

    Attributes:
        kinds: Formats and dtypes; all of them for one process, the first one for several.
        ranks: Numbers of processes under torchrun.
        plain: Whether one plain process takes part.
        transports: Each with every number of ranks.
        writers: Values of ``--writers``; ``None`` leaves it to the transport.
        io: Values of ``--io``; ``None`` does not pass the option.
        digest: Values of ``--digest``, the same way.
        everything: Every kind with every number of ranks, not only the first.
        extra: Options that each run of ours gets, such as a device.
        null_writer: Throw away what ours write.
        deepspeed: Whether zero_to_fp32 takes part.
        bare_collective: Whether the collectives alone take part.
        device: For the collectives alone.
        bucket_bytes: For the collectives alone.
        max_shard_size: Upper bound of an output file, for ours, zero_to_fp32 and what cp copies.
        only: Patterns of names; empty for all.
    """

    kinds: tuple[Kind, ...]
    ranks: tuple[int, ...] = (2,)
    plain: bool = True
    transports: tuple[str, ...] = ("direct", "gather", "allgather")
    writers: tuple[str | None, ...] = (None,)
    io: tuple[str | None, ...] = (None,)
    digest: tuple[str | None, ...] = (None,)
    everything: bool = False
    extra: tuple[str, ...] = ()
    null_writer: bool = False
    deepspeed: bool = True
    bare_collective: bool = False
    device: str = "cpu"
    bucket_bytes: int | None = None
    max_shard_size: str = "5GB"
    only: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one checkpoint, its results and the output of the present run are.

    Attributes:
        checkpoint: The run folder.
        tag_dir: The tag folder in it.
        reference: Holds a finished result for each kind.
        out: Where the present run writes.
        fp32_bytes: Size of the fp32 partitions, padding not counted.
        kind_bytes: Size of the weight files of each kind.
    """

    checkpoint: Path
    tag_dir: Path
    reference: Path
    out: Path
    fp32_bytes: int
    kind_bytes: Mapping[Kind, int]

    def reference_of(self, kind: Kind) -> Path:
        """Give the folder of a finished result."""
        return self.reference / f"{kind.format}-{kind.dtype}"

    @property
    def shards(self) -> list[Path]:
        """The optimizer files, which hold the fp32 partitions."""
        return sorted(self.tag_dir.glob("*optim_states.pt"))

    def files_read(self, contender: Contender) -> list[Path]:
        """Give the files that a contender reads."""
        if contender.reads == "shards":
            return self.shards
        if contender.reads == "checkpoint":
            return sorted(self.tag_dir.iterdir())
        if contender.reads == "reference" and contender.kind is not None:
            return sorted(self.reference_of(contender.kind).iterdir())
        return []


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to get the bytes to their place, or a yardstick for that.

    Attributes:
        name: As in the tables; unique.
        family: What it is.
        reads: What must be warm before it runs.
        command: Makes the command line.
        growth: The same for a run that counts memory from the interpreter with torch imported.
        kind: What it writes.
        num_ranks: Processes that do the work.
        discards: Whether it throws away what it should write.
    """

    name: str
    family: Family
    reads: Reads
    command: Callable[[Place], list[str]]
    growth: Callable[[Place], list[str]] | None = None
    kind: Kind | None = None
    num_ranks: int = 1
    discards: bool = False


def torchrun(num_ranks: int) -> tuple[str, ...]:
    """Start of a command that runs a module in several processes, on a port of its own."""
    launch = (*PYTHON, "torch.distributed.run", "--standalone")
    return (*launch, f"--nproc_per_node={num_ranks}", "-m")


def select(choice: Choice) -> list[Contender]:
    """Make all contenders that were asked for.

    Raises:
        ValueError: If a pattern of ``only`` fits none.
    """
    ours = list(_ours(choice))
    kinds = written_kinds(ours)
    found = [*ours, *_collectives(choice), *(_deepspeed(choice) if choice.deepspeed else ())]
    found += itertools.chain.from_iterable(_yardsticks(kind) for kind in kinds)
    found.append(
        Contender(
            "import torch", "start-up", "nothing", lambda _: [PYTHON[0], "-c", "import torch"]
        )
    )
    for pattern in choice.only:
        if not fnmatch.filter([item.name for item in found], pattern):
            raise ValueError(f"{pattern!r} fits none of:\n" + "\n".join(i.name for i in found))
    return [x for x in found if not choice.only or _fits(x.name, choice.only)]


def written_kinds(contenders: Iterable[Contender]) -> list[Kind]:
    """Give the kinds whose finished result is needed, in the contenders' order."""
    families = ("ours", "cp", "plain cp", "loop", "collective")
    found = [item.kind for item in contenders if item.family in families]
    return [kind for kind in dict.fromkeys(found) if kind is not None]


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def default_kinds(formats: Sequence[str], dtypes: Sequence[str]) -> tuple[Kind, ...]:
    """Give the kinds that share the first format or the first dtype."""
    return tuple(
        Kind(format_, dtype)
        for format_, dtype in itertools.product(formats, dtypes)
        if format_ == formats[0] or dtype == dtypes[0]
    )


def _ours(choice: Choice) -> Iterator[Contender]:
    if choice.plain:
        for kind, io, digest in itertools.product(choice.kinds, choice.io, choice.digest):
            options = (*_passed("io", io), *_passed("digest", digest))
            yield _one_of_ours("1 process", kind, 1, options, choice, launched=False)
    kinds = choice.kinds if choice.everything else choice.kinds[:1]
    ways = itertools.product(
        choice.ranks, choice.transports, choice.writers, kinds, choice.io, choice.digest
    )
    for size, transport, writers, kind, io, digest in ways:
        name = f"{size} {'rank' if size == 1 else 'ranks'} {transport}"
        options = ("--transport", transport, *_passed("io", io), *_passed("digest", digest))
        if writers is not None:
            name, options = f"{name} writers {writers}", (*options, "--writers", writers)
        yield _one_of_ours(name, kind, size, options, choice, launched=True)


def _passed(name: str, value: str | None) -> tuple[str, ...]:
    return () if value is None else (f"--{name}", value)


def _one_of_ours(
    name: str, kind: Kind, size: int, options: Sequence[str], choice: Choice, *, launched: bool
) -> Contender:
    launch = torchrun(size) if launched else PYTHON
    flags = ["--null-writer"] if choice.null_writer else []
    if "cuda" in choice.extra:
        flags.append("--device-budget")
    for option in ("io", "digest"):
        if f"--{option}" in options:
            name = f"{name} {option} {options[options.index(f'--{option}') + 1]}"
    if choice.null_writer:
        name = f"{name} (writes discarded)"

    def make(place: Place, *more: str) -> list[str]:
        ends = (str(place.checkpoint), str(place.out), *kind.options, *options, *choice.extra)
        return [*launch, "tests.bench.runner", *flags, *more, *ends]

    return Contender(
        name=f"{name}, {kind}",
        family="ours",
        reads="shards",
        command=make,
        growth=lambda place: make(place, "--growth"),
        kind=kind,
        num_ranks=size,
        discards=choice.null_writer,
    )


def _collectives(choice: Choice) -> Iterator[Contender]:
    """The all-gather and the exchange alone, and beside a loop that reads and writes."""
    if not choice.bare_collective:
        return
    more = () if choice.bucket_bytes is None else ("--bucket-size", str(choice.bucket_bytes))
    for size in (size for size in choice.ranks if size > 1):
        for what, flags in (("all-gather", ()), ("exchange", ("--exchange",))):
            yield from _collective(what, size, choice, (*more, *flags))


def _collective(what: str, size: int, choice: Choice, flags: Sequence[str]) -> Iterator[Contender]:
    kind, start = choice.kinds[0], (*torchrun(size), "tests.bench.bare_collective")

    def alone(place: Place) -> list[str]:
        return [*start, str(place.fp32_bytes), choice.device, *flags]

    def loop(place: Place) -> list[str]:
        ends = (str(place.kind_bytes[kind]), str(place.out), *map(str, place.shards))
        return [*alone(place), "--beside", *ends]

    name = f"{what} alone, {size} ranks"
    yield Contender(name, "collective", "nothing", alone, num_ranks=size)
    name = f"{what} beside a loop, {size} ranks"
    yield Contender(name, "collective", "shards", loop, kind=kind, num_ranks=size)


def _deepspeed(choice: Choice) -> Iterator[Contender]:
    for name, size in (("sharded .bin", choice.max_shard_size), ("one .bin", "none")):

        def make(place: Place, size: str = size, more: Sequence[str] = ()) -> list[str]:
            ends = (str(place.checkpoint), str(place.out), size)
            return [*PYTHON, "tests.bench.deepspeed_child", *more, *ends]

        def grow(place: Place, make: Callable[..., list[str]] = make) -> list[str]:
            return make(place, more=["--growth"])

        yield Contender(
            name=f"zero_to_fp32, {name}",
            family="zero_to_fp32",
            reads="checkpoint",
            command=make,
            growth=grow,
            kind=Kind("bin", "fp32"),
        )


def _yardsticks(kind: Kind) -> Iterator[Contender]:
    def loop(place: Place) -> list[str]:
        start = [*PYTHON, "tests.bench.copy_loop", str(place.kind_bytes[kind]), str(place.out)]
        return [*start, *map(str, place.shards)]

    families: dict[Family, tuple[str, ...]] = {"cp": ("--reflink=never",), "plain cp": ()}
    for family, flags in families.items():

        def copy(place: Place, flags: Sequence[str] = flags) -> list[str]:
            return ["cp", "-r", *flags, str(place.reference_of(kind)), str(place.out)]

        name = " ".join(("cp", *flags, "of", str(kind)))
        yield Contender(name, family, "reference", copy, kind=kind)
    yield Contender(f"loop of {kind}", "loop", "shards", loop, kind=kind)
