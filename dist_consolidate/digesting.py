"""Which rank digests which tensors, and what the digests are of the files around the tensors."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from dist_consolidate.doing import Doing
from dist_consolidate.options import Options
from dist_consolidate.output.layout import FileLayout
from dist_consolidate.plan.owners import Owned
from dist_consolidate.plan.plan import Plan
from dist_consolidate.runtime.control import Control
from dist_consolidate.runtime.digests import Digests, Stored
from dist_consolidate.runtime.results import MoveResult
from dist_consolidate.runtime.threads import in_threads

# Key of a digest in the manifest: of a tensor's bytes as they lie in the file, of a small file.
DIGEST_KEY = "xxh3_128"
# Key of the digest of a weight file's bytes that belong to no tensor, put one behind the other.
REST_KEY = "xxh3_128_outside_tensors"
_BLOCK_BYTES = 1 << 20


def make_digests(
    options: Options,
    plan: Plan,
    layouts: Sequence[FileLayout],
    owned: Sequence[Owned],
    paths: Sequence[Path],
    *,
    in_order: bool = False,
) -> Digests | None:
    """Make what digests the tensors whose first bytes a rank writes.

    Names that are tied and written in full have the same digest: the first place is digested.

    Args:
        options: The options.
        plan: The plan.
        layouts: Byte layout of each output file.
        owned: What this rank writes.
        paths: The output files.
        in_order: See :class:`Digests`.

    Returns:
        The digests to be; ``None`` where nobody wants any.
    """
    if options.digest == "none":
        return None
    ranges: dict[int, list[Owned]] = {}
    for part in owned:
        ranges.setdefault(part.file, []).append(part)
    stored = []
    for tensor in plan.tensors:
        file, index = tensor.targets[0]
        start = layouts[file].data_offset_bytes[index] if file in ranges else -1
        if any(part.start_bytes <= start < part.stop_bytes for part in ranges.get(file, ())):
            num_bytes = tensor.source.num_numel * tensor.dtype.itemsize_bytes
            stored.append(Stored(file, index, start, num_bytes))
    return Digests(paths, stored, in_order=in_order)


@contextlib.contextmanager
def closing_digests(digests: Digests | None) -> Iterator[None]:
    """Close the files that are read back, whatever happens."""
    try:
        yield
    finally:
        if digests is not None:
            digests.close()


def finish_together(result: MoveResult, digests: Digests | None, control: Control) -> MoveResult:
    """Digest what is left when all ranks have written and synced what is theirs.

    Args:
        result: What this rank did.
        digests: What it digests; ``None`` on all ranks alike.
        control: The control plane.

    Returns:
        The same with the digests.

    Raises:
        ConsolidateError: If any rank failed; every rank raises.
    """
    if digests is None:
        return result
    found = control.together(digests.finish, digests.stop, digests.progress)
    return dataclasses.replace(result, digests=found)


def rest_digest(layout: FileLayout, finishing: Sequence[tuple[int, bytes]] = ()) -> str:
    """Digest what belongs to no tensor: header, and what a zip file has around its records.

    Args:
        layout: A weight file's layout; its blocks and tensors fill the whole file.
        finishing: What was written at the end: new bytes behind the blocks, or inside them.

    Returns:
        The digest of all these bytes, in the order of the file.
    """
    blocks = [(offset, bytearray(data)) for offset, data in layout.blocks]
    starts = [offset for offset, _ in blocks]
    for offset, data in finishing:
        index = bisect.bisect_right(starts, offset) - 1
        at = offset - starts[index]
        if at + len(data) <= len(blocks[index][1]):
            blocks[index][1][at : at + len(data)] = data
        else:
            blocks.append((offset, bytearray(data)))
            starts.append(offset)
    state = xxhash.xxh3_128()
    for _, content in sorted(blocks, key=lambda block: block[0]):
        state.update(content)
    return state.hexdigest()


def sha256_of(folder: Path, names: Sequence[str], num_threads: int) -> dict[str, str]:
    """Give the SHA-256 of files, as ``sha256sum`` and the Hugging Face Hub show it.

    Args:
        folder: Where they lie.
        names: Their paths in it.
        num_threads: Files that are read at the same time.

    Returns:
        Name to digest, hexadecimal.

    Raises:
        OSError: If a file cannot be read.
    """
    found: dict[str, str] = {}

    def read(name: str) -> None:
        found[name] = _sha256(folder / name)

    in_threads(read, names, min(num_threads, len(names)))
    return {name: found[name] for name in names}


def _sha256(path: Path) -> str:
    state, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as stream:
        while True:
            with Doing("reading back", path):
                count = stream.readinto(block)
            if not count:
                return state.hexdigest()
            state.update(block[:count])


def file_facts(
    options: Options, folder: Path, weights: Mapping[str, str], small: Mapping[str, bytes]
) -> dict[str, dict[str, object]]:
    """Say of every file but the manifest how large it is, and what its checksums are.

    Args:
        options: The options.
        folder: Where the files lie, finished.
        weights: Weight files, each with the digest of what belongs to no tensor.
        small: Indexes and their content.

    Returns:
        The facts by name.

    Raises:
        OSError: If a file cannot be read.
    """
    facts: dict[str, dict[str, object]] = {
        name: {"num_bytes": (folder / name).stat().st_size} for name in (*weights, *small)
    }
    if options.digest != "none":
        for name, digest in weights.items():
            facts[name][REST_KEY] = digest
        for name, content in small.items():
            facts[name][DIGEST_KEY] = xxhash.xxh3_128_hexdigest(content)
    if options.sha256:
        num_threads = len(os.sched_getaffinity(0))
        for name, digest in sha256_of(folder, list(facts), num_threads).items():
            facts[name]["sha256"] = digest
    return facts
