"""``--include optimizer`` against the live engines of real DeepSpeed runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_consolidate import consolidate
from tests.cases import assert_same_bits, load_output
from tests.real_deepspeed import launch
from tests.zygote import fork_together

pytestmark = [pytest.mark.deepspeed, pytest.mark.dist, pytest.mark.slow]

RUNS = (
    "half:1:bf16:AdamW",
    "half:3:bf16:AdamW",
    "gpt2:2:bf16:AdamW:elastic",
    "gpt2:1:bf16:AdamW:fp32acc",
    "t5:2:fp32:AdamW",
    "gpt2:2:bf16:RMSprop",
    "gpt2:0:bf16:AdamW",
    "gpt2:3:bf16:SGD",
)
TORN = ("half:3:bf16:AdamW", "gpt2:2:bf16:AdamW:elastic")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moments")
    launch("tests.ds_moments", [str(folder), *RUNS], world=2)
    return folder


def truth_of(folder: Path, run: str) -> dict[str, dict[str, Tensor]]:
    found = torch.load(folder / run / "truth.pt", weights_only=True)
    assert all(found.values())
    return found


def states(out: Path) -> dict[str, dict[str, Tensor]]:
    """Load every state of a result, each from its file or files."""
    from safetensors.torch import load_file

    found: dict[str, dict[str, Tensor]] = {}
    for path in sorted((out / "optimizer_states").iterdir()):
        if path.name.endswith(".json"):
            continue
        key = path.name.split(".")[0].split("-")[0]
        load: Any = load_file if path.suffix == ".safetensors" else torch.load
        loaded = load(path)
        assert not set(loaded) & set(found.get(key, ()))
        found.setdefault(key, {}).update(loaded)
    return found


def check(out: Path, truth: dict[str, dict[str, Tensor]]) -> None:
    found = states(out)
    assert set(found) == set(truth)
    for key, want in truth.items():
        assert_same_bits(found[key], want)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("transport", ["direct", "allgather"])
def test_the_result_is_the_live_optimizers_state(
    trained: Path, run: str, transport: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = consolidate(
        trained / run / "ckpt", out, include=["optimizer"], transport=transport, dtype="bf16"
    )
    truth = truth_of(trained, run)
    check(out, truth)
    # Nothing of it is among the weights.
    alone = consolidate(trained / run / "ckpt", tmp_path / "alone", dtype="bf16")
    weights = load_output(out)
    assert_same_bits(weights, load_output(tmp_path / "alone"))
    assert report.num_tensors == alone.num_tensors == len(weights)
    facts = json.loads((out / "consolidation.json").read_text())["optimizer"]
    assert {k: set(v) for k, v in facts["tensors"].items()} == {k: set(v) for k, v in truth.items()}
    named = {n for group in truth.values() for n in group}
    assert set(facts["without_state"]) == set(weights) - named - set(report.ties)
    if "elastic" not in run:  # which saves no settings
        assert [group["lr"] for group in facts["param_groups"]] == [1e-2, 1e-2]
        members = [set(group["tensors"]) for group in facts["param_groups"]]
        assert members == [
            {n for n in named if weights[n].ndim > 1},
            {n for n in named if weights[n].ndim < 2},
        ]
    if "AdamW" in run and ":0:" not in run:
        assert facts["step"] == 2


@pytest.mark.parametrize("run", TORN)
@pytest.mark.parametrize("transport", ["direct", "gather", "allgather"])
def test_two_ranks_and_many_files(trained: Path, run: str, transport: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = fork_together(
        2,
        [trained / run / "ckpt", out, "--include", "optimizer", "--transport", transport,
         "--max-shard-size", "2KB", "--bucket-size", "5000", "--writers", "all"],
    )  # fmt: skip
    ended.ok()
    truth = truth_of(trained, run)
    check(out, truth)
    for key in truth:
        path = out / "optimizer_states" / f"{key}.safetensors.index.json"
        weight_map = json.loads(path.read_text())["weight_map"]
        assert set(weight_map) == set(truth[key])
        assert all((path.parent / file).is_file() for file in weight_map.values())
        assert len(set(weight_map.values())) > 1
    single = tmp_path / "single"
    consolidate(trained / run / "ckpt", single, include=["optimizer"], max_shard_size="2KB")
    digests = {
        json.loads((folder / "consolidation.json").read_text())["plan_digest"]
        for folder in (out, single)
    }
    assert len(digests) == 1


def test_bin_and_new_names(trained: Path, tmp_path: Path) -> None:
    run, out = "gpt2:1:bf16:AdamW:fp32acc", tmp_path / "out"
    consolidate(
        trained / run / "ckpt",
        out,
        include=["optimizer"],
        format="bin",
        strip_prefix=["transformer."],
    )
    truth = truth_of(trained, run)
    want = {k: {n.removeprefix("transformer."): t for n, t in v.items()} for k, v in truth.items()}
    check(out, want)
    assert {path.name for path in (out / "optimizer_states").iterdir()} == {
        "exp_avg.bin",
        "exp_avg_sq.bin",
    }
