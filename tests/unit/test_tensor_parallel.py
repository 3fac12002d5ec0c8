"""Tensor-parallel shards of known tensors: every way to declare how they go together."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_consolidate import CheckpointError, ConsolidateError, UsageError, consolidate
from dist_consolidate import UnsupportedLayoutError as Unsupported
from dist_consolidate.report import Report
from tests.cases import CASES, assert_same_bits, load_output
from tests.tensor_shards import Made, cut, write

GENERATOR = torch.Generator().manual_seed(5)
# What Megatron-DeepSpeed always writes, so that what is in no list is split in dimension 0.
MEGATRON = {
    "universal_checkpoint_version": 0.2,
    "pipeline_replicated_parameter_patterns": [],
    "tp_replicated_parameter_patterns": [r".*norm\.weight", r".*row\.bias"],
    "parameter_with_row_parallelism_patterns": [r".*row\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*swiglu\.(weight|bias)"],
    "parameter_to_average_patterns": [r".*averaged"],
    "vocabulary_parameter_patterns": [r"embedding\.weight"],
    "original_vocab_size": 11,
}


def full(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def fused(tensor: Tensor, sizes: list[int], dim: int = 0, degree: int = 2) -> list[Tensor]:
    """Give each rank its slice of each part, one behind the other."""
    parts = [part.tensor_split(degree, dim=dim) for part in tensor.split(sizes, dim=dim)]
    return [torch.cat([part[rank] for part in parts], dim=dim) for rank in range(degree)]


def copies(tensor: Tensor, degree: int = 2) -> list[Tensor]:
    return [tensor.clone() for _ in range(degree)]


def merge(tmp_path: Path, made: Made, **options: Any) -> tuple[dict[str, Tensor], Report]:
    write(tmp_path / "run", made)
    report = consolidate(tmp_path / "run", tmp_path / "out", **options)
    return load_output(tmp_path / "out"), report


def refusal(tmp_path: Path, made: Made, **options: Any) -> str:
    write(tmp_path / "run", made)
    return refused(tmp_path, **options)


def refused(tmp_path: Path, **options: Any) -> str:
    with pytest.raises(ConsolidateError) as caught:
        consolidate(tmp_path / "run", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def rules(tmp_path: Path, *tables: str) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text("".join(f"[[tensor_parallel.rule]]\n{table}\n" for table in tables))
    return path


def megatron_model(degree: int = 2) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """The full tensors of a small Megatron-like model, and their shards."""
    whole = {
        "column.weight": full(12, 5),
        "column.bias": full(12),
        "row.weight": full(6, 12),
        "row.bias": full(6),
        "norm.weight": full(7),
        "swiglu.weight": full(24, 3),
        "swiglu.bias": full(24),
        "averaged": full(4),
        "embedding.weight": full(11, 4),
    }
    padded = torch.cat([whole["embedding.weight"], full(1, 4)])
    shards = {
        "column.weight": cut(whole["column.weight"], 0, degree),
        "column.bias": cut(whole["column.bias"], 0, degree),
        "row.weight": cut(whole["row.weight"], 1, degree),
        "row.bias": copies(whole["row.bias"], degree),
        "norm.weight": copies(whole["norm.weight"], degree),
        "swiglu.weight": fused(whole["swiglu.weight"], [12, 12], degree=degree),
        "swiglu.bias": fused(whole["swiglu.bias"], [12, 12], degree=degree),
        "averaged": copies(whole["averaged"], degree),
        "embedding.weight": cut(padded, 0, degree),
    }
    return whole, shards


@pytest.mark.parametrize(("stage", "dp"), [(0, 1), (1, 1), (2, 3), (3, 1), (3, 2)])
@pytest.mark.parametrize("degree", [2, 3])
def test_megatrons_patterns(tmp_path, stage, dp, degree):
    whole, shards = megatron_model(degree)
    got, report = merge(tmp_path, Made(shards, MEGATRON, stage=stage, dp=dp))
    assert_same_bits(got, whole)
    assert report.notes == () if stage else True


@pytest.mark.parametrize("format", ["safetensors", "bin"])
@pytest.mark.parametrize("size", [64, 4096])
def test_small_buckets_and_files(tmp_path, size, format):
    whole, shards = megatron_model()
    made = Made(shards, MEGATRON, stage=2, dp=2)
    options = {"bucket_size": size, "max_shard_size": 300, "format": format, "transport": "gather"}
    got, report = merge(tmp_path, made, **options)
    assert_same_bits(got, whole)
    assert len(report.files) > 1


def sub_params(version: float, shape: list[Any], dim: int = 0, **more: Any) -> dict[str, Any]:
    listed = [{"patterns": [r"^qkv\.(weight|bias)$"], "shape": shape, "partition_dim": dim}]
    info = {**MEGATRON, "universal_checkpoint_version": version}
    return {**info, "parameter_with_sub_params": listed, **more}


@pytest.mark.parametrize(
    ("version", "shape", "sizes"),
    [
        (0.2, [3, -1], [8, 8, 8]),
        (0.3, [(16, 4, 4), -1], [16, 4, 4]),
        (0.3, [(16, 4, 4), 5], [16, 4, 4]),
    ],
)
def test_fused_parts_without_widths(tmp_path, version, shape, sizes):
    whole = {"qkv.weight": full(24, 5)}
    shards = {"qkv.weight": fused(whole["qkv.weight"], sizes)}
    assert_same_bits(merge(tmp_path, Made(shards, sub_params(version, shape)))[0], whole)


def test_fused_vectors_stay_vectors(tmp_path):
    whole = {"qkv.bias": full(24)}
    shards = {"qkv.bias": fused(whole["qkv.bias"], [8, 8, 8])}
    assert_same_bits(merge(tmp_path, Made(shards, sub_params(0.2, [3, -1])))[0], whole)


def test_fused_parts_with_uneven_widths(tmp_path):
    whole = {"qkv.weight": full(15, 5)}
    shards = {"qkv.weight": fused(whole["qkv.weight"], [9, 3, 3])}
    widths = {r"^qkv\.(weight|bias)$": [[5, 4], [2, 1], [2, 1]]}
    info = sub_params(0.4, [(9, 3, 3), -1], sub_param_shard_widths=widths)
    assert_same_bits(merge(tmp_path, Made(shards, info))[0], whole)


def test_fused_in_the_second_dimension(tmp_path):
    whole = {"qkv.weight": full(5, 24)}
    shards = {"qkv.weight": fused(whole["qkv.weight"], [16, 4, 4], dim=1)}
    info = sub_params(0.3, [-1, (16, 4, 4)], dim=1)
    assert_same_bits(merge(tmp_path, Made(shards, info))[0], whole)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (sub_params(0.3, [(9, 3, 12), -1]), "has parts of [9, 3] that 2 ranks cannot share"),
        (sub_params(0.4, [(8, 8, 8), -1]), "not their widths on the ranks"),
        (sub_params(0.3, [(8, 8, 4), -1]), "qkv.weight: by"),
        (sub_params(0.2, [0, -1]), "in a form that DeepSpeed does not write"),
        (sub_params(0.2, [7, -1]), "7 equal parts in dimension 0"),
        ({**MEGATRON, "parameter_with_sub_params": [{"shape": [3]}]}, "not as DeepSpeed writes it"),
        ({**MEGATRON, "tp_replicated_parameter_patterns": ["("]}, "not as DeepSpeed writes it"),
        ({**MEGATRON, "affine_map": {"version": 2}}, "affine_map version 2"),
        (
            {**MEGATRON, "tp_replicated_parameter_patterns": ["qkv", ".kv"]},
            "matched by several tp_replicated_parameter_patterns",
        ),
        (
            {**MEGATRON, "autotp_unsupported_parameter_patterns": {"^qkv": "mixed heads"}},
            "records that its layout cannot be told (mixed heads)",
        ),
        (
            {**MEGATRON, "vocabulary_parameter_patterns": ["qkv"], "original_vocab_size": None},
            "records no original_vocab_size",
        ),
        (
            {**MEGATRON, "vocabulary_parameter_patterns": ["qkv"], "original_vocab_size": 25},
            "is to keep 25 rows",
        ),
    ],
)
def test_records_that_cannot_be_followed(tmp_path, info, words):
    message = refusal(tmp_path, Made({"qkv.weight": fused(full(24, 5), [8, 8, 8])}, info))
    assert words in message
    assert "mp_rank_00_model_states.pt" in message or "keep 25 rows" in message


def piece(shape, to, to_steps, own, own_steps, **more):
    listed = {"shape": shape, "source": [to, to_steps], "dest": [own, own_steps], "locations": []}
    return {**listed, **more}


def affine(shape, *ranks):
    """An affine map of ``x`` of pieces by rank: shard shapes, and the pieces."""
    recorded = {r: {"shard_shape": s, "pieces": p} for r, (s, p) in enumerate(ranks)}
    params = {"^x$": {"logical_shape": shape, "ranks": recorded}}
    return {
        "universal_checkpoint_version": 0.4,
        "tp_replicated_parameter_patterns": [],
        "autotp_unsupported_parameter_patterns": {},
        "affine_map": {"version": 1, "params": params},
    }


def test_an_affine_map_that_lies_crosswise(tmp_path):
    # Even rows on one rank; odd rows, transposed, on the other.
    whole = full(6, 4)
    shards = [whole[::2].contiguous(), whole[1::2].t().contiguous()]
    info = affine(
        [6, 4],
        ([3, 4], [piece([3, 4], 0, [8, 1], 0, [4, 1])]),
        ([4, 3], [piece([3, 4], 4, [8, 1], 0, [1, 3])]),
    )
    assert_same_bits(merge(tmp_path, Made({"x": shards}, info))[0], {"x": whole})


def mixed_map():
    """Two split rows and two that both ranks hold."""
    return affine(
        [4, 3],
        ([3, 3], [piece([1, 3], 0, [3, 1], 0, [3, 1]), piece([2, 3], 6, [3, 1], 3, [3, 1])]),
        ([3, 3], [piece([1, 3], 3, [3, 1], 0, [3, 1]), piece([2, 3], 6, [3, 1], 3, [3, 1])]),
    )


def test_an_affine_map_with_a_replicated_part(tmp_path):
    whole = full(4, 3)
    shards = [whole[[0, 2, 3]], whole[[1, 2, 3]]]
    assert_same_bits(merge(tmp_path, Made({"x": shards}, mixed_map()))[0], {"x": whole})


def test_a_replicated_part_that_differs(tmp_path):
    whole = full(4, 3)
    shards = [whole[[0, 2, 3]], whole[[1, 2, 3]]]
    shards[1][2, 2] += 1
    message = refusal(tmp_path, Made({"x": shards}, mixed_map()))
    assert "x: every tensor rank should hold the same values" in message
    assert "rank 1 (mp_rank_01_model_states.pt) differs from rank 0" in message


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (([2, 3], [piece([2, 3], 6, [3, 1], 0, [3, 1], scale=0.5)]), "scaled by 0.5"),
        (([2, 3], [piece([2, 3], 7, [3, 1], 0, [3, 1])]), "lies outside"),
        (([2, 3], [piece([2, 3], 6, [3, 1], 1, [3, 1])]), "lies outside"),
        (([2, 3], [piece([2, 3], 3, [3, 1], 0, [3, 1])]), "x: elements 3 to 6 are filled twice"),
        (([2, 3], [piece([1, 3], 6, [3, 1], 0, [3, 1])]), "x: its parts fill 9 of 12 elements"),
        (([3, 2], [piece([2, 3], 6, [3, 1], 0, [3, 1])]), "but those recorded are [2, 3], [3, 2]"),
        (([2, 3], [piece([2, 3], 6, [3], 0, [3, 1])]), "in a form that DeepSpeed does not write"),
        (([2, 3], None), "in a form that DeepSpeed does not write"),
    ],
)
def test_affine_maps_that_cannot_be(tmp_path, second, words):
    info = affine([4, 3], ([2, 3], [piece([2, 3], 0, [3, 1], 0, [3, 1])]), second)
    assert words in refusal(tmp_path, Made({"x": cut(full(4, 3), 0)}, info))


def test_an_affine_map_for_other_ranks(tmp_path):
    info = affine([2, 3], ([2, 3], [piece([2, 3], 0, [3, 1], 0, [3, 1])]))
    message = refusal(tmp_path, Made({"x": cut(full(4, 3), 0)}, info))
    assert "records its layout for the ranks [0], but 2 are there" in message


def test_a_rank_without_rows(tmp_path):
    whole = {"x": full(2, 3), "y": full(6, 3)}
    shards = {"x": cut(whole["x"], 0, 3), "y": cut(whole["y"], 0, 3)}
    assert not shards["x"][2].numel()
    assert_same_bits(merge(tmp_path, Made(shards, MEGATRON))[0], whole)


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_and_ties_and_frozen(tmp_path, stage):
    whole = {"a": full(6, 4), "b": full(4), "count": torch.tensor(2**40), "table": torch.arange(6)}
    autotp = affine([4], ([4], []), ([4], []))
    autotp["affine_map"]["params"].clear()
    autotp["tp_replicated_parameter_patterns"] = ["^b$"]
    made = Made(
        {"a": cut(whole["a"], 0), "b": copies(whole["b"])},
        autotp,
        stage=stage,
        dp=2,
        buffers={"count": copies(whole["count"]), "table": copies(whole["table"])},
        ties={"c": "a"},
    )
    got, report = merge(tmp_path, made)
    assert_same_bits(got, whole | {"c": whole["a"]})
    assert report.ties == {"c": "a"}


def test_frozen_weights_of_stage_1_are_merged(tmp_path):
    whole, shards = megatron_model()
    frozen = {"frozen.row.weight": full(4, 6).half(), "frozen.norm.weight": full(5).half()}
    halves = {
        "frozen.row.weight": cut(frozen["frozen.row.weight"], 1),
        "frozen.norm.weight": copies(frozen["frozen.norm.weight"]),
    }
    got, _ = merge(tmp_path, Made(shards, MEGATRON, frozen=halves))
    assert_same_bits(got, whole | {name: value.float() for name, value in frozen.items()})


def test_buffers_that_nothing_settles(tmp_path):
    shards = {"column.weight": cut(full(4, 2), 0)}
    buffers = {"mean": copies(full(3)), "odd": cut(full(4), 0)}
    message = refusal(tmp_path, Made(shards, MEGATRON, buffers=buffers))
    assert "mean: shards [3], [3]; equal on all ranks: probably replicated\n" in message
    assert "odd: shards [2], [2]\n" in message
    assert "column" not in message


def test_megatrons_nested_module(tmp_path):
    whole, shards = megatron_model()
    inside = {f"language_model.encoder.{name}": parts for name, parts in shards.items()}

    def nest(weights: dict[str, Tensor]) -> dict[str, Any]:
        flat = {n.removeprefix("language_model.encoder."): w for n, w in weights.items()}
        return {"language_model": {"encoder": flat}}

    info = {**MEGATRON, "vocabulary_parameter_patterns": [r".*embedding\.weight"]}
    made = Made(inside, info, nest=nest, stage=2)
    got, _ = merge(tmp_path, made)
    assert_same_bits(got, {f"language_model.encoder.{name}": w for name, w in whole.items()})
    other = dataclasses.replace(made, nest=lambda weights: {"model": nest(weights)})
    with pytest.raises(Unsupported, match="`module` is nested") as caught:
        write(tmp_path / "other", other)
        consolidate(tmp_path / "other", tmp_path / "out2")
    assert "not among them" in str(caught.value)


def test_lists_of_old_autotp_settle_only_what_they_name(tmp_path):
    info = {
        "universal_checkpoint_version": 0.2,
        "parameter_with_row_parallelism_patterns": [r"^row\.weight$"],
        "tp_replicated_parameter_patterns": [],
        "vocabulary_parameter_patterns": [],
        "parameter_with_sub_params": [],
    }
    shards = {"row.weight": cut(full(4, 4), 1), "norm.weight": copies(full(3))}
    message = refusal(tmp_path, Made(shards | {"up.weight": cut(full(4, 2), 0)}, info))
    assert "leave 2 tensors open" in message
    assert "norm.weight: shards [3], [3]; equal on all ranks" in message
    assert "up.weight: shards [2, 2], [2, 2]\n" in message


@pytest.mark.parametrize("pattern", [r"^lm_head\.weight$", r"lm_head"])
def test_only_autotp_never_pads(tmp_path, pattern):
    """Its patterns are whole names; anybody else's vocabulary may have padded rows, to be cut."""
    info = {
        "parameter_with_row_parallelism_patterns": [pattern],
        "vocabulary_parameter_patterns": [pattern],
        "original_vocab_size": 5,
    }
    whole = full(6, 4)
    got, _ = merge(tmp_path, Made({"lm_head.weight": cut(whole, 1)}, info))
    rows = 6 if pattern.startswith("^") else 5
    assert_same_bits(got, {"lm_head.weight": whole[:rows]})


