"""`make check-install`: checks that the pins and all extras can be resolved from PyPI, as by users.

Downloads only metadata. Prints one line per Python version and machine; exits with 1 if one has no
solution. test_install.py runs a subset in every test run.
"""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
from pathlib import Path

from cluster.cli.parser import CommandParser
from deploy.supply.index import MACHINES, IndexUnreachableError, NoSolutionError, compiled, pins
from tests.support.paths import ROOT

PYTHONS = ("3.11", "3.12", "3.13")


def resolve(
    *requirements: str, home: Path, python: str, machine: str, constraints: Path | None = None
) -> dict[str, str]:
    """Versions that a user's installer would choose on Linux, keyed by distribution.

    Args:
        requirements: distributions, or a pyproject.toml with all its extras.
        home: folder used as the user's home directory; caches downloads.
        python: Python version, such as "3.12".
        machine: "x86_64" or "aarch64".
        constraints: file of pins.

    Raises:
        NoSolutionError: there is no solution; the message is uv's explanation.
        IndexUnreachableError: the index did not respond.
    """
    files = [name for name in requirements if Path(name).is_file()]
    lines = "\n".join(name for name in requirements if name not in files)
    extras = ["--all-extras"] if any(name.endswith("pyproject.toml") for name in files) else []
    limits = ["--constraints", str(constraints)] if constraints else []
    arguments = [*limits, *extras, *files]
    text = compiled(arguments, home=home, python=python, machine=machine, lines=lines)
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def check(constraints: Path, *, home: Path, python: str, machine: str) -> dict[str, str]:
    """Resolves the project with all extras, and every pin, even if unused.

    Raises:
        NoSolutionError: there is no solution, or its version of a pinned distribution differs.
        IndexUnreachableError: the index did not respond.
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
        raise NoSolutionError(f"resolved to versions other than the pins: {', '.join(others)}")
    return found


def check_triton(constraints: Path, *, home: Path, python: str, machine: str) -> None:
    """Checks that the pinned torch itself requires the pinned Triton.

    Raises:
        NoSolutionError: torch requires another version, or none, which means that it is not built
            for CUDA.
        IndexUnreachableError: the index did not respond.
    """
    pinned = pins(constraints)
    found = resolve(f"torch=={pinned['torch']}", home=home, python=python, machine=machine)
    if found.get("triton") != pinned["triton"]:
        raise NoSolutionError(
            f"torch {pinned['torch']} requires triton {found.get('triton')}, but the pin is "
            f"{pinned['triton']}"
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the check for all Python versions and machines; returns the exit status."""
    parser = CommandParser(description=__doc__)
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
                print(f"not checked: the index did not respond: {error}", file=sys.stderr)
                return 2
            except NoSolutionError as error:
                outcome = str(error)
                failed = True
            print(f"Python {python} on {machine}: {outcome}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
