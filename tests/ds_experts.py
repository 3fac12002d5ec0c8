"""Trains small models with experts under real DeepSpeed and saves them with the live truth.

Run under torchrun: ``python -m torch.distributed.run ... -m tests.ds_experts OUT RUN...``, where a
RUN is ``MODEL:STAGE:DTYPE[:OPTION...]``; options are ``before`` (data before expert parallelism),
``elastic``, ``round`` (round robin gradients), ``fused`` (flat masters at stage 0), ``tp`` (two
tensor ranks, AutoTP) and ``shuffle`` (odd ranks have the param groups of experts in another order,
as Python's hashing of strings may bring about). Each leaves ``ckpt`` and ``truth.pt`` in a folder
named like the run, with ``-`` for ``:``. The truth is gathered from all ranks, under the experts'
global numbers.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups, safe_get_full_fp32_param
from torch import Tensor, nn

WIDTH, STEPS = 12, 3
FUSED_ADAM = deepspeed.runtime.engine.FusedAdam
FUSED = re.compile(r".*\.experts\.w[123]")
LOCAL = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")


class Expert(nn.Module):
    """Two linear layers and a buffer that counts something."""

    def __init__(self, inner: int, buffer: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)
        if buffer:
            self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class TiedExpert(nn.Module):
    """An expert with one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


class Net(nn.Module):
    """Dense layers with experts between them."""

    def __init__(self, *layers: Callable[[], nn.Module], tie: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for make in layers)
        self.last = nn.Linear(WIDTH, WIDTH)
        if tie:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            out = layer(x)
            x = x + (out[0] if isinstance(out, tuple) else out)
        return self.last(x)


def experts(
    count: int, size: int, inner: int = 7, residual: bool = False, make: Any = Expert, **kwargs: Any
) -> Callable[[], nn.Module]:
    """A layer of ``count`` experts over ``size`` ranks."""

    def layer() -> nn.Module:
        expert = make(inner, **kwargs) if make is Expert else make()
        return MoE(
            WIDTH, expert, num_experts=count, ep_size=size, k=1, capacity_factor=2.0,
            use_residual=residual, noisy_gate_policy=None, use_rts=False,
        )  # fmt: skip

    return layer


def frozen() -> nn.Module:
    """The experts of the first layer and a dense bias are frozen."""
    net = Net(experts(4, 2), experts(2, 2, 5))
    for param in net.layers[0].deepspeed_moe.experts.parameters():
        param.requires_grad_(False)
    net.first.bias.requires_grad_(False)
    return net


def mixtral() -> nn.Module:
    """Mixtral, whose experts DeepSpeed fuses itself (AutoEP)."""
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.utils import output_capturing

    registry = output_capturing._CanRecordRegistry
    if registry.get.__code__.co_argcount == 2:
        # DeepSpeed 0.19.8 asks this registry for a default, which transformers 5 does not take.
        get = registry.get
        registry.get = lambda self, key, default=None: get(self, key)
    config = MixtralConfig(
        vocab_size=31, hidden_size=WIDTH, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    return MixtralForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ep1": lambda: Net(experts(2, 1)),
    "ep2": lambda: Net(experts(4, 2), experts(2, 2, 5)),
    "ep4": lambda: Net(experts(8, 4)),
    "mixed": lambda: Net(experts(4, 2), experts(4, 4, 5), experts(3, 1, 4)),
    "mixed2": lambda: Net(experts(4, 2), experts(3, 1, 4)),
    "residual": lambda: Net(experts(4, 2, residual=True, buffer=True), tie=True),
    "tied": lambda: Net(experts(4, 2, make=TiedExpert)),
    "frozen": frozen,
    "auto1": mixtral,
    "auto2": mixtral,
    "auto4": mixtral,
}


