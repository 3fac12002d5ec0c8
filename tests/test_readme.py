"""What the README and the sample configurations name must exist, and nothing may be left out."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
PATH_IN_BLOCK = re.compile(r"\b(?:launch|configs|tests|\.ci)/[\w./-]+")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def run_python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


def options_in(text):
    return {name for name in re.findall(r"--[a-z][a-z0-9-]+", text) if name != "--help"}


def options_in_help():
    """Names that have a line of their own; the descriptions may speak of other options."""
    section = run_python("-m", "dist_consolidate", "--help").split("\noptions:\n")[1]
    return options_in("\n".join(re.findall(r"^  (-.*?)(?:  |$)", section, re.MULTILINE)))


def options_in_table():
    section = README.split("### Options")[1].split("\n### ")[0]
    names = re.findall(r"--[a-z][a-z0-9-]+", " ".join(re.findall(r"^\| ([^|]+)", section, re.M)))
    assert len(names) == len(set(names))
    return set(names)


def test_files_named_in_shell_blocks_exist():
    named = {path for block in blocks("bash") for path in PATH_IN_BLOCK.findall(block)}
    assert {"launch/quickstart.sh", "launch/test.sh"} <= named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_links_lead_to_files():
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_options_agree_with_help():
    assert options_in_table() == options_in_help()


def test_options_in_shell_blocks_exist():
    # torchrun's (--nproc_per_node), srun's and sbatch's, mpirun's, and a script's own.
    others = {"--nproc", "--nodes", "--ntasks-per-node", "--gpus-per-task", "--dependency"}
    others |= {"--hostfile", "--bind-to", "--rdzv", "--kill-on-bad-exit"}
    used = {name for block in blocks("bash") for name in options_in(block)} - others
    assert used <= options_in_table()


def test_python_blocks_compile_and_import_what_exists():
    trees = [ast.parse(block) for block in blocks("python")]
    names = {
        alias.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "dist_consolidate"
        for alias in node.names
    }
    assert names
    package = __import__("dist_consolidate")
    assert [name for name in sorted(names) if not hasattr(package, name)] == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_holds_valid_options(path):
    from dist_consolidate.config_file import load_config

    keys = tomllib.loads(path.read_text()).keys()
    assert keys
    # The rules themselves fit into a file only.
    named = {"--" + key.replace("_", "-") for key in keys - {"tensor_parallel"}}
    assert named <= options_in_table()
    assert load_config(path).keys() == keys


def test_every_config_is_described():
    described = (ROOT / "configs" / "README.md").read_text()
    assert [path.name for path in CONFIGS if path.name not in described] == []
