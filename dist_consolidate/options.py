"""Every option of a consolidation, checked before anything is touched."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dist_consolidate.errors import UsageError
from dist_consolidate.units import Amount, parse_amount, parse_duration, parse_size

CHOICES: dict[str, tuple[str, ...]] = {
    "format": ("safetensors", "bin"),
    "dtype": ("fp32", "bf16", "fp16", "keep"),
    "ties": ("copy", "drop", "alias"),
    "transport": ("auto", "allgather", "gather", "direct"),
    "device": ("auto", "cpu", "cuda"),
    "io": ("auto", "buffered", "direct"),
    "check_crc": ("auto", "always", "never"),
    "pipeline_names": ("module", "layer"),
    "launcher": ("auto", "torchrun", "slurm", "mpi", "none"),
    "digest": ("xxh3", "none"),
}
# What may be written beside the weights.
INCLUDES = ("optimizer",)
# Options that may be given several times.
_LISTS = ("tie", "allow_missing", "strip_prefix", "rename", "include", "search_dir")
# Those that shape the result, besides how ties are written.
_SHAPING = (
    "format", "dtype", "max_shard_size", "tie", "allow_missing", "exclude_frozen", "strip_prefix",
    "rename", "include", "pipeline_names", "trust_masters", "tp_rules",
    "tensor_parallel", "hf_config", "allow_16bit",
)  # fmt: skip
_SWITCHES = (
    "exclude_frozen", "trust_masters", "allow_16bit", "salvage", "sha256", "verify",
    "overwrite", "resume", "dry_run",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asks for.

    Attributes:
        tag: Tag to read; ``None`` for ``latest``, else the newest step.
        format: ``safetensors`` or ``bin``.
        dtype: Element type of floating tensors: ``fp32``, ``bf16``, ``fp16``, or ``keep`` for that
            of the most precise copy.
        max_shard_size: Upper bound of a file, such as ``5GB``, or ``none``.
        ties: ``copy``, ``drop`` or ``alias``; ``None`` for the format's default.
        tie: Ties on top of those found, each ``NAME=SOURCE``.
        allow_missing: Globs of keys that may be left out if they have no data.
        exclude_frozen: Leave frozen parameters out.
        trust_masters: Take fp32 masters although the 16-bit weights hold other values.
        strip_prefix: Prefixes to take off the names, one after another.
        rename: Changes of names, each ``REGEX=REPL``, applied in order after that.
        search_dir: Further folders that hold shards of the tag.
        include: What to write beside the weights: ``optimizer`` for its states.
        pipeline_names: Names of a pipeline's tied layers: ``module`` for ``PipelineModule``'s,
            ``layer`` for one name per layer that has a file.
        tp_rules: A file of rules for tensor parallelism.
        tensor_parallel: The same rules themselves: a mapping with the key ``rule``.
        hf_config: The ``config.json`` of a tensor-parallel model, or the folder that holds it.
        allow_16bit: Take the 16-bit weights where all optimizer states of ZeRO-1 or 2 are gone.
        check_crc: Whether to hold what is read against the CRC-32 of the shards' records: ``auto``
            (records that are read whole, or nearly), ``always`` or ``never``.
        salvage: Write what is intact of a damaged checkpoint.
        transport: ``auto``, ``allgather``, ``gather`` or ``direct``.
        writers: How many ranks write, or ``all``; ``None`` for the transport's default.
        output_node: The rank, or the host, on whose node the result is written; ``None`` for
            rank 0's.
        bucket_size: What one round moves, all ranks together, or ``auto``.
        device_memory: Device memory that each rank may take: ``20GB``, ``40%`` of what is free for
            it, or ``auto``.
        host_memory: Host memory that each rank's buffers may take, the same way.
        device: ``auto``, ``cpu`` or ``cuda``.
        io: ``auto``, ``buffered`` or ``direct`` (past the page cache).
        launcher: Whose variables say which rank this is: ``auto``, ``torchrun``, ``slurm``,
            ``mpi``, or ``none`` for a process on its own.
        rendezvous_timeout: How long ranks wait for each other at the start, such as ``5min``.
        timeout: How long a rank may get nothing done until all ranks end, such as ``30min``.
        digest: ``xxh3`` for a digest of every tensor in the manifest, or ``none``.
        sha256: Note the SHA-256 of every file in the manifest.
        verify: Compare the result with its manifest and with the checkpoint in the end.
        overwrite: Replace an earlier result.
        resume: Go on from what an earlier run has left, and leave work for a later one.
        dry_run: Plan only.
    """

    tag: str | None = None
    format: str = "safetensors"
    dtype: str = "fp32"
    max_shard_size: str | int | None = "5GB"
    ties: str | None = None
    tie: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    exclude_frozen: bool = False
    trust_masters: bool = False
    strip_prefix: tuple[str, ...] = ()
    rename: tuple[str, ...] = ()
    search_dir: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    pipeline_names: str = "module"
    tp_rules: str | None = None
    tensor_parallel: Mapping[str, Any] | None = None
    hf_config: str | None = None
    allow_16bit: bool = False
    check_crc: str = "auto"
    salvage: bool = False
    transport: str = "auto"
    writers: str | int | None = None
    output_node: str | int | None = None
    bucket_size: str | int = "auto"
    device_memory: str | int = "auto"
    host_memory: str | int = "auto"
    device: str = "auto"
    io: str = "auto"
    launcher: str = "auto"
    rendezvous_timeout: str | float = "5min"
    timeout: str | float = "30min"
    digest: str = "xxh3"
    sha256: bool = False
    verify: bool = False
    overwrite: bool = False
    resume: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Check each value, and what goes together.

        Raises:
            UsageError: Naming the option, what was found and what is possible.
        """
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "ties" and value is None):
                raise UsageError(f"{_flag(name)} {value}: must be one of {', '.join(choices)}")
        if not isinstance(self.tag, str | None):
            raise UsageError(f"--tag {self.tag!r}: must be a name")
        for name in ("tp_rules", "hf_config"):
            if not isinstance(getattr(self, name), str | None):
                raise UsageError(f"{_flag(name)} {getattr(self, name)!r}: must be a path")
        if self.tp_rules is not None and self.tensor_parallel is not None:
            raise UsageError(
                "--tp-rules and tensor_parallel: both say how tensor-parallel shards go together; "
                "give one of them"
            )
        if not isinstance(self.tensor_parallel, Mapping | None):
            raise UsageError(f"tensor_parallel {self.tensor_parallel!r}: must be a table of rules")
        for name in _LISTS:
            if not all(isinstance(item, str) for item in getattr(self, name)):
                raise UsageError(f"{_flag(name)} {list(getattr(self, name))}: must be texts")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{_flag(name)} {getattr(self, name)!r}: must be true or false")
        node = self.output_node
        if node is not None and not (isinstance(node, str | int) and _is_node(node)):
            raise UsageError(f"--output-node {node!r}: must be a rank or the name of a host")
        if self.format == "safetensors" and self.ties == "alias":
            raise UsageError(
                "--ties alias: tensors in a safetensors file cannot share bytes; use copy or drop, "
                "or --format bin"
            )
        for item in self.include:
            if item not in INCLUDES:
                raise UsageError(f"--include {item}: must be one of {', '.join(INCLUDES)}")
        if "" in self.search_dir:
            raise UsageError("--search-dir: is empty; name a folder")
        if "" in self.strip_prefix:
            raise UsageError("--strip-prefix: is empty; name what stands before the names")
        _ = self.max_shard_bytes, self.bucket_bytes, self.num_writers(1), self.tie_pairs
        _ = self.rename_pairs, self.timeout_sec, self.rendezvous_timeout_sec
        _ = self.device_amount, self.host_amount

    @property
    def shaping(self) -> dict[str, object]:
        """The options that shape the result, as the manifest holds them."""
        return {name: getattr(self, name) for name in _SHAPING} | {"ties": self.tie_policy}

    @property
    def tie_policy(self) -> str:
        """How tied names are written."""
        return self.ties or ("copy" if self.format == "safetensors" else "alias")

    @property
    def max_shard_bytes(self) -> int | None:
        """Upper bound of a file in bytes; ``None`` for a single file."""
        if self.max_shard_size is None:
            return None
        if _written("max_shard_size", self.max_shard_size).lower() == "none":
            return None
        return _size("max_shard_size", self.max_shard_size)

    @property
    def bucket_bytes(self) -> int | None:
        """Bucket size in bytes; ``None`` for the budget's."""
        auto = self.bucket_size == "auto"
        return None if auto else _size("bucket_size", self.bucket_size)

    @property
    def timeout_sec(self) -> float:
        """How long a rank may get nothing done."""
        return _duration("timeout", self.timeout)

    @property
    def rendezvous_timeout_sec(self) -> float:
        """How long ranks wait for each other at the start."""
        return _duration("rendezvous_timeout", self.rendezvous_timeout)

    @property
    def device_amount(self) -> Amount | None:
        """Device memory that each rank may take; ``None`` for the budget's own choice."""
        return _amount("device_memory", self.device_memory)

    @property
    def host_amount(self) -> Amount | None:
        """Host memory that each rank may take; ``None`` for the budget's own choice."""
        return _amount("host_memory", self.host_memory)

    def num_writers(self, size: int) -> int | None:
        """Give how many of ``size`` ranks write; ``None`` for the transport's default."""
        if self.writers is None:
            return None
        if self.writers == "all":
            return size
        text = _written("writers", self.writers)
        if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < 1:
            raise UsageError(f"--writers {text}: must be a number of ranks, at least 1, or all")
        return min(int(text), size)

    @property
    def tie_pairs(self) -> tuple[tuple[str, str], ...]:
        """The ``--tie`` options as pairs of name and source."""
        pairs: dict[str, str] = {}
        for text in self.tie:
            name, _, source = (part.strip() for part in text.partition("="))
            if not (name and source):
                raise UsageError(f"--tie {text}: must be NAME=SOURCE")
            if pairs.setdefault(name, source) != source:
                raise UsageError(f"--tie {text}: {name} is tied to {pairs[name]} already")
        return tuple(pairs.items())

    @property
    def rename_pairs(self) -> tuple[tuple[str, str], ...]:
        """The ``--rename`` options as pairs of pattern and replacement.

        The last ``=`` parts them: patterns may hold one (``(?=...)``), replacements may not.
        """
        return tuple(_rename_pair(text) for text in self.rename)


