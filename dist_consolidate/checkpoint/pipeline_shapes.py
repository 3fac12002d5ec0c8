"""Parameter shapes that a pipeline engine under BF16_Optimizer without ZeRO does not record.

With bf16 and stage 0 the engine writes partitioned optimizer states like those of stage 1, but
``param_shapes`` only under ZeRO. The names and sizes are in ``param_slice_mappings``; the shapes
are those of the layer files' tensors.

Source: DeepSpeed's ``runtime/engine.py`` (``_do_optimizer_sanity_check``,
``_common_checkpoint_state``) and ``runtime/bf16_optimizer.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from dist_consolidate.checkpoint.pipeline_names import layer_of, tie_of
from dist_consolidate.checkpoint.states import ModelState, OptimState, Shapes, TensorsState
from dist_consolidate.errors import Problems


def with_shapes(
    folder: Path,
    model: ModelState,
    optims: Sequence[OptimState],
    files: Sequence[TensorsState],
    problems: Problems,
) -> ModelState:
    """Add the parameter shapes to the model states of one stage, where nothing records them.

    Args:
        folder: The tag folder.
        model: The model states.
        optims: The optimizer states of every rank, in rank order.
        files: The layer files of the same tensor-parallel rank.
        problems: Takes parameters whose shape cannot be found.

    Returns:
        The model states.
    """
    recorded = model.param_shapes is not None or any(o.param_shapes is not None for o in optims)
    if recorded or not optims or any(optim.slices is None for optim in optims):
        return model
    shapes = []
    for group in range(len(optims[0].parts)):
        sizes = _sizes(folder, group, optims, problems)
        found: Shapes = {}
        for name, numel in sizes.items():
            shape = _shape(name, numel, files)
            if shape is None:
                layer = layer_of(name)
                where = "a layer file" if layer is None else f"a file of layer {layer}"
                problems.add(
                    f"{folder / optims[0].shard.name}: {name} has {numel} elements, but its shape "
                    f"is in no file; expected a tensor of that size in {where}"
                )
            else:
                found[name] = shape
        shapes.append(found)
    return dataclasses.replace(model, param_shapes=tuple(shapes))


def _sizes(
    folder: Path, group: int, optims: Sequence[OptimState], problems: Problems
) -> dict[str, int]:
    """Put the ranks' slices of one group together: each parameter's number of elements."""
    sizes: dict[str, int] = {}
    origin = end = 0
    for optim in optims:
        slices = (optim.slices or ())[group] if group < len(optim.slices or ()) else {}
        for name, (start, numel) in sorted(slices.items(), key=lambda item: item[1][0]):
            if origin + start != end or (name in sizes and name != list(sizes)[-1]):
                problems.add(
                    f"{folder / optim.shard.name}: param_slice_mappings puts {name} at element "
                    f"{origin + start} of param group {group}, expected {end}; this layout is not "
                    "known"
                )
            sizes[name] = sizes.get(name, 0) + numel
            end = origin + start + numel
        origin += optim.parts[group].num_numel
    return sizes


def _shape(name: str, numel: int, files: Sequence[TensorsState]) -> tuple[int, ...] | None:
    """Find a parameter's shape; of a tied one in the files that have its name for a tensor."""
    layer, tie = layer_of(name), tie_of(name)
    key = name.partition(".")[2] if tie is None else tie[1]
    named = [f for f in files if key in f.entries and (tie is not None or f.shard.layer == layer)]
    found = {file.entries[key].span.shape for file in named}
    shapes = {shape for shape in found if math.prod(shape) == numel}
    return next(iter(shapes)) if len(shapes) == 1 else None
