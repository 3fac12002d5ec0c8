"""The restricted unpickler: what torch pickles is understood, whatever else comes stays inert."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import functools
import io
import os
import pickle
import struct
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_consolidate.checkpoint import unpickle
from dist_consolidate.checkpoint.unpickle import Inert, StorageRef, TensorRef, loads
from dist_consolidate.dtypes import BY_NAME, BY_STORAGE_CLASS

ROOT = Path(__file__).resolve().parents[2]


class Color(enum.Enum):
    """An enum of the training project."""

    RED = 3


class Outer:
    """A class with a class inside."""

    class Inner:
        """Found by its qualified name."""

        def __init__(self) -> None:
            self.level = 5


class Keyworded:
    """Pickles with keyword arguments."""

    def __new__(cls, *, level: int) -> Keyworded:
        self = super().__new__(cls)
        self.level = level
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"level": 5}


class Listed(list[int]):
    """A list subclass."""


class Mapped(dict[str, int]):
    """A dict subclass."""


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def pickled(value: object) -> bytes:
    """The pickle inside what torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
        return archive.read(name)


def reread(value: object) -> Any:
    return loads(pickled(value))


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def refused_or_read(data: bytes) -> Any:
    """Load; a ValueError is as good as an inert object."""
    try:
        return loads(data)
    except ValueError as error:
        return error


def normal_load_is_right() -> None:
    """Load a file with every kind of known thing."""
    tensors = [torch.zeros(2, dtype=getattr(torch, name)) for name in BY_NAME]
    refs = reread({"t": tensors, "p": torch.nn.Parameter(torch.ones(2, 3)), "s": torch.Size((4,))})
    assert [ref.dtype.name for ref in refs["t"]] == list(BY_NAME)
    assert [ref.dtype.itemsize_bytes for ref in refs["t"]] == [t.itemsize for t in tensors]
    assert [ref.shape for ref in refs["t"]] == [(2,)] * len(tensors)
    assert (refs["p"].shape, refs["p"].stride, refs["s"]) == ((2, 3), (3, 1), (4,))


def tables() -> tuple[object, ...]:
    """Everything in the unpickler's module that a load might change."""
    functions = {f for f in unpickle._KNOWN.values() if callable(f) and not isinstance(f, type)}
    return (
        dict(unpickle._KNOWN),
        [repr(value) for value in unpickle._KNOWN.values() if not callable(value)],
        repr(BY_NAME),
        repr(BY_STORAGE_CLASS),
        sorted(vars(Inert)),
        sorted(vars(TensorRef)),
        sorted((f.__name__, repr(f.__defaults__), repr(f.__dict__)) for f in functions),
    )


# What torch and training projects pickle.


@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_tensor_of_each_dtype(name):
    ref = reread(torch.zeros(3, 5, dtype=getattr(torch, name)))
    assert isinstance(ref, TensorRef)
    assert (ref.dtype, ref.offset_numel) == (BY_NAME[name], 0)
    assert (ref.shape, ref.stride, ref.attributes) == ((3, 5), (5, 1), None)
    width = ref.dtype.itemsize_bytes
    assert ref.storage.num_numel * ref.storage.dtype.itemsize_bytes == 15 * width


def test_views_share_their_storage():
    base = torch.arange(24.0)
    part, turned, other = base[6:12], base.view(4, 6).t(), torch.arange(24.0)
    refs = reread([base, part, turned, other])
    assert refs[0].storage is refs[1].storage is refs[2].storage
    assert refs[3].storage != refs[0].storage
    assert (refs[1].offset_numel, refs[1].shape, refs[1].stride) == (6, (6,), (1,))
    assert (refs[2].shape, refs[2].stride) == ((6, 4), (1, 6))
    assert [ref.storage.num_numel for ref in refs] == [24] * 4


def test_empty_and_scalar_tensors():
    refs = reread([torch.empty(0), torch.tensor(1.5), torch.empty(0, 8), torch.zeros(1).expand(7)])
    assert [ref.shape for ref in refs] == [(0,), (), (0, 8), (7,)]
    assert refs[3].stride == (0,)


def test_placeholders_keep_their_identity():
    one, two = torch.empty(0), torch.empty(0)
    refs = reread({"a": one, "b": one.detach(), "c": two})
    assert refs["a"].storage is refs["b"].storage
    assert refs["a"].storage != refs["c"].storage


