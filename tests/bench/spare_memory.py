"""Free memory that is really there.

A virtual machine may hand free pages back to its host (free page reporting, balloons). Touching
such a page again costs several times what writing to it does, and whoever runs after a pause pays
for it: on tmpfs that was seen to make the same copy four times slower.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

# The rest stays with the page cache, which must not be pushed out.
_SHARE_OF_FREE = 0.8


def touch(num_bytes: int) -> None:
    """Write to that much free memory, if there is so much, in another process, and free it."""
    num_bytes = min(num_bytes, int(_free_bytes() * _SHARE_OF_FREE))
    if num_bytes > 0:
        subprocess.run([sys.executable, "-S", __file__, str(num_bytes)], check=True)


def _free_bytes() -> int:
    """Give the memory that nothing uses, not even as page cache."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith("MemFree:"))
    return int(value) * 1024


def _touch_here(num_bytes: int) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, num_bytes, flags=flags).close()


if __name__ == "__main__":
    _touch_here(int(sys.argv[1]))