def _rename_pair(text: str) -> tuple[str, str]:
    pattern, equals, replacement = text.rpartition("=")
    if not (equals and pattern):
        raise UsageError(f"--rename {text}: must be REGEX=REPL; the last = parts them")
    try:
        # The replacement is checked by itself, whether or not the pattern fits anything.
        re.compile(pattern).sub(replacement, "")
    except (re.error, IndexError, OverflowError, RecursionError) as error:
        raise UsageError(f"--rename {text}: is no regular expression: {error}") from error
    return pattern, replacement


def _is_node(node: str | int) -> bool:
    """Whether something may name a node: a number of at most nine digits, or a name."""
    if isinstance(node, str):
        return bool(node) and (not node.isdecimal() or (node.isascii() and len(node) < 10))
    return not isinstance(node, bool) and 0 <= node < 10**9


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _written(name: str, value: str | int) -> str:
    try:
        return str(value)
    except ValueError as error:  # Python writes no number of thousands of digits
        raise UsageError(f"{_flag(name)}: {error}") from error


def _size(name: str, value: str | int) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise UsageError(f"{_flag(name)}: {error}") from error


def unknown_names(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Put unknown options into words, each with the known one that is nearest to it."""
    texts = []
    for name in unknown:
        near = difflib.get_close_matches(name, list(known), n=1)
        texts.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return f"unknown option {', '.join(texts)}"


def _duration(name: str, value: str | float) -> float:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise UsageError(f"{_flag(name)}: {error}") from error


def _amount(name: str, value: str | int) -> Amount | None:
    try:
        return None if value == "auto" else parse_amount(value)
    except ValueError as error:
        raise UsageError(f"{_flag(name)}: {error}") from error


def make_options(values: dict[str, Any]) -> Options:
    """Make options from loosely typed values, as the API or a TOML file gives them.

    Args:
        values: Option names with underscores.

    Returns:
        The options.

    Raises:
        UsageError: If a name or a value is wrong.
    """
    known = {field.name for field in dataclasses.fields(Options)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(f"{unknown_names(unknown, known)}; known are {', '.join(sorted(known))}")
    cleaned = dict(values)
    for name in _LISTS:
        if name in cleaned:
            given = cleaned[name]
            if not isinstance(given, str | Sequence):
                raise UsageError(f"{_flag(name)} {given!r}: must be a list of texts")
            cleaned[name] = (given,) if isinstance(given, str) else tuple(given)
    return Options(**cleaned)
