"""Full shapes of a Hugging Face model, from its ``config.json``: no weight, no code of its own.

The model class is built on the meta device, which takes milliseconds and no memory. transformers
is imported here only, and only when something needs it. A checkpoint may come from anywhere, so
that entries which make transformers fetch or run something (code of the model's own, attention
kernels, quantizers) are dropped first; shapes do not depend on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_consolidate.checkpoint.tensor_pieces import Shape
from dist_consolidate.checkpoint.tensor_user import read_limited
from dist_consolidate.errors import Caught, UsageError

_MAX_BYTES = 16 << 20

# Linear layers and embeddings whose rows and columns are one thing each, so that slices in rank
# order make the full matrix. Whatever is fused (qkv_proj, c_attn, gate_up_proj, dense_h_to_4h
# with a gate, ...) fits the full shape as well when joined in the wrong order; it is not here.
_UNFUSED = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "query", "key", "value", "dense"),
        *("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo", "fc1", "fc2", "fc_in", "fc_out"),
        *("gate_proj", "up_proj", "down_proj", "dense_4h_to_h"),
        *("lm_head", "embed_out", "embed_tokens", "wte", "word_embeddings", "shared"),
    )
)
_MOST = {"layer": 10_000, "expert": 10_000, "block": 1 << 20, "depth": 10_000, "position": 1 << 24}
# Each names code to be fetched or run.
_DROPPED = frozenset(
    ("auto_map", "attn_implementation", "experts_implementation", "quantization_config")
)


def find_config(folder: Path) -> Path | None:
    """Find a ``config.json`` in the tag folder or the run folder."""
    return next(
        (p for p in (folder / "config.json", folder.parent / "config.json") if _is(p)), None
    )


def _is(path: Path) -> bool:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return False
        return "architectures" in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def is_unfused(name: str) -> bool:
    """Whether a tensor belongs to a layer that is known not to be fused of several."""
    parts = name.split(".")
    return len(parts) > 1 and parts[-2] in _UNFUSED


def full_shapes(path: Path) -> dict[str, Shape]:
    """Build a model on the meta device and read its shapes.

    Args:
        path: ``config.json``, or the folder that holds it.

    Returns:
        The full shape of each key of its state dict.

    Raises:
        UsageError: If it cannot be read, names no class of transformers, or transformers is not
            installed.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        tree = json.loads(read_limited(file, "--hf-config"))
    except OSError as error:
        raise UsageError(f"--hf-config {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--hf-config {file}: is no JSON: {error}") from error
    names = tree.get("architectures") if isinstance(tree, dict) else None
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UsageError(f"--hf-config {file}: names no model class (`architectures`)")
    shapes: dict[str, Shape] = {}
    with (caught := Caught()):
        shapes = _on_meta(tree, names[0])
    if isinstance(caught.error, ImportError):
        raise UsageError(
            f"--hf-config {file}: reading it needs transformers, which cannot be imported "
            f"({caught.error}); install it, or give the layout with --tp-rules FILE"
        ) from caught.error
    if caught.error is not None:
        kind = type(caught.error).__name__
        raise UsageError(
            f"--hf-config {file}: {names[0]} cannot be built from it ({kind}: {caught.error})"
        ) from caught.error
    return shapes


def _harmless(value: Any, key: str = "") -> Any:  # noqa: ANN401 - any JSON
    """Drop the entries that speak of code, at any depth; refuse numbers that would never end."""
    if isinstance(value, dict):
        return {
            key: _harmless(item, key)
            for key, item in value.items()
            if key not in _DROPPED and not key.startswith("_")
        }
    if isinstance(value, list):
        return [_harmless(item, key) for item in value]
    # Of the numbers of layers and experts, as many modules are made; of positions, tables.
    for word, most in _MOST.items():
        if word in key and isinstance(value, int) and value > most:
            raise ValueError(f"{key} = {value:.6g} is beyond {most}")
    return value


def _on_meta(tree: dict[str, Any], name: str) -> dict[str, Shape]:
    import torch
    import transformers

    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"transformers {transformers.__version__} has no such model class")
    if kind.config_class is None:
        raise ValueError(f"{name} is no model of its own")
    config = kind.config_class.from_dict(_harmless(tree))
    with torch.device("meta"):
        build: Callable[..., transformers.PreTrainedModel] = kind._from_config
        model = build(config, attn_implementation="eager")
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
