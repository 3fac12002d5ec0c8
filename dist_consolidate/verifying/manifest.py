"""Reading ``consolidation.json`` back, with suspicion: a bit of it may have flipped."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dist_consolidate.digesting import DIGEST_KEY, REST_KEY
from dist_consolidate.dtypes import BY_NAME
from dist_consolidate.errors import UsageError
from dist_consolidate.output.index import MANIFEST_NAME, is_index_file, is_weight_file
from dist_consolidate.output.manifest import SELF_KEY, as_bytes, self_digest

# A manifest of a million tensors has less.
_MAX_BYTES = 2 << 30


class Entry(NamedTuple):
    """What the manifest says of a name.

    Attributes:
        state: Empty for weights, else the key of an optimizer's state.
        name: The name.
        file: The weight file that holds it; for a dropped tie, the one that holds its data.
        dtype: torch's name of the element type.
        shape: Shape.
        digest: Digest of its bytes, if noted.
        tied_to: The name that holds its data, if it is another one.
    """

    state: str
    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    digest: str | None
    tied_to: str | None

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * BY_NAME[self.dtype].itemsize_bytes

    @property
    def label(self) -> str:
        """The name, and which of the optimizer's states it is."""
        return f"{self.name} ({self.state})" if self.state else self.name


class FileFacts(NamedTuple):
    """What the manifest says of a file; ``None`` for what it does not."""

    num_bytes: int
    digest: str | None
    sha256: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that can be read.

    Attributes:
        entries: All names, of the optimizer's states, too.
        files: Weight files and indexes.
        options: The options that shaped the result.
        tag: The checkpoint's tag.
        left_out: Names that are not in the result.
        salvaged: Names that ``--salvage`` listed as missing or not of the most precise copy.
        damage: What is wrong with the manifest itself, if anything.
    """

    entries: tuple[Entry, ...]
    files: dict[str, FileFacts]
    options: dict[str, Any]
    tag: str
    left_out: frozenset[str]
    salvaged: frozenset[str] = frozenset()
    damage: str = ""

    @property
    def has_digests(self) -> bool:
        """Whether tensors can be checked against it."""
        return all(entry.digest is not None for entry in self.entries)

    @property
    def dropped(self) -> frozenset[tuple[str, str]]:
        """State and name of what no file holds, because a tied name does."""
        if self.options.get("ties") != "drop":
            return frozenset()
        return frozenset((e.state, e.name) for e in self.entries if e.tied_to is not None)


def read_manifest(output_dir: Path) -> Manifest | str:
    """Read a result's manifest.

    Args:
        output_dir: The result.

    Returns:
        The manifest, or what is wrong with it if it cannot be made out at all.

    Raises:
        UsageError: If there is none.
    """
    path = output_dir / MANIFEST_NAME
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is no regular file")
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror or error}; verify takes the folder of a result of "
            "dist-consolidate"
        ) from error
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        return f"is damaged: it is no JSON ({error})"
    try:
        return _manifest(content, _damage(data, content))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        return f"is damaged: it does not say what a manifest says ({error!r})"


def _damage(data: bytes, content: Any) -> str:  # noqa: ANN401 - whatever the JSON holds
    if not isinstance(content, dict):
        return ""
    noted = content.get(SELF_KEY)
    has_digests = any(
        isinstance(facts, dict) and DIGEST_KEY in facts for facts in content["tensors"].values()
    )
    if noted is None and has_digests:
        return "lacks the digest of itself"
    if noted is not None and noted != self_digest(content):
        return f"has another digest than the {noted} that stands in it"
    if as_bytes(content) != data:
        return "is not written as dist-consolidate writes it"
    return ""


def _manifest(content: dict[str, Any], damage: str) -> Manifest:
    entries = [_entry("", *item) for item in content["tensors"].items()]
    states = content.get("optimizer", {}).get("tensors", {})
    for state, tensors in states.items():
        entries += [_entry(state, *item) for item in tensors.items()]
    files = {name: _file(name, facts) for name, facts in content["files"].items()}
    lost = sorted({entry.file for entry in entries} - files.keys())
    if lost:
        raise ValueError(f"no facts of {lost[0]}")
    tag, options = content["checkpoint"]["tag"], dict(content["options"])
    if not isinstance(tag, str):
        raise TypeError(f"tag {tag!r}")
    left_out, salvaged = frozenset(content["left_out"]), frozenset(content.get("salvage", {}))
    return Manifest(tuple(entries), files, options, tag, left_out, salvaged, damage)


def _entry(state: str, name: str, facts: Mapping[str, Any]) -> Entry:
    shape = tuple(facts["shape"])
    if facts["dtype"] not in BY_NAME or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{name}: {facts['dtype']} {shape}")
    file, digest, tied = str(facts["file"]), _text(facts, DIGEST_KEY), _text(facts, "tied_to")
    return Entry(state, name, file, str(facts["dtype"]), shape, digest, tied)


def _text(facts: Mapping[str, Any], key: str) -> str | None:
    value = facts.get(key)
    if not isinstance(value, str | None):
        raise TypeError(f"{key}: {value!r}")
    return value


def _file(name: str, facts: Mapping[str, Any]) -> FileFacts:
    # Nothing outside the folder is ever opened because a manifest says so.
    if not is_weight_file(name) or name == MANIFEST_NAME:
        raise ValueError(f"{name!r} is no name of a weight file")
    num_bytes = facts["num_bytes"]
    if type(num_bytes) is not int:
        raise ValueError(f"{name}: {num_bytes!r} bytes")
    digest = _text(facts, DIGEST_KEY if is_index_file(name) else REST_KEY)
    return FileFacts(num_bytes, digest, _text(facts, "sha256"))
