"""What the names of a pipeline's tensors tell, and the tensors of its layer files.

``PipelineModule`` calls a tensor ``{layer}.{name}``, and ``tied_modules.{tie}.{name}`` where the
layer is a ``TiedLayerSpec``.

Source: DeepSpeed's ``runtime/pipe/module.py`` (``_build``).
"""

from __future__ import annotations

TIED = "tied_modules."
_MAX_DIGITS = 10  # no pipeline has so many layers


def layer_of(name: str) -> int | None:
    """Give the number of the ordinary layer that a tensor's name begins with."""
    number, dot, _ = name.partition(".")
    is_number = number.isascii() and number.isdigit() and len(number) < _MAX_DIGITS
    return int(number) if dot and is_number else None


def tie_of(name: str) -> tuple[str, str] | None:
    """Split the name of a tied module's tensor into the tie and the module's own name for it."""
    if not name.startswith(TIED):
        return None
    tie, _, key = name.removeprefix(TIED).partition(".")
    return tie, key
