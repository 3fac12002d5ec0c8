"""Which rank of a host speaks, before ranks can agree on anything: the first that takes a name.

The name is one of Linux' abstract sockets (unix(7)): it belongs to one process at a time, is seen
by all of a host (of a network namespace), leaves no file, and is free again when the process ends.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time

# A rank that is silent must not end before the one that speaks: the launcher may then stop all.
_PATIENCE_SEC, _PAUSE_SEC = 5.0, 0.05


class Voice:
    """The right to speak for all ranks of a host that meet at one place."""

    def __init__(self, place: str) -> None:
        """Take the name, if nobody has it.

        Args:
            place: What the ranks have in common.
        """
        digest = hashlib.sha256(f"{os.getuid()} {place}".encode()).hexdigest()[:32]
        self._name = f"\0dist-consolidate/{digest}"
        self._speaks = self._take()

    def is_taken(self) -> bool:
        """Tell whether another rank has spoken; wait until it has.

        Returns:
            ``False`` if this rank has to speak: it took the name, or who took it does not end.
        """
        if self._speaks:
            return False
        until = time.monotonic() + _PATIENCE_SEC
        while time.monotonic() < until:
            if self._take():
                return True
            time.sleep(_PAUSE_SEC)
        return False

    def _take(self) -> bool:
        taking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            taking.bind(self._name)
        except OSError:
            taking.close()
            return False
        # Kept until this process ends: a rank that went on has not spoken for those that did not.
        taking.detach()
        return True
