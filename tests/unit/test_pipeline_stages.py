"""Pipeline checkpoints that are incomplete or contradict themselves, and the names of the rest."""

import dataclasses
import shutil

import pytest
import torch

from dist_consolidate import CheckpointError, consolidate, open_checkpoint
from dist_consolidate.checkpoint.jobs import run_here
from dist_consolidate.checkpoint.layout import find_tag
from dist_consolidate.checkpoint.model import Block, Source
from dist_consolidate.checkpoint.parallel import Grid
from dist_consolidate.checkpoint.pipeline import merge_stages, read_layers
from dist_consolidate.checkpoint.pipeline_names import layer_of, tie_of
from dist_consolidate.checkpoint.reader import read_checkpoint
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.plan.coverage import check_coverage
from dist_consolidate.plan.resolve import resolve
from tests.cases import CASES, assert_same_bits, load_output
from tests.special import save_as

Z0, Z1 = "pipe_z0_fp32_w2", "pipe_z1_bf16_w2"
OPTIM = "bf16_zero_pp_rank_0_mp_rank_{:02d}_optim_states.pt"
# A name that only the live engine knows: nothing on disk has it at stage 0.
EMBED = "tied_modules.embed.weight"


@pytest.fixture
def copy(tmp_path):
    """Copies a case; gives its tag folder."""

    def copied(name):
        shutil.copytree(CASES[name].ckpt, tmp_path / "ckpt")
        return tmp_path / "ckpt" / "global_step3"

    return copied


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(find_tag(folder))
    return str(caught.value)


def change(path, **entries):
    state = torch.load(path, weights_only=False)
    torch.save({**state, **entries}, path)


def drop(path, *entries):
    state = torch.load(path, weights_only=False)
    torch.save({key: value for key, value in state.items() if key not in entries}, path)


def master_extent(folder, name, stage):
    """The bytes of a tensor that lies at the beginning of its stage's only flat group."""
    found = read_checkpoint(find_tag(folder))
    assert found.partitions[name].slot.offset_numel == 0
    return found.groups[stage].parts[0]


# What comes out.


@pytest.mark.parametrize("output_format", ["safetensors", "bin"])
def test_names_of_the_module(tmp_path, output_format):
    case = CASES[Z1]
    report = consolidate(case.ckpt, tmp_path / "out", format=output_format)
    assert_same_bits(load_output(tmp_path / "out"), case.truth["fp32"])
    assert report.ties == {}
    assert report.left_out == {}


@pytest.mark.parametrize("name", [Z0, Z1])
def test_names_of_the_layers(tmp_path, name):
    """The tied layer's second use is through a function, so it has no file and no number."""
    case = CASES[name]
    consolidate(case.ckpt, tmp_path / "out", pipeline_names="layer")
    want = {key: value for key, value in case.truth["by_layer"].items() if key != "5.weight"}
    assert_same_bits(load_output(tmp_path / "out"), want)


def test_stage_0_has_no_names_for_tied_modules(tmp_path):
    case = CASES[Z0]
    report = consolidate(case.ckpt, tmp_path / "out")
    want = {"0.weight" if key == EMBED else key: v for key, v in case.truth["fp32"].items()}
    assert_same_bits(load_output(tmp_path / "out"), want)
    assert any("named after its layer" in note for note in report.notes)


def test_order_of_keys_and_where_they_come_from():
    checkpoint = open_checkpoint(CASES[Z1].ckpt)
    layers = [-1 if name == EMBED else int(name.split(".")[0]) for name in checkpoint]
    assert layers == sorted(layers)
    origins = {name: checkpoint[name].source for name in checkpoint}
    assert {n for n, origin in origins.items() if origin == "module"} == {"1.idx", "4.idx"}
    assert (checkpoint.stage, checkpoint.world_size, checkpoint.step) == (1, 1, 3)


def test_before_degrees_were_recorded(copy, tmp_path):
    """Before 0.19.5 only ``mp_world_size`` and the layer files tell the number of stages."""
    folder = copy(Z1)
    for index in (0, 1):
        drop(folder / f"mp_rank_{index:02d}_model_states.pt", "checkpoint_parallel_dimensions")
    consolidate(folder, tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), CASES[Z1].truth["fp32"])


def test_a_tie_that_the_user_names(copy, tmp_path):
    """Two layers of equal values: at stage 0 only the user can say that they are one."""
    folder = copy(Z0)
    save_as(folder / "layer_00-model_states.pt", folder / "layer_05-model_states.pt")
    report = consolidate(folder, tmp_path / "out", tie=["5.weight=0.weight"], ties="drop")
    assert report.ties == {"5.weight": "0.weight"}
    assert "5.weight" not in load_output(tmp_path / "out")


