"""The header of a safetensors file, written before the tensors it describes.

A safetensors file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes
without holes. The header needs names, dtypes and shapes only, so it can be written first and the
tensors may follow in any order, from any process.

Source of the rules: the format section of the safetensors README and ``safetensors/src/tensor.rs``
(header of at most 100,000,000 bytes, starting with ``{``, padded with spaces; offsets that tile the
data; string-to-string ``__metadata__``). Dropped ties are noted the way
``safetensors.torch.save_model`` notes them: ``alias -> kept name``.
"""

from __future__ import annotations

import json

from dist_consolidate.errors import UsageError
from dist_consolidate.plan.outputs import OutputFile, StoredTensor

MAX_HEADER_BYTES = 100_000_000
METADATA_KEY = "__metadata__"
_LENGTH_BYTES = 8
_PAGE_BYTES = 4096
_CACHE_LINE_BYTES = 64
_SMALL_DATA_BYTES = 2**20


def data_alignment_bytes(num_data_bytes: int) -> int:
    """Tell what the start of the data is a multiple of.

    A page lets readers use O_DIRECT and GPUDirect Storage; below 1 MiB of data that gains nothing
    and the padding would show, so a cache line does.

    Args:
        num_data_bytes: Bytes of all tensors of the file together.

    Returns:
        The alignment in bytes.
    """
    return _PAGE_BYTES if num_data_bytes >= _SMALL_DATA_BYTES else _CACHE_LINE_BYTES


def data_starts_bytes(tensors: tuple[StoredTensor, ...]) -> tuple[int, ...]:
    """Lay tensors end to end.

    Args:
        tensors: Stored tensors in the order of their bytes.

    Returns:
        One more number than there are tensors: where each begins, in bytes from the start of the
        data, and where the last one ends.
    """
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + tensor.num_bytes)
    return tuple(starts)


def header_bytes(file: OutputFile, max_header_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """Write everything that stands before the first tensor.

    Args:
        file: The file to describe; every stored tensor has exactly one name.
        max_header_bytes: Longest JSON header, padding included, that readers accept.

    Returns:
        The length field and the padded JSON header; the data starts right after it.

    Raises:
        UsageError: If a dtype has no safetensors code, a name cannot be written, or the header
            would be longer than readers accept.
    """
    starts = data_starts_bytes(file.tensors)
    entries: dict[str, object] = {METADATA_KEY: _metadata(file)}
    for tensor, start, end in zip(file.tensors, starts, starts[1:], strict=False):
        entries[_single_name(tensor)] = _entry(tensor, start, end)
    assert len(entries) == len(file.tensors) + 1, "a tensor name occurs twice in one file"
    return _framed(_encoded(entries, file.name), starts[-1], file.name, max_header_bytes)


def _single_name(tensor: StoredTensor) -> str:
    assert len(tensor.names) == 1, f"safetensors cannot share the storage of {tensor.names}"
    (name,) = tensor.names
    if name == METADATA_KEY:
        raise UsageError(
            f"a tensor is named {METADATA_KEY}, which safetensors reserves; use --format bin"
        )
    return name


def _metadata(file: OutputFile) -> dict[str, str]:
    # "format" is what transformers insists on, so an alias of that name goes unrecorded, as in
    # save_model, which does not overwrite metadata either.
    return {**dict(sorted(file.dropped)), "format": "pt"}


def _entry(tensor: StoredTensor, start_bytes: int, end_bytes: int) -> dict[str, object]:
    code = tensor.dtype.safetensors
    if code is None:
        raise UsageError(
            f"tensor {tensor.names[0]} has dtype {tensor.dtype.name}, for which safetensors has no "
            "code; use --format bin"
        )
    return {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start_bytes, end_bytes]}


def _encoded(entries: dict[str, object], file_name: str) -> bytes:
    try:
        return json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{file_name}: a tensor name is not valid text ({error.reason}), which safetensors "
            "cannot hold; use --format bin or exclude the tensor"
        ) from error


def _framed(text: bytes, num_data_bytes: int, file_name: str, max_header_bytes: int) -> bytes:
    alignment = data_alignment_bytes(num_data_bytes)
    num_padding = -(_LENGTH_BYTES + len(text)) % alignment
    num_header_bytes = len(text) + num_padding
    if num_header_bytes > max_header_bytes:
        raise UsageError(
            f"the header of {file_name} would take {num_header_bytes:,} bytes, and readers accept "
            f"at most {max_header_bytes:,}; use a smaller --max-shard-size"
        )
    return num_header_bytes.to_bytes(_LENGTH_BYTES, "little") + text + b" " * num_padding
