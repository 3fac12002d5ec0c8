"""Loads a result into a ``PipelineModule``; fails where a key is missing or left over.

Run under torchrun with one process: ``-m tests.pipe_load MODEL OUTPUT_DIR``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from deepspeed.pipe import PipelineModule

from tests.cases import load_output
from tests.pipe_train import MODELS, start


def main(model: str, output_dir: str) -> None:
    """Build the whole pipeline as one stage and load it."""
    start()
    module = PipelineModule(MODELS[model](), num_stages=1)
    state = load_output(Path(output_dir))
    module.load_state_dict(state, strict=True)
    for name, tensor in module.state_dict().items():
        if not torch.equal(tensor, state[name]):
            raise RuntimeError(f"{name} differs after loading")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
