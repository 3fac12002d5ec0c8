"""A pipeline whose optimizer states are gone: ``param_shapes`` still has the names of its tensors.

With masters, values tell which layer file is a tied module's. Without them its keys and shapes do,
where one file alone has them; otherwise the file keeps the number of its layer, and a note says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Checkpoint
from dist_consolidate.checkpoint.pipeline_names import TIED, layer_of, tie_of
from dist_consolidate.checkpoint.states import ModelState, Shapes, TensorsState
from dist_consolidate.errors import Problems


def has_names(models: Sequence[ModelState]) -> bool:
    """Whether the stages' model states record the names of their parameters."""
    return all(model.param_shapes is not None for model in models)


def named(
    folder: TagFolder,
    models: Sequence[ModelState],
    stages: Sequence[Checkpoint],
    files: Sequence[TensorsState],
    naming: str,
) -> list[Checkpoint]:
    """Give tied modules their names, and check that no recorded tensor is missing.

    Args:
        folder: The shards.
        models: The model states of each stage, of one tensor-parallel rank.
        stages: The stages' checkpoints, with every tensor named after its layer.
        files: That rank's layer files.
        naming: ``module`` for ``PipelineModule``'s names, ``layer`` to leave all as they are.

    Returns:
        The checkpoints.

    Raises:
        CheckpointError: If a recorded tensor of an ordinary layer is in no file.
    """
    shapes: Shapes = {n: s for m in models for g in m.param_shapes or () for n, s in g.items()}
    _check_layers(folder, shapes, stages)
    ties: dict[str, Shapes] = {}
    for name, shape in shapes.items():
        if (parts := tie_of(name)) is not None:
            ties.setdefault(parts[0], {})[parts[1]] = shape
    known = {layer_of(name) for name in shapes}
    fitting = {
        tie: [f.shard.layer or 0 for f in files if f.shard.layer not in known and _fits(f, keys)]
        for tie, keys in ties.items()
    }
    claimed = [layer for layers in fitting.values() for layer in layers]
    told = {
        f"{layers[0]}.": f"{TIED}{tie}."
        for tie, layers in fitting.items()
        if len(layers) == 1 and claimed.count(layers[0]) == 1
    }
    told = told if naming == "module" else {}
    open_ = [tie for tie in ties if f"{TIED}{tie}." not in told.values()]
    done = [_renamed(stage, told) for stage in stages]
    if open_ and naming == "module":
        note = (
            f"without optimizer states nothing tells which layer files hold the tied modules "
            f"{', '.join(open_)}, so their tensors are named after their layers"
        )
        done[0] = dataclasses.replace(done[0], notes=(*done[0].notes, note))
    return done


def _check_layers(folder: TagFolder, shapes: Shapes, stages: Sequence[Checkpoint]) -> None:
    problems, held = Problems(), {name for stage in stages for name in stage.module}
    for name in shapes:
        layer = layer_of(name)
        if layer is not None and name not in held:
            problems.add(
                f"{folder.path / f'layer_{layer:02d}-*model_states.pt'}: {name} is recorded, but "
                "in no layer file. Look for it where that stage's ranks saved"
            )
    problems.raise_if_any(f"{folder.path}: layer files are missing")


def _fits(file: TensorsState, keys: Shapes) -> bool:
    return all(k in file.entries and file.entries[k].span.shape == s for k, s in keys.items())


def _renamed(stage: Checkpoint, told: Mapping[str, str]) -> Checkpoint:
    """Change the first part of names."""

    def new(name: str) -> str:
        head = name.partition(".")[0] + "."
        return told.get(head, head) + name.removeprefix(head)

    return dataclasses.replace(
        stage,
        module={new(name): key for name, key in stage.module.items()},
        odd_entries={new(name): kind for name, kind in stage.odd_entries.items()},
        recorded_ties={new(alias): new(name) for alias, name in stage.recorded_ties.items()},
    )
