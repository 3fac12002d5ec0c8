"""Trains small models under DeepSpeed's AutoTP and saves checkpoints with the live engine's truth.

Run under torchrun: ``python -m torch.distributed.run ... -m tests.tp_train OUT DEGREE RUN...``,
where a RUN is ``MODEL:STAGE:DTYPE`` and DEGREE ranks share a model. Each leaves in
``OUT/MODEL_zSTAGE_DTYPE`` the run folder ``ckpt``, ``truth.pt`` (the full model in fp32) and the
model's ``config.json``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups, safe_get_full_fp32_param
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

# A prime: no number of ranks shares it evenly.
VOCAB, LENGTH, STEPS = 61, 8, 2
# More than a parameter has elements; with the rank it still fits a float's 24 bits.
PLACES = 1 << 20


def llama(*, tied: bool = False) -> nn.Module:
    """Grouped-query attention; its head is split unevenly."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def half_frozen_llama() -> nn.Module:
    """Every second parameter frozen, and buffers."""
    model = llama()
    for number, param in enumerate(model.parameters()):
        param.requires_grad_(number % 2 == 1)
    model.register_buffer("positions", torch.arange(5) + 2**40)
    model.register_buffer("mean", torch.tensor([0.1, -0.2]))
    model.register_buffer("count", torch.tensor(7))
    return model


def opt() -> nn.Module:
    """Biases everywhere, and a tied head."""
    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
        attn_implementation="eager",
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
    )
    return OPTForCausalLM(config)


class Fused(nn.Module):
    """Query, key and value in one matrix, gate and up in another, all with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.qkv = nn.Linear(32, 32 + 16 + 16)
        self.mix = nn.Linear(32, 32)
        self.gate_up = nn.Linear(32, 2 * 48)
        self.down = nn.Linear(48, 32)
        self.out = nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> SimpleNamespace:
        """Give the loss; each product is of what one rank holds."""
        hidden = self.embed(input_ids)
        query, rest = self.qkv(hidden).chunk(2, dim=-1)
        hidden = hidden + self.mix(query * rest)
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        hidden = hidden + self.down(gate.sigmoid() * up)
        scores = self.out(hidden).flatten(0, 1)
        return SimpleNamespace(loss=nn.functional.cross_entropy(scores, labels.flatten()))


FUSED_LAYERS = [
    {"patterns": [r".*qkv\.weight$"], "partition_type": "column", "shape": [[32, 16, 16], -1]},
    {"patterns": [r".*gate_up\.weight$"], "partition_type": "column", "shape": [2, -1]},
    {"patterns": [r".*(mix|down)\.weight$"], "partition_type": "row"},
    {"patterns": [r".*out\.weight$"], "partition_type": "skip"},
]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "tied": lambda: llama(tied=True),
    "half": half_frozen_llama,
    "opt": opt,
    "fused": Fused,
}


def engine_config(name: str, stage: int, dtype: str, degree: int) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    zero = {
        "stage": stage,
        "overlap_comm": False,
        "sub_group_size": 3000,
        "stage3_param_persistence_threshold": 0,
    }
    parallel: dict[str, Any] = {"autotp_size": degree}
    if name == "fused":
        layers = [{**layer, "partition_dim": 0} for layer in FUSED_LAYERS if "shape" in layer]
        layers += [layer for layer in FUSED_LAYERS if "shape" not in layer]
        parallel["partition_config"] = {"use_default_specs": False, "layer_specs": layers}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bf16"},
        "tensor_parallel": parallel,
    }


def train(engine: Any) -> None:
    """A few steps on random tokens, the same ones on the ranks that share a model."""
    generator = torch.Generator().manual_seed(groups._get_data_parallel_rank())
    for _ in range(STEPS):
        ids = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()


def masters(engine: Any) -> dict[int, Tensor]:
    """The fp32 masters of 16-bit training without ZeRO, by parameter."""
    optimizer, found = engine.optimizer, {}
    for index, params in enumerate(getattr(optimizer, "fp16_groups", ())):
        if hasattr(optimizer, "fp32_groups"):
            values = optimizer.fp32_groups[index]
        else:
            flat = optimizer.fp32_groups_flat[index]
            values = flat.split([param.numel() for param in params])
        for param, value in zip(params, values, strict=True):
            found[id(param)] = value.detach().float().clone()
    return found


def shard_value(param: nn.Parameter, stage: int, apart: dict[int, Tensor]) -> Tensor:
    """This tensor rank's part of a parameter, as precise as the live engine has it."""
    if id(param) in apart:
        return apart[id(param)]
    if param.requires_grad and stage:
        value = safe_get_full_fp32_param(param)
        if value is None:
            raise RuntimeError("a trained parameter has no fp32 copy")
        return value.clone()
    with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
        return param.detach().float().clone()