def test_state_dict_with_metadata():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = reread(model.state_dict())
    assert isinstance(state, dict)
    assert list(state) == list(model.state_dict())
    assert {name: ref.shape for name, ref in state.items()} == {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
    }


def test_parameters():
    module = torch.nn.Linear(2, 3)
    module.weight.mark = "kept aside"
    refs = reread([module.weight, module.bias, torch.nn.Buffer(torch.ones(4))])
    assert [ref.shape for ref in refs] == [(3, 2), (3,), (4,)]


def test_attributes_of_a_tensor():
    tensor = torch.ones(6)
    tensor.ds_id = "0_3"
    ref = reread([tensor])[0]
    assert ref.shape == (6,)
    assert ref.attributes == {"ds_id": "0_3"}


def test_attributes_of_a_float8_tensor():
    tensor = torch.zeros(6, dtype=torch.float8_e4m3fn)[2:]
    tensor.ds_id = 4
    ref = reread(tensor)
    assert (ref.dtype.name, ref.offset_numel, ref.shape) == ("float8_e4m3fn", 2, (4,))
    assert (ref.storage.dtype.name, ref.storage.num_numel) == ("uint8", 6)
    assert ref.attributes == {"ds_id": 4}


def test_bare_storages_and_dtypes():
    tree = reread(
        {"s": torch.ones(5).untyped_storage(), "d": torch.bfloat16, "z": torch.Size((2,))}
    )
    assert isinstance(tree["s"], StorageRef)
    assert tree["s"].num_numel * tree["s"].dtype.itemsize_bytes == 20
    assert tree["d"] == BY_NAME["bfloat16"]
    assert tree["z"] == (2,)


def test_dtypes_that_are_not_known_stay_inert():
    kind = reread([torch.complex32, torch.strided])[0]
    assert issubclass(kind, Inert)
    assert kind.foreign_name == "torch.complex32"


def test_a_tensor_that_is_not_dense_stays_inert():
    tree = reread({"sparse": torch.eye(3).to_sparse(), "dense": torch.eye(3)})
    assert isinstance(tree["sparse"], Inert)
    assert tree["dense"].shape == (3, 3)


def test_plain_values():
    value = {
        "none": None,
        "flags": [True, False],
        "numbers": (1, -5, 2**40, -(2**70), 1.5, 2j),
        "text": "caf\u00e9",
        "bytes": b"\x00\xff",
        "sets": [{1, 2}, frozenset({3})],
        "nested": [[[]], {}, ((),)],
    }
    numbers = value.pop("numbers")
    assert reread(value) == value
    assert reread(numbers[:-1]) == numbers[:-1]


def test_default_dicts_become_plain_ones():
    given = collections.defaultdict(list, a=[1])
    tree = reread(given)
    assert type(tree) is dict
    assert tree == {"a": [1]}


def test_foreign_objects_keep_what_was_pickled():
    tree = reread(
        {
            "args": argparse.Namespace(lr=0.1, layers=2),
            "color": Color.RED,
            "list": Listed([1, 2]),
            "dict": Mapped(a=1),
            "queue": collections.deque([1, 2]),
            "when": datetime.date(2020, 1, 2),
            "path": Path("a"),
        }
    )
    assert all(isinstance(value, Inert) for value in tree.values())
    args = tree["args"]
    assert args.foreign_name == "argparse.Namespace"
    assert (args.attribute("lr"), args.attribute("layers")) == (0.1, 2)
    assert args.attribute("gone") is None
    assert tree["color"].args == (3,)
    assert tree["color"].foreign_name == f"{__name__}.Color"
    assert tree["list"].items == [1, 2]
    assert tree["dict"].items == [("a", 1)]
    assert tree["queue"].items == [1, 2]


def test_objects_of_one_class_share_a_stand_in():
    one, two, other = reread([argparse.Namespace(a=1), argparse.Namespace(a=2), Color.RED])
    assert type(one) is type(two)
    assert type(one) is not type(other)