def test_nothing_is_guessed(tmp_path):
    shards = {"zeros": copies(torch.zeros(4, 2)), "split": cut(full(4, 2), 0)}
    made = Made(shards)
    message = refusal(tmp_path, made)
    assert "2 tensors open" in message
    assert "  - zeros: shards [4, 2], [4, 2]; equal on all ranks: probably replicated\n" in message
    assert "  - split: shards [2, 2], [2, 2]\n" in message
    assert "--hf-config" in message and "--tp-rules" in message


def test_the_users_rules(tmp_path):
    whole = {
        "a.weight": full(4, 6),
        "b.weight": full(4, 6),
        "qkv.weight": full(16, 3),
        "gate_up.weight": full(8, 3),
        "norm": full(5),
        "mean": full(5),
        "embed": full(7, 2),
    }
    shards = {
        "a.weight": cut(whole["a.weight"], 0),
        "b.weight": cut(whole["b.weight"], 1),
        "qkv.weight": fused(whole["qkv.weight"], [8, 4, 4]),
        "gate_up.weight": fused(whole["gate_up.weight"], [4, 4]),
        "norm": copies(whole["norm"]),
        "mean": copies(whole["mean"]),
        "embed": cut(torch.cat([whole["embed"], torch.zeros(1, 2)]), 0),
    }
    path = rules(
        tmp_path,
        'match = "b.*"\ndim = 1',
        'match = "qkv.*"\ndim = 0\nsub_params = [8, 4, 4]',
        'match = "gate_up.*"\ndim = 0\nsub_params = 2',
        'match = "*.weight"\ndim = 0',
        'match = "norm"\nreplicated = true',
        'match = "mean"\naverage = true',
        'match = "embed"\ndim = 0\nvocab_size = 7',
        'match = "nothing"\ndim = 0',
    )
    got, report = merge(tmp_path, Made(shards), tp_rules=path)
    assert_same_bits(got, whole)
    assert report.notes == (
        f"{path}: rule 8 (nothing) matches no tensor that an earlier rule does not match",
    )


