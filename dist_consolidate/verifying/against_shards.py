"""A result against the checkpoint: which elements of which shards each tensor must equal.

The checkpoint is read anew. Of how the result was made, nothing is used: no plan with its offsets,
no buckets, and none of the code that moved bytes. The output is read by its own headers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Checkpoint, FlatGroup, Source
from dist_consolidate.checkpoint.reader import read_checkpoint
from dist_consolidate.dtypes import BFLOAT16, FLOAT16, FLOAT32
from dist_consolidate.errors import UsageError
from dist_consolidate.finding import find_together, settle
from dist_consolidate.nodes import look_together
from dist_consolidate.options import Options, make_options
from dist_consolidate.output.index import MANIFEST_NAME
from dist_consolidate.plan.names import Names, renamed
from dist_consolidate.plan.plan import output_dtype
from dist_consolidate.plan.resolve import Resolution, Resolved
from dist_consolidate.planning import request_for, resolved
from dist_consolidate.runtime.control import Control
from dist_consolidate.searching import search_together
from dist_consolidate.verifying.contents import Held
from dist_consolidate.verifying.findings import Difference
from dist_consolidate.verifying.manifest import Entry, Manifest

# Options of the manifest that the checkpoint is read with.
_READING = (
    "tie", "allow_missing", "exclude_frozen", "trust_masters", "strip_prefix", "rename", "include",
    "pipeline_names", "tp_rules", "tensor_parallel", "hf_config", "allow_16bit", "format", "dtype",
    "ties",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A tensor of the result and what it must equal.

    Attributes:
        file: Its weight file.
        name: Its name there.
        label: What to call it.
        held: Where it lies there, and its element type.
        source: Where its values lie in the shards; cast to that element type they are equal.
        copies: 16-bit weights of the model states, each with its name, that stand for the same
            parameter.
    """

    file: str
    name: str
    label: str
    held: Held
    source: Source
    copies: tuple[tuple[str, Source], ...] = ()

    @property
    def num_bytes(self) -> int:
        """What is read, roughly."""
        read = self.source.num_numel * self.source.dtype.itemsize_bytes + self.held.num_bytes
        return read + sum(s.num_numel * s.dtype.itemsize_bytes for _, s in self.copies)


