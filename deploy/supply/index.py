"""Dependency resolution against PyPI, as on a user's machine, and lock files with hashes.

Only this machine's network settings are used. Its configuration of pip and uv, find-links, other
indexes, constraints and caches are ignored.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

GLIBC = "manylinux_2_31"
"""Platform tag of the oldest glibc for which every pinned version has a wheel; llguidance has none
for older ones. Debian 11 and Ubuntu 20.04 have this glibc."""
MACHINES = ("x86_64", "aarch64")
TRANSPORT = {"PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "UV_HTTP_TIMEOUT", "UV_HTTP_RETRIES"} | {
    f"{scheme}_PROXY" for scheme in ("HTTP", "HTTPS", "ALL", "NO")
}
"""Environment variables with network settings."""
TIMEOUT_S = 200
"""Time limit of one resolution in seconds; it takes 3 s on an idle machine."""
_ENTRY = re.compile(r"([\w.-]+)==([\w.+!-]+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)")


class IndexUnreachableError(Exception):
    """The index did not respond."""


class NoSolutionError(Exception):
    """The requirements conflict, or one is missing from the index."""


class Locked(NamedTuple):
    """A pinned version of a distribution."""

    version: str
    hashes: tuple[str, ...]
    """SHA-256 hashes of all its files."""


Lock = Mapping[str, Locked]
"""Distributions, keyed by canonical name."""


def compiled(
    arguments: Sequence[str], *, home: Path, python: str, machine: str, lines: str = ""
) -> str:
    """Output of `uv pip compile` for Linux.

    Args:
        arguments: additional arguments.
        home: folder used as the home directory, including the download cache.
        python: Python version, such as "3.12".
        machine: one of MACHINES.
        lines: requirements in addition to those in `arguments`.

    Raises:
        NoSolutionError: there is no solution; the message is uv's explanation.
        IndexUnreachableError: the index did not respond.
    """
    # No sdists: reading their metadata requires building them, for which users need compilers.
    command = (
        "-m uv pip compile --no-config --no-build --quiet --no-annotate --no-header "
        f"--python-version {python} --python-platform {machine}-{GLIBC}"
    ).split()
    try:
        result = subprocess.run(
            [sys.executable, *command, *arguments, *(["-"] if lines else [])],
            cwd=home,  # otherwise, uv reads the settings of an enclosing project
            env=environment_of_a_user(os.environ, home),
            input=lines,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise IndexUnreachableError(f"no response within {TIMEOUT_S} s") from error
    if result.returncode != 0:
        unreachable = "error sending request" in result.stderr
        raise (IndexUnreachableError if unreachable else NoSolutionError)(result.stderr.strip())
    return result.stdout


def environment_of_a_user(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """Environment of the installer: only the network settings of this machine.

    The cache is in `home`, because this machine's cache can contain files that are not on PyPI.
    """
    kept = {name: value for name, value in environment.items() if name.upper() in TRANSPORT}
    return kept | {"HOME": str(home), "UV_CACHE_DIR": str(home / "cache")}


def pins(constraints: Path) -> dict[str, str]:
    """Versions pinned in a constraints file, keyed by distribution."""
    lines = (line.partition("#")[0].strip() for line in constraints.read_text().splitlines())
    found = (Requirement(line) for line in lines if line)
    return {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin in found
        if len(pin.specifier) == 1
    }


def parse_lock(text: str) -> dict[str, Locked]:
    """Parses the lock in a requirements file.

    Raises:
        ValueError: an entry is not a pinned version with hashes (for example an option, a URL or a
            marker).
    """
    body = re.sub(r"(?m)^#.*\n", "", text)
    rest = _ENTRY.sub("", body).strip()
    if rest:
        raise ValueError(
            f"lock file entry must be name==version with hashes, got {rest.splitlines()[0]!r}: run "
            "`make lock`"
        )
    return {
        canonicalize_name(name): Locked(version, tuple(re.findall(r"sha256:(\w+)", hashes)))
        for name, version, hashes in _ENTRY.findall(body)
    }


def render_lock(lock: Lock, comment: str) -> str:
    """Requirements file for `parse_lock` and for pip with --require-hashes."""
    text = "".join(f"# {line}\n" for line in comment.splitlines())
    for name in sorted(lock):
        version, hashes = lock[name]
        text += f"{name}=={version}"
        text += "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(hashes)) + "\n"
    return text
