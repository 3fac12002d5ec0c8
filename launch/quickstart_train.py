"""Train a small tied GPT under real DeepSpeed ZeRO-3 and save a checkpoint to consolidate.

Run under torchrun, on CPU ranks with gloo:

    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 torchrun --nproc_per_node=2 launch/quickstart_train.py RUN_DIR

It leaves ``RUN_DIR/checkpoint`` as DeepSpeed wrote it, and ``RUN_DIR/live_masters.pt``: every
parameter's fp32 master as the live engine held it at that moment, for ``quickstart_show.py``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 211, 32, 48, 4, 3, 4
SEED = 20


class Block(nn.Module):
    """One transformer layer: causal self-attention, then a feed-forward part."""

    def __init__(self) -> None:
        """Build the layer's modules under GPT-2's names."""
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(WIDTH, 3 * WIDTH), "c_proj": nn.Linear(WIDTH, WIDTH)}
        )
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)}
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states of shape (batch, length, width) to the same shape."""
        batch, length, _ = hidden.shape
        split = self.attn["c_attn"](self.ln_1(hidden)).view(batch, length, 3, HEADS, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attn["c_proj"](mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        inner = nn.functional.gelu(self.mlp["c_fc"](self.ln_2(hidden)))
        return hidden + self.mlp["c_proj"](inner)


class TiedGPT(nn.Module):
    """A GPT-2-like model whose output layer is its token embedding, under two names."""

    def __init__(self) -> None:
        """Build the model and tie ``lm_head.weight`` to ``transformer.wte.weight``."""
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(CONTEXT, WIDTH),
                "h": nn.ModuleList(Block() for _ in range(LAYERS)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        self.apply(self._small_weights)

    @staticmethod
    def _small_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the next-token loss of tokens of shape (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.transformer["wte"](tokens) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:
            hidden = block(hidden)
        logits = self.lm_head(self.transformer["ln_f"](hidden))
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


def deepspeed_config() -> dict[str, Any]:
    """Return a ZeRO-3 configuration: bf16 weights with fp32 masters, torch's own AdamW."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "steps_per_print": 1_000_000,
    }


def skip_shared_memory_collectives() -> None:
    """Keep DeepSpeed from compiling collectives that would leave buffers in /dev/shm."""
    # By its full name: the attribute deepspeed.comm.torch is PyTorch itself.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def train(num_steps: int) -> deepspeed.DeepSpeedEngine:
    """Train on random tokens and return the live engine."""
    skip_shared_memory_collectives()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(SEED)  # the same first weights on every rank
    model = TiedGPT()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=deepspeed_config()
    )
    torch.manual_seed(SEED + 1 + engine.global_rank)  # other data on every rank
    for step in range(num_steps):
        loss = engine(torch.randint(VOCABULARY, (BATCH, CONTEXT)))
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    return engine


def save_live_masters(engine: deepspeed.DeepSpeedEngine, path: Path) -> None:
    """Write the fp32 master of every parameter; all ranks must call it, rank 0 writes."""
    masters = {
        name: safe_get_full_fp32_param(parameter).clone()
        for name, parameter in engine.module.named_parameters()
    }
    if engine.global_rank == 0:
        torch.save(masters, path)


def leave() -> NoReturn:
    """End this rank once all ranks are done, without tearing the interpreter down."""
    # Threads of the native libraries outlive the engine, and now and then one of them aborts the
    # process during the teardown. Everything is on disk by then.
    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Parse the command line, train, and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="where to leave the checkpoint")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default: 3)")
    options = parser.parse_args()
    # DeepSpeed calls collectives by names that new PyTorch versions deprecate.
    warnings.filterwarnings("ignore", category=FutureWarning)
    options.run_dir.mkdir(parents=True, exist_ok=True)
    engine = train(options.steps)
    engine.save_checkpoint(str(options.run_dir / "checkpoint"))
    save_live_masters(engine, options.run_dir / "live_masters.pt")
    leave()


if __name__ == "__main__":
    main()
