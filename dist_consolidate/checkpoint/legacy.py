"""Torch's format of before 1.6, without a zip: pickles one behind the other, then the storages.

DeepSpeed still writes it with ``checkpoint_serialization: false`` (0.17.1 and later). The same
restricted unpickler reads it; nothing the file names is imported or run, and no weight is read:
the storages' places follow from their lengths.

Source: ``_legacy_save`` in ``torch/serialization.py``: the magic number, the protocol, facts
about the machine, the object, the list of storage keys; then for each key its number of elements
as int64, and the elements.
"""

from __future__ import annotations

import os
import reprlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dist_consolidate.checkpoint import unpickle
from dist_consolidate.checkpoint.opening import open_plain
from dist_consolidate.checkpoint.unpickle import StorageRef
from dist_consolidate.errors import CheckpointError, UnsupportedLayoutError

MAGIC = bytes.fromhex("80028a0a6cfc9c46f920")
_MAGIC_NUMBER, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_COUNT = struct.Struct("<q")


class LegacyFile:
    """The index of one such file.

    Attributes:
        tree: The unpickled object (see :mod:`dist_consolidate.checkpoint.unpickle`).
    """

    def __init__(self, path: Path) -> None:
        """Read the pickles, and find the storages.

        Args:
            path: A file that begins with :data:`MAGIC`.

        Raises:
            CheckpointError: If the file is damaged or cut short.
            OSError: If it cannot be read.
        """
        self._path = path
        self._places: dict[str, tuple[int, int]] = {}
        with open_plain(path) as stream:
            self._num_bytes = os.fstat(stream.fileno()).st_size
            keys, storages = self._read_pickles(stream)
            self._locate(stream, keys, storages)

    def _read_pickles(self, stream: BinaryIO) -> tuple[list[Any], Mapping[str, StorageRef]]:
        try:
            magic, protocol, machine = (unpickle.load_stream(stream)[0] for _ in range(3))
            self.tree, storages = unpickle.load_stream(stream)
            keys, _ = unpickle.load_stream(stream)
        except ValueError as error:
            raise CheckpointError(
                f"{self._path}: a pickle inside is damaged or cut short ({error}); it is in "
                "torch's format of before 1.6 (not a zip file)"
            ) from error
        if magic != _MAGIC_NUMBER or protocol != _PROTOCOL or not isinstance(keys, list):
            raise CheckpointError(
                f"{self._path}: is in torch's format of before 1.6 (not a zip file) with protocol "
                f"{reprlib.repr(protocol)}, expected {_PROTOCOL}; torch.load it and torch.save it "
                "again"
            )
        if not isinstance(machine, dict) or machine.get("little_endian") is not True:
            raise UnsupportedLayoutError(
                f"{self._path}: was written on a big-endian machine, which is not supported"
            )
        return keys, storages

    def _locate(
        self, stream: BinaryIO, keys: list[Any], storages: Mapping[str, StorageRef]
    ) -> None:
        at = stream.tell()
        for key in keys:
            storage = storages.get(key) if isinstance(key, str) else None
            if storage is None:
                raise CheckpointError(
                    f"{self._path}: holds a storage {reprlib.repr(key)} of a kind that is not "
                    "known, so that nothing tells where the next one begins; torch.load it and "
                    "torch.save it again"
                )
            stream.seek(at)
            head = stream.read(_COUNT.size)
            count = _COUNT.unpack(head)[0] if len(head) == _COUNT.size else None
            at += _COUNT.size
            end = at + storage.num_numel * storage.dtype.itemsize_bytes
            if count is None or end > self._num_bytes:
                raise CheckpointError(
                    f"{self._path}: storage {key} ends at byte {end}, but the file has "
                    f"{self._num_bytes}; it is truncated"
                )
            if count != storage.num_numel:
                raise CheckpointError(
                    f"{self._path}: storage {key} has {count} elements, expected "
                    f"{storage.num_numel}; the file is damaged"
                )
            self._places[key] = (at, end - at)
            at = end

    def place(self, key: str) -> tuple[int, int]:
        """Give a storage's first byte and its length in bytes.

        Args:
            key: Its key.

        Returns:
            Both.

        Raises:
            CheckpointError: If the file has no such storage.
        """
        if key not in self._places:
            raise CheckpointError(f"{self._path}: storage {key!r} is missing from the file")
        return self._places[key]


def is_legacy(path: Path) -> bool:
    """Whether a file begins as this format does.

    Args:
        path: The file.

    Returns:
        True if it does.

    Raises:
        OSError: If it cannot be read.
    """
    with open_plain(path) as stream:
        return stream.read(len(MAGIC)) == MAGIC
