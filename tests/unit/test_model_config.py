"""Shapes from config.json: right for models of transformers, and nothing is fetched or run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dist_consolidate.checkpoint.model_config import (
    _harmless,
    find_config,
    full_shapes,
    is_unfused,
)
from dist_consolidate.errors import UsageError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def write(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    return path


def test_shapes_are_those_of_the_model(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    path = write(tmp_path)
    model = LlamaForCausalLM(LlamaConfig.from_json_file(path))
    want = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert full_shapes(path) == want
    assert full_shapes(tmp_path) == want


def test_what_would_run_code_is_dropped(tmp_path):
    plain = full_shapes(write(tmp_path))
    path = write(
        tmp_path,
        auto_map={"AutoModelForCausalLM": "evil.Model"},
        _attn_implementation="someone/kernels",
        attn_implementation="someone/kernels",
        quantization_config={"quant_method": "unheard"},
    )
    assert full_shapes(path) == plain


def test_it_is_looked_for_in_the_tag_and_beside_it(tmp_path):
    tag = tmp_path / "global_step1"
    tag.mkdir()
    assert find_config(tag) is None
    (tag / "config.json").write_text("{}")
    outer = write(tmp_path)
    assert find_config(tag) == outer
    assert find_config(tag) != write(tag)
    assert find_config(tag) == tag / "config.json"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.mlp.down_proj.bias", True),
        ("model.layers.0.self_attn.qkv_proj.weight", False),
        ("model.layers.0.mlp.gate_up_proj.weight", False),
        ("transformer.h.0.attn.c_attn.weight", False),
        ("transformer.h.0.attn.c_proj.weight", False),
        ("transformer.h.0.self_attention.query_key_value.weight", False),
        ("weight", False),
    ],
)
def test_fused_layers_are_not_taken_for_plain_ones(name, known):
    assert is_unfused(name) is known


def test_a_file_that_is_too_large(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(UsageError, match="too large"):
        full_shapes(path)


def test_without_transformers(tmp_path):
    path = write(tmp_path)
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from dist_consolidate.checkpoint.model_config import full_shapes\n"
        "from dist_consolidate.errors import UsageError\n"
        "try:\n    full_shapes(Path(sys.argv[1]))\n"
        "except UsageError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert "needs transformers, which cannot be imported" in done.stdout


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**9},
        {"text_config": {"num_experts": 10**6}},
        {"n_layer": 10**100},
        {"max_position_embeddings": 2**40},
    ],
)
def test_numbers_that_would_take_for_ever(config):
    with pytest.raises(ValueError, match="is beyond"):
        _harmless(config)


def test_numbers_of_real_models_pass():
    real = {"num_hidden_layers": 128, "n_routed_experts": 384, "max_position_embeddings": 10485760}
    real |= {"rope_theta": 2804339835.0, "vocab_size": 256000, "layer_types": ["full"] * 128}
    assert _harmless(real) == real