def test_entries_that_are_no_tensors_are_told(copy, tmp_path):
    folder = copy(Z1)
    path = folder / "layer_02-model_states.pt"
    change(path, _extra_state={"scale": 1.0})
    report = consolidate(folder, tmp_path / "out")
    assert list(report.left_out) == ["2._extra_state"]
    assert_same_bits(load_output(tmp_path / "out"), CASES[Z1].truth["fp32"])


@pytest.mark.parametrize(
    ("name", "layer", "tie"),
    [
        ("3.fc.weight", 3, None),
        ("tied_modules.embed.word.weight", None, ("embed", "word.weight")),
        ("tied_modules.3.weight", None, ("3", "weight")),
        ("extra.weight", None, None),
        ("3", None, None),
        ("\u0663.weight", None, None),
    ],
)
def test_what_names_tell(name, layer, tie):
    assert (layer_of(name), tie_of(name)) == (layer, tie)


# What is missing.


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_missing_layer_file(copy, number):
    folder = copy(Z1)
    path = folder / f"layer_{number:02d}-model_states.pt"
    path.unlink()
    message = refusal(folder)
    assert f"{path}: is missing" in message
    assert f"layer {number} (of pipeline stage {number // 3};" in message


def test_a_tied_module_may_have_no_file(copy, tmp_path):
    """Where all its layers use it through functions; its masters are all there is to it."""
    folder = copy(Z1)
    (folder / "layer_00-model_states.pt").unlink()
    consolidate(folder, tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), CASES[Z1].truth["fp32"])


@pytest.mark.parametrize("names", ["module", "layer"])
def test_a_tied_modules_buffer_without_a_file(copy, tmp_path, names):
    folder = copy(Z1)
    (folder / "layer_00-model_states.pt").unlink()
    buffer = "tied_modules.embed.positions"
    change(folder / "mp_rank_00_model_states.pt", buffer_names=["1.idx", buffer])
    with pytest.raises(CheckpointError, match=rf"  - {buffer}\n") as caught:
        consolidate(folder, tmp_path / "out", pipeline_names=names)
    assert "no stage saved a layer file" in str(caught.value)
    report = consolidate(
        folder, tmp_path / "out", pipeline_names=names, allow_missing=["*.positions"]
    )
    assert list(report.left_out) == [buffer]
    assert_same_bits(load_output(tmp_path / "out"), CASES[Z1].truth["fp32"])


@pytest.mark.parametrize("name", [Z0, Z1])
def test_all_layer_files_missing(copy, name):
    folder = copy(name)
    for path in folder.glob("layer_*"):
        path.unlink()
    message = refusal(folder)
    assert f"{folder / 'layer_*-model_states.pt'}: all layer files are missing" in message


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_a_missing_layer_file_at_stage_0(copy, number):
    folder = copy(Z0)
    (folder / f"layer_{number:02d}-model_states.pt").unlink()
    assert "-model_states.pt" in (message := refusal(folder))
    assert "is missing" in message


def test_moments_that_say_nothing_are_no_witness(copy, tmp_path):
    """Plain SGD keeps no moments; then the report says that nothing was counted."""
    folder = copy(Z0)
    for index in (0, 1):
        change(folder / f"mp_rank_{index:02d}_model_states.pt", optimizer={"state": {}})
    report = consolidate(folder, tmp_path / "out")
    assert any("it would not be noticed" in note for note in report.notes)


def test_a_missing_stage(copy):
    folder = copy(Z1)
    path = folder / "mp_rank_01_model_states.pt"
    path.unlink()
    assert f"{path}: is missing" in refusal(folder)


@pytest.mark.parametrize("index", [0, 1])
def test_missing_masters_of_a_stage(copy, index):
    folder = copy(Z1)
    path = folder / OPTIM.format(index)
    path.unlink()
    message = refusal(folder)
    assert f"{path}: is missing, and with it every fp32 master of model-parallel index" in message
    assert message.count("is missing") == 1


def test_what_the_first_rank_must_see(copy, tmp_path):
    """Tied masters are compared by the first rank; where it cannot, it does not guess."""
    folder = copy(Z1)
    whole = find_tag(folder)
    shutil.copytree(folder, tmp_path / "seen")
    (tmp_path / "seen" / OPTIM.format(1)).unlink()
    seen = dataclasses.replace(whole, path=tmp_path / "seen")
    with pytest.raises(CheckpointError, match="where one rank sees all of it") as caught:
        read_checkpoint(seen, lambda _, jobs: run_here(whole, jobs))
    assert f"{tmp_path / 'seen' / OPTIM.format(1)}: No such file" in str(caught.value)


