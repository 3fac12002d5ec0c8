"""A torch zip file, as ``torch.save`` writes it, whose tensor bytes are filled in later.

The archive holds a pickled ``OrderedDict`` of tensors and one uncompressed record per storage. All
offsets follow from names, dtypes and shapes, so everything but the checksums is known before any
weight is read. The central directory, by which every reader finds the records, is written last: a
file whose writing broke off has none and no reader takes it for a whole one.

Sources: the ZIP application note (APPNOTE.TXT, sections 4.3 and 4.5.3) for the records;
``torch/serialization.py`` (``_save``) and ``torch/_tensor.py`` (``_reduce_ex_internal``) for the
pickle; ``caffe2/serialize/inline_container.cc`` (``getPadding``) for the ``FB`` extra field that
aligns storages to 64 bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import pickle
import struct
import sys
from collections.abc import Sequence
from typing import Any

from dist_consolidate.checkpoint.extents import contiguous_stride
from dist_consolidate.checksums import crc32
from dist_consolidate.dtypes import DType
from dist_consolidate.output.torch_names import torch_name, with_torch_names
from dist_consolidate.plan.outputs import StoredTensor

ALIGNMENT_BYTES = 64
_PREFIX = "archive"
_U16_MAX = 0xFFFF
_U32_MAX = 0xFFFFFFFF
_DOS_DATE = 0x21  # 1980-01-01, the first day a zip can name: equal input must give equal bytes
_PLAIN_VERSION, _ZIP64_VERSION = 20, 45
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CRC_FIELD_OFFSET_BYTES = 14
_LOCAL_ZIP64 = struct.Struct("<HHQQ")
_FIELD = struct.Struct("<HH")
_PADDING_ID = int.from_bytes(b"FB", "little")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END_ZIP64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR_ZIP64 = struct.Struct("<4sIQI")


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One member of the archive.

    Attributes:
        name: Member name, ASCII.
        header_offset_bytes: Where its local header begins in the file.
        data_offset_bytes: Where its bytes begin in the file.
        num_bytes: How many bytes it has.
        content: The bytes, or ``None`` for a storage, whose bytes come later.
    """

    name: bytes
    header_offset_bytes: int
    data_offset_bytes: int
    num_bytes: int
    content: bytes | None


@dataclasses.dataclass(frozen=True, slots=True)
class TorchArchive:
    """Where everything in a torch zip file lies.

    Attributes:
        records: All members in file order; storages in the order of the stored tensors.
        directory_offset_bytes: Where the central directory begins.
        num_bytes: Size of the finished file.
    """

    records: tuple[Record, ...]
    directory_offset_bytes: int
    num_bytes: int

    def data_offset_bytes(self) -> tuple[int, ...]:
        """Give the absolute offset of each storage's bytes, in the order of the tensors."""
        return tuple(item.data_offset_bytes for item in self.records if item.content is None)

    def blocks(self) -> tuple[tuple[int, bytes], ...]:
        """Give what is known now: local headers and small records, as (offset, bytes) pairs.

        The checksum of a storage is zero in its local header until it is known.
        """
        return tuple(
            (
                item.header_offset_bytes,
                _local_header(item, _known_crc(item)) + (item.content or b""),
            )
            for item in self.records
        )

    def finishing_blocks(self, crcs: Sequence[int]) -> tuple[tuple[int, bytes], ...]:
        """Give what must be written after all tensor bytes.

        Args:
            crcs: CRC-32 of each stored tensor's bytes, in order.

        Returns:
            (offset, bytes) pairs: the checksum fields of the local headers, and at the very end
            the central directory, which makes the file readable.
        """
        storages = [item for item in self.records if item.content is None]
        fields = tuple(
            (item.header_offset_bytes + _CRC_FIELD_OFFSET_BYTES, struct.pack("<I", crc))
            for item, crc in zip(storages, crcs, strict=True)
        )
        directory = _directory(self.records, crcs, self.directory_offset_bytes)
        return (*fields, (self.directory_offset_bytes, directory))


def torch_archive(tensors: tuple[StoredTensor, ...]) -> TorchArchive:
    """Lay out the file in which ``torch.load`` finds these tensors.

    Args:
        tensors: Stored tensors in the order of their bytes. All names of one stored tensor become
            tensors that share its storage.

    Returns:
        The layout; its bytes depend on the arguments alone.
    """
    members: list[tuple[str, int, bytes | None]] = [_text("data.pkl", _pickled(tensors))]
    members.append(_text("byteorder", b"little"))
    members += [(f"data/{index}", item.num_bytes, None) for index, item in enumerate(tensors)]
    members.append(_text("version", b"3\n"))
    records, cursor_bytes = [], 0
    for name, num_bytes, content in members:
        records.append(_placed(f"{_PREFIX}/{name}".encode(), cursor_bytes, num_bytes, content))
        cursor_bytes = records[-1].data_offset_bytes + num_bytes
    # The directory's length does not depend on the checksums in it.
    directory = _directory(records, [0] * len(tensors), cursor_bytes)
    return TorchArchive(tuple(records), cursor_bytes, cursor_bytes + len(directory))


def _text(name: str, content: bytes) -> tuple[str, int, bytes | None]:
    return name, len(content), content


