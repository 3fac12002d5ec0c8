"""File names, the index and the manifest; transformers and huggingface_hub as the judges."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
from transformers import utils as hf

from dist_consolidate.dtypes import BY_NAME, FLOAT32
from dist_consolidate.errors import UsageError
from dist_consolidate.output.index import (
    MANIFEST_NAME,
    index_file_name,
    index_json,
    is_entry_point,
    is_weight_file,
    shard_file_names,
)
from dist_consolidate.output.manifest import manifest_json
from dist_consolidate.plan.outputs import OutputFile, StoredTensor


def test_names_of_one_file():
    assert shard_file_names("safetensors", 1) == (hf.SAFE_WEIGHTS_NAME,) == ("model.safetensors",)
    assert shard_file_names("bin", 1) == (hf.WEIGHTS_NAME,) == ("pytorch_model.bin",)


def test_names_of_several_files():
    assert shard_file_names("safetensors", 3) == (
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    )
    assert shard_file_names("bin", 12)[-1] == "pytorch_model-00012-of-00012.bin"
    assert shard_file_names("bin", 100_000)[0] == "pytorch_model-00001-of-100000.bin"


def test_names_of_the_index():
    assert index_file_name("safetensors") == hf.SAFE_WEIGHTS_INDEX_NAME
    assert index_file_name("bin") == hf.WEIGHTS_INDEX_NAME


@pytest.mark.parametrize("function", [index_file_name, lambda name: shard_file_names(name, 1)])
def test_an_unknown_format_is_refused(function):
    with pytest.raises(UsageError, match="'gguf'"):
        function("gguf")


def test_index_bytes():
    files = (
        OutputFile(
            "model-00001-of-00002.safetensors",
            (StoredTensor(("z.weight", "a.tied"), FLOAT32, (2, 3)),),
            dropped=(("gone", "z.weight"),),
        ),
        OutputFile(
            "model-00002-of-00002.safetensors",
            (StoredTensor(("scale",), BY_NAME["float16"], ()),),
        ),
    )
    expected = """{
  "metadata": {
    "total_parameters": 7,
    "total_size": 26
  },
  "weight_map": {
    "a.tied": "model-00001-of-00002.safetensors",
    "scale": "model-00002-of-00002.safetensors",
    "z.weight": "model-00001-of-00002.safetensors"
  }
}
"""
    assert index_json(files).decode() == expected


def test_the_index_is_ascii_under_the_name_the_hub_uses():
    files = [OutputFile("f", (StoredTensor(("caf\u00e9",), FLOAT32, (1,)),))]
    assert index_json(files).isascii()
    assert json.loads(index_json(files))["weight_map"] == {"caf\u00e9": "f"}
    assert index_file_name("safetensors") == huggingface_hub.constants.SAFETENSORS_INDEX_FILE


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00001-of-100000.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model-00010-of-00020.bin",
        "pytorch_model.bin.index.json",
        "consolidation.json",
    ],
)
def test_weight_files(name):
    assert is_weight_file(name)
    assert is_entry_point(name) == ("-of-" not in name and name != "consolidation.json")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.model",
        "adapter_model.safetensors",
        "model.bin",
        "model.safetensors.bak",
        "my_model.safetensors",
        "model-1-of-2.safetensors",
        "model.safetensors\n",
        "modelXsafetensors",
        "model-00001-of-00002.safetensors.index.json",
        "pytorch_model.safetensors",
        "optimizer.bin",
        "training_args.bin",
        "",
    ],
)
def test_other_files(name):
    assert not is_weight_file(name)
    assert not is_entry_point(name)


def test_manifest_bytes_are_sorted_and_repeatable():
    def manifest(reverse):
        tensors = {"b": {"shape": [2], "dtype": "float32"}, "a": {"tied_to": "b", "file": "f"}}
        if reverse:
            tensors = dict(reversed(tensors.items()))
        return manifest_json(
            version="0.1",
            checkpoint={"tag": "global_step7", "step": 7},
            options={"dtype": "float32"},
            plan_digest="abc",
            tensors=tensors,
            left_out={"optimizer_only": "excluded by name"},
            notes=["second", "first"],
        )

    assert manifest(False) == manifest(True)
    assert MANIFEST_NAME == "consolidation.json"
    content = json.loads(manifest(False))
    assert list(content) == sorted(content)
    assert content == {
        "tool": {"name": "dist_consolidate", "version": "0.1"},
        "checkpoint": {"tag": "global_step7", "step": 7},
        "options": {"dtype": "float32"},
        "plan_digest": "abc",
        "tensors": {
            "a": {"tied_to": "b", "file": "f"},
            "b": {"shape": [2], "dtype": "float32"},
        },
        "left_out": {"optimizer_only": "excluded by name"},
        "notes": ["second", "first"],
    }
    assert manifest(False).endswith(b"}\n")
