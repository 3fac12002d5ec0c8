"""Trains under real DeepSpeed with several optimizers and saves what the live engine keeps.

Run under torchrun: ``python -m torch.distributed.run ... -m tests.ds_moments OUT RUN...``, where a
RUN is ``MODEL:STAGE:DTYPE:OPTIMIZER[:FLAG]`` (flags: ``elastic``, ``fp32acc``). Each leaves in
``OUT/RUN`` the run folder ``ckpt`` and ``truth.pt``: states by key and parameter name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import Tensor, nn

from tests.ds_train import MODELS, engine_config, param_groups, train

# What each keeps per weight; a key that is not there would end the live engine's collectives.
KEYS = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "RMSprop": ("square_avg",),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "torch_adam": True},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "RMSprop": {"lr": 1e-2, "alpha": 0.9},
}


def config_of(stage: int, dtype: str, optimizer: str, flag: str) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    config = engine_config(stage, dtype)
    config["optimizer"] = {"type": optimizer, "params": SETTINGS[optimizer]}
    config["zero_allow_untested_optimizer"] = True
    if flag == "elastic":
        config["zero_optimization"]["elastic_checkpoint"] = True
    if flag == "fp32acc":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def live_states(engine: Any, model: nn.Module, optimizer: str) -> dict[str, dict[str, Tensor]]:
    """Every state of every trained parameter, whole (collective)."""
    wrapper = engine.optimizer
    if hasattr(wrapper, "_hp_optimizer_states_linked"):
        # DeepSpeed 0.19.8 links them once, after the first param group's first step.
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()
    found: dict[str, dict[str, Tensor]] = {key: {} for key in KEYS[optimizer]}
    for name, param in model.named_parameters():
        for key in KEYS[optimizer] if param.requires_grad else ():
            is_zero = hasattr(param, "ds_id") or hasattr(param, "_hp_mapping")
            value = (
                safe_get_full_optimizer_state(param, key)
                if is_zero
                else _stage0_state(engine.optimizer, param, key)
            )
            found[key][name] = value.detach().clone()
    return found


def _stage0_state(optimizer: Any, param: nn.Parameter, key: str) -> Tensor:
    owner = param
    for narrow, wide in zip(
        getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=False
    ):
        for one, other in zip(narrow, wide, strict=True):
            owner = other if one is param else owner
    base = optimizer.optimizer if owner is not param else optimizer
    value: Tensor = base.state[owner][key]
    return value


def run(out: Path, text: str) -> None:
    """Train one model, save its checkpoint and its truth."""
    name, stage, dtype, optimizer, *flags = text.split(":")
    torch.manual_seed(0)
    model = MODELS[name]()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=param_groups(model),
        config=config_of(int(stage), dtype, optimizer, "".join(flags)),
    )
    train(engine, name == "t5")
    folder = out / text
    engine.save_checkpoint(str(folder / "ckpt"))
    truth = live_states(engine, engine.module, optimizer)
    if torch.distributed.get_rank() == 0:
        torch.save(truth, folder / "truth.pt")
    engine.destroy()


def main(out: str, *runs: str) -> None:
    """Do all runs in turn."""
    # DeepSpeed's shared-memory collectives leave their buffers in /dev/shm; gloo does without.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.set_num_threads(1)
    for text in runs:
        run(Path(out), text)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
