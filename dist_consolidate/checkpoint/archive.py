"""The index of a torch file: its pickled object and the place of every storage record.

No weight is read. The zip's directory, the pickle and the small local headers of the records that
are asked for are all that touches the disk.

Source: ``torch/serialization.py`` and miniz as torch uses it. Records are stored uncompressed
under one folder whose name is the file's stem or ``archive``; true sizes stand in the central
directory only, and the data begins behind the *local* header, whose extra field is longer than
the central one.
"""

from __future__ import annotations

import math
import os
import re
import struct
import weakref
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from dist_consolidate.checkpoint import unpickle
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.legacy import LegacyFile, is_legacy
from dist_consolidate.checkpoint.opcodes import MAX_PICKLE_BYTES
from dist_consolidate.checkpoint.opening import open_plain
from dist_consolidate.checkpoint.unpickle import TensorRef
from dist_consolidate.checksums import crc32
from dist_consolidate.errors import CheckpointError, UnsupportedLayoutError

_LOCAL_HEADER = struct.Struct("<4s2xHH12xIHH")
_END_OF_DIRECTORY, _END64, _MAX_COMMENT_BYTES = struct.Struct("<4s8xI6x"), 76, 1 << 16
_UNKNOWN = 0xFFFFFFFF
# An expanded tensor shows the same elements many times; a few bytes must not become terabytes.
_MAX_SPREAD_BYTES = 1 << 30
# Half a million records; the directory is read whole.
MAX_DIRECTORY_BYTES = 64 << 20


class ZipRecords:
    """The records of one torch zip file.

    Attributes:
        path: Where the file lies.
        name: Its file name; extents refer to it by this name.
    """

    def __init__(self, path: Path) -> None:
        """Read the zip directory.

        Args:
            path: A file that ``torch.save`` wrote.

        Raises:
            CheckpointError: If the file is missing, empty, truncated or no torch zip file.
        """
        self.path, self.name = path, path.name
        self._records: dict[str, zipfile.ZipInfo] = {}
        self._offsets: dict[str, int] = {}
        try:
            self._open()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error

    def _open(self) -> None:
        with open_plain(self.path) as stream:
            self._num_bytes = os.fstat(stream.fileno()).st_size
            self._descriptor = os.dup(stream.fileno())
            weakref.finalize(self, os.close, self._descriptor)
            head = stream.read(10)
            self._read_directory(stream, head)

    def _read_directory(self, stream: BinaryIO, head: bytes) -> None:
        size = directory_bytes(stream)
        if size > MAX_DIRECTORY_BYTES:
            raise CheckpointError(
                f"{self.path}: its zip directory claims {size} bytes, which is more than any file "
                "of torch's has; copy the file again or save again"
            )
        try:
            with zipfile.ZipFile(stream) as archive:
                entries, end_bytes = archive.infolist(), archive.start_dir
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
            found = f"found {self._num_bytes} bytes without a zip directory at their end"
            if not head.startswith(b"PK"):
                raise CheckpointError(
                    f"{self.path}: not a torch file: {found}; copy the file again or save again. "
                    "(The DataStates engine writes a format of its own under such names: load the "
                    "checkpoint with DeepSpeed and that engine, and save it without)"
                ) from error
            raise CheckpointError(
                f"{self.path}: truncated or damaged: {found}; copy the file again or save again"
            ) from error
        self._index(entries)
        self._bound(entries, end_bytes)
        self._check_byteorder()

    def _bound(self, entries: list[zipfile.ZipInfo], end_bytes: int) -> None:
        """Note where each record must end: where the next one begins, or the directory."""
        self._ends: dict[str, int] = {}
        after = end_bytes
        for entry in sorted(entries, key=lambda entry: entry.header_offset, reverse=True):
            if entry.header_offset + _LOCAL_HEADER.size + entry.compress_size > after:
                raise CheckpointError(
                    f"{self.path}: record {entry.filename!r} reaches into what follows it; the "
                    "zip directory is damaged: copy the file again or save again"
                )
            self._ends[entry.filename] = after
            after = entry.header_offset

    def _index(self, entries: list[zipfile.ZipInfo]) -> None:
        pickles = [entry.filename for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(
                f"{self.path}: found {len(pickles)} pickles (data.pkl), expected one; this is not "
                "a file that torch.save wrote"
            )
        root = pickles[0].removesuffix("data.pkl")
        for entry in entries:
            if entry.filename in self._records:
                raise CheckpointError(f"{self.path}: record {entry.filename!r} is there twice")
            self._records[entry.filename] = entry
        self._root = root

    def _check_byteorder(self) -> None:
        known = self._root + "byteorder" in self._records
        byteorder = self.read_small("byteorder") if known else b""
        if byteorder.strip() == b"big":
            raise UnsupportedLayoutError(
                f"{self.path}: was written on a big-endian machine, which is not supported"
            )

    @property
    def saved_as(self) -> str:
        """The file's name without its ending when torch.save was given a path; else "archive"."""
        return self._root.rstrip("/")

    def record(self, name: str) -> zipfile.ZipInfo:
        """Give the directory entry of a record, which must be there and be stored as it is."""
        entry = self._records.get(self._root + name)
        if entry is None:
            raise CheckpointError(f"{self.path}: record {name!r} is missing from the archive")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise CheckpointError(
                f"{self.path}: record {name!r} is compressed; torch never writes that"
            )
        return entry

    def data_offset_bytes(self, name: str) -> int:
        """Give the address of a record's first byte, from its local header."""
        if name not in self._offsets:
            entry = self.record(name)
            own_name = entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x800 else "cp437")
            wanted_bytes = _LOCAL_HEADER.size + len(own_name)
            header = os.pread(self._descriptor, wanted_bytes, entry.header_offset)
            if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
                raise CheckpointError(f"{self.path}: record {name!r} has no local header")
            _, flags, method, size, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(header)
            # A size may be left to the directory.
            same_size = size in (0, _UNKNOWN, entry.file_size)
            same_name = name_bytes == len(own_name) and header.endswith(own_name)
            if flags & 1 or method != zipfile.ZIP_STORED or not same_size or not same_name:
                raise CheckpointError(
                    f"{self.path}: the local header of record {name!r} contradicts the archive's "
                    "directory; the file is damaged: copy it again or save again"
                )
            offset = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
            if offset + entry.file_size > self._ends[entry.filename]:
                raise CheckpointError(
                    f"{self.path}: record {name!r} ends at byte {offset + entry.file_size}, "
                    f"but what follows begins at {self._ends[entry.filename]} (the file has "
                    f"{self._num_bytes}); it is truncated or damaged"
                )
            self._offsets[name] = offset
        return self._offsets[name]

    def places(self) -> list[tuple[str, int, int, int]]:
        """List the records: name, first byte, length and CRC-32 (0 if torch computed none)."""
        names = [n.removeprefix(self._root) for n in self._records if n.startswith(self._root)]
        entries = {name: self.record(name) for name in names}
        return [
            (name, self.data_offset_bytes(name), entry.file_size, entry.CRC)
            for name, entry in entries.items()
        ]

    def read_small(self, name: str) -> bytes:
        """Read a small record whole."""
        entry, offset = self.record(name), self.data_offset_bytes(name)
        if entry.file_size > MAX_PICKLE_BYTES:
            raise CheckpointError(
                f"{self.path}: record {name!r} has {entry.file_size} bytes, at most "
                f"{MAX_PICKLE_BYTES} are read of what is no tensor; save without the large objects "
                "in the client state, or as tensors"
            )
        data = os.pread(self._descriptor, entry.file_size, offset)
        # torch can be told to compute no CRC; then it is 0.
        if entry.CRC and crc32(data) != entry.CRC:
            raise CheckpointError(
                f"{self.path}: record {name!r} has another CRC-32 than the archive's directory "
                "says; the file is damaged: copy it again or save again"
            )
        return data