def test_the_user_overrules_the_record(tmp_path):
    whole, shards = megatron_model()
    swapped = {**shards, "column.weight": cut(whole["column.weight"], 1)}
    path = rules(tmp_path, 'match = "column.weight"\ndim = 1', 'match = "row.weight"\ndim = 1')
    got, report = merge(tmp_path, Made(swapped, MEGATRON), tp_rules=path)
    assert_same_bits(got, whole)
    (note,) = report.notes
    assert "contradicts the recorded layout of 1 tensor, and was followed" in note
    assert "the first is column.weight (recorded by mp_rank_00" in note


def test_a_rule_that_says_what_is_recorded(tmp_path):
    """In other words: the record splits by default, and names what lies in columns."""
    whole, shards = megatron_model()
    path = rules(tmp_path, 'match = "column.weight"\ndim = 0', 'match = "row.weight"\ndim = 1')
    got, report = merge(tmp_path, Made(shards, MEGATRON), tp_rules=path)
    assert_same_bits(got, whole)
    assert report.notes == ()


@pytest.mark.parametrize("kind", ["replicated", "average"])
def test_copies_that_differ(tmp_path, kind):
    whole = {"x": full(3, 2), "y": full(6)}
    drifted = whole["x"].clone()
    drifted[2, 1] = -drifted[2, 1]
    made = Made({"x": [whole["x"], drifted, whole["x"]], "y": cut(whole["y"], 0, 3)})
    split = 'match = "y"\ndim = 0'
    path = rules(tmp_path, f'match = "x"\n{kind} = true', split)
    message = refusal(tmp_path, made, tp_rules=path)
    assert "rank 1 (mp_rank_01_model_states.pt) differs from rank 0 (mp_rank_00" in message
    assert "x: every tensor rank should hold the same values by rule 1 of" in message
    assert ("mean is meant" in message) == (kind == "average")
    path = rules(tmp_path, f'match = "x"\n{kind} = true\ntake_rank = 1', split)
    report = consolidate(tmp_path / "run", tmp_path / "out", tp_rules=path)
    assert_same_bits(load_output(tmp_path / "out"), whole | {"x": drifted})
    assert any("of 1 tensor one rank's copy was taken" in note for note in report.notes)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('match = "x"\ndim = 2', "is split in dimension 2, but its shards have the shape"),
        ('match = "x"\ndim = 0', "is split in dimension 0, but its shards are [4, 2], [3, 3]"),
        ('match = "x"\nreplicated = true', "is replicated, but its shards have the shapes"),
        ('match = "y"\nreplicated = true\ntake_rank = 2', "is to be taken from rank 2 of 2"),
        ('match = "y"\ndim = 0\nsub_params = 3', "has 3 equal parts in dimension 0"),
        ('match = "y"\ndim = 0\nsub_params = [3, 1]', "parts of [3, 1] that 2 ranks cannot share"),
        ('match = "y"\ndim = 0\nsub_params = [4, 2]', "has parts that take [3, 3]"),
        ('match = "y"\ndim = 0\nvocab_size = 5', "is to keep 5 rows"),
    ],
)
def test_rules_that_do_not_fit(tmp_path, table, words):
    shards = {"x": [full(4, 2), full(3, 3)], "y": copies(full(2))}
    path = rules(tmp_path, table)
    message = refusal(tmp_path, Made(shards), tp_rules=path)
    assert f"by rule 1 of {path}" in message
    assert words in message


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("dim = 0", "has no `match`"),
        ('match = "x"', "exactly one of dim, replicated, average"),
        ('match = "x"\ndim = 0\naverage = true', "exactly one of"),
        ('match = "x"\ndim = -1', "dim = -1 must be a number, 0 or more"),
        ('match = "x"\ndim = true', "dim = True must be a number"),
        ('match = "x"\nreplicated = false', "can only be true"),
        ('match = "x"\ndim = 0\ndims = 1', "unknown key dims"),
        ('match = "x"\ndim = 0\nsub_params = 0', "sub_params = 0 must be"),
        ('match = "x"\ndim = 0\nsub_params = []', "sub_params = [] must be"),
        ('match = "x"\naverage = true\nsub_params = 2', "sub_params does not go with"),
        ('match = "x"\ndim = 0\ntake_rank = 1', "take_rank does not go with"),
        ('match = "x"\ndim = 0\n[other]', "and nothing else"),
        ("match = ", "is no valid TOML"),
    ],
)
def test_rules_that_are_wrong(tmp_path, table, words):
    path = rules(tmp_path, table)
    with pytest.raises(UsageError, match="--tp-rules") as caught:
        write(tmp_path / "run", Made({"x": cut(full(4, 2), 0)}))
        consolidate(tmp_path / "run", tmp_path / "out", tp_rules=path)
    assert words in str(caught.value)


