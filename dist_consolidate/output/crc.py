"""CRC-32 of data that several writers checksum in pieces.

Writers see parts of a tensor, in any order and on any rank, while a zip file needs one checksum
for the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dist_consolidate.crc_pieces import combine_crc32
from dist_consolidate.errors import ConsolidateError
from dist_consolidate.plan.outputs import StoredTensor


class CrcPiece(NamedTuple):
    """The checksum of a part of a stored tensor.

    Attributes:
        tensor_index: Which stored tensor of the file.
        start_bytes: Where the part begins, in bytes from the start of the tensor.
        num_bytes: How long it is.
        crc: Its CRC-32.
    """

    tensor_index: int
    start_bytes: int
    num_bytes: int
    crc: int


class CrcLedger:
    """Collects the checksums of the parts of one file's stored tensors, in any order."""

    def __init__(self, pieces: Iterable[CrcPiece] = ()) -> None:
        """Start with pieces that were noted elsewhere, or with none.

        Args:
            pieces: What :attr:`pieces` of other ledgers of the same file gave.
        """
        self._pieces = list(pieces)

    @property
    def pieces(self) -> tuple[CrcPiece, ...]:
        """All pieces noted: plain tuples that can be sent to another process."""
        return tuple(self._pieces)

    def add(self, tensor_index: int, start_bytes: int, num_bytes: int, crc: int) -> None:
        """Note the CRC-32 of a part of a stored tensor (see :class:`CrcPiece`)."""
        self._pieces.append(CrcPiece(tensor_index, start_bytes, num_bytes, crc))

    def extend(self, pieces: Iterable[CrcPiece]) -> None:
        """Take over pieces that another process noted for the same file."""
        self._pieces.extend(pieces)

    def tensor_crcs(self, tensors: Sequence[StoredTensor]) -> tuple[int, ...]:
        """Put the pieces together.

        Args:
            tensors: The file's stored tensors.

        Returns:
            The CRC-32 of each stored tensor's bytes, in order.

        Raises:
            ConsolidateError: If the pieces leave out, repeat or exceed bytes of a tensor.
        """
        by_tensor: dict[int, list[CrcPiece]] = {}
        for index, group in itertools.groupby(sorted(self._pieces), key=lambda item: item[0]):
            by_tensor[index] = list(group)
        crcs = [_tensor_crc(by_tensor.pop(i, []), item) for i, item in enumerate(tensors)]
        if by_tensor:
            raise ConsolidateError(
                f"checksums were noted for tensors {sorted(by_tensor)}, but the file has "
                f"{len(tensors)}"
            )
        return tuple(crcs)


def _tensor_crc(pieces: Sequence[CrcPiece], tensor: StoredTensor) -> int:
    crc = end_bytes = 0
    for piece in pieces:
        if piece.start_bytes != end_bytes:
            break
        crc = combine_crc32(crc, piece.crc, piece.num_bytes)
        end_bytes += piece.num_bytes
    else:
        if end_bytes == tensor.num_bytes:
            return crc
    spans = ", ".join(f"{p.start_bytes}+{p.num_bytes}" for p in pieces[:20]) or "nothing"
    raise ConsolidateError(
        f"the writers did not cover {tensor.names[0]} exactly once: it has {tensor.num_bytes:,} "
        f"bytes, and they wrote (start+length) {spans}; please report this"
    )
