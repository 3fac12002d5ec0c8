"""Where all ranks can be heard: a thread of rank 0 that every rank keeps a connection to.

The kernel closes a dead process's connection at once, so that a killed rank is known by its number,
whoever waits for whom in a collective; a stopped one, or one whose node is gone, falls silent.
Lines of JSON go to and fro; nothing of the run's data does.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from dist_consolidate.runtime.roll import Roll

_SETTLING_STEP_SEC = 0.05
_MAX_LINE_BYTES = 1 << 16


class Line:
    """A connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connection."""
        self.socket, self._buffer = connection, bytearray()
        self.socket.setblocking(False)
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; where nobody listens any more, or for long, it is lost."""
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Give what has come; ``None`` once the connection is closed and all is given."""
        is_open = self._fill()
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    found.append(message)
        return found if found or is_open else None

    def _fill(self) -> bool:
        try:
            while len(self._buffer) <= _MAX_LINE_BYTES:
                data = self.socket.recv(1 << 14)
                if not data:
                    return False
                self._buffer += data
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # no rank has that much to say

    def close(self) -> None:
        """Close it."""
        self.socket.close()


class Hub:
    """Listens to all ranks, and tells all of them the verdict.

    Attributes:
        port: Where it listens.
        token: What a rank has to say first; not everybody who can connect is a rank.
    """

    def __init__(self, hosts: Sequence[str], timeout_sec: float, beat_sec: float) -> None:
        """Start to listen.

        Args:
            hosts: Each rank's host.
            timeout_sec: How long a rank may be silent.
            beat_sec: How often ranks are to be heard.

        Raises:
            OSError: If that is not possible.
        """
        self._server = _listen(len(hosts))
        self.port = int(self._server.getsockname()[1])
        self.token = secrets.token_hex(16)
        self._roll, self._beat_sec = Roll(hosts, timeout_sec), beat_sec
        self._size, self._has_told = len(hosts), False
        self._selector = selectors.DefaultSelector()
        self._asleep, self._waker = socket.socketpair()
        for end in (self._server, self._asleep):
            self._selector.register(end, selectors.EVENT_READ)
        self._lines: dict[socket.socket, tuple[Line, int | None]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="consolidate-hub", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let all ranks go."""
        self._ended.set()
        with contextlib.suppress(OSError):  # it may have seen that just now, and be gone
            self._waker.send(b"\0")
        self._thread.join(4 * self._beat_sec)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ended.is_set():
            step = _SETTLING_STEP_SEC if self._roll.is_settling else min(self._beat_sec, 0.2)
            for key, _ in self._selector.select(step):
                if key.fileobj is self._server:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._lines:
                    self._hear(key.fileobj)
            now = time.monotonic()
            self._roll.tick(min(now - last, 2 * step))
            last = now
            self._tell_verdict()
        # Whoever still waits for a rank that is gone must hear of that.
        self._roll.settle()
        self._tell_verdict()
        self._tell({"end": True})
        for connection in list(self._lines):
            self._drop(connection)
        self._selector.close()
        for end in (self._server, self._asleep, self._waker):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            self._lines[connection] = (Line(connection), None)
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        line, rank = self._lines[connection]
        messages = line.receive()
        for message in messages or ():
            if rank is None:
                rank = self._greet(line, message)
                if rank is None:
                    messages = None
                    break
                self._lines[connection] = (line, rank)
            self._note(line, rank, message)
        if messages is None:
            self._drop(connection)
            if rank is not None:
                self._roll.closed(rank)

    def _greet(self, line: Line, message: dict[str, Any]) -> int | None:
        rank, token = message.get("rank"), str(message.get("token"))
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        if type(rank) is not int or not 0 <= rank < self._size:
            return None
        line.send({"welcome": True})
        return rank

    def _note(self, line: Line, rank: int, message: dict[str, Any]) -> None:
        self._roll.heard(rank, str(message.get("doing", "")))
        if "doing" in message:
            line.send({"alive": True})
        if "bye" in message:
            self._roll.left(rank)
        if "deserts" in message:
            self._roll.deserted(str(message["deserts"]))
        if "failed" in message:
            text, code = str(message.get("text")), int(message.get("code", 1))
            self._roll.failed(rank, str(message["failed"]), text, code)

    def _tell_verdict(self) -> None:
        verdict = self._roll.verdict
        if verdict is not None and not self._has_told:
            self._has_told = True
            message: dict[str, Any] = {"verdict": verdict.text, "code": verdict.code}
            self._tell({**message, "told": True} if self._roll.is_told else message)

    def _tell(self, message: dict[str, Any]) -> None:
        """Tell all ranks, rank 0 last: it may end this process."""
        order = sorted(self._lines.values(), key=lambda entry: -(entry[1] or 0))
        for line, _ in order:
            line.send(message)

    def _drop(self, connection: socket.socket) -> None:
        line, _ = self._lines.pop(connection)
        self._selector.unregister(connection)
        line.close()


def _listen(size: int) -> socket.socket:
    backlog = max(size, 128)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
    return socket.create_server(("", 0), backlog=backlog)
