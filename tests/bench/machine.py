"""Which machine the numbers are from."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path


def file_system(folder: Path) -> str:
    """Give the type of the file system that holds a folder, such as ``ext4``."""
    wanted = folder.resolve()
    best, found = -1, "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4].encode().decode("unicode_escape"))
        # A later mount at the same place hides the earlier one.
        if wanted.is_relative_to(mount) and len(mount.parts) >= best:
            best, found = len(mount.parts), right.split()[0]
    return found


def version(package: str) -> str:
    """Give the version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def describe(folder: Path) -> dict[str, str]:
    """Describe machine and software, for numbers that are written in a folder."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": models[0] if models else platform.machine(),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "file system": file_system(folder),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "torch": version("torch"),
        "DeepSpeed": version("deepspeed"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def as_line(facts: dict[str, str]) -> str:
    """Put the description into one line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())
