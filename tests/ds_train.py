"""Trains small models under real DeepSpeed and saves checkpoints with the live engine's truth.

Run under torchrun: ``python -m torch.distributed.run ... -m tests.ds_train OUT RUN...``, where a
RUN is ``MODEL:STAGE:DTYPE``. All runs share one start of the processes. Each leaves in
``OUT/MODEL_zSTAGE_DTYPE`` the run folder ``ckpt``, ``truth.pt`` and the model's ``config.json``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

VOCAB, LENGTH, STEPS = 61, 9, 2


def tied_gpt2() -> nn.Module:
    """GPT-2 whose head is its embedding."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=16,
        n_embd=20,
        n_layer=2,
        n_head=2,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def grouped_t5() -> nn.Module:
    """T5, one embedding under four names."""
    config = T5Config(
        vocab_size=VOCAB,
        d_model=12,
        d_kv=6,
        d_ff=20,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    return T5ForConditionalGeneration(config)


def half_frozen_gpt2() -> nn.Module:
    """GPT-2 with every second parameter frozen and buffers that no float can hold."""
    model = tied_gpt2()
    for number, param in enumerate(model.parameters()):
        param.requires_grad_(number % 2 == 1)
    model.register_buffer("positions", torch.arange(5) + 2**40)
    model.register_buffer("mask", torch.tensor([True, False, True]))
    model.register_buffer("mean", torch.tensor([0.1, -0.2]))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": tied_gpt2,
    "t5": grouped_t5,
    "half": half_frozen_gpt2,
}


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.01},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0},
    ]


def engine_config(stage: int, dtype: str) -> dict[str, Any]:
    """DeepSpeed's configuration; small sub-groups, so that stage 3 has several."""
    adam = {"lr": 1e-2, "torch_adam": True}
    zero = {
        "stage": stage,
        "overlap_comm": False,
        "sub_group_size": 3000,
        "stage3_param_persistence_threshold": 0,
    }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bf16"},
    }


def train(engine: Any, is_t5: bool) -> None:
    """A few steps on random tokens, other ones on each rank."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(STEPS):
        ids = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
        loss = engine(input_ids=ids, labels=ids, **({} if is_t5 else {"use_cache": False})).loss
        engine.backward(loss)
        engine.step()


def full_value(param: nn.Parameter) -> Tensor:
    """The most precise value of a parameter in the live engine (collective in stage 3)."""
    if param.requires_grad:
        value = safe_get_full_fp32_param(param)
        if value is None:
            raise RuntimeError("a trained parameter has no fp32 copy")
        return value.clone()
    with deepspeed.zero.GatheredParameters([param]):
        return param.detach().clone()


def live_truth(model: nn.Module) -> dict[str, Any]:
    """Every key of the model with its value, and which names are one parameter."""
    keys = model.state_dict().keys()
    owners = {id(param): name for name, param in model.named_parameters()}
    values = {name: full_value(param).float() for name, param in model.named_parameters()}
    ties = {name: [name] for name in values}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = owners[id(param)]
        if name != owner:
            ties[owner].append(name)
            values[name] = values[owner]
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in keys}
    for name, buffer in buffers.items():
        values[name] = buffer.float() if buffer.is_floating_point() else buffer
    return {
        "fp32": {name: values[name].clone() for name in keys},
        "ties": [names for names in ties.values() if len(names) > 1],
        "frozen": [name for name, param in model.named_parameters() if not param.requires_grad],
        "buffers": list(buffers),
    }


def live_logits(engine: Any) -> dict[str, Tensor]:
    """What the trained model answers to fixed tokens."""
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCAB
    engine.eval()
    with torch.no_grad():
        return {"input_ids": ids, "logits": engine(input_ids=ids, use_cache=False).logits}


def run(out: Path, name: str, stage: int, dtype: str) -> None:
    """Train one model, save its checkpoint and its truth."""
    torch.manual_seed(0)
    model = MODELS[name]()
    folder = out / f"{name}_z{stage}_{dtype}"
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=param_groups(model), config=engine_config(stage, dtype)
    )
    train(engine, name == "t5")
    engine.save_checkpoint(str(folder / "ckpt"))
    truth = live_truth(engine.module)
    if name == "gpt2" and dtype == "fp32":
        truth |= live_logits(engine)
    if torch.distributed.get_rank() == 0:
        torch.save(truth, folder / "truth.pt")
        model.config.save_pretrained(folder)
    engine.destroy()


def main(out: str, *runs: str) -> None:
    """Do all runs in turn."""
    # DeepSpeed's shared-memory collectives leave their buffers in /dev/shm; gloo does without.
    # (As an attribute, `deepspeed.comm.torch` is torch itself.)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.set_num_threads(1)
    for name, stage, dtype in (text.split(":") for text in runs):
        run(Path(out), name, int(stage), dtype)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
