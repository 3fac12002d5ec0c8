"""Pickles are looked through before they are carried out: honest ones mean what they meant."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.checkpoint.opcodes import CutShortError, PickleError, secured
from dist_consolidate.checkpoint.unpickle import loads
from tests.hostile.pickles import text

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**900), 2**900)
    | st.floats(allow_nan=False)
    | st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
    | st.binary(max_size=8)
)
KEYS = st.recursive(
    LEAVES, lambda inner: st.tuples(inner, inner) | st.frozensets(inner), max_leaves=4
)
VALUES = st.recursive(
    LEAVES | st.sets(KEYS, max_size=3) | st.frozensets(KEYS, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.tuples(inner)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL))
@settings(max_examples=150, deadline=None)
def test_plain_values(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert loads(data) == value
    assert secured(data + b"more")[1] == len(data)


@given(VALUES, st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_shared_stays_shared(value: Any, data: st.DataObject) -> None:
    protocol = data.draw(st.integers(0, pickle.HIGHEST_PROTOCOL))
    holder = {"a": [value], "b": 7}
    found = loads(pickle.dumps([holder, holder, {"c": holder}], protocol))
    assert found[0] is found[1] is found[2]["c"]
    assert found[0] == holder


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 70_000])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_large_dictionaries(count: int, protocol: int) -> None:
    """They are pickled in batches; so many memo indices take more than two bytes."""
    if count > 2000 and protocol != 2:
        return
    value = {f"key{index}": f"value{index}" for index in range(count)}
    assert loads(pickle.dumps(value, protocol)) == value


def test_every_cut_is_told_from_damage() -> None:
    data = pickle.dumps({"a": [1.5, 2**70, (b"x", {3})], "b": "text" * 90}, 4)
    for length in range(len(data)):
        with pytest.raises(CutShortError):
            secured(data[:length])


@pytest.mark.parametrize(
    "data",
    [
        b"Nr" + struct.pack("<I", 1 << 20) + b".",
        b"Np99999\n.",
        b"Np-1\n.",
        b"\x8b" + struct.pack("<i", -1) + b".",
        b"\x8b" + struct.pack("<I", 256) + b"x" * 256 + b".",
        b"I" + b"1" * 1001 + b"\n.",
        b"c" + b"a" * 1001 + b"\nb\n.",
        b"\x82\x01........",
        b"(ios\nsystem\n........",
        b"Pid\n........",
        b"\x97........",
        b"(" + b"]" * 2_000_001 + b"l.",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_refused(data: bytes) -> None:
    with pytest.raises(PickleError) as caught:
        secured(data)
    assert not isinstance(caught.value, CutShortError)


def test_many_objects_are_no_matter_of_the_bytes_in_texts() -> None:
    data = b"\x80\x02" + text("]}R" * 1_000_000) + b"."
    assert loads(data) == "]}R" * 1_000_000


def test_keys_that_could_collide_are_kept_up_to_a_number() -> None:
    found = loads(pickle.dumps({(index, 2): index for index in range(10_000)}, 2))
    assert found[0, 2] == 0
    assert 1000 < len(found) < 10_000
    plain = {index: index for index in range(10_000)}
    assert loads(pickle.dumps(plain, 2)) == plain
