"""Shards of one tag in several folders: each is found once, and contradictions are named."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from dist_consolidate import consolidate
from dist_consolidate.checkpoint.layout import find_tag
from dist_consolidate.checkpoint.search import find_twice, with_search_dirs
from dist_consolidate.errors import CheckpointError, UsageError
from dist_consolidate.options import make_options
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.synthetic import Buffer, Param, Spec, Truth, write
from tests.torchrun import messages, show
from tests.zygote import fork_ranks, fork_together

PARAMS = (
    Param("emb.weight", (31, 9)),
    Param("a.weight", (17, 6)),
    Param("a.bias", (17,), group=1),
    Param("base.weight", (8, 3), kind="frozen"),
    Param("head.weight", (31, 9), tie_of="emb.weight"),
)
BUFFERS = (Buffer("ids", torch.arange(7)), Buffer("mean", torch.tensor([0.5, -1.25])))
SPECS = {
    "z1": Spec(stage=1, world=4, params=PARAMS, buffers=BUFFERS),
    "z2": Spec(stage=2, world=4, params=PARAMS, buffers=BUFFERS),
    "z3": Spec(stage=3, world=4, params=PARAMS, buffers=BUFFERS, sub_group_numel=100),
}


def rank_of(path: Path) -> int:
    name = path.name
    return int(name.split("zero_pp_rank_")[1].split("_")[0]) if "zero_pp_rank_" in name else 0


def split(source: Path, homes: Sequence[Path], ranks: Sequence[Sequence[int]]) -> list[Path]:
    """Copy a run folder, each rank's files to the folders that are to have them."""
    for home, mine in zip(homes, ranks, strict=True):
        for path in sorted(source.rglob("*")):
            target = home / path.relative_to(source)
            is_here = home == homes[0] if path.name == "latest" else rank_of(path) in mine
            if path.is_file() and is_here:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    return list(homes)


@pytest.fixture(params=SPECS)
def truth(request: pytest.FixtureRequest, tmp_path: Path) -> Truth:
    return write(tmp_path / "whole", SPECS[request.param])


@pytest.mark.parametrize("transport", ["direct", "allgather"])
def test_two_nodes_side_by_side(tmp_path: Path, truth: Truth, transport: str) -> None:
    a, b = split(tmp_path / "whole", [tmp_path / "a", tmp_path / "b"], [(0, 2), (1, 3)])
    consolidate(a, tmp_path / "out", search_dir=[b], transport=transport)
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)
    consolidate(tmp_path / "whole", tmp_path / "want", transport=transport)
    names = sorted(path.name for path in (tmp_path / "want").iterdir())
    assert [(tmp_path / "out" / n).read_bytes() for n in names] == [
        (tmp_path / "want" / n).read_bytes() for n in names
    ]


def test_three_folders_of_every_kind(tmp_path: Path, truth: Truth) -> None:
    """A run folder, a tag folder, and one that has nothing of it; one more rank is there twice."""
    homes = [tmp_path / name for name in "abc"]
    split(tmp_path / "whole", homes, [(0,), (1, 2), (2, 3)])
    tag = truth.tag_dir.name
    report = consolidate(
        homes[0], tmp_path / "out", search_dir=[str(homes[1] / tag), str(homes[2])]
    )
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)
    (note,) = (note for note in report.notes if "several folders" in note)
    num_files = sum(rank_of(path) == 2 for path in truth.tag_dir.iterdir())
    assert note.startswith(f"{num_files} shards lie in several folders with the same content")


def test_one_folder_alone_is_refused_and_says_where_it_looked(tmp_path: Path, truth: Truth) -> None:
    a, b = split(tmp_path / "whole", [tmp_path / "a", tmp_path / "b"], [(0, 1), (2,)])
    with pytest.raises(CheckpointError) as refusal:
        consolidate(a, tmp_path / "out")
    assert "(rank 2 of 4)" in str(refusal.value)
    assert "(rank 3 of 4)" in str(refusal.value)
    with pytest.raises(CheckpointError) as refusal:
        consolidate(a, tmp_path / "out", search_dir=b)
    assert "(rank 3 of 4)" in str(refusal.value)
    assert "(rank 2 of 4)" not in str(refusal.value)
    tag = truth.tag_dir.name
    assert str(refusal.value).endswith(f"Looked for in: {a / tag}, {b / tag}.")
    assert not (tmp_path / "out").exists()