@dataclasses.dataclass(frozen=True, slots=True)
class Shards:
    """What a result is compared with.

    Attributes:
        folder: The shards.
        groups: Flat groups that sources refer to.
        comparisons: One for each tensor of the result.
        differences: Tensors that are in one of the two only, or of another kind.
    """

    folder: TagFolder
    groups: tuple[FlatGroup, ...]
    comparisons: tuple[Comparison, ...]
    differences: tuple[Difference, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """Where the checkpoint is, as far as the manifest cannot say.

    Attributes:
        checkpoint_dir: Run folder or tag folder.
        tag: Another tag than the one the manifest names.
        search_dir: Further folders that hold shards.
        tp_rules: Another file than the one the manifest names.
        hf_config: Another one than the one the manifest names.
    """

    checkpoint_dir: Path
    tag: str | None = None
    search_dir: tuple[str, ...] = ()
    tp_rules: str | None = None
    hf_config: str | None = None


def open_shards(asked: Asked, manifest: Manifest, contents: dict[str, dict[str, Held]]) -> Shards:
    """Read the metadata of the checkpoint, and find what each tensor of a result must equal.

    Args:
        asked: Where it is.
        manifest: The result's manifest.
        contents: What its files hold.

    Returns:
        What is to be compared.

    Raises:
        ConsolidateError: If the checkpoint is incomplete or unreadable.
    """
    options = _options(asked, manifest)
    folder = _find(asked, manifest.tag)
    request = dataclasses.replace(request_for(options), salvage=bool(manifest.salvaged))
    checkpoint = read_checkpoint(folder, request=request)
    resolution, names = resolved(checkpoint, options)
    matcher = _Matcher(manifest, contents, checkpoint, resolution, names, options.dtype)
    comparisons = tuple(matcher.comparisons())
    return Shards(folder, checkpoint.groups, comparisons, tuple(matcher.differences))


def _options(asked: Asked, manifest: Manifest) -> Options:
    values: dict[str, Any] = {
        name: manifest.options[name] for name in _READING if name in manifest.options
    }
    for name in ("tp_rules", "hf_config"):
        if getattr(asked, name) is not None:
            values[name] = getattr(asked, name)
    try:
        return make_options(values)
    except UsageError as error:
        raise UsageError(f"{MANIFEST_NAME}: its options are not possible ({error})") from error


def _find(asked: Asked, tag: str) -> TagFolder:
    alone, tag = Control(0, 1), asked.tag or tag
    views = find_together(asked.checkpoint_dir, tag, alone.hosts, alone)
    found = settle(asked.checkpoint_dir, tag, views)
    if asked.search_dir:
        found = search_together(found, asked.search_dir, alone)
    return look_together(found, alone.hosts, alone).folder


class _Matcher:
    """Finds the source of each tensor of the result, by names alone."""

    def __init__(
        self,
        manifest: Manifest,
        contents: dict[str, dict[str, Held]],
        checkpoint: Checkpoint,
        resolution: Resolution,
        names: Names,
        dtype: str,
    ) -> None:
        self._manifest, self._contents, self._dtype = manifest, contents, dtype
        self._checkpoint, self._names = checkpoint, names
        self._kept = [tensor.name for tensor in resolution.tensors]
        self._copies = {
            names[tensor.name]: tuple(self._copies_of(tensor)) for tensor in resolution.tensors
        }
        self._holders = {
            name: (tensor.source, tensor.name)
            for tensor in renamed(resolution, names).tensors
            for name in (tensor.name, *tensor.aliases)
        }
        self.differences: list[Difference] = []

    def comparisons(self) -> Iterator[Comparison]:
        left = dict.fromkeys(self._holders)
        states = self._states()
        for entry in self._manifest.entries:
            if not entry.state:
                left.pop(entry.name, None)
            if entry.name in self._manifest.salvaged:
                continue  # the shards may be whole by now
            held = self._contents.get(entry.file, {}).get(entry.name)
            dropped = (entry.state, entry.name) in self._manifest.dropped
            if held is None or dropped:
                continue  # told already, where it should be there
            if entry.state:
                source, holder = states.get((entry.state, entry.name)), ""
            else:
                source, holder = self._holders.get(entry.name, (None, ""))
            if source is None:
                self._add(entry, "is not in the checkpoint")
                continue
            wanted = output_dtype(source, "keep" if entry.state else self._dtype).name
            if (held.dtype, held.shape) != (wanted, source.shape):
                self._add(entry, f"is {held.text()}, expected {wanted} {list(source.shape)}")
                continue
            copies = self._copies[holder] if entry.name == holder else ()
            yield Comparison(entry.file, entry.name, entry.label, held, source, copies)
        for name in left:
            if name not in self._manifest.left_out | self._manifest.salvaged:
                self.differences.append(
                    Difference(MANIFEST_NAME, name, "is in the checkpoint, but not in the result")
                )

    def _add(self, entry: Entry, what: str) -> None:
        self.differences.append(Difference(entry.file, entry.label, what))

    def _states(self) -> dict[tuple[str, str], Source]:
        """Give the optimizer's states by key and the output's name."""
        optimizer, kept = self._checkpoint.optimizer, set(self._kept)
        if optimizer is None:
            return {}
        return {
            (key, self._names[name]): source
            for key, sources in optimizer.tensors.items()
            for name, source in sources.items()
            if name in kept
        }

    def _copies_of(self, tensor: Resolved) -> Iterator[tuple[str, Source]]:
        """Give the 16-bit copies of an fp32 master in the model states, each storage once."""
        source = tensor.source
        if source.origin != "fp32 partition" or source.dtype != FLOAT32:
            return
        seen = set()
        for name in (tensor.name, *tensor.aliases):
            key = self._checkpoint.module.get(name)
            if key is None or key.source is None or key.identity in seen:
                continue
            seen.add(key.identity)
            if key.source.dtype in (BFLOAT16, FLOAT16) and key.source.shape == source.shape:
                yield self._names[name], key.source


def missing_shards(shards: Shards) -> Sequence[str]:
    """Name the files that this process does not see."""
    names = [shard.name for shard in shards.folder.shards]
    return [name for name in names if not shards.folder.file(name).is_file()]
