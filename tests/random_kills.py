"""kill -9 at any time, of any ranks, again and again: the next run goes on, to the same bytes."""

from __future__ import annotations

import dataclasses
import itertools
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from dist_consolidate import cli
from tests.fault_matrix import contents, end_all, hidden, put, resumed_bytes
from tests.faults import Fault
from tests.synthetic import Param, Spec, write
from tests.torchrun import Ended, Start, running_ranks, show

PARAMS = [Param(f"layer.{number}.weight", (100, 161)) for number in range(12)]
SPECS = {
    "z3": Spec(stage=3, world=3, params=PARAMS),
    "z2": Spec(stage=2, world=2, params=PARAMS),
    "z1": Spec(stage=1, world=2, params=PARAMS, round_robin=True),
}
RESULTS: dict[str, Sequence[str]] = {
    "safetensors": ["--max-shard-size", "200KB"],
    "one file": [],
    "bin": ["--format", "bin", "--max-shard-size", "200KB"],
    "bf16": ["--dtype", "bf16", "--max-shard-size", "100KB"],
    "optimizer": ["--include", "optimizer", "--max-shard-size", "400KB"],
}
# So slow that most kills come while bytes move; so patient that ranks which never meet end soon.
MAX_KILLS, BOUND_SEC, NAP_MSEC = 4, 60.0, 12
PATIENCE = ["--rendezvous-timeout", "10s"]
WRITING = 0.3


@dataclasses.dataclass(frozen=True)
class Survival:
    """What became of one run that was killed.

    Attributes:
        kind: Of checkpoint and result.
        states: What was there after each kill, as in :class:`tests.fault_matrix.Outcome`; ``done``
            where the run was faster than the kill.
        num_resumed_bytes: What the last run has taken over.
    """

    kind: str
    states: tuple[str, ...]
    num_resumed_bytes: float