def _placed(name: bytes, offset_bytes: int, num_bytes: int, content: bytes | None) -> Record:
    num_fixed = _LOCAL.size + len(name) + len(_local_zip64(num_bytes)) + _FIELD.size
    data_offset_bytes = -(-(offset_bytes + num_fixed) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Record(name, offset_bytes, data_offset_bytes, num_bytes, content)


def _known_crc(record: Record) -> int:
    return crc32(record.content) if record.content is not None else 0


def _local_zip64(num_bytes: int) -> bytes:
    return _LOCAL_ZIP64.pack(1, 16, num_bytes, num_bytes) if num_bytes >= _U32_MAX else b""


def _local_header(record: Record, crc: int) -> bytes:
    zip64 = _local_zip64(record.num_bytes)
    used_bytes = record.header_offset_bytes + _LOCAL.size + len(record.name) + len(zip64)
    num_padding = record.data_offset_bytes - used_bytes - _FIELD.size
    extra = zip64 + _FIELD.pack(_PADDING_ID, num_padding) + b"Z" * num_padding
    version = _ZIP64_VERSION if zip64 else _PLAIN_VERSION
    size = min(record.num_bytes, _U32_MAX)
    lengths = (size, size, len(record.name), len(extra))
    head = _LOCAL.pack(b"PK\3\4", version, 0, 0, 0, _DOS_DATE, crc, *lengths)
    return head + record.name + extra


def _directory(records: Sequence[Record], crcs: Sequence[int], offset_bytes: int) -> bytes:
    """Write the central directory and the records that end a zip file."""
    remaining = iter(crcs)
    entries = b"".join(
        _central_entry(item, _known_crc(item) if item.content is not None else next(remaining))
        for item in records
    )
    return entries + _end(len(records), len(entries), offset_bytes)


def _central_entry(record: Record, crc: int) -> bytes:
    # APPNOTE 4.5.3: a value that does not fit is all ones here and stands in the zip64 field.
    values = (record.num_bytes, record.num_bytes, record.header_offset_bytes)
    large = [value for value in values if value >= _U32_MAX]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    version = _ZIP64_VERSION if large else _PLAIN_VERSION
    size, _, offset = (min(value, _U32_MAX) for value in values)
    head = (b"PK\1\2", version, version, 0, 0, 0, _DOS_DATE, crc, size, size)
    lengths = (len(record.name), len(extra), 0)
    return _CENTRAL.pack(*head, *lengths, 0, 0, 0, offset) + record.name + extra


def _end(num_records: int, num_directory_bytes: int, offset_bytes: int) -> bytes:
    count = min(num_records, _U16_MAX)
    sizes_32 = (min(num_directory_bytes, _U32_MAX), min(offset_bytes, _U32_MAX))
    end = _END.pack(b"PK\5\6", 0, 0, count, count, *sizes_32, 0)
    if num_records < _U16_MAX and max(num_directory_bytes, offset_bytes) < _U32_MAX:
        return end
    head = (b"PK\6\6", _END_ZIP64.size - 12, _ZIP64_VERSION, _ZIP64_VERSION, 0, 0)
    sizes = (num_records, num_records, num_directory_bytes, offset_bytes)
    locator = _LOCATOR_ZIP64.pack(b"PK\6\7", 0, offset_bytes + num_directory_bytes, 1)
    return _END_ZIP64.pack(*head, *sizes) + locator + end


@dataclasses.dataclass(frozen=True, slots=True)
class _StorageStandIn:
    """Pickled as the reference that ``torch.load`` resolves to a storage record."""

    key: str
    dtype: DType
    num_numel: int

    def reference(self) -> tuple[str, Any, str, str, int]:
        if self.dtype.storage_class is None:
            num_bytes = self.num_numel * self.dtype.itemsize_bytes
            untyped = torch_name("torch.storage", "UntypedStorage")
            return "storage", untyped, self.key, "cpu", num_bytes
        storage_class = torch_name("torch", self.dtype.storage_class)
        return "storage", storage_class, self.key, "cpu", self.num_numel


@dataclasses.dataclass(frozen=True, slots=True)
class _TensorStandIn:
    """Pickled as the call that rebuilds a contiguous tensor over a storage."""

    storage: _StorageStandIn
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        hooks: collections.OrderedDict[str, object] = collections.OrderedDict()
        # The pickler remembers objects by identity; fresh tuples keep the bytes independent of
        # whether the caller's shapes happen to be one object.
        size = tuple(list(self.shape))
        arguments = (self.storage, 0, size, contiguous_stride(size), False, hooks)
        dtype = self.storage.dtype
        if dtype.storage_class is None:
            rebuild = torch_name("torch._utils", "_rebuild_tensor_v3")
            return rebuild, (*arguments, torch_name("torch", dtype.name))
        return torch_name("torch._utils", "_rebuild_tensor_v2"), arguments


class _Pickler(pickle.Pickler):
    """Writes storages as references, as ``torch.save`` does."""

    def persistent_id(self, obj: Any) -> Any:  # noqa: ANN401 (the base class's signature)
        """Give the reference of a storage, and nothing for other objects."""
        return obj.reference() if isinstance(obj, _StorageStandIn) else None


def _pickled(tensors: tuple[StoredTensor, ...]) -> bytes:
    state: collections.OrderedDict[str, _TensorStandIn] = collections.OrderedDict()
    for index, item in enumerate(tensors):
        storage = _StorageStandIn(sys.intern(str(index)), item.dtype, item.num_numel)
        for name in item.names:
            assert name not in state, f"the tensor name {name} occurs twice in one file"
            state[sys.intern(name)] = _TensorStandIn(storage, item.shape)
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(state)
    return with_torch_names(buffer.getvalue(), state)
