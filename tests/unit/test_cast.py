"""Casts in host memory give the bits that torch gives, whether it is imported or not."""

from __future__ import annotations

import itertools
import struct
import sys
import warnings

import numpy as np
import pytest
import torch

from dist_consolidate.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, DType
from dist_consolidate.runtime import cast
from dist_consolidate.runtime.cast import Caster, has_infinity, overflows

# Fraction bits by hand: what is dropped is below, at or above half of the last place that stays,
# and that place is even or odd.
ROUNDING = {
    0x3F80_7FFF: 0x3F80,
    0x3F80_8000: 0x3F80,
    0x3F80_8001: 0x3F81,
    0x3F81_7FFF: 0x3F81,
    0x3F81_8000: 0x3F82,
    0x3F81_8001: 0x3F82,
    0xBF81_8000: 0xBF82,
    0x3FFF_8000: 0x4000,  # up into the next exponent
    0x7F7F_FFFF: 0x7F80,  # the largest float becomes infinite
    0xFF7F_FFFF: 0xFF80,
    0x7F7F_7FFF: 0x7F7F,
    0x7F7F_8000: 0x7F80,
    0x7F80_0000: 0x7F80,
    0xFF80_0000: 0xFF80,
    0x0000_0000: 0x0000,
    0x8000_0000: 0x8000,
    0x0000_0001: 0x0000,  # subnormal
    0x8000_0001: 0x8000,
    0x0000_8000: 0x0000,
    0x0000_8001: 0x0001,
    0x0001_8000: 0x0002,
    0x007F_FFFF: 0x0080,  # the largest subnormal becomes normal
}
NANS = (0x7F80_0001, 0x7F80_8000, 0x7FC0_0000, 0x7FFF_FFFF, 0xFF80_0001, 0xFFC1_2345, 0xFFFF_FFFF)


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> Caster:
    """As in a process that has not imported torch."""
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        return Caster(0)


def run(caster: Caster, words: np.ndarray, pair: tuple[DType, DType], shift: int = 0) -> bytes:
    """Cast some elements, from and to memory that begins at an odd place where there is a shift."""
    source = bytearray(shift) + bytearray(words.tobytes())
    target = bytearray(shift + len(words) * pair[1].itemsize_bytes + 4)
    end = len(target) - 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        caster.cast(memoryview(source)[shift:], pair[0], memoryview(target)[shift:end], pair[1])
    assert target[end:] == bytes(4)
    return bytes(target[shift:end])


def narrow(caster: Caster, words: np.ndarray) -> np.ndarray:
    return np.frombuffer(run(caster, words, (FLOAT32, BFLOAT16)), np.uint16)


def of_torch(words: np.ndarray, source: DType, target: DType) -> bytes:
    kind = getattr(torch, source.name)
    tensor = torch.frombuffer(bytearray(words.tobytes()), dtype=kind)
    return tensor.to(getattr(torch, target.name)).view(torch.uint8).numpy().tobytes()


def test_rounding_by_hand(lean):
    words = np.array(list(ROUNDING), np.uint32)
    assert narrow(lean, words).tolist() == list(ROUNDING.values())


def assert_as_torch(caster: Caster, words: np.ndarray) -> None:
    """The same bits, but for NaN: which one torch writes depends on the machine."""
    want = np.frombuffer(of_torch(words, FLOAT32, BFLOAT16), np.uint16)
    is_nan = (want & 0x7FFF) > 0x7F80
    assert narrow(caster, words).tolist() == np.where(is_nan, 0xFFFF, want).tolist()


def test_every_nan_stays_one(lean):
    words = np.array(NANS, np.uint32)
    assert narrow(lean, words).tolist() == [0xFFFF] * len(NANS)
    assert_as_torch(lean, words)


@pytest.mark.parametrize("count", [1, 7, 8, 31, 65_535, 65_536, 65_537, 200_001])
def test_random_bits_become_what_torch_makes_of_them(lean, count):
    random = np.random.default_rng(count)
    words = random.integers(0, 1 << 32, count, np.uint32)
    special = np.array([*ROUNDING, *NANS], np.uint32)
    at = random.integers(0, count, count // 50 + 1)
    words[at] = random.choice(special, len(at))
    assert_as_torch(lean, words)


def test_a_nan_in_one_block_of_many(lean):
    words = np.full(3 * 65_536, 0x3F81_8000, np.uint32)
    words[70_000] = 0xFFC0_0001
    assert_as_torch(lean, words)


@pytest.mark.parametrize("exponent", range(0, 256, 5))
def test_all_upper_halves_of_some_exponents_at_every_kind_of_tie(lean, exponent):
    uppers = range((exponent << 7), (exponent + 1) << 7)
    lowers = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    pairs = itertools.product((0, 0x8000), uppers, lowers)
    words = np.array([(sign | upper) << 16 | lower for sign, upper, lower in pairs], np.uint32)
    assert_as_torch(lean, words)


@pytest.mark.parametrize("is_lean", [True, False])
def test_every_bfloat16_is_widened_exactly(lean, is_lean):
    halves = np.arange(1 << 16, dtype=np.uint16)
    got = run(lean if is_lean else Caster(0), halves, (BFLOAT16, FLOAT32))
    # The upper half of the bits; NaNs keep theirs.
    assert got == struct.pack("<65536I", *(half << 16 for half in range(1 << 16)))


@pytest.mark.parametrize("pair", [(FLOAT32, BFLOAT16), (BFLOAT16, FLOAT32)])
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_memory_that_is_not_aligned(lean, pair, shift):
    kind = np.uint32 if pair[0] == FLOAT32 else np.uint16
    words = np.random.default_rng(0).integers(0, 1 << 14, 70_001).astype(kind) << 1
    assert run(lean, words, pair, shift) == of_torch(words, *pair)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("float32", "float16"),
        ("float16", "float32"),
        ("float64", "float32"),
        ("float64", "bfloat16"),
        ("bfloat16", "float16"),
        ("float32", "bfloat16"),
        ("float8_e4m3fn", "float32"),
    ],
)
def test_every_other_pair_is_torchs(source, target):
    pair = BY_NAME[source], BY_NAME[target]
    random = np.random.default_rng(1)
    words = random.integers(0, 256, 4000 * pair[0].itemsize_bytes, np.uint8)
    words = words.view(f"V{pair[0].itemsize_bytes}")
    assert run(Caster(0), words, pair) == of_torch(words, *pair)


def test_no_elements(lean):
    assert narrow(lean, np.zeros(0, np.uint32)).tolist() == []
    lean.cast(memoryview(b""), FLOAT32, memoryview(bytearray()), FLOAT16)


def test_much_to_cast_is_worth_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    assert not Caster(cast._WORTH_TORCH_BYTES - 1)._use_torch
    assert Caster(cast._WORTH_TORCH_BYTES)._use_torch


@pytest.mark.parametrize(
    ("halves", "want"),
    [
        ([], False),
        ([0x7BFF, 0xFBFF, 0x0000], False),
        ([0x7C01, 0xFE00], False),  # NaN
        ([0x0000, 0x7C00], True),
        ([0xFC00], True),
    ],
)
def test_infinities_of_float16(halves, want):
    assert has_infinity(memoryview(np.array(halves, np.uint16).tobytes())) is want


def test_which_casts_overflow():
    assert overflows(FLOAT32, FLOAT16)
    assert overflows(BFLOAT16, FLOAT16)
    assert not overflows(FLOAT16, FLOAT16)
    assert not overflows(FLOAT32, BFLOAT16)
