"""The generator of synthetic checkpoints against two readers that are not ours.

One is a plain reassembly, written here from the format alone; the other is DeepSpeed's own
converter, where it is right. And the files must have the keys that real files have.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests import synthetic
from tests.cases import CASES, assert_same_bits, bits
from tests.strategies import specs
from tests.synthetic import Buffer, Param, Spec, Truth, write, write_large

PARAMS = (
    Param("scale", (), group=1),
    Param("emb.weight", (11, 5)),
    Param("inp.weight", (7, 13)),
    Param("inp.bias", (7,), group=1),
    Param("base.weight", (9, 3), kind="frozen"),
    Param("one", (1, 1)),
    Param("loose", (6,), kind="unoptimized"),
    Param("out.weight", (17,)),
    Param("base2.weight", (2, 5), kind="frozen"),
    Param("head.weight", (11, 5), tie_of="emb.weight"),
)
BUFFERS = (
    Buffer("ids", torch.arange(3) + 2**40),
    Buffer("mask", torch.tensor([True, False])),
    Buffer("mean", torch.tensor([1.5, -2.25], dtype=torch.bfloat16)),
    Buffer("mean_again", torch.tensor([1.5, -2.25], dtype=torch.bfloat16), tie_of="mean"),
)
# What DeepSpeed's converter reads rightly: recorded ties, nothing in `module` alone.
PLAIN_PARAMS = [param for param in PARAMS if param.kind == "trained"]


class _Inert:
    """Takes the place of every DeepSpeed class, which a reader does not need."""

    def __new__(cls, *args: object) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert if module.startswith("deepspeed") else super().find_class(module, name)


_PICKLE = SimpleNamespace(
    Unpickler=_Unpickler,
    load=pickle.load,
    __name__="pickle",
    UnpicklingError=pickle.UnpicklingError,
)


def load(path: Path) -> dict[str, Any]:
    """Load a whole file without DeepSpeed."""
    state: dict[str, Any] = torch.load(
        path, weights_only=False, pickle_module=_PICKLE, map_location="cpu"
    )
    return state


def by_rank(folder: Path, ending: str) -> list[dict[str, Any]]:
    """Load the files of all ranks in order."""
    paths = {int(p.name.split("_pp_rank_")[1].split("_")[0]): p for p in folder.glob(ending)}
    return [load(paths[rank]) for rank in sorted(paths)]


def reassemble(truth: Truth, stage: int) -> dict[str, Tensor]:
    """Put the fp32 and frozen tensors of a checkpoint together, by concatenation alone."""
    optimizers = by_rank(truth.tag_dir, "*zero_pp_rank_*_optim_states.pt")
    pattern = "zero_pp_rank_*_model_states.pt"
    models = by_rank(truth.tag_dir, pattern) or [load(truth.tag_dir / "mp_rank_00_model_states.pt")]
    shapes = models[0].get("param_shapes", optimizers[0].get("param_shapes"))
    shapes = [shapes] if isinstance(shapes, dict) else shapes
    states = [optimizer["optimizer_state_dict"] for optimizer in optimizers]
    found = _stage3(states, models, shapes) if stage == 3 else _stage12(states, shapes)
    if stage < 3:
        module = models[0]["module"]
        found |= {name: tensor.clone() for name, tensor in module.items() if name not in found}
    return found


def _stage12(
    states: list[dict[str, Any]], shapes: list[dict[str, tuple[int, ...]]]
) -> dict[str, Tensor]:
    found = {}
    for number, group in enumerate(shapes):
        flat = torch.cat([s["single_partition_of_fp32_groups"][number] for s in states])
        gaps = states[0].get("param_alignment_paddings", {number: [0] * len(group)})[number]
        start = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            found[name] = flat[start : start + math.prod(shape)].view(tuple(shape)).clone()
            start += math.prod(shape) + gap
    return found


def _stage3(
    states: list[dict[str, Any]],
    models: list[dict[str, Any]],
    shapes: list[dict[str, tuple[int, ...]]],
) -> dict[str, Tensor]:
    found = {}
    for number, group in enumerate(shapes):
        start = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            size = -(-numel // len(states))
            slices = [s["fp32_flat_groups"][number][start : start + size] for s in states]
            found[name] = torch.cat(slices)[:numel].view(tuple(shape))
            start += size
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        slices = [model["frozen_param_fragments"][name] for model in models]
        found[name] = torch.cat(slices)[: math.prod(shape)].view(tuple(shape))
    found |= {n: t for n, t in models[0]["module"].items() if n in models[0]["buffer_names"]}
    return found


def assert_stored(got: Mapping[str, Tensor], truth: Truth) -> None:
    """Check the dtypes in which some names are stored, and their values as fp32."""
    assert {n: t.dtype for n, t in got.items()} == {n: truth.native[n] for n in got}
    as_fp32 = {n: t.float() if t.is_floating_point() else t for n, t in got.items()}
    assert_same_bits(as_fp32, {name: truth.fp32[name] for name in got})


FORMS: dict[str, dict[str, Any]] = {
    "z1": {"stage": 1},
    "z1_half": {"stage": 1, "model_dtype": torch.float16, "trimming": "none"},
    "z1_bf16_optimizer": {"stage": 1, "world": 4, "bf16_optimizer": True},
    "z1_0.5": {"stage": 1, "era": "0.5", "trimming": "last_rank", "world": 3},
    "z2": {"stage": 2},
    "z2_aligned": {"stage": 2, "world": 3, "alignment_padding": True},
    "z2_aligned_fp32": {"stage": 2, "alignment_padding": True, "model_dtype": torch.float32},
    "z2_round_robin": {"stage": 2, "world": 3, "round_robin": True},
    "z2_0.6": {"stage": 2, "era": "0.6", "trimming": "last_rank", "world": 5},
    "z2_0.9.2": {"stage": 2, "era": "0.9.2", "trimming": "last_rank", "world": 9},
    "z2_many_ranks": {"stage": 2, "world": 12},
    "z2_bf16_masters": {"stage": 2, "master_dtype": torch.bfloat16},
    "z3": {"stage": 3},
    "z3_one_rank": {"stage": 3, "world": 1},
    "z3_many_ranks": {"stage": 3, "world": 12, "sub_group_numel": 60},
    "z3_0.5": {"stage": 3, "era": "0.5", "tuple_shapes": True},
    "z3_0.6": {"stage": 3, "era": "0.6"},
    "z3_0.9.2": {"stage": 3, "era": "0.9.2", "sub_group_numel": 1},
    "z3_packed": {"stage": 3, "world": 3, "packed_fragments": True},
}


@pytest.mark.parametrize("moments", ["real", "holes", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_concatenation_gives_the_truth(form: str, moments: str, tmp_path: Path) -> None:
    spec = Spec(params=PARAMS, buffers=BUFFERS, moments=moments, **FORMS[form])
    truth = write(tmp_path, spec)
    got = reassemble(truth, spec.stage)
    assert got.keys() >= {p.name for p in PARAMS if p.tie_of is None} - set(truth.lost)
    if spec.stage < 3 and spec.model_dtype != torch.float32:
        alias = got.pop("head.weight")
        assert_same_bits({"": alias}, {"": truth.fp32["emb.weight"].to(spec.model_dtype)})
    assert_stored(got, truth)


@settings(max_examples=80, deadline=None)
@given(specs(stages=(1, 2, 3), lossless=False))
def test_any_checkpoint_concatenates_to_its_truth(spec: Spec) -> None:
    with TemporaryDirectory() as folder:
        truth = write(Path(folder), spec)
        got = reassemble(truth, spec.stage)
        stored = {p.name for p in spec.params if p.tie_of is None} - set(truth.lost)
        stored |= set(truth.buffers)
        aliases = {p.name for p in spec.params if p.tie_of} | {b.name for b in spec.buffers}
        assert stored <= got.keys() | aliases
        got = {name: tensor for name, tensor in got.items() if name in stored}
        assert_stored(got, truth)


@settings(max_examples=80, deadline=None)
@given(specs())
def test_nothing_is_lost_where_nothing_may_be(spec: Spec) -> None:
    with TemporaryDirectory() as folder:
        assert not write(Path(folder), spec).lost


def test_stage0_masters_are_the_truth(tmp_path: Path) -> None:
    names = [p.name for g in (0, 1) for p in PLAIN_PARAMS if p.group == g and p.tie_of is None]
    for fused, moments in ((False, "real"), (False, "holes"), (True, "holes")):
        spec = Spec(stage=0, params=PARAMS, stage0_fused=fused, moments=moments)
        truth = write(tmp_path / f"{fused}{moments}", spec)
        optimizer = load(truth.tag_dir / "mp_rank_00_model_states.pt")["optimizer"]
        if fused:
            got = torch.cat(optimizer["fp32_groups_flat"])
        else:
            got = torch.cat([t.flatten() for group in optimizer["fp32_groups"] for t in group])
        want = torch.cat([truth.fp32[name].flatten() for name in names])
        assert_same_bits({"all": got}, {"all": want})


def test_stage0_fp32_is_all_in_module(tmp_path: Path) -> None:
    truth = write(tmp_path, Spec(stage=0, params=PARAMS, model_dtype=torch.float32))
    module = load(truth.tag_dir / "mp_rank_00_model_states.pt")["module"]
    assert_same_bits(module, truth.fp32)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_module_holds_the_rounded_values(stage: Any, tmp_path: Path) -> None:
    truth = write(tmp_path, Spec(stage=stage, params=PARAMS, buffers=BUFFERS))
    module = load(truth.tag_dir / "mp_rank_00_model_states.pt")["module"]
    model_names = truth.fp32.keys() - set(truth.buffers)
    want = {name: truth.fp32[name].bfloat16() for name in model_names}
    assert_same_bits({name: module[name] for name in model_names}, want)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("storage_tie", [True, False])
def test_ties_share_a_storage(stage: Any, storage_tie: bool, tmp_path: Path) -> None:
    """Of two equal addresses, that of an empty tensor is no proof: read the storage's number."""
    alias = Param("c", (3,), tie_of="a", storage_tie=storage_tie, record_tie=False)
    params = [Param("a", (3,)), Param("b", (3,)), alias]
    truth = write(tmp_path, Spec(stage=stage, params=params))
    path = next(truth.tag_dir.glob("*_model_states.pt"))

    class Unpickler(_Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return pid

        def find_class(self, module: str, name: str) -> Any:
            if name == "_rebuild_tensor_v2":
                return lambda storage, offset, *_: (storage[2], offset)
            return super().find_class(module, name)

    with torch.serialization._open_zipfile_reader(str(path)) as archive:
        places = Unpickler(io.BytesIO(archive.get_record("data.pkl"))).load()["module"]
    assert (places["a"] == places["c"]) == storage_tie
    assert places["a"] != places["b"]
    assert ("c" in truth.lost) == (stage == 3 and not storage_tie)


def test_partitions_are_views_of_longer_storages(tmp_path: Path) -> None:
    truth = write(tmp_path, Spec(stage=2, world=4, params=[Param("a", (13,))]))
    states = by_rank(truth.tag_dir, "*_optim_states.pt")
    parts = [s["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] for s in states]
    assert [part.numel() for part in parts] == [4, 4, 4, 1]
    assert {part.untyped_storage().nbytes() for part in parts} == {16}
    whole = torch.empty(0).set_(parts[-1].untyped_storage())
    assert whole.isnan().tolist() == [False, True, True, True]


def form_of(state: dict[str, Any]) -> dict[str, str]:
    """The keys of a file, and of its optimizer section, with the types of what they hold."""
    inner = state.get("optimizer_state_dict", {})
    form = {key: type(value).__name__ for key, value in state.items()}
    form |= {f"optimizer: {key}": type(value).__name__ for key, value in inner.items()}
    for key in ("single_partition_of_fp32_groups", "param_shapes", "param_slice_mappings"):
        held = inner.get(key) or state.get(key) or []
        form |= {f"{key}: item": type(item).__name__ for item in held}
    return form


@pytest.mark.parametrize(
    ("case", "form"),
    [
        ("kitchen_z2_groups_w4", {"stage": 2, "model_dtype": torch.float32}),
        ("kitchen_z3_bf16_w2", {"stage": 3}),
        ("frozen_half_z1_w2", {"stage": 1, "model_dtype": torch.float32}),
        ("z1_bf16opt_groups_w4", {"stage": 1, "bf16_optimizer": True}),
        ("z0_bf16_w2", {"stage": 0}),
        ("ds0.5.4_half_z3_w2", {"stage": 3, "era": "0.5", "model_dtype": torch.float16}),
        ("ds0.5.4_half_z1_w2", {"stage": 1, "era": "0.5", "model_dtype": torch.float16}),
        ("ds0.6.1_gpt2_z2_w2", {"stage": 2, "era": "0.6", "model_dtype": torch.float16}),
        ("ds0.6.1_gpt2_z3_w2", {"stage": 3, "era": "0.6", "model_dtype": torch.float16}),
        ("ds0.9.2_tied_z1_w2", {"stage": 1, "era": "0.9.2", "model_dtype": torch.float16}),
        ("ds0.9.2_tiedbf16_z3_w2", {"stage": 3, "era": "0.9.2"}),
    ],
)
def test_files_have_the_keys_of_real_ones(case: str, form: Any, tmp_path: Path) -> None:
    real = CASES[case]
    truth = write(tmp_path, Spec(world=real.world, params=PARAMS, buffers=BUFFERS, **form))
    folder = real.ckpt / (real.ckpt / "latest").read_text()
    assert {p.name for p in truth.tag_dir.iterdir()} == {p.name for p in folder.iterdir()}
    for path in sorted(folder.iterdir()):
        assert form_of(load(truth.tag_dir / path.name)) == form_of(load(path)), path.name


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "form",
    [
        {"stage": 1, "world": 3},
        {"stage": 2, "world": 3, "alignment_padding": True},
        {"stage": 2, "world": 4, "round_robin": True},
        {"stage": 2, "world": 12, "era": "0.9.2", "trimming": "last_rank"},
        {"stage": 3, "world": 5, "sub_group_numel": 60},
        {"stage": 3, "world": 3, "packed_fragments": True},
    ],
    ids=str,
)
def test_deepspeed_reads_the_truth(form: Any, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    params = [p for p in PARAMS if p.kind == "trained" or (p.kind, form["stage"]) == ("frozen", 3)]
    buffers = [buffer for buffer in BUFFERS if buffer.tie_of is None]
    truth = write(tmp_path, Spec(params=params, buffers=buffers, **form))
    got = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    if form.get("era") == "0.9.2":
        got["head.weight"] = got["emb.weight"]
    kept = {name: t.float() if t.is_floating_point() else t for name, t in got.items()}
    assert_same_bits(kept, truth.fp32)


@pytest.mark.deepspeed
def test_deepspeed_knows_its_own_classes(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    truth = write(tmp_path, Spec(stage=2, params=PARAMS))
    assert sys.modules["deepspeed"].__file__
    path = truth.tag_dir / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]
    assert state["zero_stage"] is ZeroStageEnum.gradients
    assert isinstance(state["loss_scaler"], LossScaler)
    assert state["param_slice_mappings"][0]["inp.weight"].numel


@pytest.mark.parametrize("stage", [2, 3])
def test_large_form_gives_the_truth_without_holding_it(stage: Any, tmp_path: Path) -> None:
    truth = write_large(tmp_path, stage, 3, layers=2, width=24, vocab=101, positions=16)
    got = reassemble(truth, stage)
    got.pop("lm_head.weight", None)
    assert_stored(got, truth)
    assert len(truth.fp32) == 2 + 2 * 12 + 2 + 1
    flat = torch.cat([bits(t).view(torch.int32) for n, t in truth.fp32.items() if "lm_" not in n])
    assert flat.unique().numel() > 0.99 * flat.numel()


def test_holes_take_no_room(tmp_path: Path) -> None:
    truth = write_large(tmp_path, 3, 2, layers=1, width=512, vocab=64, positions=16)
    path = next(truth.tag_dir.glob("*_optim_states.pt"))
    status = path.stat()
    assert status.st_blocks * 512 < 0.5 * status.st_size


@pytest.mark.parametrize(
    "wrong",
    [
        {"params": [Param("a", (2,)), Param("a", (2,))]},
        {"params": [Param("b", (2,), tie_of="a"), Param("a", (2,))]},
        {"params": [Param("a", (2,)), Param("b", (3,), tie_of="a")]},
        {"buffers": [Buffer("a", torch.ones(1))]},
        {"world": 0},
        {"stage": 2, "bf16_optimizer": True},
        {"stage": 3, "alignment_padding": True},
        {"era": "0.6", "alignment_padding": True},
        {"params": [Param("a", (2,)), Param("b", (2,), group=1)], "single_dict_shapes": True},
    ],
    ids=str,
)
def test_impossible_checkpoints_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Spec(**{"stage": 1, "params": [Param("a", (2,))], **wrong})


def test_round_robin_mappings_are_wrong_as_in_deepspeed(tmp_path: Path) -> None:
    """DeepSpeed lists the fragments in the order before the reordering; so do we."""
    params = [Param(name, (4,)) for name in "abcd"]
    truth = write(tmp_path, Spec(stage=2, world=2, params=params, round_robin=True))
    model = load(truth.tag_dir / "mp_rank_00_model_states.pt")
    assert list(model["param_shapes"][0]) == ["a", "c", "b", "d"]
    states = by_rank(truth.tag_dir, "*_optim_states.pt")
    mapping = states[0]["optimizer_state_dict"]["param_slice_mappings"][0]
    assert list(mapping) == ["a", "b"]


def test_no_trace_of_deepspeed_is_left(tmp_path: Path) -> None:
    before = {name: sys.modules[name] for name in sys.modules if name.startswith("deepspeed")}
    write(tmp_path, Spec(stage=1, params=PARAMS))
    assert before == {n: sys.modules[n] for n in sys.modules if n.startswith("deepspeed")}
    assert synthetic._STAND_INS["ZeroStageEnum"].__module__ not in sys.modules or before
