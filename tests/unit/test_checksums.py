"""CRC-32 by the fastest library that is here: zlib's numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib

import numpy as np
import pytest

from dist_consolidate.checksums import crc32

DATA = np.random.default_rng(0).bytes(100_003)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 63, 64, 4095, 100_003])
@pytest.mark.parametrize("value", [0, 1, 0xFFFFFFFF, 0xDEADBEEF])
def test_numbers_are_zlibs(length, value):
    data = DATA[-length:] if length else b""
    assert crc32(data, value) == zlib.crc32(data, value)
    assert crc32(memoryview(bytearray(data)), value) == zlib.crc32(data, value)


def test_pieces_one_after_another():
    assert crc32(DATA[5000:], crc32(DATA[:5000])) == zlib.crc32(DATA)


def test_without_isal_zlib_does_it():
    code = (
        "import sys; sys.modules['isal'] = None\n"
        "from dist_consolidate import checksums\n"
        "assert checksums._crc32.__module__ in ('zlib', None), checksums._crc32\n"
        "print(checksums.crc32(b'123456789'))"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=60
    )
    # The check value of CRC-32 in catalogues of checksums.
    assert (outcome.stdout.strip(), outcome.stderr) == (str(0xCBF43926), "")
