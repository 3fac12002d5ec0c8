"""A checkpoint as a mapping of names to tensors that are read when asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dist_consolidate.checkpoint.fragments import fragments
from dist_consolidate.checkpoint.layout import TagFolder, find_tag
from dist_consolidate.checkpoint.model import Checkpoint
from dist_consolidate.checkpoint.reader import read_checkpoint
from dist_consolidate.checkpoint.request import Request
from dist_consolidate.options import Options
from dist_consolidate.plan.plan import Plan
from dist_consolidate.units import plural

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of the checkpoint; nothing is read before :meth:`load`.

    Attributes:
        name: Its key in the model.
        shape: Its full shape.
        dtype: torch's name of the element type of the most precise copy, such as ``float32``.
        source: Which copy that is: ``fp32 partition``, ``frozen`` or ``module``.
        tied_to: The name that holds the data, if it is not this one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: str
    tied_to: str | None
    _checkpoint: LazyCheckpoint = dataclasses.field(repr=False)

    def load(self) -> torch.Tensor:
        """Read the tensor.

        Returns:
            A tensor of its own on the CPU, with this shape and dtype.

        Raises:
            CheckpointError: If a shard is gone, changed or cut short meanwhile.
        """
        return self._checkpoint._load(self.tied_to or self.name)


class LazyCheckpoint(Mapping[str, LazyTensor]):
    """The keys of a model, as a ZeRO checkpoint holds them.

    Attributes:
        tag: The tag that was opened.
        stage: ZeRO stage, 0 to 3.
        step: Training steps taken, or ``None`` where not recorded.
        world_size: Ranks that share the flat partitions.
        deepspeed_version: The release that wrote it, or ``None`` where not recorded.
        ties: Alias to the name that holds its data.
        missing: Keys of the model that have no data here, with reasons.
        notes: What was assumed, inferred or not followed.
    """

    def __init__(self, folder: TagFolder, checkpoint: Checkpoint, plan: Plan) -> None:
        """Wrap a plan; see :func:`dist_consolidate.open_checkpoint`."""
        self._folder, self._plan = folder, plan
        self._tensors = {tensor.name: tensor for tensor in plan.tensors}
        self._order = [n for n in checkpoint.module if n in self._tensors or n in plan.ties]
        self._order += [n for n in self._tensors if n not in checkpoint.module]
        self.tag, self.stage, self.step = checkpoint.tag, checkpoint.stage, checkpoint.step
        self.world_size = checkpoint.world_size
        self.deepspeed_version = checkpoint.ds_version
        self.ties = {alias: tie.holder for alias, tie in plan.ties.items()}
        self.missing, self.notes = plan.left_out, plan.notes

    def __repr__(self) -> str:
        """Say what it is."""
        held = plural(len(self), "tensor")
        return f"<ZeRO-{self.stage} checkpoint {self.tag}: {held}, step {self.step}>"

    def __getitem__(self, name: str) -> LazyTensor:
        """Give a tensor by its key."""
        holder = self.ties.get(name)
        source = self._tensors[holder or name].source
        return LazyTensor(name, source.shape, source.dtype.name, source.origin, holder, self)

    def __iter__(self) -> Iterator[str]:
        """Go through the keys in the model's order."""
        return iter(self._order)

    def __len__(self) -> int:
        """Count the keys."""
        return len(self._order)

    def _load(self, name: str) -> torch.Tensor:
        import torch

        from dist_consolidate.checkpoint.shards import ShardReader
        from dist_consolidate.runtime.buffers import host_bytes

        source = self._tensors[name].source
        num_bytes = source.num_numel * source.dtype.itemsize_bytes
        data, view = host_bytes(num_bytes, pinned=False)
        sizes = {shard.name: shard.num_bytes for shard in self._folder.shards}
        reader = ShardReader(self._folder.folders, sizes)
        try:
            for read in fragments(source, self._plan.groups):
                reader.fill(view, read)
        finally:
            reader.close()
        return data.view(getattr(torch, source.dtype.name)).view(source.shape)


def open_lazily(checkpoint_dir: Path, tag: str | None, request: Request) -> LazyCheckpoint:
    """Read the metadata of a checkpoint (see :func:`dist_consolidate.open_checkpoint`)."""
    from dist_consolidate.planning import plan_here

    folder = find_tag(checkpoint_dir, tag)
    checkpoint = read_checkpoint(folder, request=request)
    options = Options(dtype="keep", ties="drop", allow_missing=("*",), max_shard_size=None)
    return LazyCheckpoint(folder, checkpoint, plan_here(checkpoint, options))
