"""Digesting ranges of files, block by block."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import xxhash

from dist_consolidate.doing import Doing
from dist_consolidate.verifying.findings import Difference

BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class RangeCheck:
    """Ranges of one file, of which the digest is known.

    Attributes:
        file: The file.
        tensor: The tensor they are, or nothing.
        kind: ``xxh3_128`` or ``sha256``.
        ranges: First byte and length of each.
        expected: The digest, as text.
    """

    file: str
    tensor: str
    kind: str
    ranges: tuple[tuple[int, int], ...]
    expected: str

    @property
    def num_bytes(self) -> int:
        """What is read."""
        return sum(length for _, length in self.ranges)

    def run(self, folder: Path, count: Callable[[int], None]) -> Difference | None:
        """Read and digest.

        Args:
            folder: Where the file lies.
            count: Told of each block's bytes.

        Returns:
            The difference, if there is one.
        """
        state = _state(self.kind)
        try:
            for offset, length in self.ranges:
                if not read_range(folder / self.file, offset, length, state.update, count):
                    return Difference(self.file, self.tensor, "the file ends before its end")
        except OSError as error:
            return Difference(self.file, self.tensor, f"cannot be read: {error.strerror or error}")
        found = state.hexdigest()
        if found == self.expected:
            return None
        part = "" if self.tensor or self.kind == "sha256" or len(self.ranges) == 0 else _AROUND
        what = f"{part}{self.kind} is {found}, the manifest says {self.expected}"
        return Difference(self.file, self.tensor, what)


# An index has no tensors: there it is the whole file.
_AROUND = "what belongs to no tensor has changed: "


class _State(Protocol):
    def update(self, data: memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


def _state(kind: str) -> _State:
    return hashlib.sha256() if kind == "sha256" else xxhash.xxh3_128()


def read_range(
    path: Path,
    offset_bytes: int,
    num_bytes: int,
    take: Callable[[memoryview], object],
    count: Callable[[int], None] = lambda _: None,
) -> bool:
    """Read a range of a file in blocks.

    Args:
        path: The file.
        offset_bytes: First byte.
        num_bytes: Length.
        take: Called with each block; its memory is used again.
        count: Told of each block's bytes.

    Returns:
        Whether the file has that many bytes there.

    Raises:
        OSError: If it cannot be read.
    """
    room = memoryview(bytearray(min(num_bytes, BLOCK_BYTES)))
    with path.open("rb", buffering=0) as stream:
        at, stop = offset_bytes, offset_bytes + num_bytes
        while at < stop:
            with Doing("reading", path):
                done = os.preadv(stream.fileno(), [room[: stop - at]], at)
            if not done:
                return False
            take(room[:done])
            count(done)
            at += done
    return True