# What contradicts.


def test_surplus_stages(copy):
    folder = copy(Z1)
    for name in ("mp_rank_01_model_states.pt", OPTIM.format(1)):
        shutil.copy(folder / name, folder / name.replace("mp_rank_01", "mp_rank_02"))
    message = refusal(folder)
    for name in ("mp_rank_02_model_states.pt", OPTIM.format(2)):
        assert f"{folder / name}: is surplus: model-parallel index 2" in message


@pytest.mark.parametrize("name", [Z0, Z1])
def test_stages_of_different_steps(copy, name):
    folder = copy(name)
    path = folder / "mp_rank_01_model_states.pt"
    change(path, global_steps=2)
    message = refusal(folder)
    assert f"{path}: global_steps is 2, but 3 in mp_rank_00_model_states.pt" in message


def test_masters_of_different_steps(copy):
    folder = copy(Z1)
    path = folder / OPTIM.format(1)
    state = torch.load(path, weights_only=False)
    inner = state["optimizer_state_dict"]["base_optimizer_state"]["state"]
    inner[0]["step"] = torch.tensor(7.0)
    torch.save(state, path)
    assert f"{path}: step is 7, but 3 in {OPTIM.format(0)}" in refusal(folder)


def flip_last_bit(folder, stage):
    """Change a stage's master of the embedding by far less than its 16-bit copy would show."""
    extent = master_extent(folder, EMBED, stage)
    with (folder / extent.file).open("r+b") as stream:
        stream.seek(extent.offset_bytes + 4 * (23 * 13 - 1))
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("stage", [0, 1])
def test_tied_masters_that_differ(copy, stage):
    folder = copy(Z1)
    flip_last_bit(folder, stage)
    message = refusal(folder)
    assert f"{EMBED}: is tied on pipeline stages 0 and 1, but its fp32 partition" in message
    assert OPTIM.format(0) in message
    assert OPTIM.format(1) in message


def test_masters_that_differ_are_both_written_by_layer(copy, tmp_path):
    """Each under its layer's number; one without a layer file keeps the tied module's name."""
    folder = copy(Z1)
    flip_last_bit(folder, 1)
    report = consolidate(folder, tmp_path / "out", pipeline_names="layer", check_crc="never")
    want = {name: value for name, value in CASES[Z1].truth["by_layer"].items() if name[0] != "5"}
    other = want["0.weight"].clone()
    other.view(torch.int32)[-1, -1] ^= 1
    assert_same_bits(load_output(tmp_path / "out"), {**want, EMBED: other})
    assert any("pipeline stage 1's copy of the tied module embed" in n for n in report.notes)


def test_masters_that_differ_go_to_the_layers_around(copy, tmp_path):
    """Both files fit both masters, rounded; layer 5 lies behind a layer of stage 1."""
    folder = copy(Z1)
    save_as(folder / "layer_00-model_states.pt", folder / "layer_05-model_states.pt")
    flip_last_bit(folder, 1)
    report = consolidate(folder, tmp_path / "out", pipeline_names="layer", check_crc="never")
    want = dict(CASES[Z1].truth["by_layer"])
    want["5.weight"] = want["0.weight"].clone()
    want["5.weight"].view(torch.int32)[-1, -1] ^= 1
    assert_same_bits(load_output(tmp_path / "out"), want)
    assert report.ties == {}


def test_a_gap_of_any_size_is_one_note(copy, tmp_path):
    folder = copy(Z1)
    save_as(folder / "layer_02-model_states.pt", folder / "layer_999999999-model_states.pt")
    (folder / "layer_02-model_states.pt").unlink()
    message = refusal(folder)
    assert f"{folder / 'layer_02-model_states.pt'}: is missing" in message


def test_a_layer_file_of_other_values_is_no_tied_module(copy, tmp_path):
    """It may be a frozen layer of the same shape: both are written, and the report tells."""
    folder = copy(Z1)
    path = folder / "layer_00-model_states.pt"
    other = torch.load(path)["weight"] + 1
    torch.save({"weight": other}, path)
    report = consolidate(folder, tmp_path / "out")
    want = {**CASES[Z1].truth["fp32"], "0.weight": other.float()}
    assert_same_bits(load_output(tmp_path / "out"), want)
    assert any("1 parameter has no fp32 master" in note for note in report.notes)


