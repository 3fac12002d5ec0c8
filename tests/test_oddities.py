"""Odd checkpoints, environments and requests, each of which once went wrong in some way."""

from __future__ import annotations

import enum
import errno
import json
import os
import shutil
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_consolidate import cli, consolidate
from dist_consolidate.consolidation import Report
from dist_consolidate.errors import (
    CheckpointError,
    ConsolidateError,
    UnsupportedLayoutError,
    UsageError,
)
from dist_consolidate.output.index import MANIFEST_NAME
from tests import synthetic
from tests.cases import assert_same_bits, load_output
from tests.synthetic import Param, Spec, Truth, write
from tests.torchrun import INHERITED, MESSAGE, messages, run_python, show
from tests.zygote import fork_ranks

State = dict[str, Any]
Change = Callable[[State], None]
Main = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.filterwarnings(
    # torch on element types and layouts that it does not recommend.
    "ignore:(Sparse CSR|ComplexHalf|torch.quantize_per_tensor):UserWarning"
)

PARAMS = (
    Param("emb.weight", (11, 5)),
    Param("inp.weight", (7, 13)),
    Param("inp.bias", (7,), group=1),
    Param("scale", (), group=1),
    Param("head.weight", (11, 5), tie_of="emb.weight"),
)
FROZEN = (*PARAMS, Param("base.weight", (9, 3), kind="frozen"))
PAIR = (Param("a", (4, 6)), Param("b", (4, 6)))
EXTRA = "net._extra_state"

# Classes of a project that is not installed: they can be found while a file is edited, only then.
ELSEWHERE = ModuleType("somebody_elses_project")


def foreign(cls: type) -> type:
    """Give a class of this file the name of one that nobody can import."""
    cls.__module__, cls.__qualname__ = ELSEWHERE.__name__, cls.__name__
    setattr(ELSEWHERE, cls.__name__, cls)
    return cls


@foreign
class Status(enum.Enum):
    """What DeepSpeed hangs on a parameter, under another name."""

    NOT_AVAILABLE = 2


@foreign
class Config(dict[str, Any]):
    """A dictionary with a name of its own."""


@foreign
class NamedState(OrderedDict[str, Any]):
    """A state dict with a name of its own."""


@foreign
class Named(Tensor):
    """A tensor subclass that only has a name of its own."""