def test_a_rules_file_that_is_not_there(tmp_path):
    message = refusal(tmp_path, Made({"x": cut(full(4), 0)}), tp_rules=tmp_path / "no.toml")
    assert message == f"--tp-rules {tmp_path / 'no.toml'}: No such file or directory"


# --- ranks that do not belong together


def test_a_missing_tensor_rank(tmp_path):
    folder = write(tmp_path / "run", Made(megatron_model()[1], MEGATRON, stage=2, dp=2))
    for name in ("mp_rank_01_model_states.pt", "zero_pp_rank_1_mp_rank_01_optim_states.pt"):
        (folder / name).rename(tmp_path / name)
        message = refused(tmp_path)
        assert f"{folder / name}: is missing" in message
        (tmp_path / name).rename(folder / name)
    consolidate(tmp_path / "run", tmp_path / "out")


def test_a_surplus_tensor_rank(tmp_path):
    folder = write(tmp_path / "run", Made(megatron_model()[1], MEGATRON))
    shutil.copy(folder / "mp_rank_01_model_states.pt", folder / "mp_rank_02_model_states.pt")
    message = refused(tmp_path)
    assert "mp_rank_02_model_states.pt: is surplus: model-parallel index 2, but the run had 2" in (
        message
    )


def test_a_tensor_rank_of_another_step(tmp_path):
    made = Made(megatron_model()[1], MEGATRON, rank_step=(1, 7))
    message = refusal(tmp_path, made)
    assert "mp_rank_01_model_states.pt: step is 7, but 3 in mp_rank_00_model_states.pt" in message


