"""Which rank of a host speaks, before ranks can agree on anything: the first that takes a name.

The name is one of Linux' abstract sockets (unix(7)): it belongs to one process at a time, is seen
by all of a host (of a network namespace), leaves no file, and is free again when the process ends.
Whoever comes later connects to it, and hears whether the first has spoken, or ended without a word.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time

# How long the rank that speaks may take to fail after another one has; and how long a silent rank
# stays, so that a launcher that stops all at the first one's end does not stop the one that speaks.
_PATIENCE_SEC, _STAY_SEC, _PAUSE_SEC = 15.0, 3.0, 0.05
_MAX_WAITING = 4096
_SPOKEN = b"spoken"


class Voice:
    """The right to speak for all ranks of a host that meet at one place."""

    def __init__(self, place: str) -> None:
        """Take the name, if nobody has it.

        Args:
            place: What the ranks have in common.
        """
        digest = hashlib.sha256(f"{os.getuid()} {place}".encode()).hexdigest()[:32]
        self._name = f"\0dist-consolidate/{digest}"
        self._listening: socket.socket | None = None
        self._asking: socket.socket | None = None
        self._settle()

    def is_taken(self) -> bool:
        """Tell, on a rank that fails, whether another rank speaks; wait until it has spoken.

        Returns:
            ``False`` if this rank has to speak: it took the name, or who took it does not fail, or
            ended without a word.
        """
        until = time.monotonic() + _PATIENCE_SEC
        while self._listening is None:
            if time.monotonic() > until:
                return False
            if self._asking is None:
                time.sleep(_PAUSE_SEC)
            elif self._hears(until):
                return True
            self._settle()
        self.speak()
        return False

    def speak(self) -> None:
        """Let all others of this host know, from now on until this process ends."""
        if self._listening is None:
            return
        # Those that wait already hear of it before this process can end.
        kept: list[socket.socket] = []
        self._listening.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            _tell_all(self._listening, kept)
        self._listening.setblocking(True)
        threading.Thread(
            target=_tell_all, args=[self._listening, kept], name="consolidate-voice", daemon=True
        ).start()

    def close(self) -> None:
        """Leave it to others: this rank goes on, and says nothing here."""
        for end in (self._listening, self._asking):
            if end is not None:
                end.close()

    def _settle(self) -> None:
        """Take the name, or reach the one who has it; neither, where it is just changing hands."""
        if self._asking is None:
            self._listening = _take(self._name)
            if self._listening is None:
                self._asking = _reach(self._name)

    def _hears(self, until: float) -> bool:
        """Wait for a word of the one who has the name; ``False`` if none comes, or it ends."""
        assert self._asking is not None
        heard = b""
        with self._asking as asking:
            self._asking = None
            with contextlib.suppress(OSError):
                asking.settimeout(max(until - time.monotonic(), _PAUSE_SEC))
                heard = asking.recv(len(_SPOKEN))
            with contextlib.suppress(OSError):
                asking.settimeout(_STAY_SEC)
                if heard:
                    asking.recv(1)  # its end
        return bool(heard)


def _take(name: str) -> socket.socket | None:
    taking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        taking.bind(name)
        taking.listen(_MAX_WAITING)
    except OSError:
        taking.close()
        return None
    return taking


def _reach(name: str) -> socket.socket | None:
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        asking.setblocking(False)  # so many may wait already that connecting would, too
        asking.connect(name)
    except OSError:
        asking.close()
        return None
    return asking


def _tell_all(listening: socket.socket, kept: list[socket.socket]) -> None:
    """Tell everyone who asks, and keep them until this process ends."""
    while True:
        kept.append(listening.accept()[0])
        with contextlib.suppress(OSError):  # it may have ended
            kept[-1].sendall(_SPOKEN)