@foreign
class Wrapped(Tensor):
    """A tensor subclass whose values lie in another tensor, as those of quantizers do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, *_call: object) -> object:
        raise NotImplementedError


def edit(path: Path, change: Change) -> None:
    """Load a file, change what it holds, and save it."""
    with synthetic._deepspeed_names(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, ELSEWHERE.__name__, ELSEWHERE)
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)


def models(truth: Truth) -> list[Path]:
    """The model states, in rank order (below ten ranks)."""
    return sorted(truth.tag_dir.glob("*_model_states.pt"))


def optims(truth: Truth) -> list[Path]:
    """The optimizer states, in rank order (below ten ranks)."""
    return sorted(truth.tag_dir.glob("*_optim_states.pt"))


def edit_all(paths: Sequence[Path], change: Change) -> None:
    """Edit several files in the same way."""
    for path in paths:
        edit(path, change)


def make(root: Path, stage: int, params: Sequence[Param] = PARAMS, **more: object) -> Truth:
    """Write a checkpoint of two ranks."""
    return write(root, Spec(stage=stage, params=params, **more))


def setting(**entries: object) -> Change:
    """Set entries at the top of a file."""
    return lambda state: state.update(entries)


def setting_module(**entries: object) -> Change:
    """Set entries of ``module``; two underscores stand for a dot."""
    named = {name.replace("__", "."): value for name, value in entries.items()}
    return lambda state: state["module"].update(named)


def nothing_at(out: Path) -> bool:
    """Whether neither a result nor a work folder is there."""
    return not out.exists() and not list(out.parent.glob(".*consolidating-*"))


def refusal(root: Path, kind: type[ConsolidateError] = CheckpointError, **options: object) -> str:
    """The message of an error of exactly this kind, after which nothing may be there."""
    out = root.parent / "refused"
    with pytest.raises(ConsolidateError) as caught:
        consolidate(root, out, device="cpu", **options)
    assert type(caught.value) is kind, repr(caught.value)
    assert nothing_at(out)
    return str(caught.value)


def assert_exact(root: Path, want: Mapping[str, Tensor], **options: object) -> Report:
    """Check that a consolidation gives exactly these tensors; give its report."""
    out = root.parent / "out"
    report = consolidate(root, out, device="cpu", overwrite=True, **options)
    assert_same_bits(load_output(out), want)
    return report


def assert_named(message: str, names: Sequence[str]) -> None:
    """Check that a list of keys in a message names these, and no other."""
    items = [line for line in message.splitlines() if line.startswith("  - ")]
    assert items == [f"  - {name}" for name in names], message


@pytest.fixture(autouse=True)
def plain_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take away what a launcher around the tests has set, and what a command line sets."""
    for name in INHERITED:
        monkeypatch.delenv(name, raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def main(capsys: pytest.CaptureFixture[str]) -> Main:
    """The command line in this process: arguments to exit code and output."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli.main([*map(str, arguments), "--device", "cpu"])
        return code, *capsys.readouterr()

    return run


# Files of two steps.


def set_step(step: object) -> Change:
    """Set the step of the optimizer inside, everywhere it stands; ``None`` removes it."""

    def change(state: State) -> None:
        zero = state["optimizer_state_dict"]
        inner = zero.get("base_optimizer_state", zero.get("optimizer_state_dict"))
        # Old releases keep a list with the state of each group.
        states = inner if isinstance(inner, list) else list(inner["state"].values())
        assert states
        for moments in states:
            if step is None:
                del moments["step"]
            else:
                moments["step"] = step

    return change


FORMS: Sequence[tuple[int, Mapping[str, Any]]] = (
    (1, {}),
    (1, {"bf16_optimizer": True}),
    (2, {}),
    (2, {"era": "0.5"}),
    (2, {"era": "0.9.2"}),
    (3, {}),
    (3, {"era": "0.6"}),
)


@pytest.mark.parametrize("step", [5, torch.tensor(5), torch.tensor(5.0)], ids=repr)
@pytest.mark.parametrize(("stage", "more"), FORMS)
def test_an_optimizer_file_of_another_step(
    tmp_path: Path, stage: int, more: Mapping[str, Any], step: object
) -> None:
    truth = make(tmp_path / "run", stage, world=3, **more)
    other = make(tmp_path / "other", stage, world=3, seed=1, **more)
    path = optims(truth)[1]
    edit(optims(other)[1], set_step(step))
    shutil.copy(optims(other)[1], path)
    items = refusal(tmp_path / "run").splitlines()[1:]
    first = optims(truth)[0].name
    assert items == [f"  - {path}: step is 5, but 3 in {first}; the files are of different saves"]


@pytest.mark.parametrize("without", [(0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(("stage", "more"), FORMS)
def test_a_rank_whose_optimizer_knows_no_step(
    tmp_path: Path, stage: int, more: Mapping[str, Any], without: Sequence[int]
) -> None:
    truth = make(tmp_path / "run", stage, world=3, **more)
    edit_all([optims(truth)[rank] for rank in without], set_step(None))
    assert_exact(tmp_path / "run", truth.fp32)


@pytest.mark.parametrize("without", [0, 1])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_without_a_step_hides_no_mixed_steps(
    tmp_path: Path, stage: int, without: int
) -> None:
    truth = make(tmp_path / "run", stage, world=3)
    paths = optims(truth)
    edit(paths[without], set_step(None))
    edit(paths[2], set_step(5))
    (item,) = refusal(tmp_path / "run").splitlines()[1:]
    first = paths[1 - without].name
    assert item == (
        f"  - {paths[2]}: step is 5, but 3 in {first}; the files are of different saves"
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_in_another_form_is_the_same_step(tmp_path: Path, stage: int) -> None:
    truth = make(tmp_path / "run", stage)
    edit(optims(truth)[1], set_step(3))
    assert_exact(tmp_path / "run", truth.fp32)


# Entries of `module` that are tensors of a kind that is not read.


def conjugate() -> Tensor:
    """A view that is complex conjugated by a flag only."""
    return torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj()


ODD: Mapping[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "subclass": lambda: Wrapped(torch.ones(3)),
    "conjugated": conjugate,
    "negated": lambda: conjugate().imag,
    "float8_e4m3fnuz": lambda: torch.ones(3).to(torch.float8_e4m3fnuz),
    "complex32": lambda: torch.zeros(3, dtype=torch.complex32),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_tensors_of_an_unknown_kind_are_refused_by_name(
    tmp_path: Path, stage: int, kind: str, is_buffer: bool
) -> None:
    truth = make(tmp_path / "run", stage, FROZEN)

    def change(state: State) -> None:
        state["module"]["net.odd"] = ODD[kind]()
        if is_buffer:
            state["buffer_names"].append("net.odd")

    edit_all(models(truth), change)
    assert_named(refusal(tmp_path / "run"), ["net.odd"])
    assert_named(refusal(tmp_path / "run", allow_missing=["odd", "net.od"]), ["net.odd"])
    report = assert_exact(tmp_path / "run", truth.fp32, allow_missing=["net.o*"])
    assert list(report.left_out) == ["net.odd"]
    assert "which is not read" in report.left_out["net.odd"]


@pytest.mark.parametrize("kind", ["sparse", "subclass", "conjugated", "quantized"])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_parameter_of_an_unknown_kind_is_refused_by_name(
    tmp_path: Path, stage: int, kind: str
) -> None:
    params = (*PAIR, Param("odd", (3, 3), kind="unoptimized"))
    truth = make(tmp_path / "run", stage, params, model_dtype=torch.float32)
    edit_all(models(truth), setting_module(odd=ODD[kind]()))
    assert_named(refusal(tmp_path / "run"), ["odd"])
    want = {name: truth.fp32[name] for name in "ab"}
    assert list(assert_exact(tmp_path / "run", want, allow_missing=["*"]).left_out) == ["odd"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_tensor_and_its_conjugate_in_one_storage(tmp_path: Path, stage: int) -> None:
    truth = make(tmp_path / "run", stage)
    plain = torch.view_as_complex(torch.arange(8.0).view(4, 2))
    edit_all(models(truth), setting_module(freqs=plain, freqs_conj=plain.conj()))
    assert_named(refusal(tmp_path / "run"), ["freqs_conj"])
    want = {**truth.fp32, "freqs": plain}
    report = assert_exact(tmp_path / "run", want, allow_missing=["freqs_conj"])
    assert list(report.left_out) == ["freqs_conj"]


def test_a_subclass_without_anything_of_its_own_is_a_tensor(tmp_path: Path) -> None:
    truth = make(tmp_path / "run", 2)
    values = torch.randn(5, 3)
    edit_all(models(truth), setting_module(named=values.as_subclass(Named)))
    report = assert_exact(tmp_path / "run", {**truth.fp32, "named": values})
    assert report.left_out == {}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unknown_kinds_in_client_state_have_no_effect(tmp_path: Path, stage: int) -> None:
    truth = make(tmp_path / "run", stage, FROZEN)
    edit_all(models(truth), lambda state: state.update({k: [ODD[k]()] for k in ODD}))
    report = assert_exact(tmp_path / "run", truth.fp32)
    assert report.left_out == {}


# Placeholders, frozen slices, ties.


@pytest.mark.parametrize("shape", [(400, 20), (5,), (1,), ()], ids=str)
def test_an_old_placeholder_beside_parameters_with_data(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    trained = (Param("lora_a", (4, 2)), Param("lora_b", (2, 4)), Param("gain", (1,)))
    params = (trained[0], Param("base", shape, kind="unoptimized"), *trained[1:])
    truth = make(tmp_path / "run", 3, params, era="0.5")
    data = {param.name: truth.fp32[param.name] for param in trained}
    half = {name: tensor.bfloat16() for name, tensor in data.items()}

    def change(state: State) -> None:
        assert state["module"]["base"].tolist() == [1.0]
        state["module"].update(half)

    edit_all(models(truth), change)
    assert_named(refusal(tmp_path / "run"), ["base"])
    report = assert_exact(tmp_path / "run", data, allow_missing=["base"])
    assert list(report.left_out) == ["base"]


@pytest.mark.parametrize(
    ("stage", "dtype", "kind"),
    [
        (0, torch.float32, "trained"),
        (0, torch.bfloat16, "unoptimized"),
        (1, torch.bfloat16, "unoptimized"),
        (2, torch.float32, "unoptimized"),
        (2, torch.bfloat16, "unoptimized"),
        (2, torch.bfloat16, "trained"),
        (2, torch.bfloat16, "frozen"),
    ],
)
def test_tying_a_name_that_has_other_values(
    tmp_path: Path, stage: int, dtype: torch.dtype, kind: synthetic.Kind
) -> None:
    params = (Param("a", (4, 6), kind=kind), PAIR[1])
    truth = make(tmp_path / "run", stage, params, model_dtype=dtype)
    message = refusal(tmp_path / "run", UsageError, tie=["a=b"])
    items = [line for line in message.splitlines() if line.startswith("  - ")]
    assert len(items) == 1, message
    assert items[0].startswith("  - a: has "), message
    assert_exact(tmp_path / "run", truth.fp32)


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (0, torch.float32),
        (1, torch.bfloat16),
        (2, torch.bfloat16),
        (2, torch.float16),
        (2, torch.float32),
    ],
)
def test_tying_a_name_that_has_a_clone(tmp_path: Path, stage: int, dtype: torch.dtype) -> None:
    params = (Param("a", (4, 6), kind="unoptimized"), PAIR[1])
    truth = make(tmp_path / "run", stage, params, model_dtype=dtype)
    values = truth.fp32["b"]
    edit_all(models(truth), lambda state: state["module"].update(a=values.to(dtype)))
    assert dtype == torch.float32 or not values.to(dtype).float().equal(values)
    report = assert_exact(tmp_path / "run", {"a": values, "b": values}, tie=["a=b"])
    assert report.ties == {"a": "b"}


@pytest.mark.parametrize("change_numel", [-1, 1, 13])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_a_frozen_slice_of_a_wrong_length(
    tmp_path: Path, rank: int, packed: bool, change_numel: int
) -> None:
    truth = make(tmp_path / "run", 3, FROZEN, world=3, packed_fragments=packed)
    path = models(truth)[rank]

    def change(state: State) -> None:
        values = state["frozen_param_fragments"]["base.weight"]
        changed = torch.cat([values, values, values])[: len(values) + change_numel]
        state["frozen_param_fragments"]["base.weight"] = changed

    edit(path, change)
    message = refusal(tmp_path / "run")
    assert path.name in message, message
    assert f"'base.weight' has {9 + change_numel} elements here, expected 9" in message, message


# What is pickled with the weights.


def add_attributes(state: State) -> None:
    """Hang attributes of a foreign class on every tensor that is looked at."""
    tensors = [*state.get("module", {}).values()]
    tensors += (state.get("frozen_param_fragments") or {}).values()
    tensors += state.get("optimizer_state_dict", {}).get("fp32_flat_groups", ())
    assert tensors
    for tensor in tensors:
        tensor.ds_status = Status.NOT_AVAILABLE
        tensor.ds_config = Config(status=Status.NOT_AVAILABLE)


@pytest.mark.dist
def test_attributes_of_foreign_classes_travel_between_ranks(tmp_path: Path) -> None:
    truth = make(tmp_path / "run", 3, FROZEN)
    edit_all([*models(truth), *optims(truth)], add_attributes)
    assert ELSEWHERE.__name__.encode() in models(truth)[1].read_bytes()
    assert_exact(tmp_path / "run", truth.fp32)
    ended = fork_ranks(2, [tmp_path / "run", tmp_path / "together"])
    assert [rank.returncode for rank in ended] == [0, 0], show(ended)
    assert_same_bits(load_output(tmp_path / "together"), truth.fp32)


MALFORMED: Mapping[str, tuple[int, Mapping[str, object]]] = {
    "buffer_names": (3, {"buffer_names": [[1]]}),
    "shared_params": (2, {"shared_params": {"a": [1]}}),
    "optimizer": (0, {"optimizer": {"fp32_groups": 3}}),
}


@pytest.fixture(params=MALFORMED)
def malformed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The model states of rank 0 of a checkpoint with an entry that makes no sense."""
    stage, entries = MALFORMED[request.param]
    truth = make(tmp_path / "run", stage)
    edit_all(models(truth), setting(**entries))
    return models(truth)[0]


def test_entries_that_make_no_sense(malformed: Path, tmp_path: Path, main: Main) -> None:
    assert f"{malformed}: " in refusal(tmp_path / "run")
    code, stdout, stderr = main(tmp_path / "run", tmp_path / "out")
    assert (code, stdout) == (3, ""), stderr
    headline, item = stderr.splitlines()
    assert headline == f"{MESSAGE}{malformed.parent}: the checkpoint cannot be read:"
    assert item.startswith(f"  - {malformed}: "), stderr
    assert nothing_at(tmp_path / "out")


@pytest.mark.dist
def test_entries_that_make_no_sense_end_all_ranks(malformed: Path, tmp_path: Path) -> None:
    ended = fork_ranks(2, [tmp_path / "run", tmp_path / "out"], timeout_sec=40.0)
    assert [rank.returncode for rank in ended] == [3, 3], show(ended)
    assert "Traceback" not in show(ended), show(ended)
    (message,) = messages(ended)
    assert f"  - {malformed}: " in message, message
    assert nothing_at(tmp_path / "out")


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("numel", [0, 1, 5])
def test_extra_states_that_are_tensors_are_kept(tmp_path: Path, stage: int, numel: int) -> None:
    truth = make(tmp_path / "run", stage)
    values = torch.arange(numel, dtype=torch.uint8)
    edit_all(models(truth), lambda state: state["module"].update({EXTRA: values}))
    report = assert_exact(tmp_path / "run", {**truth.fp32, EXTRA: values})
    assert report.left_out == {}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "value",
    [{"amax": torch.ones(2), "n": {"deep": torch.ones(1)}}, {"n": 3}, [torch.ones(2)], None],
)
def test_extra_states_that_are_no_tensors_are_left_out(
    tmp_path: Path, stage: int, value: object
) -> None:
    truth = make(tmp_path / "run", stage)
    edit_all(models(truth), lambda state: state["module"].update({EXTRA: value}))
    report = assert_exact(tmp_path / "run", truth.fp32)
    assert report.left_out == {EXTRA: f"is no tensor ({type(value).__name__})"}


