"""Hardware and software versions of the machine that runs a benchmark."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

from cluster.bench.report import Result

_PACKAGES = ("rayfleet", "ray", "torch", "triton", "transformers", "numpy")
_GPUS = "/proc/driver/nvidia/gpus"
"""Folder of the NVIDIA driver that has one subfolder per GPU."""


def machine(gpus: str = _GPUS) -> Result:
    """CPU, cores available to this process, memory in GiB, GPUs by name, and operating system."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": ", ".join(f"{count} x {name}" for name, count in _gpu_names(gpus).items()) or None,
        "os": platform.platform(terse=True),
    }


def versions(packages: Sequence[str] = _PACKAGES) -> Result:
    """Versions of Python and of the given packages; omits packages that are not installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _cpu_name() -> str:
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return match[1]
    return platform.processor() or platform.machine()


def _gpu_names(folder: str) -> Counter[str]:
    """Number of GPUs by name, from the driver's files, as the load client does not need torch."""
    names: Counter[str] = Counter()
    for path in Path(folder).glob("*/information"):
        with suppress(OSError):
            if match := re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE):
                names[match[1].strip()] += 1
    return names
