"""Network interfaces: those that the user has chosen, and how others reach this host.

gloo's choice is ``GLOO_SOCKET_IFNAME``, one or several names
(https://docs.pytorch.org/docs/stable/distributed.html); NCCL's is ``NCCL_SOCKET_IFNAME``,
beginnings of names, with ``=`` in front whole names, with ``^`` those that are not to be used
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # netdevice(7)
_ANY_PORT = 9  # no packet is sent there


def interface_problem(environ: Mapping[str, str] = os.environ, *, with_nccl: bool) -> str | None:
    """Tell what is wrong with the chosen interfaces on this host.

    Args:
        environ: The environment.
        with_nccl: Whether NCCL's choice counts.

    Returns:
        A sentence that names the variable, or ``None``.
    """
    there = [name for _, name in socket.if_nameindex()]
    chosen = {GLOO: environ.get(GLOO, ""), NCCL: environ.get(NCCL, "") if with_nccl else ""}
    for variable, text in chosen.items():
        missing = _missing_gloo(text, there) if variable == GLOO else _missing_nccl(text, there)
        if missing:
            return (
                f"{variable} is {text!r}, but host {socket.gethostname()} has no network interface "
                f"{missing}; it has {', '.join(there)}; correct the variable or unset it"
            )
    return None


def _missing_gloo(text: str, there: Sequence[str]) -> str:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return " and ".join(name for name in names if name not in there)


def _missing_nccl(text: str, there: Sequence[str]) -> str:
    if not text or text.startswith("^"):
        return ""
    whole, names = text.startswith("="), text.removeprefix("=").split(",")
    fits = [n for n in there for name in names if (n == name if whole else n.startswith(name))]
    return (
        "" if fits else (" or ".join(names) if whole else f"that begins with {' or '.join(names)}")
    )


def interface_address(name: str) -> str | None:
    """Give an interface's IPv4 address; ``None`` where it has none or does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def address_for(others: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Choose the address under which other hosts reach this one.

    Args:
        others: Names of other hosts.
        environ: The environment.

    Returns:
        The address of the interface that gloo (else NCCL) is told to use; else the one from which
        packets to the others leave; else this host's name.
    """
    for name in (environ.get(GLOO, ""), environ.get(NCCL, "").removeprefix("=")):
        found = interface_address(name.split(",")[0].strip()) if name else None
        if found:
            return found
    for other in dict.fromkeys(others):
        found = _address_towards(other)
        if found:
            return found
    return socket.gethostname()


def _address_towards(host: str) -> str | None:
    """Give the address from which packets to a host leave, unless it seems to be this very host."""
    try:
        known = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, place in known:
        try:
            with socket.socket(family, kind, protocol) as leaving:
                leaving.connect(place)
                address = str(leaving.getsockname()[0])
        except OSError:
            continue
        if not address.startswith(("127.", "::1", "fe80:")):
            return address
    return None