# Some hundred kilobytes lie between the counter of the run and this one.
NESTED = {
    "trainer": {
        "lines": [str(number) for number in range(30_000)],
        "history": [{"global_steps": 7}],
        "note": "global_steps",
    }
}


@pytest.mark.parametrize("params", [PARAMS, FROZEN], ids=["plain", "frozen"])
@pytest.mark.parametrize(
    "state",
    [NESTED, {"lr_scheduler": NESTED}, {"lr_scheduler": {"global_steps": 7}}],
    ids=["behind", "before", "shallow"],
)
@pytest.mark.parametrize("is_one_text", [False, True])
def test_another_step_counter_in_client_state(
    tmp_path: Path, params: Sequence[Param], state: Mapping[str, Any], is_one_text: bool
) -> None:
    # Pickled in full where it comes first; again in full, or not if it is the same object.
    early = state if is_one_text else {}
    truth = make(tmp_path / "run", 3, params, world=3, client_state=early)
    if not is_one_text:
        edit_all(models(truth), setting(**state))
    assert assert_exact(tmp_path / "run", truth.fp32).facts["step"] == 3


@pytest.mark.parametrize("params", [PARAMS, FROZEN], ids=["plain", "frozen"])
@pytest.mark.parametrize("nested", [3, 4, 7])
@pytest.mark.parametrize("place", ["trainer", "lr_scheduler"])
def test_another_step_counter_hides_no_mixed_steps(
    tmp_path: Path, params: Sequence[Param], place: str, nested: int
) -> None:
    state = {place: {"history": [{"global_steps": nested}]}}
    truth = make(tmp_path / "run", 3, params, world=3, client_state=state)
    first, path, _ = models(truth)
    edit(path, setting(global_steps=4))
    message = refusal(tmp_path / "run")
    expected = f"{path}: is of step 4, but {first.name} of step 3; the files are of different saves"
    assert_named(message, [expected])


