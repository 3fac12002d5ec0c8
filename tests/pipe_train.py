"""Trains small pipelines under real DeepSpeed; saves checkpoints with the live engines' truth.

Run under torchrun: ``python -m torch.distributed.run ... -m tests.pipe_train OUT RUN...``, where a
RUN is ``MODEL:ZERO_STAGE:DTYPE:NUM_STAGES[:OPTION...]``. Each leaves in ``OUT/RUN`` (colons
replaced by underscores) the run folder ``ckpt`` and, for every pipeline stage, ``truth_S.pt``:
what the stage's own module holds, by its own names and by the layers' numbers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

VOCAB, WIDTH, STEPS = 23, 13, 2


class Block(nn.Module):
    """A layer with a buffer that no float can hold and one that changes while training."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("ids", torch.arange(number + 3) + 2**40)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.relu(self.norm(self.fc(x)))


class HalfFrozen(Block):
    """A layer of which the matrix is frozen."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.fc.weight.requires_grad_(False)


class Frozen(nn.Linear):
    """A layer that is frozen whole."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class TwinBlock(nn.Module):
    """One matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.two(self.one(x)))


class Mixer(nn.Module):
    """A layer that can be tied and used with its own forward; it has a buffer too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.weight.to(x.dtype) * self.scale.to(x.dtype)


class Biased(nn.Module):
    """A tied layer of which only ``weight`` is kept equal over stages."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.weight + self.bias


def embed(x: Tensor) -> Tensor:
    """Make the inputs floating, as the first layer of models without an embedding."""
    return torch.nn.functional.one_hot(x, WIDTH).to(DTYPES[-1])


def relu(x: Tensor) -> Tensor:
    """A layer without a state."""
    return torch.relu(x)


def head(module: nn.Embedding, x: Tensor) -> Tensor:
    """Use the embedding as the output's matrix."""
    return x @ module.weight.t()


def plain() -> list[Any]:
    """No ties; layers with and without a state."""
    ends = [LayerSpec(nn.Embedding, VOCAB, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCAB)]
    inner = [LayerSpec(Block, 0), relu, LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Block, 1)]
    return [ends[0], *inner, ends[1]]


def tied() -> list[Any]:
    """The head is the embedding, through a function of its own; then there is one file."""
    first = TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH)
    last = TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH, forward_fn=head)
    inner = [LayerSpec(Block, 0), LayerSpec(nn.Linear, WIDTH, WIDTH), relu, LayerSpec(Block, 1)]
    return [first, *inner, last]


def repeated() -> list[Any]:
    """A tied layer used with its own forward, twice in one stage and once in the last."""
    mixer = [TiedLayerSpec("mixer", Mixer) for _ in range(3)]
    ends = [LayerSpec(nn.Embedding, VOCAB, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCAB)]
    return [
        ends[0],
        mixer[0],
        mixer[1],
        LayerSpec(Block, 0),
        LayerSpec(Block, 1),
        mixer[2],
        ends[1],
    ]


def biased() -> list[Any]:
    """Tied layers of which only the matrix is kept equal."""
    both = [TiedLayerSpec("mixer", Biased) for _ in range(2)]
    ends = [LayerSpec(nn.Embedding, VOCAB, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCAB)]
    return [ends[0], both[0], LayerSpec(Block, 0), LayerSpec(Block, 1), both[1], ends[1]]


def frozen() -> list[Any]:
    """Layers that are frozen in part and whole."""
    ends = [LayerSpec(nn.Embedding, VOCAB, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCAB)]
    inner = [LayerSpec(HalfFrozen, 0), LayerSpec(Frozen), LayerSpec(Block, 1), LayerSpec(Frozen)]
    return [ends[0], *inner, ends[1]]


def shared() -> list[Any]:
    """One module as two layers of a stage, and a matrix under two names in each stage."""
    again = nn.Linear(WIDTH, WIDTH)
    ends = [LayerSpec(nn.Embedding, VOCAB, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCAB)]
    return [ends[0], again, again, LayerSpec(TwinBlock), LayerSpec(TwinBlock), ends[1]]


MODELS: dict[str, Callable[[], list[Any]]] = {
    "plain": plain,
    "tied": tied,
    "repeated": repeated,
    "biased": biased,
    "frozen": frozen,
    "shared": shared,
}
DTYPES = [torch.float32]


