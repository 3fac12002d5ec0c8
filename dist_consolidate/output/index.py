"""Names of weight files and the index beside them, in Hugging Face form.

Source: ``huggingface_hub`` (``constants.py`` and ``serialization/_base.py``) and ``transformers``
(``utils/__init__.py``), which look weights up by these names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from dist_consolidate.errors import UsageError
from dist_consolidate.plan.outputs import OutputFile

MANIFEST_NAME = "consolidation.json"
_STEMS = {"safetensors": ("model", "safetensors"), "bin": ("pytorch_model", "bin")}
_SHARD = r"(-\d{5,}-of-\d{5,})?"
# Optimizer states lie in a folder of their own: loaders that take every weight file of a folder
# would find tensors of the same names in them.
STATES_FOLDER = "optimizer_states"
_STATE = rf"{STATES_FOLDER}/\w+"
_WEIGHT_FILE = re.compile(
    "|".join(
        rf"{stem}(?:{_SHARD}\.{suffix}|\.{suffix}\.index\.json)"
        for stem, suffix in (*_STEMS.values(), (_STATE, "safetensors"), (_STATE, "bin"))
    )
)
# One for each stem and format: what stands in the names of a file of several.
_SHARD_GROUPS = range(1, _WEIGHT_FILE.groups + 1)


def _stem_and_suffix(file_format: str, state: str) -> tuple[str, str]:
    if file_format not in _STEMS:
        raise UsageError(f"unknown output format {file_format!r}; use one of: {', '.join(_STEMS)}")
    stem, suffix = _STEMS[file_format]
    return (f"{STATES_FOLDER}/{state}" if state else stem), suffix


def shard_file_names(file_format: str, count: int, state: str = "") -> tuple[str, ...]:
    """Name the weight files of a result, or those of an optimizer's states.

    Args:
        file_format: ``safetensors`` or ``bin``.
        count: How many files there are, at least one.
        state: Key of the optimizer's states, such as ``exp_avg``; empty for weights.

    Returns:
        ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on; ``pytorch_model``
        and ``bin`` for torch files; ``optimizer_states/exp_avg.safetensors`` and so on for states.

    Raises:
        UsageError: If the format is unknown.
    """
    assert count >= 1, "a result has at least one weight file"
    stem, suffix = _stem_and_suffix(file_format, state)
    if count == 1:
        return (f"{stem}.{suffix}",)
    return tuple(f"{stem}-{i:05d}-of-{count:05d}.{suffix}" for i in range(1, count + 1))


def index_file_name(file_format: str, state: str = "") -> str:
    """Name the index of a result of several files.

    Args:
        file_format: ``safetensors`` or ``bin``.
        state: Key of the optimizer's states; empty for weights.

    Returns:
        ``model.safetensors.index.json`` or ``pytorch_model.bin.index.json``.

    Raises:
        UsageError: If the format is unknown.
    """
    stem, suffix = _stem_and_suffix(file_format, state)
    return f"{stem}.{suffix}.index.json"


def index_json(files: Sequence[OutputFile]) -> bytes:
    """Write the index by which loaders find each tensor's file.

    Args:
        files: All weight files of the result, or all files of one of the optimizer's states.

    Returns:
        JSON with ``metadata`` (``total_size`` in bytes and ``total_parameters`` in elements, a
        shared storage counted once) and ``weight_map`` (every name that a file holds, and that
        file; dropped names are in none).
    """
    stored = [tensor for file in files for tensor in file.tensors]
    weight_map = {
        name: PurePosixPath(file.name).name
        for file in files
        for tensor in file.tensors
        for name in tensor.names
    }
    metadata = {
        "total_size": sum(tensor.num_bytes for tensor in stored),
        "total_parameters": sum(tensor.num_numel for tensor in stored),
    }
    content = {"metadata": metadata, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode("ascii")


def is_entry_point(name: str) -> bool:
    """Tell whether loaders look for a name first: that of an index, or of a file that needs none.

    Args:
        name: A file's path inside the output folder.
    """
    known = _WEIGHT_FILE.fullmatch(name)
    return known is not None and not any(known[group] for group in _SHARD_GROUPS)


def is_weight_file(name: str) -> bool:
    """Tell whether an earlier run, or a Hugging Face library, may have left a file of this name.

    Args:
        name: A file's path inside the output folder.

    Returns:
        True for weight files, shards and indexes of either format, and for ``consolidation.json``.
    """
    return name == MANIFEST_NAME or _WEIGHT_FILE.fullmatch(name) is not None
