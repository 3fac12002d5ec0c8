"""Where everything in an output file lies, known before any weight is read.

One writer puts down the blocks known in advance, any number of writers put tensor bytes at their
offsets in any order, and one writer ends with the blocks that need the checksums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dist_consolidate.errors import UsageError
from dist_consolidate.output.safetensors_file import data_starts_bytes, header_bytes
from dist_consolidate.output.torch_file import TorchArchive, torch_archive
from dist_consolidate.plan.outputs import OutputFile

FORMATS = ("safetensors", "bin")


@dataclasses.dataclass(frozen=True, slots=True)
class FileLayout:
    """The byte layout of one output file.

    Attributes:
        num_bytes: Size of the finished file.
        blocks: (absolute offset in bytes, bytes) of all that is neither tensor data nor written at
            the end.
        data_offset_bytes: Absolute offset of each stored tensor's bytes, in order.
        archive: The zip archive of a torch file, ``None`` for safetensors.
    """

    num_bytes: int
    blocks: tuple[tuple[int, bytes], ...]
    data_offset_bytes: tuple[int, ...]
    archive: TorchArchive | None = None

    @property
    def needs_crc(self) -> bool:
        """Whether :meth:`finishing_blocks` needs the CRC-32 of each stored tensor."""
        return self.archive is not None

    def finishing_blocks(self, crcs: Sequence[int] = ()) -> tuple[tuple[int, bytes], ...]:
        """Give what must be written, in this order, after all tensor bytes are.

        Args:
            crcs: CRC-32 of each stored tensor's bytes, in order; ignored unless ``needs_crc``.

        Returns:
            (absolute offset in bytes, bytes) pairs; none for safetensors.

        Raises:
            ValueError: If checksums are needed and there is not one for each stored tensor.
        """
        return () if self.archive is None else self.archive.finishing_blocks(crcs)


def layout_for(file_format: str, file: OutputFile) -> FileLayout:
    """Lay out an output file.

    Args:
        file_format: ``safetensors`` or ``bin``.
        file: The file and its tensors.

    Returns:
        The layout; equal arguments give equal layouts, on any rank.

    Raises:
        UsageError: If the format is unknown or cannot hold one of the tensors.
    """
    if file_format == "safetensors":
        return _safetensors_layout(file)
    if file_format == "bin":
        return _torch_layout(file)
    raise UsageError(f"unknown output format {file_format!r}; use one of: {', '.join(FORMATS)}")


def _safetensors_layout(file: OutputFile) -> FileLayout:
    header = header_bytes(file)
    *starts, num_data_bytes = data_starts_bytes(file.tensors)
    return FileLayout(
        num_bytes=len(header) + num_data_bytes,
        blocks=((0, header),),
        data_offset_bytes=tuple(len(header) + start for start in starts),
    )


def _torch_layout(file: OutputFile) -> FileLayout:
    archive = torch_archive(file.tensors)
    return FileLayout(
        num_bytes=archive.num_bytes,
        blocks=archive.blocks(),
        data_offset_bytes=archive.data_offset_bytes(),
        archive=archive,
    )