def test_an_optimizer_of_another_step(tmp_path):
    made = Made(megatron_model()[1], MEGATRON, optim_steps=(3, 4), dp=2)
    message = refusal(tmp_path, made)
    assert "mp_rank_01_model_states.pt: the optimizer of its tensor rank has taken 4 steps" in (
        message
    )


def test_a_tensor_rank_of_another_model(tmp_path):
    shards = megatron_model()[1]
    folder = write(tmp_path / "run", Made(shards, MEGATRON))
    other = write(tmp_path / "other", Made({**shards, "new": copies(full(3))}, MEGATRON))
    for path in other.glob("*mp_rank_01*"):
        shutil.copy(path, folder)
    message = refused(tmp_path)
    assert "1 keys of `module` are there or in mp_rank_00_model_states.pt, but not in both" in (
        message
    )
    assert message.endswith("the first is new")


def test_a_tensor_rank_of_another_run(tmp_path):
    folder = write(tmp_path / "run", Made(megatron_model()[1], MEGATRON))
    other = write(tmp_path / "other", Made(megatron_model()[1], MEGATRON))
    for path in other.glob("*mp_rank_01*"):
        shutil.copy(path, folder)
    message = refused(tmp_path)
    for name in ("norm.weight", "row.bias", "averaged"):
        assert f"{name}: every tensor rank should hold the same values" in message
    assert "column" not in message


