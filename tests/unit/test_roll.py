"""The roll call: what the ranks say becomes one reason to end."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable

import pytest

from dist_consolidate.errors import UsageError
from dist_consolidate.runtime.control import describe
from dist_consolidate.runtime.hub import Hub, Line
from dist_consolidate.runtime.roll import KILLED, Roll, named_ranks
from dist_consolidate.runtime.watch import Stopped, Watch
from tests.children import end_of, start_child

HOSTS = ["a", "a", "b", "b"]


def verdict(roll: Roll) -> tuple[str, int] | None:
    roll.tick(0.3)
    return None if roll.verdict is None else (roll.verdict.text, roll.verdict.code)


def test_nothing_happens():
    roll = Roll(HOSTS, 10)
    roll.left(1)
    roll.closed(1)
    assert verdict(roll) is None
    for _ in range(100):
        roll.tick(1)
        for rank in (0, 2, 3):
            roll.heard(rank, "")
    assert verdict(roll) is None


def test_a_node_that_dies_is_told_in_one_line():
    roll = Roll(HOSTS, 10)
    roll.closed(3)
    roll.tick(0.1)
    roll.closed(2)
    assert verdict(roll) == (f"ranks 2, 3 (on b): {KILLED}", 1)


def test_silence():
    roll = Roll(HOSTS, 10)
    roll.heard(2, "reading x")
    for _ in range(11):
        roll.tick(1)
        for rank in (0, 1, 3):
            roll.heard(rank, "")
    text, code = verdict(roll)
    assert text.startswith("rank 2 (on b): not heard of for 10 s (--timeout): it is stopped")
    assert text.endswith("; it was reading x")
    assert code == 1


def test_the_first_reason_counts():
    roll = Roll(HOSTS, 10)
    roll.failed(1, "failed", "no space", 4)
    roll.failed(2, "stopped", "stopped by SIGTERM", 143)
    roll.closed(1)
    assert verdict(roll) == ("rank 1 (on a): no space", 4)
    roll.failed(3, "failed", "late", 1)
    assert verdict(roll) == ("rank 1 (on a): no space", 4)


@pytest.mark.parametrize(
    ("ranks", "hosts", "words"),
    [
        ([0], [], "rank 0"),
        ([0, 1], HOSTS, "ranks 0, 1 (on a)"),
        ([1, 3], HOSTS, "ranks 1 (on a) and 3 (on b)"),
    ],
)
def test_names(ranks, hosts, words):
    assert named_ranks(ranks, hosts) == words


def connect(hub: Hub, hello: dict[str, object]) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", hub.port), timeout=10)
    connection.sendall(json.dumps(hello).encode() + b"\n")
    return connection


@pytest.mark.parametrize(
    "hello",
    [{"rank": 1}, {"rank": 1, "token": "x"}, {"token": 0}, {"rank": 9, "token": None}],
)
def test_a_stranger_is_sent_away(hello):
    hub = Hub(HOSTS, 10, 0.2)
    try:
        hello = {**hello, "token": hub.token} if hello.get("token", 0) is None else hello
        with connect(hub, hello) as stranger:
            assert stranger.recv(100) == b""
        # It is not missed, and the hub still listens.
        with connect(hub, {"rank": 1, "token": hub.token}) as rank:
            assert json.loads(rank.recv(100)) == {"welcome": True}
            rank.sendall(b"no json\n[3]\n" + json.dumps({"doing": "x"}).encode() + b"\n")
            assert json.loads(rank.recv(100)) == {"alive": True}
    finally:
        hub.stop()


def test_all_hear_the_verdict():
    hub = Hub(HOSTS[:2], 10, 0.2)
    try:
        lines = []
        for rank in range(2):
            connection = connect(hub, {"rank": rank, "token": hub.token})
            assert json.loads(connection.recv(100)) == {"welcome": True}
            lines.append(connection)
        lines[1].close()
        heard = json.loads(lines[0].recv(1000))
        assert heard == {"verdict": f"rank 1 (on a): {KILLED}", "code": 1}
        lines[0].close()
    finally:
        hub.stop()


def test_a_hub_that_stops_tells_what_it_has_just_heard():
    """Or else a rank that waits for one that is gone would never hear which one that is."""
    hub = Hub(HOSTS[:3], 60, 0.2)
    lines = [connect(hub, {"rank": rank, "token": hub.token}) for rank in range(3)]
    for line in lines:
        assert json.loads(line.recv(100)) == {"welcome": True}
    lines[1].close()
    while not hub._roll.is_settling and hub._roll.verdict is None:
        time.sleep(0.001)
    hub.stop()
    heard = [json.loads(text) for text in lines[2].makefile()]
    assert heard == [{"verdict": f"rank 1 (on a): {KILLED}", "code": 1}, {"end": True}]
    for line in lines:
        line.close()


def test_a_hub_that_slept_hears_why_the_others_are_gone():
    hub = Hub(HOSTS[:2], 60, 0.2)
    try:
        lines = [connect(hub, {"rank": rank, "token": hub.token}) for rank in range(2)]
        for line in lines:
            assert json.loads(line.recv(100)) == {"welcome": True}
        lines[1].sendall(json.dumps({"deserts": "rank 0 (on a): not heard of"}).encode() + b"\n")
        lines[1].close()
        heard = json.loads(lines[0].recv(1000))
        assert heard == {"verdict": "rank 0 (on a): not heard of", "code": 1, "told": True}
        lines[0].close()
    finally:
        hub.stop()


def in_child(action: Callable[[], object]) -> int:
    """Run something in a process of its own; give its exit code, 7 where it came to its end."""
    return end_of(start_child(action, done=7, failed=8))


def test_clearing_up_is_not_cut_short_by_a_signal():
    def clear_up():
        with Watch(0, 60.0) as watch:
            watch.clear_up()
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.1)

    # Where the machine is busy, the watch may find that it has had time enough.
    assert in_child(clear_up) in (7, 143)


def test_ranks_that_met_but_are_not_connected_end_in_time(capfd):
    def wait():
        with Watch(1, 60.0, lambda error: os.write(1, str(error).encode())) as watch:
            watch.connect_within(0.2)
            try:
                time.sleep(30)
            except Stopped as stop:
                watch.tell(watch.settle(stop))
                os._exit(watch.code)

    started = time.monotonic()
    assert in_child(wait) == 1
    assert time.monotonic() - started < 20
    said = capfd.readouterr().out
    assert said.startswith(f"rank 1 (on {socket.gethostname()}): has met the others, but not all")
    assert "within 0.2 s (--rendezvous-timeout)" in said


def test_lines_come_whole():
    left, right = socket.socketpair()
    line = Line(left)
    right.sendall(b'{"a": 1}\n{"b"')
    assert line.receive() == [{"a": 1}]
    right.sendall(b": 2}\n")
    right.close()
    assert line.receive() == [{"b": 2}]
    assert line.receive() is None
    line.close()


def test_a_hub_that_has_just_noticed_its_end_is_stopped_all_the_same() -> None:
    hub = Hub(["here"], 60.0, 0.2)
    hub._ended.set()
    hub._thread.join(5)
    assert not hub._thread.is_alive()
    hub.stop()


def test_a_reason_of_any_length_arrives() -> None:
    left, right = socket.socketpair()
    watch = Watch(1, 60.0)
    watch._line = Line(left)
    watch._send_failure("failed", "\x01" * 100_000, 3)
    (message,) = Line(right).receive() or ()
    assert message["text"] == "\x01" * 8000 + " [cut]"
    assert message["code"] == 3
    left.close()
    right.close()


def test_a_mistake_of_the_program_is_told_with_its_place() -> None:
    def mistake() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        mistake()
    text = describe(caught.value)
    assert text.startswith("KeyError('x')\nTraceback")
    assert "in mistake" in text
    assert describe(UsageError("so")) == "so"
