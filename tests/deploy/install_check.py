"""`make check-install`: the pins and all extras resolve on the public index, as users have it.

Nothing of this machine takes part but its way to the network: no configuration of pip or uv, no
find-links, no further index, no constraint from outside, no cache. Only metadata is downloaded. A
line per Python and machine; ends with 1 where one has no solution. The cut of it that runs with all
tests is test_install.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
GLIBC = "manylinux_2_31"
"""The oldest C library that has a wheel of every pin: llguidance's (Debian 11, Ubuntu 20.04)."""
TRANSPORT = {"PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "UV_HTTP_TIMEOUT", "UV_HTTP_RETRIES"} | {
    f"{scheme}_PROXY" for scheme in ("HTTP", "HTTPS", "ALL", "NO")
}
"""Variables that say how to reach the network, and nothing about what is there."""
TIMEOUT_S = 200
"""For one resolution, which takes three seconds where network and machine are idle."""


class IndexUnreachableError(Exception):
    """The public index does not answer from here."""


class NoSolutionError(Exception):
    """The requirements contradict each other, or name what the index does not have."""


def resolve(
    *requirements: str, home: Path, python: str, machine: str, constraints: Path | None = None
) -> dict[str, str]:
    """Versions by distribution that a user's installer would choose for Linux.

    Args:
        requirements: distributions, or a pyproject.toml, which counts with all its extras.
        home: folder that stands for a user's; what was downloaded lies there.
        python: version of Python, such as "3.12".
        machine: "x86_64" or "aarch64".
        constraints: file of pins for what is required.

    Raises:
        NoSolutionError: there is none; the text is uv's explanation.
        IndexUnreachableError: nobody could tell.
    """
    files = [name for name in requirements if Path(name).is_file()]
    lines = "\n".join(name for name in requirements if name not in files)
    extras = ["--all-extras"] if any(name.endswith("pyproject.toml") for name in files) else []
    limits = ["--constraints", str(constraints)] if constraints else []
    # An sdist's metadata would be had by building it: users would need compilers as well.
    command = (
        "-m uv pip compile --no-config --no-build --quiet --no-annotate --no-header "
        f"--python-version {python} --python-platform {machine}-{GLIBC}"
    ).split()
    try:
        result = subprocess.run(
            [sys.executable, *command, *limits, *extras, *files, *(["-"] if lines else [])],
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
    return dict(re.findall(r"^([\w.-]+)==(\S+)", result.stdout, re.MULTILINE))


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


def check(constraints: Path, *, home: Path, python: str, machine: str) -> dict[str, str]:
    """Resolves the project with all extras, and every pin whether anything needs it or not.

    Raises:
        NoSolutionError: it cannot be installed, or it would be with another version than its pin's.
        IndexUnreachableError: nobody could tell.
    """
    pinned = pins(constraints)
    found = resolve(
        str(ROOT / "pyproject.toml"),
        *(f"{name}=={version}" for name, version in pinned.items()),
        home=home,
        python=python,
        machine=machine,
        constraints=constraints,
    )
    others = [name for name, version in pinned.items() if found.get(name) != version]
    if others:
        raise NoSolutionError(f"resolved to other versions than their pins': {', '.join(others)}")
    return found


def check_triton(constraints: Path, *, home: Path, python: str, machine: str) -> None:
    """The pinned torch, left to itself, chooses the pinned Triton.

    Raises:
        NoSolutionError: it demands another one, or none: then it is no build for CUDA.
        IndexUnreachableError: nobody could tell.
    """
    pinned = pins(constraints)
    found = resolve(f"torch=={pinned['torch']}", home=home, python=python, machine=machine)
    if found.get("triton") != pinned["triton"]:
        raise NoSolutionError(
            f"torch {pinned['torch']} brings triton {found.get('triton')}, the pin is "
            f"{pinned['triton']}"
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the check on all Pythons and machines; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    constraints = parser.parse_args(argv).constraints.resolve()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for python, machine in itertools.product(PYTHONS, MACHINES):
            try:
                check_triton(constraints, home=home, python=python, machine=machine)
                found = check(constraints, home=home, python=python, machine=machine)
                parts = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton", "ray"))
                outcome = f"{len(found)} distributions, {parts}"
            except IndexUnreachableError as error:
                print(f"not checked: the index does not answer: {error}", file=sys.stderr)
                return 2
            except NoSolutionError as error:
                outcome = str(error)
                failed = True
            print(f"Python {python} on {machine}: {outcome}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
