"""Running contenders: the checkpoint and reference results first, then round after round.

This process stays small: it imports no torch, and a child's memory is what the child says.
"""

from __future__ import annotations

import dataclasses
import filecmp
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench import page_cache, spare_memory
from tests.bench.contenders import PYTHON, Contender, Kind, Place
from tests.bench.self_proc import told

REPOSITORY = Path(__file__).resolve().parents[2]
# Set by a launcher around the benchmark; a new launch must not take them for its own.
_INHERITED = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
# Below this the files count as not warm, above the complement as not cold.
_WARM_RATIO = 0.99
_TAIL_CHARS = 4000
# Weights that are in memory during a run: the result in the page cache or on tmpfs, what
# zero_to_fp32 holds itself, and what a host takes back again while a process starts.
_TOUCHED_COPIES = 4
_PATIENCE_SEC = 30


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run of one contender.

    Attributes:
        contender: Its name.
        stage: ZeRO stage of the checkpoint.
        cache: ``warm`` or ``cold``.
        round: Number of the round.
        position: How many ran before it in its round.
        whole_sec: From the start of the process until every file is on disk.
        resident_ratio: How much of what it reads was in the page cache when it started;
            ``None`` if it reads nothing.
        other_cores: Processor time that others took meanwhile, write-back included, in cores.
        ranks: What its processes said, by rank.
    """

    contender: str
    stage: int
    cache: str
    round: int
    position: int
    whole_sec: float
    resident_ratio: float | None
    other_cores: float
    ranks: tuple[dict[str, Any], ...]

    @property
    def lead(self) -> dict[str, Any]:
        """What rank 0 said; empty for programs that say nothing."""
        return self.ranks[0] if self.ranks else {}


@dataclasses.dataclass(frozen=True)
class Arena:
    """How runs are done.

    Attributes:
        folder: Holds everything that is written.
        settle_sec: Pause between the sync before a run and the run.
        timeout_sec: A run that takes longer ends the benchmark.
        touches: Whether free memory is touched before each run.
    """

    folder: Path
    settle_sec: float
    timeout_sec: float
    touches: bool = True

    def make_checkpoint(self, stage: int, shards: int, layers: int, width: int) -> Place:
        """Write a checkpoint, in another process."""
        checkpoint = self.folder / "checkpoint"
        numbers = map(str, (stage, shards, layers, width))
        command = [*PYTHON, "tests.bench.make_checkpoint", str(checkpoint), *numbers]
        (facts,) = told(self._run(command)[0])
        return Place(
            checkpoint=checkpoint,
            tag_dir=Path(facts["tag_dir"]),
            reference=self.folder / "reference",
            out=self.folder / "out",
            fp32_bytes=facts["fp32_bytes"],
            kind_bytes={},
        )

    def make_references(
        self, place: Place, kinds: Sequence[Kind], extra: Sequence[str] = ()
    ) -> Place:
        """Make the result of each kind: what cp copies, and what all others are compared with."""
        sizes = {}
        for kind in kinds:
            out = place.reference_of(kind)
            command = [*PYTHON, "tests.bench.runner", str(place.checkpoint), str(out)]
            self._run([*command, *kind.options, *extra])
            sizes[kind] = sum(path.stat().st_size for path in _weight_files(out))
        return dataclasses.replace(place, kind_bytes=sizes)

    def run_round(
        self, place: Place, contenders: Sequence[Contender], *, stage: int, cache: str, number: int
    ) -> list[Measured]:
        """Run every contender once, in an order of the round's own."""
        order = list(contenders)
        # The same orders for everybody who runs the same command.
        random.Random(f"{stage} {cache} {number}").shuffle(order)
        return [
            self._measure(place, item, stage=stage, cache=cache, number=number, position=position)
            for position, item in enumerate(order)
        ]

    def run_growth(self, place: Place, contender: Contender, *, stage: int) -> Measured:
        """Run a contender once for its memory alone, and compare its bytes with the reference."""
        assert contender.growth is not None
        self._clear(place)
        output, whole_sec, other_cores = self._run_timed(contender.growth(place), place)
        self._check_output(place, contender, whole=True)
        shutil.rmtree(place.out, ignore_errors=True)
        ranks = tuple(told(output))
        return Measured(contender.name, stage, "any", 0, 0, whole_sec, None, other_cores, ranks)

    def _measure(
        self,
        place: Place,
        contender: Contender,
        *,
        stage: int,
        cache: str,
        number: int,
        position: int,
    ) -> Measured:
        self._clear(place)
        files = place.files_read(contender)
        page_cache.drop() if cache == "cold" else page_cache.warm(files)
        if self.touches:
            spare_memory.touch(_TOUCHED_COPIES * place.fp32_bytes)
        resident_ratio = page_cache.resident_ratio(files)
        output, whole_sec, other_cores = self._run_timed(contender.command(place), place)
        ranks = tuple(told(output))
        self._check_output(place, contender, whole=False)
        _check_discarded(contender, ranks)
        return Measured(
            contender.name,
            stage,
            cache,
            number,
            position,
            whole_sec,
            resident_ratio,
            other_cores,
            ranks,
        )

    def _clear(self, place: Place) -> None:
        """Remove the output of the run before, and let the machine come to rest."""
        shutil.rmtree(place.out, ignore_errors=True)
        os.sync()
        time.sleep(self.settle_sec)

    def _run_timed(self, command: Sequence[str], place: Place) -> tuple[str, float, float]:
        """Run a command until its bytes are on disk: its output, seconds, and others' cores."""
        others_before = _others_cpu_sec()
        output, started = self._run(command)
        _sync_tree(place.out)
        whole_sec = time.perf_counter() - started
        return output, whole_sec, max(_others_cpu_sec() - others_before, 0.0) / whole_sec

    def _run(self, command: Sequence[str]) -> tuple[str, float]:
        """Run a command; give its output and when it was started."""
        environment = {k: v for k, v in os.environ.items() if k not in _INHERITED}
        paths = (str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")]))
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with tempfile.TemporaryFile("w+", errors="replace") as file:
            started = time.perf_counter()
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT
            )
            try:
                code = process.wait(self.timeout_sec)
            except BaseException:
                _end(process)
                raise
            file.seek(0)
            output = file.read()
        if code:
            raise SystemExit(f"{' '.join(command)}\nended with {code}:\n{output[-_TAIL_CHARS:]}")
        return output, started

    def _check_output(self, place: Place, contender: Contender, *, whole: bool) -> None:
        """Fail if one of ours left other files than the reference, in names, sizes or bytes."""
        if contender.family != "ours" or contender.kind is None:
            return
        files = _weight_files(place.out)
        expected = _weight_files(place.reference_of(contender.kind))
        same = _names_and_sizes(files) == _names_and_sizes(expected)
        if whole and not contender.discards:
            pairs = zip(files, expected, strict=False)
            same = same and all(filecmp.cmp(a, b, shallow=False) for a, b in pairs)
        if not same:
            raise SystemExit(f"{contender.name}: the result differs from the reference")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command; torchrun ends its ranks when it is asked to end."""
    process.terminate()
    try:
        process.wait(_PATIENCE_SEC)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _weight_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)


def _names_and_sizes(files: Sequence[Path]) -> list[tuple[str, int]]:
    return [(path.name, path.stat().st_size) for path in files]


def _check_discarded(contender: Contender, ranks: Sequence[dict[str, Any]]) -> None:
    """Fail if bytes were written past the calls that discard them."""
    if not contender.discards:
        return
    dropped = sum(rank["discarded_bytes"] for rank in ranks)
    # Less than the tensor bytes where tied names share them.
    expected = 0.9 * ranks[0]["num_bytes"]
    if dropped < expected:
        raise SystemExit(
            f"{contender.name}: {dropped:,} bytes were discarded of {ranks[0]['num_bytes']:,}; "
            "the rest was written by calls that tests/bench/null_writer.py does not know"
        )


def _sync_tree(folder: Path) -> None:
    """Bring every file of a folder to the disk, and the folder; not what others have written."""
    if not folder.exists():
        return
    for path in (*sorted(folder.rglob("*")), folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _others_cpu_sec() -> float:
    """Give the processor time of the machine so far, without ours and our children's."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _wait, irq, softirq = map(int, fields[:7])
    busy_sec = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return busy_sec - sum(os.times()[:4])


def cache_notes(runs: Sequence[Measured]) -> list[str]:
    """Name the runs whose cache was not what it should have been."""
    notes = []
    for run in runs:
        ratio = run.resident_ratio
        if ratio is None:
            continue
        if run.cache == "warm" and ratio < _WARM_RATIO:
            notes.append(f"{run.contender}: only {ratio:.0%} of what it reads was in memory")
        if run.cache == "cold" and ratio > 1 - _WARM_RATIO:
            notes.append(f"{run.contender}: {ratio:.0%} of what it reads was still in memory")
    return sorted(set(notes))


def log(text: str) -> None:
    """Say how far the benchmark is, apart from the tables."""
    print(text, file=sys.stderr, flush=True)