def directory_bytes(stream: BinaryIO) -> int:
    """Give the length of a zip file's directory, as the file's end claims it.

    Args:
        stream: The file.

    Returns:
        The length, which nothing has checked; 0 where there is no such end.
    """
    num_bytes = os.fstat(stream.fileno()).st_size
    tail_bytes = min(num_bytes, _END64 + _END_OF_DIRECTORY.size + _MAX_COMMENT_BYTES)
    stream.seek(num_bytes - tail_bytes)
    tail = stream.read(tail_bytes)
    at, size = tail.rfind(b"PK\5\6"), 0
    if 0 <= at <= len(tail) - _END_OF_DIRECTORY.size:
        size = _END_OF_DIRECTORY.unpack_from(tail, at)[1]
        if at >= _END64 and tail.startswith(b"PK\6\6", at - _END64):
            (size,) = struct.unpack_from("<Q", tail, at - _END64 + 40)
    stream.seek(0)
    return size


class Archive:
    """One torch file with its pickled object, a zip file or of the format before that.

    Attributes:
        path: Where the file lies.
        name: Its name in the tag folder; spans refer to it by this name.
        tree: The unpickled object (see :mod:`dist_consolidate.checkpoint.unpickle`).
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Read the index and the pickle.

        Args:
            path: A file that ``torch.save`` wrote.
            name: What spans call it, if it lies deeper than in the tag folder.

        Raises:
            CheckpointError: If the file is missing, empty, truncated or no torch file.
        """
        self.path, self.name = path, name or path.name
        self._records: ZipRecords | LegacyFile
        try:
            if is_legacy(path):
                self._records = LegacyFile(path)
                self.tree: Any = self._records.tree
                return
            self._records = ZipRecords(path)
            self.tree = unpickle.loads(self._records.read_small("data.pkl"))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise CheckpointError(
                f"{path}: the pickle inside is damaged or not a torch.save of a state ({error})"
            ) from error

    @property
    def saved_as(self) -> str:
        """The name it was saved as, without its ending, where the file remembers one."""
        return self._records.saved_as if isinstance(self._records, ZipRecords) else ""

    def scalar(self, tensor: TensorRef) -> int | None:
        """Read a tensor of one element, such as an optimizer's step; ``None`` for other ones."""
        code, span = _SCALARS.get(tensor.dtype.name), self.span(tensor)
        if code is None or span.num_numel != 1:
            return None
        with open_plain(self.path) as stream:
            stream.seek(span.offset_bytes)
            (value,) = struct.unpack(code, stream.read(span.dtype.itemsize_bytes))
        return int(value) if math.isfinite(value) else None

    def span(self, tensor: TensorRef) -> TensorSpan:
        """Locate a tensor's elements in the file.

        Args:
            tensor: A tensor of :attr:`tree`.

        Returns:
            Where its elements lie.

        Raises:
            CheckpointError: If the storage record is missing, or too short for the tensor.
        """
        width = tensor.dtype.itemsize_bytes
        place = TensorSpan(self.name, 0, tensor.dtype, tensor.shape, tensor.stride)
        if not place.num_numel:
            return place
        base, held = self._place(tensor.storage.key)
        need = (tensor.offset_numel + place.reach_numel) * width
        if need > held:
            raise CheckpointError(
                f"{self.path}: storage record data/{tensor.storage.key} holds {held} bytes, but a "
                f"tensor of shape {list(tensor.shape)} in it needs {need}"
            )
        if place.num_numel * width > max(held, _MAX_SPREAD_BYTES):
            raise CheckpointError(
                f"{self.path}: a tensor of shape {list(tensor.shape)} spreads {held} bytes of "
                f"storage record data/{tensor.storage.key} over {place.num_numel * width}; this is "
                "not what training leaves"
            )
        offset_bytes = base + tensor.offset_numel * width
        return TensorSpan(self.name, offset_bytes, tensor.dtype, tensor.shape, tensor.stride)

    def _place(self, key: str) -> tuple[int, int]:
        """Give a storage's first byte and its length in bytes."""
        if isinstance(self._records, LegacyFile):
            return self._records.place(key)
        record = f"data/{key}"
        return self._records.data_offset_bytes(record), self._records.record(record).file_size