def gathered_places(layer: nn.Module, stage: int) -> dict[str, Tensor]:
    """Let DeepSpeed gather numbers instead of weights: rank and place of each element.

    Args:
        layer: A module with parameters of its own.
        stage: The ZeRO stage.

    Returns:
        By parameter, for each element of the full tensor where it lies.
    """
    rank = groups.get_tensor_model_parallel_rank()
    params = dict(layer.named_parameters(recurse=False))
    with deepspeed.zero.GatheredParameters(list(params.values()), enabled=stage == 3):
        weights = {name: param.data for name, param in params.items()}
        for param in params.values():
            numbers = torch.arange(param.numel(), dtype=torch.float32) + rank * PLACES
            param.data = numbers.view(param.shape)
        if hasattr(layer, "gather_params"):
            layer.gather_params([params[key] for key in ("weight", "bias") if key in params])
        places = {name: param.data.detach().long().clone() for name, param in params.items()}
        for name, param in params.items():
            param.data = weights[name]
    return places


def full_values(engine: Any, stage: int, degree: int) -> dict[str, Tensor]:
    """Every parameter in full: each rank's masters, put where DeepSpeed's gathering puts them."""
    model, apart = engine.module, {} if stage else masters(engine)
    found: dict[str, Tensor] = {}
    names = {id(param): name for name, param in model.named_parameters()}
    for layer in model.modules():
        own = list(layer.named_parameters(recurse=False))
        places = gathered_places(layer, stage) if own else {}
        for key, param in own:
            name = names[id(param)]
            if name not in found:
                value = shard_value(param, stage, apart).flatten()
                found[name] = _placed(value, places[key], degree)
    return found


def _placed(value: Tensor, places: Tensor, degree: int) -> Tensor:
    shards: list[Any] = [None] * degree
    group = groups.get_tensor_model_parallel_group()
    torch.distributed.all_gather_object(shards, value, group=group)
    full = torch.empty(places.numel())
    wanted = places.flatten()
    for rank, shard in enumerate(shards):
        mine = (wanted // PLACES) == rank
        full[mine] = shard[wanted[mine] % PLACES]
    return full.view(places.shape)


def live_truth(engine: Any, stage: int, degree: int) -> dict[str, Any]:
    """Every key of the model with its value, and which names are one parameter."""
    model = engine.module
    keys = model.state_dict().keys()
    values = full_values(engine, stage, degree)
    owners = {id(param): name for name, param in model.named_parameters()}
    ties = {name: [name] for name in values}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = owners[id(param)]
        if name != owner:
            ties[owner].append(name)
            values[name] = values[owner]
    for name, buffer in model.named_buffers():
        if name in keys:
            values[name] = buffer.float() if buffer.is_floating_point() else buffer
    return {
        "fp32": {name: values[name].clone() for name in keys},
        "ties": [names for names in ties.values() if len(names) > 1],
    }


def run(out: Path, name: str, stage: int, dtype: str, degree: int) -> None:
    """Train one model, save its checkpoint and its truth."""
    torch.manual_seed(0)
    model = MODELS[name]()
    folder = out / f"{name}_z{stage}_{dtype}"
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[param for param in model.parameters() if param.requires_grad],
        config=engine_config(name, stage, dtype, degree),
    )
    train(engine)
    engine.save_checkpoint(str(folder / "ckpt"))
    truth = live_truth(engine, stage, degree)
    if torch.distributed.get_rank() == 0:
        torch.save(truth, folder / "truth.pt")
        if hasattr(model, "config"):
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
    engine.destroy()


def main(out: str, degree: str, *runs: str) -> None:
    """Do all runs in turn."""
    # DeepSpeed's shared-memory collectives leave their buffers in /dev/shm; gloo does without.
    # (As an attribute, `deepspeed.comm.torch` is torch itself.)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.set_num_threads(1)
    for name, stage, dtype in (text.split(":") for text in runs):
        run(Path(out), name, int(stage), dtype, int(degree))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