def test_staging_folder_of_the_trainer(tmp_path: Path, truth: Truth) -> None:
    homes = [tmp_path / "checkpoint-5", tmp_path / "tmp-checkpoint-5"]
    done, staged = split(tmp_path / "whole", homes, [(0, 1), (2, 3)])
    with pytest.raises(CheckpointError) as refusal:
        consolidate(done, tmp_path / "out")
    assert str(refusal.value).endswith(f"add --search-dir {staged}")
    consolidate(done, tmp_path / "out", search_dir=[staged])
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)


def test_contradicting_shards_are_named(tmp_path: Path, truth: Truth) -> None:
    homes = [tmp_path / "a", tmp_path / "b"]
    a, b = split(tmp_path / "whole", homes, [(0, 1, 2), (1, 2, 3)])
    paths = sorted(b.rglob("*zero_pp_rank_[12]_*optim_states.pt"))
    for path in paths:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointError) as refusal:
        consolidate(a, tmp_path / "out", search_dir=[b])
    for path in paths:
        other = a / path.relative_to(b)
        assert f"{other} and {path}: are one shard, but differ in content" in str(refusal.value)


def test_links_and_the_same_folder_again_are_one(tmp_path: Path, truth: Truth) -> None:
    a, b = split(tmp_path / "whole", [tmp_path / "a", tmp_path / "b"], [(0, 1, 2, 3), (1,)])
    for path in sorted(b.rglob("*.pt")):
        path.unlink()
        path.symlink_to(a / path.relative_to(b))
    folder = with_search_dirs(find_tag(a), [str(b), str(a), f"{a}/../a"])
    assert find_twice(folder.folders) == []
    consolidate(a, tmp_path / "out", search_dir=[b, a])
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)


# With node-local storage each node saves model states of its own.


def _edit(path: Path, change: Callable[[dict], None]) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


@pytest.mark.deepspeed
@pytest.mark.parametrize("first_is_main", [True, False])
def test_model_states_of_each_node(tmp_path: Path, first_is_main: bool) -> None:
    """The other node's has no ties and other buffers; that of the run's first rank is read."""
    case = CASES["shared_layers_z2_w3"]
    homes = [tmp_path / "a", tmp_path / "b"]
    a, b = split(case.ckpt, homes, [(0, 1), (0, 2)])
    (tag,) = (path.name for path in a.iterdir() if path.is_dir())
    (b / tag / next(p.name for p in (b / tag).glob("*zero_pp_rank_0_*"))).unlink()
    _edit(b / tag / "mp_rank_00_model_states.pt", lambda s: s.update(shared_params={}, mine=1))
    main, other = (a, b) if first_is_main else (b, a)
    report = consolidate(main, tmp_path / "out", tag=tag, search_dir=[other])
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))
    (note,) = (note for note in report.notes if "as each node saves it" in note)
    assert f"{a / tag}'s was read" in note


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update(global_steps=9), "differ in global_steps"),
        (lambda s: next(iter(s["module"].values())).add_(1), "differ in the values of "),
        (lambda s: s["module"].popitem(), "differ in the keys of `module`"),
    ],
)
def test_model_states_of_another_save(
    tmp_path: Path, change: Callable[[dict], None], words: str
) -> None:
    case = CASES["shared_layers_z2_w3"]
    a, b = split(case.ckpt, [tmp_path / "a", tmp_path / "b"], [(0, 1, 2), (0,)])
    (tag,) = (path.name for path in a.iterdir() if path.is_dir())
    next((b / tag).glob("*zero_pp_rank_0_*")).unlink()
    _edit(b / tag / "mp_rank_00_model_states.pt", change)
    with pytest.raises(CheckpointError) as refusal:
        consolidate(a, tmp_path / "out", search_dir=[b])
    assert words in str(refusal.value)
    assert str(b / tag / "mp_rank_00_model_states.pt") in str(refusal.value)


