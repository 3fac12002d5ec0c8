"""From the states of every pipeline stage, and the layer files, to one checkpoint per stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dist_consolidate.checkpoint import pipeline_masters, pipeline_recorded, pipeline_shapes
from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Checkpoint
from dist_consolidate.checkpoint.parallel import Grid
from dist_consolidate.checkpoint.pipeline_layers import with_layers
from dist_consolidate.checkpoint.states import ModelState, OptimState, TensorsState
from dist_consolidate.errors import CheckpointError, Problems


def is_pipeline(folder: TagFolder, model: ModelState) -> bool:
    """Tell whether a pipeline engine wrote a checkpoint.

    Args:
        folder: The shards.
        model: The model states of rank 0.

    Returns:
        Whether the weights are in layer files.

    Raises:
        CheckpointError: If the layer files are missing, or left over from another run.
    """
    layers = folder.of("layer")
    if model.module is None and not layers:
        raise CheckpointError(
            f"{folder.path / 'layer_*-model_states.pt'}: all layer files are missing, and with "
            "them the buffers and whatever has no fp32 master; `module` of "
            f"{model.shard.name} is empty, as pipeline engines leave it. Look for them where the "
            "first rank of each pipeline stage saved"
        )
    if model.module is not None and layers:
        raise CheckpointError(
            f"{folder.path / layers[0].name}: holds a pipeline layer, but {model.shard.name} is "
            "not of a pipeline engine: saves of two runs lie on top of each other; move away what "
            "is left over"
        )
    return model.module is None


class PipelineStages:
    """The stages of a pipeline, each of one or more tensor-parallel ranks."""

    def __init__(
        self, folder: TagFolder, grid: Grid, layers: Sequence[Sequence[TensorsState]]
    ) -> None:
        """Set up.

        Args:
            folder: The shards.
            grid: How the model is spread.
            layers: The layer files of each tensor-parallel rank, in the layers' order.
        """
        self.folder, self.grid, self.layers = folder, grid, layers

    def _rank(self, index: int) -> int:
        """Give the tensor-parallel rank of a model-parallel index."""
        return index % self.grid.tensor_degree

    def with_shapes(
        self, models: Sequence[ModelState], optims: Sequence[Sequence[OptimState]]
    ) -> list[ModelState]:
        """Add the parameter shapes where only the layer files have them.

        Args:
            models: The model states of each model-parallel index.
            optims: Its optimizer states.

        Returns:
            The model states.

        Raises:
            CheckpointError: If a shape cannot be found.
        """
        problems, path = Problems(), self.folder.path
        completed = [
            pipeline_shapes.with_shapes(path, model, states, self.layers[self._rank(i)], problems)
            for i, (model, states) in enumerate(zip(models, optims, strict=True))
        ]
        problems.raise_if_any(f"{path}: the layer files do not fit the optimizer states")
        return completed

    def with_layers(
        self, models: Sequence[ModelState], checkpoints: Sequence[Checkpoint], naming: str
    ) -> list[Checkpoint]:
        """Add what the layer files hold.

        Args:
            models: The model states of each model-parallel index.
            checkpoints: Its checkpoint.
            naming: How tensors are named.

        Returns:
            The checkpoint of each model-parallel index, with all keys in ``module``.

        Raises:
            CheckpointError: If layer files are missing or contradict the fp32 masters.
        """
        done = list(checkpoints)
        for rank, files in enumerate(self.layers):
            mine = slice(rank, None, self.grid.tensor_degree)
            done[mine] = self._attach(models[mine], checkpoints[mine], files, naming)
        return done

    def _attach(
        self,
        models: Sequence[ModelState],
        stages: Sequence[Checkpoint],
        files: Sequence[TensorsState],
        naming: str,
    ) -> list[Checkpoint]:
        buffers = [model.buffer_names or frozenset[str]() for model in models]
        nameless = not any(stage.partitions for stage in stages)
        if nameless and pipeline_recorded.has_names(models):
            placed = with_layers(self.folder, stages, buffers, files, naming)
            return pipeline_recorded.named(self.folder, models, placed, files, naming)
        if nameless:
            stages = self._nameless(models, stages, files)
        return with_layers(self.folder, stages, buffers, files, naming)

    def _nameless(
        self,
        models: Sequence[ModelState],
        stages: Sequence[Checkpoint],
        files: Sequence[TensorsState],
    ) -> list[Checkpoint]:
        """Find the masters of stage 0, which have no names."""
        problems, notes, path = Problems(), list[str](), self.folder.path
        found = pipeline_masters.masters(self.folder.folders, models, files, problems, notes)
        problems.raise_if_any(f"{path}: the layer files do not fit the optimizer states")
        dtypes = [e.span.dtype for f in files for e in f.entries.values() if e.span.num_numel]
        if not any(found) and not any(dtype.name == "float32" for dtype in dtypes):
            notes.append("no fp32 masters were saved; the 16-bit weights are all there is")
        notes.append(
            "nothing at stage 0 records which layers are tied and what PipelineModule calls them, "
            "so every tensor is named after its layer"
        )
        notes = [*stages[0].notes, *notes]
        return [
            dataclasses.replace(
                stage, partitions=mine, notes=tuple(notes if not i else stage.notes)
            )
            for i, (stage, mine) in enumerate(zip(stages, found, strict=True))
        ]
