"""What moving the bytes gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from dist_consolidate.crc_pieces import CrcRange
from dist_consolidate.runtime.digests import Digest
from dist_consolidate.runtime.stages import StageTime


class Checksum(NamedTuple):
    """CRC-32 of a range of a stored tensor that one process wrote."""

    file: int
    tensor: int
    start_bytes: int
    num_bytes: int
    crc: int


@dataclasses.dataclass(frozen=True, slots=True)
class MoveResult:
    """What one rank did.

    Attributes:
        num_bytes_read: Bytes read from shards.
        num_bytes_written: Bytes written to output files.
        checksums: CRC-32 of each range written, if asked for.
        overflowed: Tensors that hold infinities after a cast to fp16.
        stages: How long each stage was busy.
        digests: Of the tensors whose first bytes this rank owns, if asked for.
        read_crcs: CRC-32 of what was read of each shard, if asked for.
    """

    num_bytes_read: int
    num_bytes_written: int
    checksums: tuple[Checksum, ...]
    overflowed: frozenset[int]
    stages: tuple[StageTime, ...]
    digests: tuple[Digest, ...] = ()
    read_crcs: Mapping[str, tuple[CrcRange, ...]] = dataclasses.field(default_factory=dict)