_SCALARS = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}


def scan_integer(path: Path, key: str) -> int | None:
    """Find ``key: integer`` in a torch file's pickle without unpickling it.

    A ZeRO-3 run writes as many model files as ranks, each naming every parameter; where only a
    counter is wanted, building all those objects again and again would take minutes.

    Args:
        path: A file that ``torch.save`` wrote.
        key: A dictionary key that stands in it once.

    Returns:
        The integer, or ``None`` if no such entry is found.

    Raises:
        CheckpointError: If the file is no readable torch file.
    """
    try:
        legacy = is_legacy(path)
        found = [] if legacy else _scan(ZipRecords(path).read_small("data.pkl"), key.encode())
        if len(found) == 1:
            return found[0]
        # The key may stand elsewhere too (client state can hold anything): see which is ours.
        tree = Archive(path).tree if found or legacy else None
        value = tree.get(key) if isinstance(tree, dict) else None
        return value if type(value) is int else None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _scan(pickled: bytes, key: bytes) -> list[int]:
    """Find what may be ``key: integer``: the key's text or a memo reference, then a number.

    Protocol 2: BINUNICODE and BINPUT or LONG_BINPUT where the text stands first, BINGET or
    LONG_BINGET where it stands again; then BININT1, BININT2 or BININT.
    """
    number = rb"(?:K(.)|M(..)|J(....))"
    text = re.escape(b"X" + struct.pack("<I", len(key)) + key)
    put = re.search(text + rb"(?:q(.)|r(....))", pickled, re.DOTALL)
    again = b""
    if put is not None:
        index = int.from_bytes(put[1] or put[2], "little")
        short = b"|h" + re.escape(bytes([index])) if index < 256 else b""
        again = short + b"|j" + re.escape(struct.pack("<I", index))
    pattern = rb"(?:" + text + rb"(?:q.|r....)?" + again + rb")" + number
    found = re.finditer(pattern, pickled, re.DOTALL)
    return [int.from_bytes(next(p for p in match.groups() if p), "little") for match in found]