def test_a_tensor_rank_with_another_record(tmp_path):
    shards = megatron_model()[1]
    folder = write(tmp_path / "run", Made(shards, MEGATRON))
    other = write(tmp_path / "other", Made(shards, {**MEGATRON, "original_vocab_size": 12}))
    for path in other.glob("*mp_rank_01*"):
        shutil.copy(path, folder)
    assert "records another tensor-parallel layout than mp_rank_00" in refused(tmp_path)


def test_a_tensor_rank_that_is_a_copy(tmp_path):
    folder = write(tmp_path / "run", Made(megatron_model()[1], MEGATRON))
    for path in folder.glob("*mp_rank_00*"):
        state = torch.load(path, weights_only=False)
        torch.save(state, folder / path.name.replace("mp_rank_00", "mp_rank_01"))
    message = refused(tmp_path)
    assert "one rank's files are a copy of the other's" in message
    assert "mp_rank_01_model_states.pt: holds the same values as mp_rank_00" in message


def test_real_shards_of_another_case(tmp_path):
    """AutoTP's own files, of which one rank's are replaced by files of a plain checkpoint."""
    shutil.copytree(CASES["tp2_z1_fp32_w2"].ckpt, tmp_path / "run")
    (folder,) = (tmp_path / "run").glob("global_step*")
    (foreign,) = CASES["frozen_half_z1_w2"].ckpt.glob("*/mp_rank_00_model_states.pt")
    shutil.copy(foreign, folder / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="mp_rank_01") as caught:
        consolidate(tmp_path / "run", tmp_path / "out")
    assert str(folder) in str(caught.value)


def test_sizes_that_differ_only_on_one_rank_are_named(tmp_path):
    whole, shards = megatron_model()
    shards["norm.weight"][1] = whole["norm.weight"][:6].clone()
    message = refusal(tmp_path, Made(shards, MEGATRON))
    assert (
        "norm.weight: by mp_rank_00_model_states.pt (tp_replicated_parameter_patterns) it is "
        in (message)
    )
    assert "[7], [6]" in message


def test_rules_for_a_plain_checkpoint_are_noted(tmp_path):
    made = Made({"x": [full(4)]})
    path = rules(tmp_path, 'match = "x"\ndim = 0')
    got, report = merge(tmp_path, made, tp_rules=path, hf_config=tmp_path)
    assert_same_bits(got, {"x": made.params["x"][0]})
    assert report.notes == tuple(
        f"{option} {given} was not read: nothing here is split over tensor-parallel ranks"
        for option, given in (("--tp-rules", path), ("--hf-config", tmp_path))
    )
