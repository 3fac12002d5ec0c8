"""Names of weight files and the index beside them, in Hugging Face form.

Source: ``huggingface_hub`` (``constants.py`` and ``serialization/_base.py``) and ``transformers``
(``utils/__init__.py``), which look weights up by these names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from dist_consolidate.errors import UsageError
from dist_consolidate.plan.outputs import OutputFile

MANIFEST_NAME = "consolidation.json"
_STEMS = {"safetensors": ("model", "safetensors"), "bin": ("pytorch_model", "bin")}
_SHARD = r"(-\d{5,}-of-\d{5,})?"
_WEIGHT_FILE = re.compile(
    "|".join(
        rf"{stem}({_SHARD}\.{suffix}|\.{suffix}\.index\.json)" for stem, suffix in _STEMS.values()
    )
)


def _stem_and_suffix(file_format: str) -> tuple[str, str]:
    if file_format not in _STEMS:
        raise UsageError(f"unknown output format {file_format!r}; use one of: {', '.join(_STEMS)}")
    return _STEMS[file_format]


def shard_file_names(file_format: str, count: int) -> tuple[str, ...]:
    """Name the weight files of a result.

    Args:
        file_format: ``safetensors`` or ``bin``.
        count: How many files there are, at least one.

    Returns:
        ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on; ``pytorch_model``
        and ``bin`` for torch files.

    Raises:
        UsageError: If the format is unknown.
    """
    assert count >= 1, "a result has at least one weight file"
    stem, suffix = _stem_and_suffix(file_format)
    if count == 1:
        return (f"{stem}.{suffix}",)
    return tuple(f"{stem}-{i:05d}-of-{count:05d}.{suffix}" for i in range(1, count + 1))


def index_file_name(file_format: str) -> str:
    """Name the index of a result of several files.

    Args:
        file_format: ``safetensors`` or ``bin``.

    Returns:
        ``model.safetensors.index.json`` or ``pytorch_model.bin.index.json``.

    Raises:
        UsageError: If the format is unknown.
    """
    stem, suffix = _stem_and_suffix(file_format)
    return f"{stem}.{suffix}.index.json"


def index_json(files: Sequence[OutputFile]) -> bytes:
    """Write the index by which loaders find each tensor's file.

    Args:
        files: All weight files of the result.

    Returns:
        JSON with ``metadata`` (``total_size`` in bytes and ``total_parameters`` in elements, a
        shared storage counted once) and ``weight_map`` (every name that a file holds, and that
        file; dropped names are in none).
    """
    stored = [tensor for file in files for tensor in file.tensors]
    weight_map = {
        name: file.name for file in files for tensor in file.tensors for name in tensor.names
    }
    metadata = {
        "total_size": sum(tensor.num_bytes for tensor in stored),
        "total_parameters": sum(tensor.num_numel for tensor in stored),
    }
    content = {"metadata": metadata, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode("ascii")


def is_index_file(name: str) -> bool:
    """Tell whether a name is that of an index, in either format."""
    return name in {index_file_name(file_format) for file_format in _STEMS}


def is_weight_file(name: str) -> bool:
    """Tell whether an earlier run, or a Hugging Face library, may have left a file of this name.

    Args:
        name: A file name without folders.

    Returns:
        True for weight files, shards and indexes of either format, and for ``consolidation.json``.
    """
    return name == MANIFEST_NAME or _WEIGHT_FILE.fullmatch(name) is not None
