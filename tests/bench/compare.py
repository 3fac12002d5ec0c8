"""Speed and memory, side by side: this tool, DeepSpeed's zero_to_fp32, and cp of the same bytes.

    python -m tests.bench.compare --stage 3 --shards 4 --layers 24 --runs 3 [--cold] [--dir DIR]

A synthetic GPT-like checkpoint with a tied head is written (moments as holes), then every
contender runs in turn, several times, interleaved. Each clock stops when the bytes are on disk
(sync included). Printed: median seconds, the ratio to cp, and the peak resident memory of the
largest process. zero_to_fp32 cannot write tied weights as safetensors, so it writes .bin, once as
it does by default and once as a single file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.synthetic import write_large

REPOSITORY = Path(__file__).resolve().parents[2]
ZERO_TO_FP32 = (
    "import sys; from deepspeed.utils import zero_to_fp32 as z; "
    "z.convert_zero_checkpoint_to_fp32_state_dict(*sys.argv[1:3], **eval(sys.argv[3]))"
)


def contenders(checkpoint: Path, ranks: Sequence[int]) -> dict[str, Callable[[Path], list[str]]]:
    """Name every contender, with the command it runs for an output folder."""
    found: dict[str, Callable[[Path], list[str]]] = {}
    single = [sys.executable, "-m", "dist_consolidate", str(checkpoint)]
    for extra in ((), ("--format", "bin"), ("--dtype", "bf16")):
        found[" ".join(("1 process", *extra))] = lambda out, e=extra: [*single, str(out), *e]
    for size in ranks:
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={size}"]
        command = [*launch, "-m", "dist_consolidate", str(checkpoint)]
        for transport in ("direct", "gather", "allgather"):
            name = f"{size} ranks {transport}"
            found[name] = lambda out, c=command, t=transport: [*c, str(out), "--transport", t]
    script = [sys.executable, "-c", ZERO_TO_FP32, str(checkpoint)]
    found["zero_to_fp32 .bin"] = lambda out: [*script, str(out), "{}"]
    found["zero_to_fp32 one .bin"] = lambda out: [*script, str(out), "{'max_shard_size': None}"]
    return found


def run(command: Sequence[str]) -> tuple[float, float]:
    """Run a command until its bytes are on disk; give seconds and peak resident megabytes."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    os.sync()
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}:\n{output.decode()}")
    return time.monotonic() - started, usage.ru_maxrss / 1e3


def forget_cache() -> None:
    """Drop the page cache (needs root), so that the next reads come from the disk."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def copy_command(reference: Path) -> Callable[[Path], list[str]]:
    """Make the command that copies the weight files of a result."""
    return lambda out: ["cp", "-r", "--reflink=never", str(reference), str(out)]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Write the checkpoint, then run every contender in turn, several times."""
    checkpoint, reference = folder / "checkpoint", folder / "reference"
    write_large(
        checkpoint, options.stage, options.shards, layers=options.layers, width=options.width
    )
    single = [sys.executable, "-m", "dist_consolidate", str(checkpoint), str(reference)]
    run([*single, "--format", "bin"])
    commands = contenders(checkpoint, options.ranks)
    commands["cp of the .bin result"] = copy_command(reference)
    commands["start-up alone (import torch)"] = lambda _out: [sys.executable, "-c", "import torch"]
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(options.runs):
        for name, command in commands.items():
            if options.cold:
                forget_cache()
            out = folder / "out"
            results[name].append(run(command(out)))
            shutil.rmtree(out, ignore_errors=True)
    return results


def main() -> None:
    """Parse the command line, measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2])
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each run")
    parser.add_argument("--dir", type=Path, default=Path("bench_run"))
    options = parser.parse_args()
    shutil.rmtree(options.dir, ignore_errors=True)
    results = measure(options, options.dir.resolve())
    shutil.rmtree(options.dir)
    base = statistics.median(seconds for seconds, _ in results["cp of the .bin result"])
    print("| contender | median s | of cp | peak MB |")
    print("| --- | --- | --- | --- |")
    for name, runs in results.items():
        seconds = statistics.median(s for s, _ in runs)
        peak = max(mb for _, mb in runs)
        print(f"| {name} | {seconds:.2f} | {seconds / base:.2f} | {peak:.0f} |")


if __name__ == "__main__":
    main()
