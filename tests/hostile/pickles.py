"""Pickles by hand: fragments that push one object, and ways to put them into a real pickle."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping


def text(value: str | bytes) -> bytes:
    """Push a text; bytes need not be any."""
    data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """Push an integer of any size."""
    return pickle.dumps(value, 2)[2:-1]


def real(value: float) -> bytes:
    """Push a float."""
    return b"G" + struct.pack(">d", value)


def named(module: str, name: str) -> bytes:
    """Push a global."""
    return f"c{module}\n{name}\n".encode()


def storage(key: bytes = text("0"), numel: bytes = number(4), kind: str = "FloatStorage") -> bytes:
    """Push a storage."""
    return b"(" + text("storage") + named("torch", kind) + key + text("cpu") + numel + b"tQ"


def tensor(
    size: bytes = number(4) + b"\x85",
    stride: bytes = number(1) + b"\x85",
    offset: bytes = number(0),
    held: bytes | None = None,
) -> bytes:
    """Push a tensor."""
    start = named("torch._utils", "_rebuild_tensor_v2") + b"("
    return start + (held or storage()) + offset + size + stride + b"\x89)tR"


HUGE = (2**31, 2**32, 2**62, 2**63, 2**63 + 1, 2**64, 2**2000)


def running(canary: str) -> dict[str, bytes]:
    """Objects that would make a file if anything in them were run or imported."""
    shell, code = f"touch '{canary}'", f"open({canary!r}, 'w')"
    system = named("os", "system")
    return {
        "reduce os.system": system + text(shell) + b"\x85R",
        "reduce posix.system": named("posix", "system") + text(shell) + b"\x85R",
        "reduce eval": named("builtins", "eval") + text(code) + b"\x85R",
        "reduce exec": named("builtins", "exec") + text(code) + b"\x85R",
        "reduce __import__": named("builtins", "__import__") + text("antigravity") + b"\x85R",
        "reduce open": named("builtins", "open") + text(canary) + text("w") + b"\x86R",
        "reduce Popen": named("subprocess", "Popen") + text(shell) + b"\x85R",
        "reduce runpy": named("runpy", "run_path") + text(canary) + b"\x85R",
        "reduce torch.load": named("torch", "load") + text(canary) + b"\x85R",
        "reduce our own": named("dist_consolidate.api", "consolidate") + text(canary) + b"\x85R",
        "build": named("os", "environ") + b"}" + text("__setstate__") + system + b"sb",
        "build a made one": system + b")\x81}" + text("__class__") + system + b"sb",
        "build slots": system + b")\x81N}" + text("__setstate__") + system + b"s\x86b",
        "newobj": named("subprocess", "Popen") + text(shell) + b"\x85\x81",
        "newobj_ex": named("subprocess", "Popen") + text(shell) + b"\x85}" + b"\x92",
        "stack_global": text("os") + text("system") + b"\x93" + text(shell) + b"\x85R",
        "stack_global dotted": text("os") + text("path.os.system") + b"\x93" + text(shell)
        + b"\x85R",
        "inst": b"(" + text(shell) + b"ios\nsystem\n",
        "obj": b"(" + system + text(shell) + b"o",
        "ext1": b"\x82\x01",
        "ext2": b"\x83\x01\x00",
        "ext4": b"\x84\x01\x00\x00\x00",
        "getattr": named("builtins", "getattr") + named("os", "path") + text("system") + b"\x86R"
        + text(shell) + b"\x85R",
        "attrgetter": named("operator", "attrgetter") + text("system") + b"\x85R"
        + named("importlib", "import_module") + text("os") + b"\x85R\x85R" + text(shell) + b"\x85R",
        "rebuild from type": named("torch._tensor", "_rebuild_from_type_v2") + b"(" + system
        + named("builtins", "list") + text(shell) + b"NtR",
        "reconstructor": named("copyreg", "_reconstructor") + b"(" + system
        + named("builtins", "object") + text(shell) + b"tR",
        "default factory": named("collections", "defaultdict") + system + b"\x85R",
        "module in a pid": b"(" + text("module") + system + text(shell) + text(shell) + b"tQ",
        "codecs": named("_codecs", "encode") + text(shell) + text("rot13") + b"\x86R",
    }  # fmt: skip


def _pairs(levels: int) -> bytes:
    """Push a tuple of two of the same, of two of the same, and so on."""
    return b"N" + b"2\x86" * levels


def wasteful() -> dict[str, bytes]:
    """Objects that take long to make or to look at, or much memory, or overflow a stack."""
    long_list = b"](" + b"N" * 100_000 + b"eq\x05"
    copies = b"0](" + b"h\x06h\x05\x85R" * 100_000 + b"e"
    texts = b"0](" + b"h\x06h\x05" + text("utf-8") + b"\x86R"
    return {
        "deep lists": b"]" * 200_000 + b"a" * 199_999,
        "deep tuples": b")" + b"\x85" * 200_000,
        "deep dictionaries": b"}" + b"K\x01}" * 100_000 + b"s" * 100_000,
        "deep lists in a tuple as a key": b"})" + b"\x85" * 200_000 + b"K\x01s",
        "tuples of tuples": _pairs(60),
        "a key that hashes for ever": b"}" + _pairs(60) + b"K\x01s",
        "a set of what hashes for ever": b"\x8f(" + _pairs(60) + b"\x90",
        "a frozen set of it": b"(" + _pairs(60) + b"\x91",
        "a set made of it": named("builtins", "set") + b"](" + _pairs(60) + b"e\x85R",
        "a dictionary made of it": named("collections", "OrderedDict") + b"](" + _pairs(60)
        + b"K\x01\x86e\x85R",
        "a foreign dictionary with such a key": named("a", "B") + b")R" + _pairs(60) + b"K\x01s",
        "dictionaries of dictionaries": b"}K\x00Ns" + b"".join(
            b"q\x07}(K\x00h\x07K\x01h\x07u" for _ in range(60)
        ),
        "dictionaries of dictionaries with texts": b"}" + text("a") + b"Ns" + b"".join(
            b"q\x07}(" + text("a") + b"h\x07" + text("b") + b"h\x07u" for _ in range(60)
        ),
        "lists of lists": b"]q\x07" + b"".join(b"](h\x07h\x07eq\x07" for _ in range(60)),
        "dictionaries of tensors": b"}" + text("a") + tensor() + b"s" + b"".join(
            b"q\x07}(" + text("a") + b"h\x07" + text("b") + b"h\x07u" for _ in range(40)
        ),
        "a list in itself": b"]q\x05h\x05a",
        "a dictionary in itself": b"}q\x05" + text("a") + b"h\x05s",
        "a list of itself many times": b"]q\x05(" + b"h\x05" * 100_000 + b"e",
        "memo index": b"Nr\xff\xff\xff\x7f",
        "memo index as text": b"Np2147483647\n",
        "memo index beyond": b"Np99999999999999999999\n",
        "binunicode8": b"\x8d" + b"\xff" * 7 + b"\x7f",
        "binbytes8": b"\x8e" + struct.pack("<Q", 1 << 40),
        "binbytes": b"B\xff\xff\xff\xff",
        "bytearray8": b"\x96" + struct.pack("<Q", 1 << 40),
        "binunicode": b"X\xff\xff\xff\xff",
        "binstring": b"T\xff\xff\xff\x7f",
        "negative binstring": b"T\xff\xff\xff\xff",
        "long4": b"\x8b\xff\xff\xff\x7f",
        "negative long4": b"\x8b\xff\xff\xff\xff",
        "a long of a megabyte": b"\x8b" + struct.pack("<I", 1 << 20) + b"\x7f" * (1 << 20),
        "a number of many digits": b"I" + b"9" * 5000 + b"\n",
        "a long of many digits": b"L" + b"9" * 5000 + b"L\n",
        "frame": b"\x95" + b"\xff" * 8 + b"N",
        "next buffer": b"\x97",
        "copies of a long list": named("builtins", "list") + b"q\x060" + long_list + copies,
        "tuples of a long list": named("builtins", "tuple") + b"q\x060" + long_list + copies,
        "copies of a text": named("_codecs", "encode") + b"q\x060" + text("x" * 1_000_000)
        + b"q\x05" + texts * 1 + (b"h\x06h\x05" + text("utf-8") + b"\x86R") * 10_000 + b"e",
        "names that grow": named("builtins", "getattr") + b"q\x060" + text("x" * 100_000)
        + b"q\x050" + named("a", "b") + b"".join(
            b"q\x070h\x06h\x07h\x05\x86R" for _ in range(5000)
        ),
        "many classes": b"](" + b"".join(named("a", f"b{i}") for i in range(50_000)) + b"e",
        "many odd tensors": named("torch._utils", "_rebuild_sparse_tensor") + b"q\x060]("
        + b"h\x06)R" * 200_000 + b"e",
        "many lists": b"](" + b"]" * 3_000_000 + b"e",
        "too many lists": b"](" + b"]" * 9_000_000 + b"e",
        "numbers that collide as keys": b"}(" + b"".join(
            number(i * (2**61 - 1)) + b"N" for i in range(1, 60_000)
        ) + b"u",
        "many marks": b"(" * 1_000_000,
        "many globals in one line": b"c" + b"a" * 2_000_000 + b"\n" + b"b\n",
    }  # fmt: skip


def impossible() -> dict[str, bytes]:
    """Objects of wrong kinds and impossible numbers."""
    found = {
        "none": b"N",
        "true": b"\x88",
        "text": text("x"),
        "empty text": text(""),
        "bytes": b"B\x02\x00\x00\x00\xff\xfe",
        "zero": number(0),
        "minus one": number(-1),
        "nan": real(float("nan")),
        "infinity": real(float("inf")),
        "half": real(0.5),
        "empty list": b"]",
        "empty tuple": b")",
        "empty dictionary": b"}",
        "list of none": b"](Ne",
        "list of lists of none": b"](](Nee",
        "list of nan": b"](" + real(float("nan")) + b"e",
        "list of minus one": b"](" + number(-1) + b"e",
        "list of truths": b"](\x88\x89e",
        "list of texts": b"](" + text("a") + text("b") + b"e",
        "list of dictionaries": b"](}}e",
        "dictionary of none": b"}" + text("a") + b"Ns",
        "dictionary of nan": b"}" + text("a") + real(float("nan")) + b"s",
        "dictionary with odd keys": b"}(Nb".replace(b"b", b"N") + b"K\x01N\x88N" + real(0.5)
        + b"N" + real(float("nan")) + b"NC\x01aNu",
        "a list as a key": b"}]Ns",
        "a tensor as a key": b"}" + tensor() + b"Ns",
        "a class as a key": b"}" + named("os", "system") + b"Ns",
        "a set": named("builtins", "set") + b"](K\x01K\x02e\x85R",
        "a foreign object": named("os", "environ") + b")R",
        "a class": named("os", "environ"),
        "a dtype": named("torch", "float32"),
        "a function": named("torch._utils", "_rebuild_tensor_v2"),
        "a storage": storage(),
        "a tensor": tensor(),
        "a list of tensors": b"](" + tensor() + b"e",
        "a list of lists of tensors": b"](](" + tensor() + b"ee",
        "a tensor without dimensions": tensor(b")", b")"),
        "an empty tensor": tensor(number(0) + b"\x85"),
        "a list of empty tensors": b"](" + tensor(number(0) + b"\x85") + b"e",
        "a tensor past its storage": b"](" + tensor(number(5) + b"\x85") + b"e",
        "an offset past its storage": b"](" + tensor(offset=number(1)) + b"e",
        "a stride past its storage": b"](" + tensor(stride=number(2) + b"\x85") + b"e",
        "a negative size": b"](" + tensor(number(-4) + b"\x85") + b"e",
        "a negative stride": b"](" + tensor(stride=number(-1) + b"\x85") + b"e",
        "a negative offset": b"](" + tensor(offset=number(-1)) + b"e",
        "a stride of zero": b"](" + tensor(stride=number(0) + b"\x85") + b"e",
        "a huge tensor of stride zero": b"](" + tensor(number(2**40) + b"\x85", number(0) + b"\x85")
        + b"e",
        "sizes whose product overflows": b"](" + tensor(
            number(2**32) + number(2**32) + b"\x86", b"K\x00K\x00\x86"
        ) + b"e",
        "many dimensions": b"](" + tensor(b"(" + b"K\x02" * 65 + b"t", b"(" + b"K\x00" * 65 + b"t")
        + b"e",
        "a million dimensions": b"](" + tensor(
            b"(" + number(2**31 - 1) * 200_000 + b"t", b"(" + b"K\x00" * 200_000 + b"t"
        ) + b"e",
        "a float as a size": b"](" + tensor(real(4.0) + b"\x85") + b"e",
        "nan as a size": b"](" + tensor(real(float("nan")) + b"\x85") + b"e",
        "a storage that is missing": b"](" + tensor(held=storage(text("999"))) + b"e",
        "a storage named by a path": b"](" + tensor(
            held=storage(text("../../../../etc/passwd"))
        ) + b"e",
        "a storage with an odd key": b"](" + tensor(held=storage(text("a\0b\x1b[31m\n"))) + b"e",
        "a storage with a huge key": b"](" + tensor(held=storage(text("9" * 100_000))) + b"e",
        "a storage keyed by a number": storage(number(0)),
        "a storage of minus one": storage(text("77"), number(-1)),
        "a storage of nan": storage(text("77"), real(float("nan"))),
        "a storage of a text": storage(text("77"), text("4")),
        "a storage of another type": storage(text("77"), kind="NoStorage"),
        "a pid that is a number": b"K\x01Q",
        "a pid that is a list": b"]Q",
        "a pid that is a short tuple": text("storage") + b"\x85Q",
        "an empty pid": b")Q",
        "a pid as text": b"Pstorage\n",
        "a pid of three": b"NNN\x87Q",
        "a pid of two": b"NN\x86Q",
        "shapes with minus one": b"](}" + text("a") + b"(J\xff\xff\xff\xffts" + b"e",
        "shapes with nan": b"](}" + text("a") + b"(" + real(float("nan")) + b"tse",
        "shapes with truth": b"](}" + text("a") + b"(\x88tse",
    }  # fmt: skip
    for value in HUGE:
        found |= {
            f"{value:.3g}" if value < 2**70 else "2**2000": number(value),
            f"list of {value.bit_length()} bits": b"](" + number(value) + b"e",
            f"minus {value.bit_length()} bits": number(-value),
            f"size of {value.bit_length()} bits": b"](" + tensor(number(value) + b"\x85") + b"e",
            f"offset of {value.bit_length()} bits": b"](" + tensor(offset=number(value)) + b"e",
            f"stride of {value.bit_length()} bits": b"](" + tensor(stride=number(value) + b"\x85")
            + b"e",
            f"storage of {value.bit_length()} bits": b"](" + tensor(
                held=storage(text("78"), number(value))
            ) + b"e",
            f"shapes of {value.bit_length()} bits": b"](}" + text("a") + b"(" + number(value)
            + b"tse",
            f"product of {value.bit_length()} bits": b"](}" + text("a") + b"(" + number(value) * 8
            + b"tse",
        }  # fmt: skip
    return found


NAMES: Mapping[str, bytes] = {
    "newline": text("a\nnote: all is well"),
    "carriage return": text("a\rb"),
    "escape": text("a\x1b[2J\x1b]0;owned\x07"),
    "c1": text("a\x9b31mb"),
    "nul": text("a\0b"),
    "backspace": text("a\b\b\b\bb"),
    "delete": text("a\x7fb"),
    "half a surrogate": text(b"a\xed\xa0\x80"),
    "not utf-8": text(b"a\xff\xfe"),
    "right to left": text("a\u202etxt.exe"),
    "path": text("../../../../tmp/owned"),
    "absolute": text("/etc/passwd"),
    "metadata": text("__metadata__"),
    "empty": text(""),
    "dots": text(".."),
    "huge": text("x" * 2_000_000),
    "a number": number(7),
    "none": b"N",
    "a tuple": b"NN\x86",
}


def overridden(pickled: bytes, keys: tuple[str, ...], value: bytes) -> bytes | None:
    """Set an item of the dictionary a pickle makes, or of one inside, once more at its end.

    Args:
        pickled: What torch pickled.
        keys: The way to the item, from dictionary to dictionary.
        value: Opcodes that push its new value.

    Returns:
        The new pickle; ``None`` if it holds no such dictionary.
    """
    assert pickled.endswith(b".")
    added = b""
    for key in keys[:-1]:
        place = _memo_of(pickled, key)
        if place is None:
            return None
        added = place
    end = text(keys[-1]) + value + b"s"
    return pickled[:-1] + (added + end + b"0" if added else end) + b"."


def renamed(pickled: bytes, keys: tuple[str, ...], name: bytes) -> bytes | None:
    """Add an item under a name that is pushed by opcodes, with a tensor as its value."""
    place = _memo_of(pickled, keys[-1])
    return None if place is None else pickled[:-1] + place + name + tensor() + b"s0."


def _memo_of(pickled: bytes, key: str) -> bytes | None:
    """Find the container that is the value of a key; give the opcodes that push it again."""
    import pickletools

    ops = list(pickletools.genops(pickled))
    for index, (op, argument, _) in enumerate(ops):
        if op.name != "BINUNICODE" or argument != key:
            continue
        at = index + 1 + (ops[index + 1][0].name in ("BINPUT", "LONG_BINPUT"))
        # An OrderedDict is the call of a global, or of one got from the memo.
        if ops[at][0].name in ("GLOBAL", "BINGET", "LONG_BINGET"):
            at = next(i for i in range(at, at + 6) if ops[i][0].name == "REDUCE")
        elif ops[at][0].name not in ("EMPTY_DICT", "EMPTY_LIST"):
            continue
        put, memo, _ = ops[at + 1]
        if put.name in ("BINPUT", "LONG_BINPUT"):
            return b"j" + struct.pack("<I", memo)
    return None
