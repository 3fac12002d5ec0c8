"""Names of torch's in a pickle, without importing torch.

A pickle refers to a class or function by module and name, and Python's pickler insists on finding
it there. So stand-ins are pickled, and their names are replaced in the finished bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from dist_consolidate.errors import UsageError

_REAL: dict[bytes, bytes] = {}


def _key(module: str, name: str) -> str:
    return f"{module}.{name}".replace(".", "__")


@functools.cache
def torch_name(module: str, name: str) -> type:
    """Make the stand-in for something of torch's.

    Args:
        module: Its module, such as ``torch._utils``.
        name: Its name there.

    Returns:
        A class; once pickled, :func:`with_torch_names` puts the real name in its place.
    """
    key = _key(module, name)
    standing = type(key, (), {"__module__": __name__, "__qualname__": key})
    globals()[key] = standing
    _REAL[_reference(__name__, key)] = _reference(module, name)
    return standing


def _reference(module: str, name: str) -> bytes:
    # Opcode GLOBAL of pickle protocols 0 to 3: module and name, a line each.
    return f"c{module}\n{name}\n".encode()


def with_torch_names(pickled: bytes, texts: Iterable[str]) -> bytes:
    """Replace the stand-ins' names in a pickle of protocol 2.

    Args:
        pickled: The pickle.
        texts: Every text that is pickled as a value; none of them may look like a reference.

    Returns:
        The pickle that refers to torch.

    Raises:
        UsageError: If a text looks like one.
    """
    marker = f"c{__name__}\n"
    for text in texts:
        if marker in text:
            raise UsageError(f"a tensor is named {text!r}, which a .bin file cannot hold here")
    for found, real in _REAL.items():
        pickled = pickled.replace(found, real)
    return pickled