def test_folders_without_the_tag(tmp_path: Path, truth: Truth) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError) as refusal:
        consolidate(
            tmp_path / "whole",
            tmp_path / "out",
            search_dir=[tmp_path / "other", tmp_path / "nowhere", tmp_path / "whole"],
        )
    found = [line for line in str(refusal.value).splitlines() if line.startswith("  - ")]
    assert [line.split(":")[0] for line in found] == [
        f"  - {tmp_path / 'other'}",
        f"  - {tmp_path / 'nowhere'}",
    ]


def test_bad_values() -> None:
    with pytest.raises(UsageError, match="--search-dir: is empty"):
        make_options({"search_dir": [""]})
    with pytest.raises(UsageError, match="--search-dir"):
        make_options({"search_dir": [b"x"]})


# Several ranks.


@pytest.mark.dist
@pytest.mark.parametrize("transport", ["direct", "gather", "allgather"])
def test_two_ranks_on_one_machine(tmp_path: Path, transport: str) -> None:
    truth = write(tmp_path / "whole", SPECS["z3"])
    a, b = split(tmp_path / "whole", [tmp_path / "a", tmp_path / "b"], [(0, 2), (1, 2, 3)])
    fork_together(2, [a, tmp_path / "out", "--search-dir", b, "--transport", transport]).ok()
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)


@pytest.mark.dist
def test_each_node_has_two_disks(tmp_path: Path) -> None:
    """Node 0 has ranks 0 and 1, node 1 ranks 2 and 3; each on two disks, one of its own name."""
    spec = dataclasses.replace(SPECS["z2"])
    truth = write(tmp_path / "whole", spec)
    split(
        tmp_path / "whole",
        [tmp_path / "node0" / "d0", tmp_path / "node0" / "d1",
         tmp_path / "node1" / "d0", tmp_path / "node1" / "d2"],
        [(0,), (1,), (2,), (3,)],
    )  # fmt: skip
    arguments = ["d0", tmp_path / "out", "--search-dir", "d1", "--search-dir", "d2"]
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    ended = fork_ranks(2, ["cli", *nodes, *arguments], module="tests.test_visibility")
    assert [rank.returncode for rank in ended] == [0, 0], show(ended)
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)


@pytest.mark.dist
@pytest.mark.deepspeed
def test_node_local_model_states_of_another_size(tmp_path: Path) -> None:
    """Two nodes, one path: the other node's model states are no copy, and none is taken for it."""
    case = CASES["kitchen_z2_groups_w4"]
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    homes = [node / "run" for node in nodes]
    _, b = split(case.ckpt, homes, [(0, 1), (0, 2, 3)])
    (tag,) = (path.name for path in b.iterdir() if path.is_dir())
    next((b / tag).glob("*zero_pp_rank_0_*")).unlink()
    _edit(
        b / tag / "mp_rank_00_model_states.pt", lambda s: s.update(shared_params={}, mine=[0] * 9)
    )
    arguments = ["run", tmp_path / "out", "--tag", tag, "--transport", "allgather"]
    ended = fork_ranks(2, ["cli", *nodes, *arguments], module="tests.test_visibility")
    assert [rank.returncode for rank in ended] == [0, 0], show(ended)
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))


@pytest.mark.dist
def test_a_contradiction_on_the_other_node_ends_all(tmp_path: Path) -> None:
    write(tmp_path / "whole", SPECS["z2"])
    split(
        tmp_path / "whole",
        [tmp_path / "node0" / "d0", tmp_path / "node1" / "d0", tmp_path / "node1" / "d1"],
        [(0, 1), (2, 3), (3,)],
    )
    (path,) = (tmp_path / "node1" / "d1").rglob("*zero_pp_rank_3_*optim_states.pt")
    path.write_bytes(path.read_bytes() + b"\0")
    arguments = ["d0", tmp_path / "out", "--search-dir", "d1"]
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    ended = fork_ranks(2, ["cli", *nodes, *arguments], module="tests.test_visibility")
    assert [rank.returncode for rank in ended] == [3, 3], show(ended)
    assert any("are one shard, but differ in content" in text for text in messages(ended))
    assert "Traceback" not in show(ended), show(ended)
    assert not (tmp_path / "out").exists()
