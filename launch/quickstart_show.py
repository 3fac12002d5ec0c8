"""Show that a consolidated folder holds what the live engine held, tied names included.

    python launch/quickstart_show.py CONSOLIDATED_DIR LIVE_MASTERS

Exits with 1 if a parameter is missing or differs in a single bit. The files are read with the
safetensors library, so nothing here depends on the tool that wrote them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

TIED, SOURCE = "lm_head.weight", "transformer.wte.weight"


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Tell whether two tensors agree in dtype, shape and every bit."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of every safetensors file in a folder."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(path))
    return weights


def find_problems(weights: dict[str, torch.Tensor], masters: dict[str, torch.Tensor]) -> list[str]:
    """Compare the result with the live masters and the tied name with its source."""
    problems = [f"{name} is missing" for name in [*masters, TIED] if name not in weights]
    problems += [
        f"{name} differs from the live engine's fp32 master"
        for name, master in masters.items()
        if name in weights and not same_bits(weights[name], master)
    ]
    if {TIED, SOURCE} <= weights.keys() and not same_bits(weights[TIED], weights[SOURCE]):
        problems.append(f"{TIED} differs from {SOURCE}")
    return problems


def main() -> int:
    """Compare, print the outcome, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("consolidated_dir", type=Path)
    parser.add_argument("live_masters", type=Path)
    options = parser.parse_args()
    weights = load_folder(options.consolidated_dir)
    masters = torch.load(options.live_masters, weights_only=True)
    problems = find_problems(weights, masters)
    for problem in problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    if problems:
        return 1
    print(f"{len(weights)} tensors in {options.consolidated_dir}")
    print(f"{len(masters)} parameters equal the live engine's fp32 masters bit for bit")
    print(f"{TIED} {tuple(weights[TIED].shape)} is there and equals {SOURCE} bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
