"""ZeRO-3 masters that were offloaded to NVMe lie in raw files beside the shards.

The swapper needs libaio, so these files are made here from real ZeRO-3 checkpoints, as DeepSpeed
would have left them: emptied tensors that keep their `ds_id`, and raw files with padding behind.
The expected values are the checkpoints' own truth.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dist_consolidate import CheckpointError, UnsupportedLayoutError, consolidate, open_checkpoint
from tests.cases import Case, assert_same_bits, expected_fp32, load_output
from tests.special import State, copy_of, edit
from tests.zygote import fork_together

pytestmark = pytest.mark.deepspeed

CASES = ["kitchen_z3_bf16_w2", "tied_frozen_z3_w2", "same_module_tie_z3_w2"]
ALIGNED_BYTES = 1024


def swapped_out(
    name: str,
    tmp_path: Path,
    folder: Callable[[int], str] = lambda rank: f"offloaded_tensors/rank{rank:02d}",
    only: Callable[[int], bool] = lambda _index: True,
) -> tuple[Case, Path, list[Path]]:
    """Move sub-groups of a checkpoint into swap files; gives these too."""
    case, tag = copy_of(name, tmp_path)
    files = []
    for path in sorted(tag.glob("*optim_states.pt")):
        rank = int(path.name.split("pp_rank_")[1].split("_")[0])

        def move(state: State, rank: int = rank) -> None:
            groups: list[Tensor] = state["optimizer_state_dict"]["fp32_flat_groups"]
            for index, flat in enumerate(groups):
                if not only(index) or not flat.numel():
                    continue
                assert isinstance(flat.ds_id, str)
                data = flat.detach().numpy().tobytes()
                target = tag / folder(rank) / f"{flat.ds_id}.tensor.swp"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data + b"\xff" * (-len(data) % ALIGNED_BYTES))
                moment = target.with_name(f"exp_avg-{target.name}")
                moment.write_bytes(bytes(target.stat().st_size))
                files.append(target)
                flat.data = torch.Tensor()
                assert flat.ds_id

        edit(path, move)
    assert files
    return case, tag, files


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("some", [False, True])
def test_exact(name: str, some: bool, tmp_path: Path) -> None:
    """All sub-groups, or every second one: small ones stay in the shard."""
    case, _, _ = swapped_out(name, tmp_path, only=lambda index: not some or index % 2 == 0)
    consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))


@pytest.mark.dist
@pytest.mark.parametrize("transport", ["allgather", "direct"])
def test_by_several_ranks(transport: str, tmp_path: Path) -> None:
    case, _, _ = swapped_out("kitchen_z3_bf16_w2", tmp_path)
    arguments = [tmp_path / "ckpt", tmp_path / "out", "--transport", transport]
    fork_together(2, [*arguments, "--bucket-size", "200"]).ok()
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))


def test_lazily(tmp_path: Path) -> None:
    case, _, _ = swapped_out("tied_frozen_z3_w2", tmp_path)
    loaded = {name: tensor.load() for name, tensor in open_checkpoint(tmp_path / "ckpt").items()}
    wide = {n: t.float() if t.is_floating_point() else t for n, t in loaded.items()}
    assert_same_bits(wide, expected_fp32(case))


def refusal(tmp_path: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    return str(error.value)


def test_missing_and_wrong_files_are_named_together(tmp_path: Path) -> None:
    _, _, files = swapped_out("kitchen_z3_bf16_w2", tmp_path)
    files[0].unlink()
    data = files[-1].read_bytes()
    files[-1].write_bytes(data[:-ALIGNED_BYTES])
    message = refusal(tmp_path)
    assert f"{files[0]}: is missing; it holds sub-group 0 of rank 0" in message
    assert f"{files[-1]}: has {len(data) - ALIGNED_BYTES} bytes, expected" in message


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    _, _, files = swapped_out("kitchen_z3_bf16_w2", tmp_path)
    files[0].write_bytes(bytes((1 << 20) + (1 << 16)))
    assert f"{files[0]}: has {(1 << 20) + (1 << 16)} bytes, expected" in refusal(tmp_path)


def test_one_folder_for_all_ranks_is_refused(tmp_path: Path) -> None:
    """As 0.13.0 to 0.17.6 wrote it: the last rank's files lie over the others'."""
    swapped_out("kitchen_z3_bf16_w2", tmp_path, lambda _rank: "offloaded_tensors")
    message = refusal(tmp_path, UnsupportedLayoutError)
    assert "0.13.0 to 0.17.6" in message and "of 2 ranks the last one's are left" in message


def test_parts_that_do_not_name_their_file_are_refused(tmp_path: Path) -> None:
    _, tag, _ = swapped_out("tied_frozen_z3_w2", tmp_path)

    def forget(state: State) -> None:
        groups = state["optimizer_state_dict"]["fp32_flat_groups"]
        groups[:] = [torch.Tensor() for _ in groups]

    for path in tag.glob("*optim_states.pt"):
        edit(path, forget)
    assert "names no swap file" in refusal(tmp_path)


def test_a_hostile_id_stays_inside_the_folder(tmp_path: Path) -> None:
    """An id is looked up among the files found, never made into a path."""
    _, tag, files = swapped_out("tied_frozen_z3_w2", tmp_path)
    outside = tmp_path / "outside.tensor.swp"
    outside.write_bytes(files[0].read_bytes())

    def point(state: State) -> None:
        for flat in state["optimizer_state_dict"]["fp32_flat_groups"]:
            flat.ds_id = "../../../../outside"

    for path in tag.glob("*optim_states.pt"):
        edit(path, point)
    assert "is missing" in refusal(tmp_path)
