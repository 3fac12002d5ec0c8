"""Tensor-parallel checkpoints that DeepSpeed's AutoTP writes here and now, against its engine."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_consolidate import CheckpointError, UsageError, consolidate, open_checkpoint
from tests.cases import assert_same_bits, load_output
from tests.real_deepspeed import TIMEOUT_SEC, Run, Trained, _call, _trained
from tests.zygote import fork_together

pytestmark = [pytest.mark.deepspeed, pytest.mark.dist, pytest.mark.slow]

# Two ranks share a model, and there is one such pair, or two; or four ranks share a model.
ONE_PAIR = [
    Run("llama", 1, "fp32"),
    Run("llama", 0, "bf16"),
    Run("half", 0, "bf16"),
    Run("half", 1, "bf16"),
    Run("half", 2, "fp32"),
    Run("half", 3, "bf16"),
    Run("tied", 0, "fp32"),
    Run("tied", 3, "fp32"),
    Run("opt", 2, "bf16"),
    Run("fused", 1, "bf16"),
]
TWO_PAIRS = [
    Run("llama", 3, "fp32"),
    Run("tied", 2, "bf16"),
    Run("half", 3, "fp32"),
    Run("opt", 1, "fp32"),
    Run("fused", 3, "bf16"),
]
ONE_FOUR = [Run("llama", 3, "bf16"), Run("tied", 1, "fp32"), Run("fused", 2, "fp32")]
LAUNCHES = {"w2-tp2": (2, 2, ONE_PAIR), "w4-tp2": (4, 2, TWO_PAIRS), "w4-tp4": (4, 4, ONE_FOUR)}
NAMES = [f"{launch}-{run}" for launch, (_, _, runs) in LAUNCHES.items() for run in runs]
LLAMAS = [name for name in NAMES if "llama" in name or "tied" in name]


def train(out: Path, world: int, degree: int, runs: Sequence[Run]) -> dict[str, Trained]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={world}", "-m", "tests.tp_train", str(out), str(degree)]
    _call(command + [f"{run.model}:{run.stage}:{run.dtype}" for run in runs], TIMEOUT_SEC)
    return {str(run): _trained(out / str(run), run) for run in runs}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Trained]]:
    """Each launch on its own, when a test first asks for it: a test has limited time."""
    folder = tmp_path_factory.mktemp("autotp")

    @functools.cache
    def launch(name: str) -> dict[str, Trained]:
        return train(folder / name, *LAUNCHES[name])

    return launch


@pytest.fixture
def trained(
    launched: Callable[[str], dict[str, Trained]], request: pytest.FixtureRequest
) -> Trained:
    launch, _, run = request.param.rpartition("-")
    return launched(launch)[run]


def only(trained: Trained, tmp_path: Path, **changes: Any) -> Path:
    """Copy the run folder, with other values (or none) for keys of all states."""
    shutil.copytree(trained.ckpt, tmp_path / "run")
    for path in (tmp_path / "run").glob("global_step*/*.pt"):
        tree = torch.load(path, weights_only=False)
        inner = tree.get("optimizer_state_dict")
        for state in (tree, inner if isinstance(inner, dict) else {}):
            for key, value in changes.items():
                if value is None:
                    state.pop(key, None)
                elif key in state:
                    state[key] = value
        torch.save(tree, path)
    return tmp_path / "run"


@pytest.mark.parametrize("trained", NAMES, indirect=True)
def test_the_result_is_the_live_engines_state(trained: Trained, tmp_path: Path) -> None:
    format = "bin" if "fp32" in str(trained.run) else "safetensors"
    report = consolidate(trained.ckpt, tmp_path / "out", format=format)
    assert_same_bits(load_output(tmp_path / "out"), trained.fp32)
    assert len(report.ties) == sum(len(names) - 1 for names in trained.ties)
    assert not report.left_out


@pytest.mark.parametrize("trained", NAMES, indirect=True)
def test_lazily(trained: Trained) -> None:
    checkpoint = open_checkpoint(trained.ckpt)
    assert set(checkpoint) == set(trained.fp32)
    found = {name: tensor.load() for name, tensor in checkpoint.items()}
    wide = {n: t.float() if t.is_floating_point() else t for n, t in found.items()}
    assert_same_bits(wide, trained.fp32)


@pytest.mark.parametrize("trained", ["w4-tp2-llama_z3_fp32", "w4-tp2-tied_z2_bf16"], indirect=True)
@pytest.mark.parametrize(("ranks", "transport"), [(2, "allgather"), (3, "direct")])
def test_on_several_ranks(trained: Trained, ranks: int, transport: str, tmp_path: Path) -> None:
    arguments: list[str | Path] = [trained.ckpt, tmp_path / "out", "--transport", transport]
    fork_together(ranks, [*arguments, "--bucket-size", "8KB", "--device", "cpu"]).ok()
    assert_same_bits(load_output(tmp_path / "out"), trained.fp32)


@pytest.mark.parametrize("trained", LLAMAS, indirect=True)
def test_transformers_config_stands_in_for_the_record(trained: Trained, tmp_path: Path) -> None:
    """As with AutoTP of before 0.18.9, which records nothing."""
    run = only(trained, tmp_path, universal_checkpoint_info=None)
    with pytest.raises(CheckpointError, match="nothing says how they go together") as caught:
        consolidate(run, tmp_path / "out")
    assert "o_proj.weight: shards [32, " in str(caught.value)
    report = consolidate(run, tmp_path / "out", hf_config=trained.folder)
    assert_same_bits(load_output(tmp_path / "out"), trained.fp32)
    assert any("were merged by the full shapes of" in note for note in report.notes)
    shutil.copy(trained.folder / "config.json", run)
    again = consolidate(run, tmp_path / "again")
    assert_same_bits(load_output(tmp_path / "again"), trained.fp32)
    assert any(str(run / "config.json") in note for note in again.notes)


@pytest.mark.parametrize("trained", ["w2-tp2-llama_z1_fp32"], indirect=True)
def test_a_config_of_another_model(trained: Trained, tmp_path: Path) -> None:
    config = json.loads((trained.folder / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "vocab_size": 59}))
    with pytest.raises(CheckpointError) as caught:
        consolidate(trained.ckpt, tmp_path / "out", hf_config=path)
    assert f"lm_head.weight: its shards make [61, 32], but {path} says [59, 32]" in (
        str(caught.value)
    )


@pytest.mark.parametrize("trained", ["w2-tp2-llama_z1_fp32"], indirect=True)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("{}", "names no model class"),
        ('{"architectures": ["Unheard"]}', "Unheard cannot be built from it"),
        ('{"architectures": ["AutoConfig"]}', "has no such model class"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_size": "x"}', "cannot be built from it"),
    ],
)
def test_a_config_that_is_none(trained: Trained, text: str, words: str, tmp_path: Path) -> None:
    run = only(trained, tmp_path, universal_checkpoint_info=None)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match="--hf-config") as caught:
        consolidate(run, tmp_path / "out", hf_config=tmp_path / "config.json")
    assert words in str(caught.value)


@pytest.mark.parametrize("trained", ["w2-tp2-fused_z1_bf16"], indirect=True)
def test_fused_layers_without_a_record(trained: Trained, tmp_path: Path) -> None:
    run = only(trained, tmp_path, universal_checkpoint_info=None)
    rules = tmp_path / "rules.toml"
    tables = [
        'match = "qkv.*"\ndim = 0\nsub_params = [32, 16, 16]',
        'match = "gate_up.*"\ndim = 0\nsub_params = 2',
        'match = "mix.weight"\ndim = 1',
        'match = "down.weight"\ndim = 1',
        'match = "*"\nreplicated = true',
    ]
    rules.write_text("".join(f"[[tensor_parallel.rule]]\n{table}\n" for table in tables))
    report = consolidate(run, tmp_path / "out", tp_rules=rules)
    assert_same_bits(load_output(tmp_path / "out"), trained.fp32)
    assert report.notes == ()


@pytest.mark.parametrize("trained", ["w2-tp2-fused_z1_bf16"], indirect=True)
def test_patterns_without_an_affine_map(trained: Trained, tmp_path: Path) -> None:
    """As 0.19.6 writes them."""
    (path,) = trained.ckpt.glob("global_step*/mp_rank_00_model_states.pt")
    info = torch.load(path, weights_only=False)["universal_checkpoint_info"]
    assert info.pop("affine_map")
    run = only(trained, tmp_path, universal_checkpoint_info=info)
    consolidate(run, tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), trained.fp32)


@pytest.mark.parametrize("trained", ["w4-tp2-llama_z3_fp32", "w2-tp2-opt_z2_bf16"], indirect=True)
def test_files_of_a_tensor_rank_are_missing(trained: Trained, tmp_path: Path) -> None:
    run = only(trained, tmp_path)
    gone = sorted(run.glob("global_step*/*mp_rank_01*"))
    assert gone
    for path in gone:
        path.unlink()
    with pytest.raises(CheckpointError) as caught:
        consolidate(run, tmp_path / "out")
    assert "_model_states.pt: is missing" in str(caught.value)
    assert "mp_rank_01" in str(caught.value)


@pytest.mark.parametrize("trained", ["w4-tp4-llama_z3_bf16"], indirect=True)
def test_files_of_another_run(trained: Trained, tmp_path: Path) -> None:
    """Of the same step and shapes, but with other values."""
    run = only(trained, tmp_path)
    (path,) = run.glob("global_step*/*zero_pp_rank_0_mp_rank_02_optim_states.pt")
    tree = torch.load(path, weights_only=False)
    for part in tree["optimizer_state_dict"]["fp32_flat_groups"]:
        part.data += 1
    torch.save(tree, path)
    with pytest.raises(CheckpointError) as caught:
        consolidate(run, tmp_path / "out")
    message = str(caught.value)
    assert "model.norm.weight: every tensor rank should hold the same values" in message
    assert "rank 2 (zero_pp_rank_0_mp_rank_02_model_states.pt) differs from rank 0" in message
    assert "q_proj" not in message
