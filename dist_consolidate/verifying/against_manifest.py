"""A result against its manifest: which files there are, what their headers say, what to digest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from dist_consolidate.errors import listed
from dist_consolidate.output.index import (
    MANIFEST_NAME,
    STATES_FOLDER,
    is_index_file,
    is_weight_file,
)
from dist_consolidate.verifying.contents import Held, outside, read_contents
from dist_consolidate.verifying.findings import Difference
from dist_consolidate.verifying.manifest import Manifest, read_manifest
from dist_consolidate.verifying.ranges import RangeCheck


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A result as its own files describe it.

    Attributes:
        manifest: The manifest; ``None`` where it cannot be made out.
        contents: What each readable weight file holds.
        checks: What has to be read for the digests.
        differences: What does not fit together already.
        notes: What people should hear of.
    """

    manifest: Manifest | None
    contents: dict[str, dict[str, Held]]
    checks: tuple[RangeCheck, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


def look_at(output_dir: Path) -> Result:
    """Look at a result's files, without reading a weight.

    Args:
        output_dir: The result.

    Returns:
        What is there.

    Raises:
        UsageError: If there is no manifest.
    """
    manifest = read_manifest(output_dir)
    if isinstance(manifest, str):
        return Result(None, {}, (), (Difference(MANIFEST_NAME, "", manifest),), ())
    looker = _Looker(output_dir, manifest)
    looker.look()
    return Result(
        manifest,
        looker.contents,
        tuple(looker.checks),
        tuple(looker.differences),
        tuple(looker.notes),
    )


class _Looker:
    def __init__(self, output_dir: Path, manifest: Manifest) -> None:
        self._dir, self._manifest = output_dir, manifest
        self.contents: dict[str, dict[str, Held]] = {}
        self.checks: list[RangeCheck] = []
        self.differences: list[Difference] = []
        self.notes: list[str] = []

    def look(self) -> None:
        if self._manifest.damage:
            self._add(MANIFEST_NAME, self._manifest.damage)
        for name in _stray(self._dir, self._manifest):
            self._add(name, "is a weight file that the manifest does not name")
        for name in self._manifest.files:
            self._look_at_file(name)
        self._compare_tensors()
        for name in filter(is_index_file, self._manifest.files):
            self._compare_index(name)
        if self._manifest.salvaged:
            self.notes.append(
                f"--salvage listed {listed(sorted(self._manifest.salvaged))} as missing or not of "
                "the most precise copy: not compared with shards"
            )
        for name in _loadable(self._dir, self._manifest):
            self.notes.append(
                f"{name}: is no part of the result, but taken for one by whoever loads all "
                "weight files of the folder"
            )
        if not self._manifest.has_digests:
            self.notes.append(
                f"{MANIFEST_NAME} has no digests of the tensors (--digest none, or of an earlier "
                "release): their bytes were not compared with it"
            )

    def _add(self, file: str, what: str, tensor: str = "") -> None:
        self.differences.append(Difference(file, tensor, what))

    def _look_at_file(self, name: str) -> None:
        path, facts = self._dir / name, self._manifest.files[name]
        if not path.is_file():
            self._add(name, "is not there" if not path.exists() else "is no regular file")
            return
        num_bytes = path.stat().st_size
        if facts.num_bytes != num_bytes:
            self._add(name, f"has {num_bytes:,} bytes, the manifest says {facts.num_bytes:,}")
            if num_bytes < facts.num_bytes:
                return
        whole: tuple[tuple[int, int], ...] = ((0, num_bytes),)
        if facts.sha256 is not None:
            self.checks.append(RangeCheck(name, "", "sha256", whole, facts.sha256))
        if not is_index_file(name):
            try:
                self.contents[name] = read_contents(path)
            except (ValueError, OSError) as error:
                self._add(name, str(error))
                return
            whole = tuple(outside(self.contents[name], num_bytes))
        if facts.digest is not None:
            self.checks.append(RangeCheck(name, "", "xxh3_128", whole, facts.digest))

    def _compare_tensors(self) -> None:
        """Compare what the files hold with what the manifest says of each name."""
        left = {file: dict(held) for file, held in self.contents.items()}
        seen: set[tuple[str, int, str | None]] = set()
        for entry in self._manifest.entries:
            if (entry.state, entry.name) in self._manifest.dropped or entry.file not in left:
                continue
            held = left[entry.file].pop(entry.name, None)
            if held is None:
                self._add(entry.file, "is not in the file", entry.label)
                continue
            if (held.dtype, held.shape) != (entry.dtype, entry.shape):
                what = f"is {held.text()}, the manifest says {entry.dtype} {list(entry.shape)}"
                self._add(entry.file, what, entry.label)
                continue
            # Names that share a storage are read once.
            place = (entry.file, held.offset_bytes, entry.digest)
            if entry.digest is not None and (place not in seen or not held.num_bytes):
                ranges = ((held.offset_bytes, held.num_bytes),)
                check = RangeCheck(entry.file, entry.label, "xxh3_128", ranges, entry.digest)
                self.checks.append(check)
            seen.add(place)
        for file, surplus in left.items():
            for name in surplus:
                self._add(file, "is in the file, but not in the manifest", name)

    def _compare_index(self, name: str) -> None:
        path = self._dir / name
        if not path.is_file():
            return
        try:
            found = json.loads(path.read_bytes())["weight_map"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._add(name, f"is damaged ({error!r})")
            return
        want = self._weight_map(PurePosixPath(name))
        if found != want:
            items = found.items() if isinstance(found, dict) else ()
            wrong = sorted(map(str, dict(set(map(_plain, items)) ^ set(want.items()))))
            self._add(name, f"does not say where these are: {', '.join(wrong[:5])}")

    def _weight_map(self, index: PurePosixPath) -> dict[str, str]:
        """Give the map that an index must hold."""
        state = index.name.split(".")[0] if index.parent.name == STATES_FOLDER else ""
        return {
            entry.name: PurePosixPath(entry.file).name
            for entry in self._manifest.entries
            if entry.state == state and (state, entry.name) not in self._manifest.dropped
        }


def _plain(item: tuple[object, object]) -> tuple[str, str]:
    return str(item[0]), str(item[1])


def _loadable(output_dir: Path, manifest: Manifest) -> Iterator[str]:
    """Name further files that are named like weights, though loaders do not look for them."""
    for path in sorted(output_dir.iterdir()):
        other = path.name not in manifest.files and not is_weight_file(path.name)
        if other and path.suffix.lower() in (".safetensors", ".bin") and path.is_file():
            yield path.name


def _stray(output_dir: Path, manifest: Manifest) -> Iterator[str]:
    """Name weight files that do not belong to the result: loaders may take them for part of it."""
    known = {*manifest.files, MANIFEST_NAME}
    for folder in (output_dir, output_dir / STATES_FOLDER):
        if folder.is_dir():
            names = sorted(str(path.relative_to(output_dir)) for path in folder.iterdir())
            yield from (name for name in names if is_weight_file(name) and name not in known)
