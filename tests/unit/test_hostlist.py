"""SLURM's short forms, as scontrol writes them out."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.runtime.hostlist import expand_counts, expand_hosts
from tests.requirements import require

HOSTS = {
    "a": ["a"],
    "a1": ["a1"],
    "a[1-3,5],b7": ["a1", "a2", "a3", "a5", "b7"],
    "rack[0-1]n[08-10]": ["rack0n08", "rack0n09", "rack0n10", "rack1n08", "rack1n09", "rack1n10"],
    "gpu-a[001,3-4],x-y.site": ["gpu-a001", "gpu-a3", "gpu-a4", "x-y.site"],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[09-11]": ["n09", "n10", "n11"],
    "n[099-101],m[1-2]": ["n099", "n100", "n101", "m1", "m2"],
    "a[1-2][3-4]": ["a13", "a14", "a23", "a24"],
    "a1-3": ["a1-3"],
    "b,a": ["b", "a"],
}


@pytest.mark.parametrize("text", HOSTS)
def test_hosts(text: str) -> None:
    assert expand_hosts(text) == HOSTS[text]


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a,,b", "a[", "a[1-2", "a]", "a[]", "a[x]", "a[3-1]", "a[1-]", "a b"]
)
def test_malformed_hosts(text: str) -> None:
    with pytest.raises(ValueError):
        expand_hosts(text)


def test_a_typing_error_does_not_fill_the_memory() -> None:
    for text in ("a[0-999999999999]", "a[0-99999]b[0-99999]"):
        with pytest.raises(ValueError):
            expand_hosts(text)
    with pytest.raises(ValueError, match="more than"):
        expand_counts("1(x999999999)")


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1(x2)", [1, 1]), ("3,1", [3, 1])],
)
def test_counts(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "a", "2(x", "2(3)", "2x3", "1,,2", "-1", "2(x3)1"])
def test_malformed_counts(text: str) -> None:
    with pytest.raises(ValueError):
        expand_counts(text)


@st.composite
def brackets(draw: st.DrawFn) -> str:
    """A list of numbers and ranges, some with leading zeros."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        first, more = draw(st.integers(0, 120)), draw(st.integers(0, 12))
        width = draw(st.integers(1, 4))
        text = f"{first:0{width}}"
        parts.append(f"{text}-{first + more:0{width}}" if more else text)
    return f"[{','.join(parts)}]"


NAMES = st.sampled_from(["a", "node", "gpu-b", "r0c"])
# scontrol takes no name behind the last bracket.
PARTS = st.lists(st.builds("{}{}".format, NAMES, brackets()), min_size=1, max_size=2)
LISTS = st.lists(st.one_of(NAMES, PARTS.map("".join)), min_size=1, max_size=4).map(",".join)


@settings(max_examples=40, deadline=None)
@given(LISTS)
def test_hosts_as_scontrol_writes_them_out(tmp_path_factory: pytest.TempPathFactory, text: str):
    scontrol = shutil.which("scontrol")
    require("slurm", scontrol is not None, "scontrol not found (Debian: slurm-client)")
    conf = tmp_path_factory.getbasetemp() / "slurm.conf"
    write_configuration(conf)
    written = subprocess.run(
        [str(scontrol), "show", "hostnames", text],
        env={**os.environ, "SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert expand_hosts(text) == written.stdout.split(), written.stderr


def write_configuration(conf: Path) -> None:
    """scontrol wants one, though it asks nobody."""
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=a\n")