def of_foreign_class(state: State) -> None:
    """Make the mappings of a model state objects of a foreign class."""
    state["module"] = NamedState(state["module"])
    if isinstance(state["param_shapes"], list):
        state["param_shapes"] = [NamedState(group) for group in state["param_shapes"]]
    elif state["param_shapes"] is not None:
        state["param_shapes"] = NamedState(state["param_shapes"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_mappings_of_a_foreign_class(tmp_path: Path, stage: int) -> None:
    truth = make(tmp_path / "run", stage, FROZEN)
    edit_all(models(truth), of_foreign_class)
    assert_exact(tmp_path / "run", truth.fp32)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_single_mapping_of_a_foreign_class(tmp_path: Path, stage: int) -> None:
    params = [param for param in FROZEN if not param.group]
    truth = make(tmp_path / "run", stage, params, single_dict_shapes=True)
    edit_all(models(truth), of_foreign_class)
    assert_exact(tmp_path / "run", truth.fp32)


# Folders and the machine.


def test_an_unreadable_folder_beside_the_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    make(root, 2, global_step=3, seed=1, save_latest=False)
    newest = make(root, 2, global_step=12, save_latest=False)
    make(root, 2, global_step=4, seed=2, save_latest=False)
    closed = {root / "lost+found", root / "global_step99"}
    for path in closed:
        path.mkdir()
    listing = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path in closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listing(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert assert_exact(root, newest.fp32).facts["tag"] == "global_step12"


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    name, alias = "\u0441\u043b\u043e\u0439.weight", "\u30d8\u30c3\u30c9.weight"
    params = (Param(name, (5, 3)), Param(alias, (5, 3), tie_of=name))
    truth = make(tmp_path / "run", 3, params)
    arguments = ["-m", "dist_consolidate", tmp_path / "run", tmp_path / "out"]
    ended = run_python(arguments, env={"PYTHONIOENCODING": "ascii"}).ok()
    assert "Traceback" not in ended.stderr, ended
    shown = [text.encode("ascii", "backslashreplace").decode() for text in (alias, name)]
    assert f"ties: {shown[0]} = {shown[1]}" in ended.stdout.splitlines(), ended
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_shard_that_goes_stale_while_it_is_read(
    tmp_path: Path, stage: int, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = make(tmp_path / "run", stage, model_dtype=torch.float32)
    stale = [*models(truth)[:1], *optims(truth)[1:]][-1]
    preadv = os.preadv

    def failing(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == stale.resolve():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    message = refusal(tmp_path / "run")
    assert message.startswith(f"{stale}: cannot be read at byte "), message
    assert message.endswith(os.strerror(errno.ESTALE)), message
    code, stdout, stderr = main(tmp_path / "run", tmp_path / "out")
    assert (code, stdout) == (3, ""), stderr
    assert stderr.startswith(f"{MESSAGE}{stale}: cannot be read"), stderr
    assert len(stderr.splitlines()) == 1, stderr
    assert nothing_at(tmp_path / "out")


@pytest.mark.parametrize("link", ["consolidated", "consolidated/global_step3"])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_checkpoint_that_leads_the_result_elsewhere(
    tmp_path: Path, link: str, absolute: bool
) -> None:
    root, victim = tmp_path / "run", tmp_path / "victim"
    truth = make(root, 3)
    victim.mkdir()
    (victim / "mine.txt").write_text("mine")
    path = root / link
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(victim if absolute else os.path.relpath(victim, path.parent))
    before = sorted(tmp_path.rglob("*"))
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="lies outside"):
            consolidate(root, device="cpu", overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before
    assert_exact(root, truth.fp32)


@pytest.mark.parametrize("tag", ["../other", "../other/global_step3", "global_step3/../../other"])
def test_tags_outside_the_checkpoint(tmp_path: Path, tag: str) -> None:
    make(tmp_path / "run", 2)
    other = make(tmp_path / "other", 2)
    shutil.copytree(other.tag_dir, tmp_path / "other", dirs_exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    for name in (tag, str(other.tag_dir)):
        with pytest.raises(CheckpointError, match="has no tag"):
            consolidate(tmp_path / "run", device="cpu", tag=name)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_rank_without_a_world_is_a_single_process(tmp_path: Path) -> None:
    truth = make(tmp_path / "run", 2)
    program = ["-m", "dist_consolidate", tmp_path / "run", tmp_path / "out"]
    env = {"RANK": "1"}
    ended = run_python(program, env=env).ok()
    assert ended.stdout.startswith("tag global_step3 (named by `latest`), ZeRO stage 2"), ended
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)
    for wrong, words in ((["--bucket-size", "0"], "--bucket-size"), (["--nonsense"], "--nonsense")):
        ended = run_python([*program, *wrong], env=env)
        assert (ended.returncode, ended.stdout) == (2, ""), ended
        assert words in ended.stderr, ended


# Values.


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_values_beyond_fp16_are_told(tmp_path: Path, stage: int) -> None:
    params = (Param("big", (6,)), Param("fits", (6,)), Param("alias", (6,), tie_of="big"))
    truth = make(tmp_path / "run", stage, params, world=1, model_dtype=torch.float32)
    # 65520 is the first number that is rounded up to infinity.
    values = {
        "big": torch.tensor([1.0, 1e6, -1e6, 65520.0, 65504.0, 0.0]),
        "fits": torch.tensor([65519.0, -65519.0, 1e-9, 65504.0, 2.0, 0.0]),
    }
    flat = torch.cat([*values.values()])

    def change(state: State) -> None:
        zero = state["optimizer_state_dict"]
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        zero[key][0][:12] = flat

    if stage:
        edit_all(optims(truth), change)
    if stage < 3:
        edit_all(models(truth), lambda s: [s["module"][n].copy_(v) for n, v in values.items()])
    want = {n: values["big" if n == "alias" else n] for n in ("big", "fits", "alias")}
    report = assert_exact(
        tmp_path / "run", {n: v.half() for n, v in want.items()}, dtype="fp16", bucket_size="8"
    )
    assert values["big"].half().isinf().tolist() == [False, True, True, True, False, False]
    (note,) = [note for note in report.notes if "fp16" in note]
    assert note.endswith("infinities were written in big"), note
    manifest = json.loads((report.output_dir / MANIFEST_NAME).read_text())
    assert note in manifest["notes"]
    for dtype in ("fp32", "bf16"):
        want_here = {n: v.bfloat16() if dtype == "bf16" else v for n, v in want.items()}
        assert not assert_exact(tmp_path / "run", want_here, dtype=dtype).notes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_values_within_fp16_are_not_mentioned(tmp_path: Path, stage: int) -> None:
    truth = make(tmp_path / "run", stage)
    want = {name: tensor.half() for name, tensor in truth.fp32.items()}
    report = assert_exact(tmp_path / "run", want, dtype="fp16")
    manifest = json.loads((report.output_dir / MANIFEST_NAME).read_text())
    assert not [note for note in (*report.notes, *manifest["notes"]) if "infinit" in note]


NORMS = ("norm1", "norm2", "norm3")


def stage0_masters(
    root: Path, groups: Sequence[Sequence[str]], *, fused: bool, matrices: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Write a bf16 stage-0 checkpoint whose norms differ in fp32 only; give the masters."""
    names = [*NORMS, *matrices]
    params = [Param(name, (4,) if name in NORMS else (3, 5)) for name in names]
    truth = make(root, 0, params, stage0_fused=fused)
    masters = {name: 1 + torch.full((4,), 1e-3 * place) for place, name in enumerate(NORMS)}
    assert all(tensor.bfloat16().eq(1).all() for tensor in masters.values())
    masters |= {name: truth.fp32[name] for name in matrices}

    def change(state: State) -> None:
        module = {}
        flats = [torch.cat([masters[name].flatten() for name in group]) for group in groups]
        for group, flat in zip(groups, flats, strict=True):
            half = flat.bfloat16()
            sizes = [masters[name].numel() for name in group]
            for name, part in zip(group, half.split(sizes), strict=True):
                module[name] = part.view(masters[name].shape)
        if fused:
            state["optimizer"]["fp32_groups_flat"] = flats
        else:
            state["optimizer"]["fp32_groups"] = [[masters[n] for n in group] for group in groups]
            module = {name: tensor.clone() for name, tensor in module.items()}
        state["module"] = OrderedDict((name, module[name]) for name in names)

    edit_all(models(truth), change)
    return masters


@pytest.mark.parametrize(
    ("groups", "matrices"),
    [
        ([("norm3", "norm2", "norm1")], ()),
        ([("norm2", "norm1", "norm3")], ()),
        ([("norm2", "norm3", "norm1")], ()),
        ([("w1", "norm3", "norm1", "norm2")], ("w1",)),
        ([("w2", "norm3", "norm1", "norm2", "w1")], ("w1", "w2")),
        ([("norm3",), ("norm1", "norm2")], ()),
        ([("w1", "w2"), ("norm2", "norm3", "norm1")], ("w1", "w2")),
    ],
)
def test_masters_that_cannot_be_told_apart_are_not_guessed(
    tmp_path: Path, groups: Sequence[Sequence[str]], matrices: Sequence[str]
) -> None:
    masters = stage0_masters(tmp_path / "run", groups, fused=False, matrices=matrices)
    want = {name: masters[name].bfloat16().float() for name in NORMS}
    report = assert_exact(tmp_path / "run", {**want, **{n: masters[n] for n in matrices}})
    (note,) = report.notes
    assert note.endswith("16-bit values were taken: norm1, norm2, norm3"), note


@pytest.mark.parametrize(
    ("groups", "matrices"),
    [
        ([("norm3", "norm2", "norm1")], ()),
        ([("norm1", "norm2", "norm3")], ()),
        ([("norm2", "w1", "norm3", "norm1")], ("w1",)),
        ([("w2", "norm3"), ("norm2", "w1", "norm1")], ("w1", "w2")),
    ],
)
def test_fused_masters_need_no_order(
    tmp_path: Path, groups: Sequence[Sequence[str]], matrices: Sequence[str]
) -> None:
    masters = stage0_masters(tmp_path / "run", groups, fused=True, matrices=matrices)
    assert assert_exact(tmp_path / "run", masters).notes == ()


@pytest.mark.parametrize(
    "groups", [[("norm1",), ("norm2",), ("norm3",)], [("norm3",), ("norm1",), ("norm2",)]]
)
def test_fused_groups_that_look_alike_are_not_guessed_silently(
    tmp_path: Path, groups: Sequence[Sequence[str]]
) -> None:
    masters = stage0_masters(tmp_path / "run", groups, fused=True)
    report = consolidate(tmp_path / "run", tmp_path / "out", device="cpu")
    found = load_output(tmp_path / "out")
    wrong = [name for name in NORMS if not found[name].equal(masters[name])]
    assert all(any(name in note for note in report.notes) for name in wrong), (wrong, report.notes)


# Requests.


@pytest.mark.parametrize(
    "text", ["9" * 400, "9" * 400 + ".5GB", "9" * 5000 + "TB", "1." + "0" * 400]
)
@pytest.mark.parametrize("option", ["bucket_size", "max_shard_size"])
def test_sizes_of_hundreds_of_digits(tmp_path: Path, main: Main, option: str, text: str) -> None:
    make(tmp_path / "run", 2)
    assert f"--{option.replace('_', '-')}" in refusal(
        tmp_path / "run", UsageError, **{option: text}
    )
    code, stdout, stderr = main(tmp_path / "run", tmp_path / "out", f"--{option}", text)
    assert (code, stdout) == (2, ""), stderr
    assert stderr.startswith(f"{MESSAGE}--{option.replace('_', '-')}"), stderr
    assert len(stderr.splitlines()) == 1, stderr
    assert nothing_at(tmp_path / "out")


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400, "-" + "9" * 5000, "0" * 5000])
def test_writers_of_thousands_of_digits(tmp_path: Path, main: Main, text: str) -> None:
    make(tmp_path / "run", 2)
    assert "--writers" in refusal(tmp_path / "run", UsageError, writers=text)
    code, stdout, stderr = main(tmp_path / "run", tmp_path / "out", f"--writers={text}")
    assert (code, stdout) == (2, ""), stderr
    assert stderr.startswith(f"{MESSAGE}--writers"), stderr
    assert len(stderr.splitlines()) == 1, stderr
    assert nothing_at(tmp_path / "out")


@pytest.mark.parametrize("option", ["bucket_size", "max_shard_size", "writers"])
def test_numbers_of_thousands_of_digits(tmp_path: Path, main: Main, option: str) -> None:
    make(tmp_path / "run", 2)
    config = tmp_path / "options.toml"
    config.write_text(f"{option} = {'9' * 5000}\n")
    code, stdout, stderr = main(tmp_path / "run", tmp_path / "out", "--config", config)
    assert (code, stdout) == (2, ""), stderr
    assert str(config) in stderr, stderr
    refusal(tmp_path / "run", UsageError, **{option: 10**5000})


# Matrices that may lie transposed.


def set_zenflow(value: object) -> Change:
    """Set ZenFlow's section of the configuration."""
    return lambda state: state["ds_config"]["zero_optimization"].update(zenflow=value)


@pytest.mark.parametrize("value", [{"topk_ratio": 0.1}, {}, True], ids=str)
def test_zenflow_under_stage_3_is_refused_by_name(tmp_path: Path, value: object) -> None:
    truth = make(tmp_path / "run", 3)
    edit_all(models(truth), set_zenflow(value))
    message = refusal(tmp_path / "run", UnsupportedLayoutError)
    assert "ZenFlow" in message
    assert str(truth.tag_dir) in message


@pytest.mark.parametrize("value", [None, False], ids=str)
def test_zenflow_that_is_off(tmp_path: Path, value: object) -> None:
    truth = make(tmp_path / "run", 3)
    edit_all(models(truth), set_zenflow(value))
    assert_exact(tmp_path / "run", truth.fp32)


@pytest.mark.parametrize("params", [PARAMS, [PARAMS[1]]], ids=["several", "single"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_matrix_that_lies_transposed(tmp_path: Path, stage: int, params: Sequence[Param]) -> None:
    truth = make(tmp_path / "run", stage, params)
    assert_exact(tmp_path / "run", truth.fp32)

    def change(state: State) -> None:
        held = state["module"]["inp.weight"]
        state["module"]["inp.weight"] = held.as_strided((7, 13), (1, 7))

    edit_all(models(truth), change)
    message = refusal(tmp_path / "run")
    assert "'inp.weight'" in message, message
    assert "stride [1, 7]" in message, message