def engine_config(name: str, stage: int, dtype: str, options: list[str]) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False}
    zero |= {"elastic_checkpoint": True} if "elastic" in options else {}
    zero |= {"round_robin_gradients": True} if "round" in options else {}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 4},
    }
    if name.startswith("auto"):
        size, preset = int(name[4:]), {"preset_model": "mixtral", "use_grouped_mm": False}
        config["expert_parallel"] = {"enabled": True, "autoep_size": size, **preset}
    if "tp" in options:
        columns = {"patterns": [r".*self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"}
        rows = {"patterns": [r".*o_proj\.weight$"], "partition_type": "row"}
        specs = {"use_default_specs": False, "layer_specs": [columns, rows]}
        config["tensor_parallel"] = {"autotp_size": 2, "partition_config": specs}
    if stage and dtype == "bf16":
        config["data_types"] = {"grad_accum_dtype": "bf16"}
    return config | ({"use_data_before_expert_parallelism": True} if "before" in options else {})


def scramble(model: nn.Module, before: bool) -> None:
    """Make every expert and every other parameter of its own value, the same on all replicas."""
    rank, world, numbers = dist.get_rank(), dist.get_world_size(), {}
    for prefix, layer in model.named_modules():
        if isinstance(layer, MoE):
            of_layer = rank // (world // layer.ep_size) if before else rank % layer.ep_size
            numbers[prefix] = of_layer * layer.num_local_experts
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            seed = sum(map(ord, global_name(name, numbers)))
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
            tensor.add_(noise.to(tensor.dtype) * 0.05)


def global_name(name: str, starts: dict[str, int]) -> str:
    """The name under the expert's global number."""
    match = LOCAL.fullmatch(name)
    if not match:
        return name
    start = next(s for prefix, s in starts.items() if name.startswith(f"{prefix}.deepspeed_moe."))
    return f"{match[1]}{int(match[2]) + start}{match[3]}"


def live_truth(engine: Any, stage: int) -> dict[str, Any]:
    """Every key of the model on this rank with its value, experts under their global numbers."""
    model = engine.module
    starts = {
        prefix: groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
        for prefix, layer in model.named_modules()
        if isinstance(layer, MoE)
    }
    values = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    masters, names = masters_of(engine, stage), {}
    for name, param in model.named_parameters(remove_duplicate=False):
        # Under ZeRO-3 the state dict lacks the experts.
        values[name] = masters.get(id(param), values.get(name)).float()
        names.setdefault(id(param), []).append(global_name(name, starts))
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    for name in [name for name in values if FUSED.fullmatch(name)]:
        rows = values.pop(name)
        first = groups._get_expert_parallel_rank(groups._get_max_expert_size_name()) * len(rows)
        values |= {f"{name}.{first + index}": row for index, row in enumerate(rows)}
    return {
        "fp32": {
            global_name(name, starts): value.float().clone() for name, value in values.items()
        },
        "ties": [tied for tied in names.values() if len(tied) > 1],
        "frozen": [global_name(name, starts) for name in frozen],
        "buffers": [global_name(name, starts) for name, _ in model.named_buffers()],
    }


def masters_of(engine: Any, stage: int) -> dict[int, Tensor]:
    """The fp32 masters of the live optimizer by parameter, put together over the ranks."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_flat"):  # a fused optimizer without ZeRO
        found = {}
        for params, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            pieces = flat.detach().split([param.numel() for param in params])
            found |= {id(p): piece.view(p.shape) for p, piece in zip(params, pieces, strict=True)}
        return found
    if not stage:
        pairs = zip(
            getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()),
            strict=True,
        )  # fmt: skip
        return {id(p): m.detach() for ps, ms in pairs for p, m in zip(ps, ms, strict=True)}
    if stage == 3:
        return {id(p): full_master(p) for p in engine.module.parameters()}
    found = {}
    shuffled = getattr(optimizer, "round_robin_bit16_groups", None)
    for index, part in enumerate(optimizer.single_partition_of_fp32_groups):
        group = optimizer.real_dp_process_group[index]
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.detach().contiguous(), group=group)
        flat, offset = torch.cat(parts), 0
        for param in (shuffled or optimizer.bit16_groups)[index]:
            found[id(param)] = flat[offset : offset + param.numel()].view(param.shape)
            offset += param.numel()
    return found


def full_master(param: Any) -> Tensor:
    """One parameter's fp32 master under ZeRO-3; rounded, it must be the parameter."""
    master = safe_get_full_fp32_param(param).detach().clone()
    with deepspeed.zero.GatheredParameters([param]):
        if not torch.equal(master.to(param.dtype), param.detach()):
            raise RuntimeError(f"the master of shape {tuple(param.shape)} is another parameter's")
    return master


def whole(name: str, value: Tensor) -> Tensor:
    """Put the pieces of the two tensor ranks together (as the configuration cuts them)."""
    if not name.endswith("_proj.weight"):
        return value
    group = groups.get_tensor_model_parallel_group()
    pieces = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(pieces, value.contiguous(), group=group)
    return torch.cat(pieces, dim=1 if name.endswith("o_proj.weight") else 0)


def train(engine: Any, dtype: str, degree: int = 1) -> None:
    """A few steps on random rows, other ones on each rank (but for tensor ranks)."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank() // degree)
    for _ in range(STEPS):
        rows = torch.randn(2, 6, WIDTH, generator=generator).to(kind)
        tokens = torch.randint(0, 31, (2, 8), generator=generator)
        if hasattr(engine.module, "lm_head"):
            engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        else:
            engine.backward(engine(rows).float().pow(2).mean())
        with torch.no_grad():  # older releases gather into views, which today's torch minds
            engine.step()


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and vectors apart, so that each kind of experts lies in two groups of one name."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "name": "matrices"},
        {"params": [p for p in trained if p.ndim < 2], "name": "vectors", "weight_decay": 0.0},
    ]


def run(out: Path, text: str) -> None:
    """Train one model, save its checkpoint and its truth."""
    name, stage, dtype, *options = text.split(":")
    groups._EXPERT_PARALLEL_GROUP.clear()
    groups._EXPERT_DATA_PARALLEL_GROUP.clear()
    torch.manual_seed(0)
    model, folder = MODELS[name](), out / text.replace(":", "-")
    before = "before" in options
    scramble(model, before)
    wanted = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(
        param_groups(model)
    )
    wanted = [group for group in wanted if group["params"]]
    # Without ZeRO, a fused Adam's masters are flat; on CPU no other Adam passes for it.
    fused = torch.optim.AdamW if "fused" in options else FUSED_ADAM
    vars(importlib.import_module("deepspeed.runtime.engine"))["FusedAdam"] = fused
    if "shuffle" in options and dist.get_rank() % 2:
        wanted.sort(key=lambda group: -int(group["name"][8:]) if group.get("moe") else -99)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()) if name.startswith("auto") else wanted,
        config=engine_config(name, int(stage), dtype, options),
    )
    train(engine, dtype, 2 if "tp" in options else 1)
    engine.save_checkpoint(str(folder / "ckpt"))
    truths: list[Any] = [None] * torch.distributed.get_world_size()
    truth = live_truth(engine, int(stage))
    if "tp" in options:
        truth["fp32"] = {name: whole(name, value) for name, value in truth["fp32"].items()}
    torch.distributed.all_gather_object(truths, truth)
    if torch.distributed.get_rank() == 0:
        torch.save(merged(text, truths), folder / "truth.pt")
    if hasattr(engine, "destroy"):
        engine.destroy()


def merged(text: str, truths: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' truths; what several have must be the same."""
    together: dict[str, Any] = {"fp32": {}, "ties": [], "frozen": [], "buffers": []}
    for truth in truths:
        for key, value in truth["fp32"].items():
            if not torch.equal(together["fp32"].setdefault(key, value), value):
                raise RuntimeError(f"{text}: the ranks disagree about {key}")
        for what in ("ties", "frozen", "buffers"):
            together[what] += [item for item in truth[what] if item not in together[what]]
    fused: dict[str, dict[int, Tensor]] = {}
    for key in [key for key in together["fp32"] if FUSED.fullmatch(key.rpartition(".")[0])]:
        name, _, number = key.rpartition(".")
        fused.setdefault(name, {})[int(number)] = together["fp32"].pop(key)
    stacked = {name: [rows[number] for number in sorted(rows)] for name, rows in fused.items()}
    together["fp32"] |= {name: torch.stack(rows) for name, rows in stacked.items()}
    return together


def main(out: str, *runs: str) -> None:
    """Do all runs in turn."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed's shared-memory collectives leave their buffers in /dev/shm; gloo does without.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.set_num_threads(1)
    for text in runs:
        run(Path(out), text)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
