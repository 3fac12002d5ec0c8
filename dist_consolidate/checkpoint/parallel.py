"""Model parallelism: how many pipeline stages and tensor-parallel ranks a model-parallel index is.

Sources: DeepSpeed's ``PipeModelDataParallelTopology`` (index = stage * tensor degree + tensor
rank) and ``checkpoint_parallel_dimensions``, recorded since 0.19.5.
"""

from __future__ import annotations

import dataclasses

from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.states import ModelState


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """How a model is spread over model-parallel indices.

    Attributes:
        num_stages: Pipeline stages.
        tensor_degree: Ranks that share each tensor.
    """

    num_stages: int
    tensor_degree: int

    @property
    def size(self) -> int:
        """Number of model-parallel indices."""
        return self.num_stages * self.tensor_degree


def find_grid(folder: TagFolder, model: ModelState) -> Grid:
    """Tell the grid by what is recorded, and by names only where nothing is.

    Sequence parallelism has written names with ``mp_rank_01`` too; there the recorded
    model-parallel size is 1.

    Args:
        folder: The shards.
        model: The model states of rank 0.

    Returns:
        The grid.
    """
    if model.parallel_degrees is not None:
        return Grid(*model.parallel_degrees)
    recorded = model.mp_world_size if (model.mp_world_size or 0) > 0 else None
    size = recorded or len({s.mp_rank for s in folder.shards if s.role != "layer"})
    layers = folder.of("layer")
    if not layers:
        return Grid(1, size)
    degree = len({shard.mp_rank for shard in layers})
    return Grid(max(size // degree, 1), degree)
