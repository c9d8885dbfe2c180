"""Builds the library for this machine's processor, once, in the user's cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_CPU_ISA = "RAYFLEET_MAX_CPU_ISA"
"""Environment variable that limits the instruction sets of the library, for tests; like oneDNN's
`ONEDNN_MAX_CPU_ISA`."""
_SOURCES = Path(__file__).with_name("src")
_TIMEOUT_S = 300
_WITHOUT = {
    "AVX512_CORE_BF16": ["-mno-amx-bf16", "-mno-amx-int8", "-mno-amx-tile"],
    "AVX512_CORE": ["-mno-avx512bf16"],
    "AVX2": ["-mno-avx512f"],
    "SSE41": ["-mno-avx"],
}
"""Compiler flags by limit. The flags of a limit and of all limits before it together disable all
instruction sets above that limit."""


class NativeUnavailable(RuntimeError):
    """The library cannot be compiled or loaded on this machine; the message gives the reason."""


def build_library() -> Path:
    """Path of the compiled library, which is compiled if it does not exist yet.

    Raises:
        NativeUnavailable: there is no C++ compiler, or it failed.
    """
    compiler = _compiler()
    flags = _flags()
    folder = cache_folder()
    name = f"librayfleet-{_fingerprint(compiler, flags)}.so"
    library = folder / name
    if library.exists():
        return library
    with (folder / "lock").open("w") as lock:
        # If several ranks start at the same time, one compiles and the others wait for the result.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, flags, library)
    return library


def _compile(compiler: str, flags: list[str], library: Path) -> None:
    # Compile to a temporary name: an incomplete library must never be loaded.
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [compiler, *flags, str(_SOURCES / "library.cpp"), "-o", str(unfinished)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{compiler} failed: {error}") from error
    if done.returncode:
        unfinished.unlink(missing_ok=True)
        raise NativeUnavailable(f"{compiler} failed:\n{done.stderr[-2000:]}")
    unfinished.rename(library)


def _compiler() -> str:
    named = os.environ.get("CXX")
    for candidate in [named] if named else ["c++", "g++", "clang++"]:
        found = shutil.which(candidate)
        if found:
            return found
    raise NativeUnavailable(
        f"no C++ compiler found ({named or 'c++, g++ or clang++'}): install g++, or set CXX"
    )


def _flags() -> list[str]:
    machine = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    # Fuse all multiply-adds or none, since rows must not differ in rounding.
    flags = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread"]
    return [*flags, machine, *_flags_without(os.environ.get(MAX_CPU_ISA, ""))]


def _flags_without(most: str) -> list[str]:
    if not most:
        return []
    if most not in _WITHOUT:
        raise NativeUnavailable(
            f"unknown {MAX_CPU_ISA} {most!r}: choose from {', '.join(_WITHOUT)}"
        )
    kinds = list(_WITHOUT)
    return [flag for kind in kinds[: kinds.index(most) + 1] for flag in _WITHOUT[kind]]


def _fingerprint(compiler: str, flags: list[str]) -> str:
    """Hash of everything that the compiled code depends on, since machines may share a home
    folder."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest.update("\0".join(flags).encode() + version + processor().encode())
    return digest.hexdigest()[:20]


def processor() -> str:
    """The system's description of the CPU: flags, features and model."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        kept = [line for line in lines if line.startswith(("flags", "Features", "model"))]
        return "\n".join(dict.fromkeys(kept))
    return platform.processor() + platform.version()


def cache_folder() -> Path:
    """A folder that only this user can write to, since code is loaded from it: the user's cache
    folder, or a new temporary one."""
    return private_folder("native") or Path(tempfile.mkdtemp(prefix="rayfleet-native-"))


def private_folder(name: str) -> Path | None:
    """One of the user's cache folders; None if it is not writable, or is writable by other
    users."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "rayfleet" / name
    with contextlib.suppress(OSError):  # containers may have a read-only home
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        is_private = status.st_uid == os.getuid() and not status.st_mode & 0o022
        if is_private and os.access(folder, os.W_OK):
            return folder
    return None


def main() -> None:
    """Compiles the library, and prints its path."""
    try:
        print(build_library())
    except NativeUnavailable as error:
        print(f"falling back to torch on CPU, several times slower: {error}", file=sys.stderr)
