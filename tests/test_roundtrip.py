"""What other libraries make of a result: safetensors, torch and transformers load it, ties tied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from dist_consolidate import consolidate
from tests.cases import assert_same_bits, load_output
from tests.synthetic import Buffer, Param, Spec, Truth, write

TIMES_OVERHEAD = 1.05
MEGABYTE = 1_000_000


class Tied(nn.Module):
    """A small model whose head is its embedding, and two of whose buffers are one."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(19, 7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 19, bias=False)
        self.head.weight = self.emb.weight
        table = torch.zeros(5)
        self.register_buffer("table", table)
        self.register_buffer("same_table", table)


BUFFERS = (
    Buffer("norm.running_mean", torch.linspace(-1, 1, 7)),
    Buffer("norm.running_var", torch.linspace(1, 2, 7)),
    Buffer("norm.num_batches_tracked", torch.tensor(2**40 + 1)),
    Buffer("table", torch.linspace(0, 1, 5)),
    Buffer("same_table", torch.linspace(0, 1, 5), tie_of="table"),
)


def params_of(model: nn.Module, kinds: Mapping[str, Any] | None = None) -> list[Param]:
    """Describe a model's parameters, aliases behind what they are tied to."""
    first: dict[int, str] = {}
    params = []
    for name, value in model.named_parameters(remove_duplicate=False):
        holder = first.setdefault(id(value), name)
        tie_of = None if holder == name else holder
        kind = (kinds or {}).get(holder, "trained")
        params.append(Param(name, tuple(value.shape), tie_of=tie_of, kind=kind))
    return params


@pytest.fixture(params=[2, 3])
def tied(request: pytest.FixtureRequest, tmp_path: Path) -> Truth:
    spec = Spec(stage=request.param, params=params_of(Tied()), buffers=BUFFERS)
    return write(tmp_path / "ckpt", spec)


def root(truth: Truth) -> Path:
    return truth.tag_dir.parent


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_bin_files_with_weights_only(tied: Truth, mmap: bool, tmp_path: Path) -> None:
    consolidate(root(tied), tmp_path / "out", format="bin")
    path = tmp_path / "out" / "pytorch_model.bin"
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    assert_same_bits(loaded, tied.fp32)
    Tied().load_state_dict(loaded, strict=True)


def test_safetensors_loads_its_files(tied: Truth, tmp_path: Path) -> None:
    consolidate(root(tied), tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert_same_bits(loaded, tied.fp32)
    Tied().load_state_dict(loaded, strict=True)


@pytest.mark.parametrize("ties", ["drop", "copy"])
def test_safetensors_loads_a_tied_module_strictly(tied: Truth, ties: str, tmp_path: Path) -> None:
    consolidate(root(tied), tmp_path / "out", ties=ties)
    path, model = tmp_path / "out" / "model.safetensors", Tied()
    missing, _surplus = load_model(model, path, strict=ties == "drop")
    assert not missing
    assert model.head.weight is model.emb.weight
    assert_same_bits(model.state_dict(), tied.fp32)
    dropped = set(tied.fp32) - set(load_file(path))
    assert len(dropped) == (2 if ties == "drop" else 0)


def test_the_names_of_an_alias_share_one_storage(tied: Truth, tmp_path: Path) -> None:
    consolidate(root(tied), tmp_path / "alias", format="bin", ties="alias")
    consolidate(root(tied), tmp_path / "copy", format="bin", ties="copy")
    for names in tied.ties:
        shared = _storages(tmp_path / "alias", names)
        apart = _storages(tmp_path / "copy", names)
        assert (len(shared), len(apart)) == (1, len(names)), names
    assert_same_bits(load_output(tmp_path / "copy"), tied.fp32)


def _storages(folder: Path, names: tuple[str, ...]) -> set[int]:
    loaded = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return {loaded[name].untyped_storage().data_ptr() for name in names}


# transformers


def gpt2() -> tuple[Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return GPT2LMHeadModel, config


def t5() -> tuple[Any, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=61,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
    )
    return T5ForConditionalGeneration, config


@pytest.mark.parametrize("make", [gpt2, t5])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("format", "ties"),
    [("safetensors", "copy"), ("safetensors", "drop"), ("bin", "alias"), ("bin", "copy")],
)
@pytest.mark.parametrize("max_shard_size", ["none", "6KB"])
def test_transformers_loads_it_with_its_ties(
    make: Any, stage: Any, format: str, ties: str, max_shard_size: str, tmp_path: Path
) -> None:
    cls, config = make()
    truth = write(tmp_path / "ckpt", Spec(stage=stage, params=params_of(cls(config))))
    out, single = tmp_path / "out", max_shard_size == "none"
    report = consolidate(root(truth), out, format=format, ties=ties, max_shard_size=max_shard_size)
    assert (len(report.files) == 1) == single
    config.save_pretrained(out)
    model, loading = cls.from_pretrained(
        out, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not {what: list(names) for what, names in loading.items() if names}
    assert_same_bits(dict(model.state_dict()), truth.fp32)
    by_name = dict(model.named_parameters(remove_duplicate=False))
    assert truth.ties
    for names in truth.ties:
        assert len({id(by_name[name]) for name in names}) == 1, names


# Sizes


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_files_keep_to_the_limit_and_carry_nothing_else(
    stage: Any, format: str, tmp_path: Path
) -> None:
    params = [Param(f"w{number}", (250, 1000)) for number in range(16)]
    truth = write(tmp_path / "ckpt", Spec(stage=stage, params=params, moments="none"))
    out, limit = tmp_path / "out", 4 * MEGABYTE
    report = consolidate(root(truth), out, format=format, max_shard_size="4MB")
    sizes = [(out / name).stat().st_size for name in report.files]
    payload = 16 * MEGABYTE
    assert payload <= sum(sizes) <= TIMES_OVERHEAD * payload
    # A file's own header comes on top of the tensors that the limit speaks of.
    assert max(sizes) <= TIMES_OVERHEAD * limit, sizes
    assert report.num_bytes == payload
    assert len(sizes) == math.ceil(payload / limit)
    assert_same_bits(load_output(out), truth.fp32)


# Element types


NATIVE_BUFFERS = (
    Buffer("ids", torch.arange(5) + 2**24 + 1),
    Buffer("mask", torch.tensor([True, False, True])),
    Buffer("half", torch.tensor([1.5, -2.25, 3.0], dtype=torch.float16)),
    Buffer("double", torch.tensor([1.0, 1e-3], dtype=torch.float64)),
)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("format", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "keep"])
def test_casts_are_torchs_own_and_integers_stay(
    stage: Any, format: str, dtype: str, tmp_path: Path
) -> None:
    kinds = {"norm.weight": "frozen"}
    spec = Spec(
        stage=stage, params=params_of(Tied(), kinds), buffers=NATIVE_BUFFERS, buffers_after=2
    )
    truth = write(tmp_path / "ckpt", spec)
    consolidate(root(truth), tmp_path / "out", format=format, dtype=dtype)
    assert_same_bits(load_output(tmp_path / "out"), _cast(truth, dtype))


def _cast(truth: Truth, dtype: str) -> dict[str, Tensor]:
    """The truth in another element type; what is no fp32 number comes from the buffer itself."""
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    own = {buffer.name: buffer.tensor for buffer in NATIVE_BUFFERS}
    want = {}
    for name in truth.fp32:
        value = own[name] if name in own else truth.fp32[name].to(truth.native[name])
        to = types.get(dtype, value.dtype) if value.is_floating_point() else value.dtype
        want[name] = value.to(to)
    return want
