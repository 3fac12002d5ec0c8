"""Every option's check and message, and the TOML form."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dist_consolidate.config_file import load_config
from dist_consolidate.errors import UsageError
from dist_consolidate.options import CHOICES, Options, make_options
from dist_consolidate.units import Amount


def refusal(**values: object) -> str:
    """The message of the refusal of these options, which is one line."""
    with pytest.raises(UsageError) as caught:
        make_options(values)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults():
    options = make_options({})
    assert options == Options()
    assert dataclasses.asdict(options) == {
        "tag": None,
        "format": "safetensors",
        "dtype": "fp32",
        "max_shard_size": "5GB",
        "ties": None,
        "tie": (),
        "allow_missing": (),
        "exclude_frozen": False,
        "trust_masters": False,
        "strip_prefix": (),
        "rename": (),
        "search_dir": (),
        "include": (),
        "pipeline_names": "module",
        "tp_rules": None,
        "tensor_parallel": None,
        "hf_config": None,
        "allow_16bit": False,
        "check_crc": "auto",
        "salvage": False,
        "transport": "auto",
        "writers": None,
        "output_node": None,
        "bucket_size": "auto",
        "device_memory": "auto",
        "host_memory": "auto",
        "device": "auto",
        "io": "auto",
        "launcher": "auto",
        "rendezvous_timeout": "5min",
        "timeout": "30min",
        "digest": "xxh3",
        "sha256": False,
        "verify": False,
        "overwrite": False,
        "resume": False,
        "dry_run": False,
    }
    assert (options.tie_policy, options.max_shard_bytes) == ("copy", 5_000_000_000)
    assert (options.bucket_bytes, options.num_writers(4), options.tie_pairs) == (None, None, ())


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name):
    for choice in CHOICES[name]:
        more = {"format": "bin"} if choice == "alias" else {}
        assert getattr(make_options({name: choice, **more}), name) == choice
    choices = ", ".join(CHOICES[name])
    flag = "--" + name.replace("_", "-")
    assert refusal(**{name: "gguf"}) == f"{flag} gguf: must be one of {choices}"
    assert refusal(**{name: 3}) == f"{flag} 3: must be one of {choices}"


@pytest.mark.parametrize("name", ["format", "dtype", "transport", "device", "io", "launcher"])
def test_choices_that_cannot_be_left_open(name):
    assert refusal(**{name: None}).startswith(f"--{name} None: must be one of ")


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", [["bin"], {"a": 1}])
def test_choices_of_a_wrong_type(name, value):
    assert refusal(**{name: value}).startswith(f"--{name.replace('_', '-')} ")


@pytest.mark.parametrize("name", ["exclude_frozen", "trust_masters", "overwrite"])
def test_switches(name):
    assert getattr(make_options({name: True}), name) is True
    flag = "--" + name.replace("_", "-")
    for value in ("true", 1, None, "no"):
        assert refusal(**{name: value}) == f"{flag} {value!r}: must be true or false"


@pytest.mark.parametrize(
    ("format", "ties", "policy"),
    [
        ("safetensors", None, "copy"),
        ("safetensors", "copy", "copy"),
        ("safetensors", "drop", "drop"),
        ("bin", None, "alias"),
        ("bin", "copy", "copy"),
        ("bin", "drop", "drop"),
        ("bin", "alias", "alias"),
    ],
)
def test_tie_policies(format, ties, policy):
    assert make_options({"format": format, "ties": ties}).tie_policy == policy


def test_safetensors_cannot_share_bytes():
    assert refusal(ties="alias") == (
        "--ties alias: tensors in a safetensors file cannot share bytes; use copy or drop, "
        "or --format bin"
    )


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("none", None), ("None", None), (None, None), ("7KB", 7000), (1, 1), ("1GiB", 1 << 30)],
)
def test_max_shard_size(size, num_bytes):
    assert make_options({"max_shard_size": size}).max_shard_bytes == num_bytes


@pytest.mark.parametrize(("size", "num_bytes"), [("auto", None), ("1MB", 10**6), (16, 16)])
def test_bucket_size(size, num_bytes):
    assert make_options({"bucket_size": size}).bucket_bytes == num_bytes


@pytest.mark.parametrize("name", ["max_shard_size", "bucket_size"])
@pytest.mark.parametrize("size", ["big", "", "-1GB", "5 XB", True, [5]])
def test_sizes_that_are_none(name, size):
    flag = "--" + name.replace("_", "-")
    assert refusal(**{name: size}) == (
        f"{flag}: {size!r} is not a size; write it like 5GB, 512MB or 64MiB"
    )


@pytest.mark.parametrize("name", ["max_shard_size", "bucket_size"])
@pytest.mark.parametrize("size", [0, "0GB"])
def test_sizes_of_nothing(name, size):
    assert refusal(**{name: size}).endswith(f": {size!r} is below one byte")


@pytest.mark.parametrize("name", ["device_memory", "host_memory"])
def test_amounts_of_memory(name):
    flag = "--" + name.replace("_", "-")
    for value in ("lots", "", "-5%", "5%%", True, None, "%"):
        text = f"{flag}: {value!r} is neither a size like 5GB nor a part like 40%"
        assert refusal(**{name: value}) == text
    for value in ("0%", "101%", "1000%", "0.0%"):
        assert refusal(**{name: value}) == f"{flag}: {value!r} must be above 0% and at most 100%"
    assert refusal(**{name: 0}) == f"{flag}: 0 is below one byte"


def test_a_bucket_is_of_some_size():
    assert refusal(bucket_size="none").startswith("--bucket-size: 'none' is not a size")


@pytest.mark.parametrize(
    ("writers", "size", "number"),
    [(None, 4, None), ("all", 4, 4), (1, 4, 1), ("3", 4, 3), (9, 4, 4), ("9", 1, 1)],
)
def test_writers(writers, size, number):
    assert make_options({"writers": writers}).num_writers(size) == number


@pytest.mark.parametrize("writers", [0, "0", -1, "-1", "some", "", 1.5, "1.5", True, "\u00b2"])
def test_writers_that_are_none(writers):
    message = f"--writers {writers}: must be a number of ranks, at least 1, or all"
    assert refusal(writers=writers) == message


def test_ties_as_pairs():
    options = make_options({"tie": ["a.b=c", " d = e ", "f=g=h"]})
    assert options.tie_pairs == (("a.b", "c"), ("d", "e"), ("f", "g=h"))
    assert make_options({"tie": "a=b"}).tie_pairs == (("a", "b"),)


@pytest.mark.parametrize("tie", ["", "a", "=", "a=", "=b", " =b", "a= "])
def test_ties_that_are_no_pairs(tie):
    assert refusal(tie=[tie]) == f"--tie {tie}: must be NAME=SOURCE"


def test_one_name_tied_twice():
    assert "a" in refusal(tie=["a=b", "a=c"])
    assert make_options({"tie": ["a=b", "a=b"]}).tie_pairs[0] == ("a", "b")


@pytest.mark.parametrize("name", ["tie", "allow_missing"])
@pytest.mark.parametrize("value", [3, True, None])
def test_lists_of_a_wrong_type(name, value):
    flag = "--" + name.replace("_", "-")
    assert refusal(**{name: value}).startswith(flag)


@pytest.mark.parametrize("value", [[3], [None], [["a"]]])
def test_lists_of_wrong_items(value):
    assert refusal(allow_missing=value).startswith("--allow-missing")


@pytest.mark.parametrize("value", [3, True, ["a"]])
def test_tags_of_a_wrong_type(value):
    assert refusal(tag=value).startswith("--tag")


def test_globs():
    assert make_options({"allow_missing": "head.*"}).allow_missing == ("head.*",)
    assert make_options({"allow_missing": ["a", "b"]}).allow_missing == ("a", "b")


def test_unknown_options():
    message = refusal(zeal=1, form="bin")
    assert message.startswith(
        "unknown option form (did you mean format?), zeal; known are allow_16bit, allow_missing, "
    )


# The TOML form.


def config(folder: Path, text: str | bytes) -> Path:
    path = folder / "options.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_file_with_every_option(tmp_path):
    text = """
