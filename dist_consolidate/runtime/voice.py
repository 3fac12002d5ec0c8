"""Which rank of a host speaks, before ranks can agree on anything: the first that takes a name.

The name is one of Linux' abstract sockets (unix(7)): it belongs to one process at a time, is seen
by all of a host (of a network namespace), leaves no file, and is free again when the process ends.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time

# How long the rank that speaks may take to fail after another one has; and how long a silent rank
# stays, so that a launcher that stops all at the first one's end does not stop the one that speaks.
_PATIENCE_SEC, _STAY_SEC, _PAUSE_SEC = 15.0, 3.0, 0.05


class Voice:
    """The right to speak for all ranks of a host that meet at one place."""

    def __init__(self, place: str) -> None:
        """Take the name, if nobody has it.

        Args:
            place: What the ranks have in common.
        """
        digest = hashlib.sha256(f"{os.getuid()} {place}".encode()).hexdigest()[:32]
        self._name = f"\0dist-consolidate/{digest}"
        self._speaks = _take(self._name)

    def is_taken(self) -> bool:
        """Tell, on a rank that fails, whether another rank speaks; wait until it has spoken.

        Returns:
            ``False`` if this rank has to speak: it took the name, or who took it does not fail.
        """
        speaking = f"{self._name}/speaks"
        if self._speaks:
            _take(speaking)
            return False
        until = time.monotonic() + _PATIENCE_SEC
        while not _is_held(speaking):
            if not _is_held(self._name):
                return True  # it has spoken and ended between two looks
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE_SEC)
        until = time.monotonic() + _STAY_SEC
        while _is_held(speaking) and time.monotonic() < until:
            time.sleep(_PAUSE_SEC)
        return True


def _take(name: str) -> bool:
    """Take a name until this process ends: a rank that went on has not spoken for the others."""
    taking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        taking.bind(name)
    except OSError:
        taking.close()
        return False
    taking.listen()
    taking.detach()
    return True


def _is_held(name: str) -> bool:
    """Tell whether a process has a name, without taking it for a moment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(name)
        except BlockingIOError:
            return True  # asked by so many that the queue is full
        except OSError:
            return False
    return True