def test_values_that_are_all_alike_testify_to_nothing(copy, tmp_path):
    """A tied module that is all ones, and a layer file of ones: it may be a frozen layer's."""
    folder = copy(Z1)
    for extent in [master_extent(folder, EMBED, stage) for stage in (0, 1)]:
        with (folder / extent.file).open("r+b") as stream:
            stream.seek(extent.offset_bytes)
            stream.write(torch.ones(23 * 13).numpy().tobytes())
    torch.save({"weight": torch.ones(23, 13).bfloat16()}, folder / "layer_00-model_states.pt")
    consolidate(folder, tmp_path / "out", check_crc="never")
    ones = dict.fromkeys((EMBED, "0.weight"), torch.ones(23, 13))
    assert_same_bits(load_output(tmp_path / "out"), {**CASES[Z1].truth["fp32"], **ones})


def test_a_layer_of_another_shape(copy):
    folder = copy(Z1)
    path = folder / "layer_02-model_states.pt"
    change(path, bias=torch.zeros(14, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"2\.bias: `module` holds shape \[14\]"):
        consolidate(folder, folder.parent / "out")


def test_a_layer_that_is_there_twice(copy):
    folder = copy(Z1)
    shutil.copy(folder / "layer_02-model_states.pt", folder / "layer_2-model_states.pt")
    message = refusal(folder)
    assert "holds layer 2, as layer_" in message
    assert "keep one" in message


def test_a_damaged_layer_file(copy):
    path = copy(Z1) / "layer_02-model_states.pt"
    path.write_bytes(path.read_bytes()[:-200])
    assert f"{path}: truncated or damaged" in refusal(path.parent)


def test_layers_of_tensor_parallel_ranks_must_all_be_there(copy):
    folder = copy(Z1)
    for path in list(folder.glob("layer_*")):
        save_as(path, folder / path.name.replace("-model_states", "-model_00-model_states"))
        path.unlink()
    save_as(
        folder / "layer_02-model_00-model_states.pt", folder / "layer_02-model_01-model_states.pt"
    )
    message = refusal(folder)
    assert "layer_02-model_01-model_states.pt: is surplus: tensor-parallel rank 1" in message


def test_a_layer_file_of_one_tensor_parallel_rank_missing(copy):
    folder = copy(Z1)
    for path in list(folder.glob("layer_*")):
        for rank in (0, 1):
            name = path.name.replace("-model_states", f"-model_{rank:02d}-model_states")
            save_as(path, folder / name)
        path.unlink()
    names = ["layer_00-model_01-model_states.pt", "layer_02-model_00-model_states.pt"]
    for name in names:
        (folder / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        read_layers(find_tag(folder), Grid(2, 2), run_here)
    for name in names:
        assert f"{folder / name}: is missing (tensor-parallel rank" in str(caught.value)


def test_sources_made_of_blocks_are_merged():
    """What several tensor-parallel ranks hold of a tensor keeps its place in their flat groups."""
    folder = find_tag(CASES[Z1].ckpt)
    whole, name = read_checkpoint(folder), "4.fc.weight"
    source = whole.partitions[name]
    assert source.slot.group == 1
    alone = dataclasses.replace(source, slot=dataclasses.replace(source.slot, group=0))
    half = source.num_numel // 2
    blocks = (
        Block(alone, 1, half, 0, 0, 0, 0),
        Block(alone, 1, source.num_numel - half, half, 0, half, 0),
    )
    split = Source(source.origin, source.shape, source.dtype, blocks=blocks)
    first = {"2.weight": whole.partitions["2.weight"]}
    stages = [
        dataclasses.replace(whole, groups=whole.groups[:1], partitions=first, module={}),
        dataclasses.replace(whole, groups=whole.groups[1:], partitions={name: split}, module={}),
    ]
    merged = merge_stages(folder, stages)
    check_coverage(merged, resolve(merged))
    prints = Fingerprints(folder.path, merged.groups)
    assert prints.of(merged.partitions[name], source.dtype) == prints.of(source, source.dtype)
    prints.close()


def test_layers_left_over_from_a_pipeline(tmp_path):
    shutil.copytree(CASES["noncontig_z2_w2"].ckpt, tmp_path / "ckpt")
    folder = find_tag(tmp_path / "ckpt").path
    layer = find_tag(CASES[Z1].ckpt).path / "layer_02-model_states.pt"
    shutil.copy(layer, folder)
    message = refusal(folder)
    assert f"{folder / layer.name}: holds a pipeline layer, but" in message


def test_stages_that_record_the_same_layer(copy):
    folder = copy(Z1)
    change(folder / "mp_rank_01_model_states.pt", buffer_names=["4.idx", "1.idx"])
    assert "1.idx: is recorded by pipeline stages 0 and 1" in refusal(folder)