tag = "global_step7"
format = "bin"
dtype = "keep"
max-shard-size = "1GB"
ties = "alias"
tie = ["head=emb", "a=b"]
allow-missing = ["x.*"]
exclude_frozen = true
trust_masters = true
strip-prefix = ["module."]
rename = ["a=b"]
search-dir = ["x/y"]
include = ["optimizer"]
pipeline-names = "layer"
tp_rules = "rules.toml"
hf_config = "model"
allow_16bit = true
check_crc = "always"
salvage = true
transport = "direct"
writers = 2
output_node = "node-b"
bucket_size = 1000000
device-memory = "40%"
host_memory = "2GB"
device = "cpu"
io = "buffered"
launcher = "mpi"
rendezvous_timeout = "90s"
timeout = "5min"
digest = "none"
sha256 = true
verify = true
overwrite = true
resume = true
dry_run = true
"""
    values = load_config(config(tmp_path, text))
    # In place of tp_rules there may be the rules themselves.
    others = {field.name for field in dataclasses.fields(Options)} - {"tensor_parallel"}
    assert set(values) == others
    options = make_options(values)
    assert (options.tag, options.format, options.dtype) == ("global_step7", "bin", "keep")
    assert (options.max_shard_bytes, options.bucket_bytes) == (10**9, 10**6)
    assert (options.device_amount, options.host_amount) == (
        Amount("40%", None, 0.4),
        Amount("2GB", 2 * 10**9),
    )
    assert options.tie_pairs == (("head", "emb"), ("a", "b"))
    assert options.allow_missing == ("x.*",)
    assert (options.exclude_frozen, options.overwrite, options.dry_run) == (True, True, True)
    assert options.trust_masters and options.allow_16bit and options.salvage
    assert options.check_crc == "always"
    assert (options.tp_rules, options.hf_config) == (
        str(tmp_path / "rules.toml"),
        str(tmp_path / "model"),
    )
    assert options.io == "buffered"
    assert (options.launcher, options.rendezvous_timeout_sec) == ("mpi", 90)
    assert (options.transport, options.num_writers(8), options.device) == ("direct", 2, "cpu")


def test_an_empty_file(tmp_path):
    assert load_config(config(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("formt = 'bin'", "unknown option formt (did you mean format?); known are"),
        ("[consolidate]\nformat = 'bin'", "unknown option consolidate"),
        ("format = 3", "--format 3: must be one of"),
        ("format = ['bin']", "--format ['bin']: must be one of"),
        ("overwrite = 'yes'", "--overwrite 'yes': must be true or false"),
        ("max_shard_size = true", "--max-shard-size: True is not a size"),
        ("bucket-size = 'big'", "--bucket-size: 'big' is not a size"),
        ("tie = ['a']", "--tie a: must be NAME=SOURCE"),
        ("tie = 3", "--tie"),
        ("allow_missing = 3", "--allow-missing"),
        ("tag = 3", "--tag"),
        ("writers = 0", "--writers 0: must be a number of ranks"),
        ("format = ", "Invalid value"),
        ("not toml", "Expected '='"),
        (b"tag = '\xff'", "codec can't decode"),
    ],
)
def test_files_that_are_refused(tmp_path, text, words):
    path = config(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"--config {path}: ")
    assert words in str(caught.value)


def test_one_option_given_in_both_spellings(tmp_path):
    path = config(tmp_path, "max-shard-size = '1GB'\nmax_shard_size = '2GB'\n")
    with pytest.raises(UsageError, match=r"max.shard.size"):
        load_config(path)


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "gone.toml", tmp_path):
        with pytest.raises(UsageError) as caught:
            load_config(path)
        assert str(caught.value).startswith(f"--config {path}: ")