def engine_config(stage: int, dtype: str, options: list[str]) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    bf16: dict[str, Any] = {"enabled": dtype == "bf16"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "bf16": bf16,
    }
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if "bf16opt" in options:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if "bf16acc" in options:
        config["data_types"] = {"grad_accum_dtype": "bf16"}
    if "fused" in options:
        # The wrapper that flattens masters is for this class; the GPU's is not here.
        deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW
    if "parallel" in options:
        config["checkpoint"] = {"parallel_write": {"pipeline_stage": True}}
    return config


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens, other ones on each data-parallel rank."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        ids = torch.randint(0, WIDTH, (2, 5), generator=generator)
        yield ids, ids


def loss(output: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(output.float().flatten(0, 1), labels.flatten())


def full_value(engine: Any, param: nn.Parameter) -> Tensor:
    """The most precise value of a parameter in the live engine (collective under ZeRO)."""
    optimizer = engine.optimizer
    flat = getattr(optimizer, "fp32_groups_flat", None)
    if flat is not None and hasattr(optimizer, "fp16_groups"):
        for group, ours in zip(flat, optimizer.fp16_groups, strict=True):
            for low, master in zip(ours, _unflatten(group, ours), strict=True):
                if low is param:
                    return master
        return param.detach().clone()
    for ours, theirs in zip(
        getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=True
    ):
        for low, master in zip(ours, theirs, strict=True):
            if low is param:
                return master.detach().clone()
    if param.requires_grad and hasattr(param, "_hp_mapping"):
        value = safe_get_full_fp32_param(param)
        if value is None:
            raise RuntimeError("a trained parameter has no fp32 copy")
        return value.clone()
    return param.detach().clone()


def _unflatten(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    parts = flat.detach().split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).clone() for part, tensor in zip(parts, tensors, strict=True)]


def live_truth(engine: Any) -> dict[str, Any]:
    """Every key of this stage's module with its value, and the same by the layers' numbers."""
    module = engine.module
    masters = {id(param): full_value(engine, param) for param in module.parameters()}
    live = module.state_dict(keep_vars=True)

    def value(tensor: Tensor) -> Tensor:
        found = masters.get(id(tensor), tensor.detach())
        return found.float().clone() if found.is_floating_point() else found.clone()

    start = module._local_start
    layers = {start + i: layer for i, layer in enumerate(module.forward_funcs)}
    return {
        "named": {name: value(tensor) for name, tensor in live.items()},
        "raw": {name: tensor.detach().clone() for name, tensor in live.items()},
        "by_layer": {
            f"{number}.{name}": value(tensor)
            for number, layer in layers.items()
            if hasattr(layer, "state_dict")
            for name, tensor in layer.state_dict(keep_vars=True).items()
        },
        "trained": [name for name, tensor in live.items() if tensor.requires_grad],
        "optimizer": type(engine.optimizer).__name__,
    }


def run(out: Path, text: str) -> None:
    """Train one model, save its checkpoint and its truth."""
    name, stage, dtype, num_stages, *options = text.split(":")
    torch.manual_seed(0)
    DTYPES.append({"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32))
    module = PipelineModule(
        MODELS[name](),
        num_stages=int(num_stages),
        loss_fn=loss,
        partition_method="uniform",
        seed_layers=name == "biased",
    )
    folder = out / text.replace(":", "_")
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        config=engine_config(int(stage), dtype, options),
    )
    data = batches(engine.grid.data_parallel_id)
    for _ in range(STEPS):
        engine.train_batch(data)
    engine.save_checkpoint(str(folder / "ckpt"), exclude_frozen_parameters="nofrozen" in options)
    truth = live_truth(engine)
    if engine.grid.data_parallel_id == 0:
        torch.save(truth, folder / f"truth_{engine.grid.get_stage_id()}.pt")
    torch.distributed.barrier()
    engine.destroy()


def start() -> None:
    """Join the other processes."""
    # DeepSpeed's shared-memory collectives leave their buffers in /dev/shm; gloo does without.
    # (`deepspeed.comm.torch` would be torch itself.)
    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    # Whether this CPU is fast at fp16 does not matter here.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    torch.set_num_threads(1)


def main(out: str, *runs: str) -> None:
    """Do all runs in turn."""
    start()
    for text in runs:
        run(Path(out), text)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