class Kills:
    """Checkpoints, what has to come out of them, and how long that takes."""

    def __init__(self, folder: Path, start: Start, kinds: Sequence[tuple[str, str]] = ()) -> None:
        """Make the checkpoints and unbroken results.

        Args:
            folder: For all of it.
            start: How ranks are started.
            kinds: Pairs of a checkpoint and a result; by default all.
        """
        self.kinds = kinds or tuple(itertools.product(SPECS, RESULTS))
        self.start = start
        self.ckpts = {
            name: write(folder / name, SPECS[name]).tag_dir.parent
            for name in sorted({name for name, _ in self.kinds})
        }
        self.wants = {}
        for name, result in self.kinds:
            out = folder / f"{name}-{result}"
            arguments = [self.ckpts[name], out, *RESULTS[result]]
            assert cli.main([str(argument) for argument in arguments]) == 0
            self.wants[name, result] = contents(out)
        # How long the last unbroken run took until it wrote, and from then on.
        self.planning_sec, self.moving_sec = 0.5, 0.5
        name, result = self.kinds[0]
        arguments = [self.ckpts[name], *RESULTS[result], "--resume"]
        ended = self._run(2, folder / "timed" / "out", arguments, None)
        assert ended[0].returncode == 0, show(ended)

    def _run(
        self,
        num_ranks: int,
        out: Path,
        arguments: Sequence[str | Path],
        kill: tuple[float, Sequence[int]] | None,
    ) -> list[Ended]:
        """Run; after a time kill some ranks, and see that all others end.

        Args:
            num_ranks: Ranks.
            out: The output folder.
            arguments: What else there is to say, the checkpoint first.
            kill: When, as a part of the whole (up to ``WRITING`` it has not begun to write), and
                which ranks.
        """
        arguments, before = [arguments[0], out, *arguments[1:]], _homes(out)
        with running_ranks(
            num_ranks,
            arguments,
            module="tests.faults",
            env=Fault("slow", count=NAP_MSEC).to_env(),
            start=self.start,
        ) as ranks:
            began = time.monotonic()
            deadline = began + BOUND_SEC
            if kill is None or kill[0] > WRITING:
                while _homes(out) <= before and not ranks[0].has_ended():
                    assert time.monotonic() < deadline, "nothing is written"
                    time.sleep(0.005)
                begun = time.monotonic()
            if kill is not None:
                when, victims = kill
                sec, part = self.planning_sec, when / WRITING
                if when > WRITING:
                    sec, part = self.moving_sec, (when - WRITING) / (1 - WRITING)
                time.sleep(sec * part)
                for victim in victims:
                    ranks[victim].send_signal(signal.SIGKILL)
            done = [rank.ends_before(deadline) for rank in ranks]
            if kill is None:
                self.planning_sec = begun - began
                # Runs that go on are shorter than others; the machine is not always as busy.
                self.moving_sec = max(0.8 * self.moving_sec, time.monotonic() - begun)
            ended = end_all(ranks)
        assert all(done), f"took too long: {show(ended)}"
        assert "Traceback" not in show(ended), show(ended)
        return ended

    def survive(self, seed: int, folder: Path) -> Survival:
        """Kill a run, and those that go on from it; then let one come through.

        Args:
            seed: Of all choices.
            folder: Holds nothing yet.
        """
        choose = random.Random(seed)
        name, result = self.kinds[seed % len(self.kinds)]
        want, place = self.wants[name, result], folder / "place"
        place.mkdir(parents=True)
        is_old = choose.random() < 0.4
        old = {"model.safetensors": b"old", "consolidation.json": b"old", "config.json": b"mine"}
        if is_old:
            put(place / "out", old)
        states = []
        for _ in range(choose.randint(1, MAX_KILLS)):
            num_ranks = choose.choice([1, 2, 2, 3])
            victims = choose.sample(range(num_ranks), choose.choice([1, num_ranks]))
            arguments = self._arguments(choose, name, result, is_old=is_old)
            kill = (choose.uniform(0.1, 1.05), victims)
            ended = self._run(num_ranks, place / "out", arguments, kill)
            is_killed = any(rank.returncode == -signal.SIGKILL for rank in ended)
            state = _state(place / "out", want, old if is_old else {}, ended)
            states.append(state if is_killed else "done")
            if state == "new":
                break
        num_ranks = choose.choice([1, 2])
        arguments = self._arguments(choose, name, result, is_old=is_old)
        ended = self._run(num_ranks, place / "out", arguments, None)
        codes = {rank.returncode for rank in ended}
        if states[-1] in ("new", "done") and not is_old and codes == {2}:
            assert "holds weight files already" in show(ended), show(ended)
        else:
            assert codes == {0}, show(ended)
        expected = {**want, "config.json": b"mine"} if is_old else want
        found = contents(place / "out")
        assert found == expected, f"{sorted(found)}, not {sorted(expected)}\n{show(ended)}"
        assert hidden(place) == [], f"{hidden(place)}\n{show(ended)}"
        return Survival(f"{name} {result}", tuple(states), resumed_bytes(ended))

    def _arguments(
        self, choose: random.Random, name: str, result: str, *, is_old: bool
    ) -> list[str | Path]:
        found: list[str | Path] = [self.ckpts[name], *RESULTS[result], *PATIENCE, "--resume"]
        found += ["--transport", choose.choice(["direct", "allgather", "gather"])]
        found += ["--writers", choose.choice(["1", "all"])]
        found += ["--bucket-size", choose.choice(["15KB", "25KB", "100KB"])]
        return found + ["--overwrite"] * is_old


def _homes(out: Path) -> set[Path]:
    """Give the work folders; one that a run takes over gets a new name."""
    homes = itertools.chain(out.parent.glob(".*consolidating-*"), out.glob(".*consolidating-*"))
    return {home for home in homes if home.is_dir()}


def _state(out: Path, want: dict[str, bytes], old: dict[str, bytes], ended: Sequence[Ended]) -> str:
    """Tell what is there; fail if a loader could take it for more than it is."""
    found = contents(out)
    if old:
        assert found.pop("config.json", None) == b"mine", show(ended)
    if found == want:
        return "new"
    if found == {key: value for key, value in old.items() if key != "config.json"}:
        return "old" if old else "none"
    assert old, f"{sorted(found)}\n{show(ended)}"
    # Half renamed: neither an index, nor a manifest, nor a file that is a whole model by itself.
    entries = [n for n in found if n.endswith(".json") or "-of-" not in n]
    assert not entries, f"{sorted(found)}\n{show(ended)}"
    return "cut off"
