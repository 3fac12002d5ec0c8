"""Kill runs at random, let them go on, and compare exactly: the long form of ``tests.test_resume``.

    python -m tests.long.resume_kills [RUNS] [SEED]

Of the runs (200 by default), every eighth has two ranks, all transports in turn; the others have
one. Each may be killed several times before it comes through.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from pathlib import Path

from dist_consolidate import consolidate
from dist_consolidate.runtime import journal
from tests.synthetic import Spec, write
from tests.test_resume import (
    BUFFERS,
    PARAMS,
    SHAPES,
    bytes_of,
    ckpt_of,
    flags,
    kill_a_rank,
    left_by,
    random_run,
)
from tests.torchrun import start_ranks

TRANSPORTS = ("allgather", "gather", "direct")


def two_ranks(choose: random.Random, ckpt: Path, folder: Path, number: int) -> str:
    """Kill one of two ranks, once or twice; the end may be one rank or two."""
    out, shape = folder / "out", choose.choice(sorted(SHAPES))
    consolidate(ckpt, folder / "whole", **SHAPES[shape])
    said = [f"two ranks, {shape}"]
    for turn in range(choose.choice((1, 2))):
        transport, killed = TRANSPORTS[(number + turn) % 3], choose.randrange(2)
        codes = kill_a_rank(ckpt, out, shape, transport, killed, choose.randrange(110))
        said.append(f"{transport}, rank {killed} killed: {codes}")
        assert bytes_of(out) in ({}, bytes_of(folder / "whole")), said
        if out.exists():
            break
    if not out.exists() and choose.random() < 0.5:
        arguments = [ckpt, out, "--transport", TRANSPORTS[(number + 2) % 3], "--resume"]
        ended = start_ranks(2, [*arguments, *flags(shape)])
        assert [rank.returncode for rank in ended] == [0, 0], (said, ended)
    elif not out.exists():
        consolidate(ckpt, out, resume=True, **SHAPES[shape])
    assert bytes_of(out) == bytes_of(folder / "whole"), said
    consolidate(ckpt, out, overwrite=True, **SHAPES[shape])
    assert not left_by(out), said
    shutil.rmtree(folder)
    return "; ".join(said)


def main(arguments: list[str]) -> int:
    """Do as many runs as asked for."""
    runs, seed = map(int, (arguments + ["200", "0"][len(arguments) :])[:2])
    journal._CLAIM_BYTES, journal._CLAIM_SEC, journal._PAUSE_SEC = 1, 0.01, 0.0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        truths = {
            stage: write(
                root / f"z{stage}", Spec(stage=stage, world=3, params=PARAMS, buffers=BUFFERS)
            )
            for stage in (2, 3)
        }
        for number in range(runs):
            choose = random.Random(f"{seed} {number}")
            if number % 8 == 7:
                ckpt = ckpt_of(truths[choose.choice((2, 3))])
                said = two_ranks(choose, ckpt, root / f"run{number}", number // 8)
            else:
                said = random_run(choose, truths, root / f"run{number}")
            sys.stdout.write(f"{number + 1}: {said}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{runs} runs (seed {seed}): every result was the same, byte for byte\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
