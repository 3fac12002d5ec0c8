"""Writes the checkpoint of the benchmark, in a process of its own because it imports torch.

    python -m tests.bench.make_checkpoint FOLDER STAGE SHARDS LAYERS WIDTH

A GPT-like model with a tied head; Adam's moments are holes in the files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.self_proc import tell
from tests.synthetic import gpt_params, write_large

VOCAB, POSITIONS = 50257, 1024


def main(arguments: Sequence[str]) -> None:
    """Write it, and print how large it is."""
    folder = Path(arguments[0])
    numbers: list[Any] = [int(text) for text in arguments[1:]]
    stage, shards, layers, width = numbers
    truth = write_large(
        folder, stage, shards, layers=layers, width=width, vocab=VOCAB, positions=POSITIONS
    )
    params = gpt_params(layers, width, VOCAB, POSITIONS)
    num_params = sum(param.numel for param in params if param.tie_of is None)
    facts = {"num_params": num_params, "fp32_bytes": 4 * num_params}
    tell({**facts, "tag_dir": str(truth.tag_dir)})


if __name__ == "__main__":
    main(sys.argv[1:])
