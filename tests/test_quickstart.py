"""The quick start's own steps, through this interpreter instead of a fresh environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
ENVIRONMENT = os.environ | {
    "DS_ACCELERATOR": "cpu",
    "DS_BUILD_OPS": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}

pytestmark = [pytest.mark.deepspeed, pytest.mark.dist, pytest.mark.slow]


def run(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def succeed(*arguments):
    outcome = run(*arguments)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("quickstart")
    succeed(*TORCHRUN, LAUNCH / "quickstart_train.py", folder)
    return folder


def test_the_live_engine_is_reproduced(run_dir):
    output = run_dir / "consolidated"
    succeed(*TORCHRUN, "-m", "dist_consolidate", run_dir / "checkpoint", output)
    shown = succeed(LAUNCH / "quickstart_show.py", output, run_dir / "live_masters.pt")
    assert "lm_head.weight (211, 48) is there" in shown


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda weights: weights.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda weights: weights["lm_head.weight"].neg_(), "lm_head.weight differs from"),
        (lambda weights: weights["transformer.ln_f.bias"].add_(1e-3), "ln_f.bias differs from"),
    ],
)
def test_a_wrong_result_is_shown_as_wrong(run_dir, tmp_path, change, complaint):
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    weights = torch.load(run_dir / "live_masters.pt", weights_only=True)
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    outcome = run(LAUNCH / "quickstart_show.py", tmp_path, run_dir / "live_masters.pt")
    assert outcome.returncode == 1
    assert complaint in outcome.stderr