@pytest.mark.parametrize(
    "value",
    [Outer.Inner(), Keyworded(level=5), functools.partial(Color)],
    ids=["nested", "keywords", "partial"],
)
def test_objects_whose_class_is_got_by_a_call(value):
    tree = reread({"strange": value, "weight": torch.ones(3)})
    assert tree["weight"].shape == (3,)
    assert not isinstance(tree["strange"], type(value))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol(protocol):
    value = {"a": [1, (2, "three")], "b": collections.OrderedDict(c=argparse.Namespace(d=4))}
    tree = loads(pickle.dumps(value, protocol))
    assert tree["a"] == value["a"]
    assert tree["b"]["c"].attribute("d") == 4


# Hostile input.


def traps(marker: str) -> dict[str, bytes]:
    """Pickles that would create the marker if anything in them were run."""
    shell, code = f"touch '{marker}'", f"open({marker!r}, 'w')"
    calls = {
        "os.system": Call(os.system, shell),
        "eval": Call(eval, code),
        "exec": Call(exec, code),
        "open": Call(open, marker, "w"),
        "subprocess": Call(subprocess.call, ["touch", marker]),
        "popen": Call(subprocess.Popen, ["touch", marker]),
        "import": Call(__import__, "antigravity"),
        "load_from_bytes": Call(torch.storage._load_from_bytes, pickle.dumps(Call(eval, code))),
        "pickle": Call(pickle.loads, pickle.dumps(Call(eval, code))),
        "encode": [Call(os.system, shell)],
    }
    made = {name: pickle.dumps(call, 2) for name, call in calls.items()}
    made["proto 4"] = pickle.dumps(Call(os.system, shell), 4)
    made["attrgetter"] = (
        b"\x80\x02" + named("operator", "attrgetter") + text("system") + b"\x85R"
        b"" + named("importlib", "import_module") + text("os") + b"\x85R\x85R"
        b"" + text(shell) + b"\x85R."
    )
    made["from type"] = (
        b"\x80\x02" + named("torch._tensor", "_rebuild_from_type_v2") + b"("
        b"" + named("os", "system") + named("builtins", "list") + text(shell) + b"\x85NtR."
    )
    made["new"] = b"\x80\x02" + named("subprocess", "Popen") + text(shell) + b"\x85\x81."
    made["inst"] = b"(" + f"S{shell!r}\nios\nsystem\n.".encode()
    made["obj"] = b"(" + named("os", "system") + text(shell) + b"o."
    made["reconstructor"] = (
        b"\x80\x02" + named("copyreg", "_reconstructor") + b"(" + named("os", "system") + b""
        b"" + named("builtins", "list") + text(shell) + b"tR."
    )
    made["default factory"] = (
        b"\x80\x02" + named("collections", "defaultdict") + named("os", "abort") + b"\x85R"
        b"" + text("a") + text("b") + b"s."
    )
    made["persistent"] = (
        b"\x80\x02(" + text("module") + named("os", "system") + text(shell) + b"tQ."
    )
    return made


TRAPS = sorted(traps("x"))


@pytest.mark.parametrize("name", TRAPS)
def test_nothing_is_run(name, tmp_path):
    before, marker = tables(), tmp_path / "marker"
    outcome = refused_or_read(traps(str(marker))[name])
    assert not marker.exists()
    assert not isinstance(outcome, io.IOBase | subprocess.Popen)
    assert tables() == before
    normal_load_is_right()


def test_a_hostile_rebuild_function_becomes_inert(tmp_path):
    outcome = loads(traps(str(tmp_path / "marker"))["from type"])
    assert isinstance(outcome, Inert)
    assert outcome.foreign_name == "tensor: of a tensor subclass"


