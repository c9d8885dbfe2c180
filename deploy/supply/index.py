"""What the public index offers, as users' machines see it, and files that hold on to it by hash.

Nothing of this machine takes part but its way to the network: no configuration of pip or uv, no
find-links, no further index, no constraint from outside, no cache.
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
"""The oldest C library that has a wheel of every pin: llguidance's (Debian 11, Ubuntu 20.04)."""
MACHINES = ("x86_64", "aarch64")
TRANSPORT = {"PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "UV_HTTP_TIMEOUT", "UV_HTTP_RETRIES"} | {
    f"{scheme}_PROXY" for scheme in ("HTTP", "HTTPS", "ALL", "NO")
}
"""Variables that say how to reach the network, and nothing about what is there."""
TIMEOUT_S = 200
"""Seconds for one resolution, which takes three where network and machine are idle."""
_ENTRY = re.compile(r"([\w.-]+)==([\w.+!-]+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)")


class IndexUnreachableError(Exception):
    """The index does not answer from here."""


class NoSolutionError(Exception):
    """The requirements contradict each other, or name what the index does not have."""


class Locked(NamedTuple):
    """A distribution in one version."""

    version: str
    hashes: tuple[str, ...]
    """SHA-256 of all its files."""


Lock = Mapping[str, Locked]
"""Distributions by canonical name."""


def compiled(
    arguments: Sequence[str], *, home: Path, python: str, machine: str, lines: str = ""
) -> str:
    """What `uv pip compile` says for Linux.

    Args:
        arguments: further ones of it.
        home: folder that stands for a user's; what was downloaded lies there.
        python: version of Python, such as "3.12".
        machine: one of MACHINES.
        lines: requirements besides those that `arguments` name.

    Raises:
        NoSolutionError: there is none; the text is uv's explanation.
        IndexUnreachableError: nobody could tell.
    """
    # An sdist's metadata would be had by building it: users would need compilers as well.
    command = (
        "-m uv pip compile --no-config --no-build --quiet --no-annotate --no-header "
        f"--python-version {python} --python-platform {machine}-{GLIBC}"
    ).split()
    try:
        result = subprocess.run(
            [sys.executable, *command, *arguments, *(["-"] if lines else [])],
            cwd=home,  # a project around it would be asked for settings
            env=environment_of_a_user(os.environ, home),
            input=lines,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise IndexUnreachableError(f"no answer in {TIMEOUT_S} s") from error
    if result.returncode != 0:
        unreachable = "error sending request" in result.stderr
        raise (IndexUnreachableError if unreachable else NoSolutionError)(result.stderr.strip())
    return result.stdout


def environment_of_a_user(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """What of this machine's environment an installer may see: how to reach the network.

    The cache lies in `home` as well: this machine's may hold what the public index has not.
    """
    kept = {name: value for name, value in environment.items() if name.upper() in TRANSPORT}
    return kept | {"HOME": str(home), "UV_CACHE_DIR": str(home / "cache")}


def pins(constraints: Path) -> dict[str, str]:
    """Version by distribution in a file of constraints."""
    lines = (line.partition("#")[0].strip() for line in constraints.read_text().splitlines())
    found = (Requirement(line) for line in lines if line)
    return {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin in found
        if len(pin.specifier) == 1
    }


def parse_lock(text: str) -> dict[str, Locked]:
    """The lock in a requirements file.

    Raises:
        ValueError: something in it is no distribution in one version with its hashes: an option, an
            address, a marker, or a version alone.
    """
    body = re.sub(r"(?m)^#.*\n", "", text)
    rest = _ENTRY.sub("", body).strip()
    if rest:
        raise ValueError(f"no name==version with hashes: {rest.splitlines()[0]}")
    return {
        canonicalize_name(name): Locked(version, tuple(re.findall(r"sha256:(\w+)", hashes)))
        for name, version, hashes in _ENTRY.findall(body)
    }


def render_lock(lock: Lock, comment: str) -> str:
    """A requirements file that `parse_lock` reads, and pip with --require-hashes."""
    text = "".join(f"# {line}\n" for line in comment.splitlines())
    for name in sorted(lock):
        version, hashes = lock[name]
        text += f"{name}=={version}"
        text += "".join(f" \\\n    --hash=sha256:{one}" for one in sorted(hashes)) + "\n"
    return text