def test_named_modules_are_not_imported(tmp_path, monkeypatch):
    (tmp_path / "trap_module").mkdir()
    (tmp_path / "trap_module" / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    for name in ("Thing", "inner.Thing"):
        data = (
            b"\x80\x04" + text("trap_module") + text(name) + b"\x93)\x81}" + text("a") + b"K\x01sb."
        )
        assert loads(data).attribute("a") == 1
    assert set(sys.modules) == known


def build(target: bytes, state: bytes) -> bytes:
    return b"\x80\x02" + target + state + b"b."


PLAIN_STATE = b"}" + text("evil") + b"K\x01s"
SLOT_STATE = b"N}" + text("evil") + b"K\x01s\x86"
DEFAULTS_STATE = b"N}" + text("__defaults__") + b"K\x01K\x02\x86s\x86"
FIELDS_STATE = b"](" + text("float32") + b"K\x01" + text("int") + b"NNe"
STATES = {
    "dict": PLAIN_STATE,
    "slots": SLOT_STATE,
    "defaults": DEFAULTS_STATE,
    "fields": FIELDS_STATE,
    "none": b"N",
    "number": b"K\x01",
}
GLOBALS = [
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("_codecs", "encode"),
    ("copyreg", "_reconstructor"),
    ("torch", "float32"),
    ("torch", "FloatStorage"),
    ("torch", "UntypedStorage"),
    ("builtins", "list"),
    ("os", "system"),
]


@pytest.fixture
def repaired_afterwards():
    """Undo what a load has done to the tables, so that other tests are not hit."""
    kinds = [*BY_NAME.values(), *(v for v in unpickle._KNOWN.values() if not callable(v))]
    fields = [(kind, name, getattr(kind, name)) for kind in kinds for name in kind.__slots__]
    functions = [v for v in unpickle._KNOWN.values() if isinstance(v, types.FunctionType)]
    defaults = [(function, function.__defaults__) for function in functions]
    yield
    for kind, name, value in fields:
        object.__setattr__(kind, name, value)
    for function, value in defaults:
        function.__defaults__ = value
        function.__dict__.clear()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("target", GLOBALS, ids=".".join)
@pytest.mark.usefixtures("repaired_afterwards")
def test_building_a_global_changes_nothing(target, state):
    before = tables()
    refused_or_read(build(named(*target), STATES[state]))
    assert tables() == before
    normal_load_is_right()


@pytest.mark.parametrize("name", ["get", "items", "values", "keys", "__class__", "_metadata"])
def test_attributes_of_a_dictionary_hide_no_method(name):
    filled = named("collections", "OrderedDict") + b")R" + text("a") + b"K\x01s"
    tree = refused_or_read(b"\x80\x02" + filled + b"}" + text(name) + b"K\x05sb.")
    if not isinstance(tree, ValueError):
        assert isinstance(tree, dict)
        assert (tree.get("a"), list(tree.items()), list(tree.values())) == (1, [("a", 1)], [1])
        assert list(tree.keys()) == ["a"]


@pytest.mark.parametrize(
    "arguments",
    [
        b")",
        b"(K\x01K\x02K\x03K\x04K\x05K\x06K\x07t",
        b"(NNNNNNNt",
        b"(]}))))K\x01t",
        b"(" + named("os", "system") * 4 + b"t",
        b"((K\x01tJ\xff\xff\xff\xff(K\x01t(K\x01tNNNt",
    ],
)
@pytest.mark.parametrize("target", GLOBALS, ids=".".join)
@pytest.mark.usefixtures("repaired_afterwards")
def test_calls_with_odd_arguments(target, arguments):
    before = tables()
    outcome = refused_or_read(b"\x80\x02" + named(*target) + arguments + b"R.")
    assert not isinstance(outcome, types.BuiltinFunctionType)
    assert tables() == before


def test_stand_ins_take_any_arguments():
    data = (
        b"\x80\x04"
        + text("os")
        + text("system")
        + b"\x93(K\x01K\x02t}"
        + text("k")
        + b"K\x03s\x92."
    )
    outcome = loads(data)
    assert isinstance(outcome, Inert)
    assert outcome.args == (1, 2)


STORAGE = (
    b"(" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x06tQ"
)


def tensor_pickle(storage: bytes, offset: bytes, size: bytes, stride: bytes) -> bytes:
    start = b"\x80\x02" + named("torch._utils", "_rebuild_tensor_v2")
    return start + b"(" + storage + offset + size + stride + b"\x89)tR."


def test_a_tensor_by_hand():
    ref = loads(tensor_pickle(STORAGE, b"K\x01", b"K\x02\x85", b"K\x01\x85"))
    storage = StorageRef("0", BY_NAME["float32"], 6)
    assert ref == TensorRef(storage, BY_NAME["float32"], 1, (2,), (1,))


@pytest.mark.parametrize(
    ("storage", "offset", "size", "stride"),
    [
        (b"N", b"K\x00", b"K\x02\x85", b"K\x01\x85"),
        (STORAGE, b"J\xff\xff\xff\xff", b"K\x02\x85", b"K\x01\x85"),
        (STORAGE, b"\x88", b"K\x02\x85", b"K\x01\x85"),
        (STORAGE, b"K\x00", b"J\xff\xff\xff\xff\x85", b"K\x01\x85"),
        (STORAGE, b"K\x00", b"K\x02\x85", b"J\xff\xff\xff\xff\x85"),
        (STORAGE, b"K\x00", b"K\x02\x85", b"K\x01K\x01\x86"),
        (STORAGE, b"K\x00", text("ab"), text("cd")),
        (STORAGE, b"K\x00", b"\x88\x85", b"K\x01\x85"),
        (STORAGE, b"K\x00", b"N", b"N"),
    ],
)
def test_impossible_tensors_are_refused(storage, offset, size, stride):
    with pytest.raises(ValueError, match="Error: "):
        loads(tensor_pickle(storage, offset, size, stride))


@pytest.mark.parametrize(
    "pid",
    [
        b"K\x01",
        text("storage") + b"\x85",
        b"(" + text("storage") + b"N" + text("0") + text("cpu") + b"K\x06t",
        b"("
        + text("storage")
        + named("torch", "FloatStorage")
        + b"K\x00"
        + text("cpu")
        + b"K\x06t",
        b"(" + text("storage") + named("torch", "FloatStorage") + b"]" + text("cpu") + b"K\x06t",
        STORAGE[:-4] + b"J\xff\xff\xff\xfft",
        STORAGE[:-4] + text("6") + b"t",
        b"(" + text("elsewhere") + STORAGE[1 + len(text("storage")) : -1],
    ],
)
def test_impossible_storages_are_refused(pid):
    with pytest.raises(ValueError, match="Error: "):
        loads(b"\x80\x02" + pid + b"Q.")


def test_every_truncation_is_refused():
    data = pickled({"a": torch.ones(3), "b": [argparse.Namespace(c=1), Color.RED, {1}, b"x"]})
    for length in range(len(data)):
        with pytest.raises(ValueError, match="Error: "):
            loads(data[:length])


@pytest.mark.usefixtures("repaired_afterwards")
def test_damaged_bytes_are_refused_or_read():
    before, data = tables(), pickled({"a": torch.ones(3), "b": argparse.Namespace(c=[1, 2])})
    for position in range(len(data)):
        for value in (0, 0x2E, 0x52, 0x62, 0xFF):
            changed = bytearray(data)
            changed[position] = value
            refused_or_read(bytes(changed))
    assert tables() == before
    normal_load_is_right()


@pytest.mark.parametrize(
    "data", [b"", b".", b"\x80\x09.", b"0.", b"}s.", b"h\x01.", b"not a pickle"]
)
def test_no_pickle_at_all(data):
    with pytest.raises(ValueError, match="Error: "):
        loads(data)


@pytest.mark.parametrize(
    "opcode", ["\\x8e", "\\x8d", "\\x96", "B", "X", "T", "\\x8b", "r"], ids=repr
)
def test_huge_declared_sizes_are_refused(opcode):
    # With little memory to spare, so that a machine with much of it is not filled either.
    size = "\\xff" * 3 + "\\x7f" + ("\\xff\\xff\\xff\\x00" if opcode in SIZED_BY_8 else "")
    start = "\\x80\\x04N" if opcode == "r" else "\\x80\\x04"
    outcome = run_apart(LIMITED + f"load(b'{start}{opcode}{size}abc')")
    assert (outcome.returncode, outcome.stdout) == (0, "refused\n"), outcome.stderr


SIZED_BY_8 = ("\\x8e", "\\x8d", "\\x96")
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from dist_consolidate.checkpoint.unpickle import loads
def load(data):
    try:
        loads(data)
    except ValueError:
        print("refused")
"""
NESTINGS = {
    "lists": "b']' * N + b'a' * (N - 1) + b'.'",
    "tuples": "b')' + b'\\x85' * N + b'.'",
    "dicts": "b'}' + b'K\\x01}' * N + b's' * N + b'.'",
    "shape": "b'ctorch\\nSize\\n)' + b'\\x85' * N + b'\\x85R.'",
    "key": "b'})' + b'\\x85' * N + b'K\\x01s.'",
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_deep_nesting_does_not_crash(nesting):
    code = f"N = 100_000\nload(b'\\x80\\x02' + {NESTINGS[nesting]})"
    outcome = run_apart(LIMITED + code)
    assert outcome.returncode == 0, outcome.stderr


def run_apart(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
