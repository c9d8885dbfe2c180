"""`make check-supply`: checks the contents of images before a release.

Checks that lock files agree with constraints.txt, that the images' distributions have no known
vulnerabilities, and that images are pinned by digest. Also writes bills of materials (CycloneDX) to
build/sbom. Prints one line per check: passed, failed or not checked. The exit status is 1 if a
check failed, else 2 if something could not be checked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from cluster.cli.parser import CommandParser
from deploy.supply.index import Lock, parse_lock, pins

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
DEVICES = ("cpu", "cuda")
TOOLS = ROOT / "build" / "supply-tools"
SBOMS = ROOT / "build" / "sbom"
CANARY = "urllib3==1.24.1"
"""A release with known vulnerabilities (CVE-2019-11236 and later ones)."""
TIMEOUT_S = 600
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Outcome(NamedTuple):
    """Verdict and message of one check."""

    verdict: Literal["passed", "failed", "not checked"]
    text: str


class NotAuditedError(Exception):
    """Error if distributions were not audited: pip-audit failed, or its service has no data on some
    of them."""


def read_device(device: str) -> str:
    """Requirements of an image, in the format of a requirements file."""
    return "".join((FOLDER / f"{name}.txt").read_text() for name in ("common", device))


def check_locks(
    constraints: Mapping[str, str], locks: Mapping[str, Lock], required: Sequence[str]
) -> Iterator[Outcome]:
    """Checks that lock files have the required distributions, in the versions of the constraints.

    Args:
        constraints: versions, keyed by distribution.
        locks: lock files, keyed by name.
        required: distributions that each lock file must have.
    """
    for name, lock in locks.items():
        others = [
            f"{package} {locked.version} instead of {constraints[package]}"
            for package, locked in lock.items()
            # Versions of device-specific builds have a suffix (+cpu).
            if package in constraints and locked.version.partition("+")[0] != constraints[package]
        ]
        missing = [f"no {package}" for package in required if package not in lock]
        if others or missing:
            problems = ", ".join(others + missing)
            yield Outcome("failed", f"the lock file of {name} has {problems}: run `make lock`")
        else:
            yield Outcome(
                "passed", f"the lock file of {name}: {len(lock)} distributions, all with hashes"
            )


def install_tools() -> None:
    """Installs the tools, pinned by hash, into a separate environment.

    Raises:
        SubprocessError: the installation failed.
    """
    lock = FOLDER / "tools.txt"
    stamp = TOOLS / "tools.txt"
    if stamp.is_file() and stamp.read_text() == lock.read_text():
        return
    venv.create(TOOLS, clear=True, with_pip=True)
    options = ["--quiet", "--require-hashes", "--only-binary", ":all:", "--requirement", str(lock)]
    _run([str(TOOLS / "bin" / "python"), "-m", "pip", "install", *options])
    stamp.write_text(lock.read_text())


def write_sbom(device: str) -> Outcome:
    """Writes the bill of materials of an image's Python distributions."""
    SBOMS.mkdir(parents=True, exist_ok=True)
    path = SBOMS / f"{device}.cdx.json"
    options = [
        "--pyproject",
        str(ROOT / "pyproject.toml"),
        "--output-reproducible",
        "-o",
        str(path),
    ]
    _run([str(TOOLS / "bin" / "cyclonedx-py"), "requirements", *options, "-"], read_device(device))
    listed = {part["name"] for part in json.loads(path.read_text())["components"]}
    missing = sorted(set(parse_lock(read_device(device))) - listed)
    if missing:
        return Outcome("failed", f"{path} lacks {', '.join(missing)}")
    return Outcome(
        "passed", f"bill of materials: {path.relative_to(ROOT)}, {len(listed)} components"
    )


def audit(program: str, lock: Lock) -> list[str]:
    """Known vulnerabilities, one line each.

    Args:
        program: path of pip-audit.
        lock: distributions to check.

    Raises:
        NotAuditedError: pip-audit failed, or the service has no data on some distributions.
    """
    # The service has no data for local versions (+cpu), and returns nothing for unknown versions.
    wanted_pins = [
        f"{name}=={locked.version.partition('+')[0]}" for name, locked in sorted(lock.items())
    ]
    if not any(_audited(program, [CANARY])[0]["vulns"]):
        raise NotAuditedError(
            f"the vulnerability service returned no vulnerabilities for {CANARY}, which is known "
            "to have some"
        )
    return [
        f"{package['name']} {package['version']}: {found['id']}, fixed in "
        f"{', '.join(found['fix_versions']) or 'no version'}"
        for package in _audited(program, wanted_pins)
        for found in package["vulns"]
    ]


def _audited(program: str, requirements: Sequence[str]) -> list[dict[str, Any]]:
    """pip-audit's result for each distribution. The exit status of pip-audit is not used: it is 0
    even if all distributions were skipped."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements) + "\n")
        file.flush()
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        try:
            done = subprocess.run(
                [program, *options, "--requirement", file.name],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
        except OSError as error:
            raise NotAuditedError(f"cannot run {program}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise NotAuditedError(f"pip-audit did not finish within {TIMEOUT_S} s") from error
        except (ValueError, KeyError) as error:
            end = done.stderr.strip().rpartition("\n")[2]
            raise NotAuditedError(f"pip-audit wrote no report: {end:.500}") from error
    audited = {package["name"] for package in found if "vulns" in package}
    wanted = [requirement.partition("==")[0] for requirement in requirements]
    if missing := [name for name in wanted if name not in audited]:
        raise NotAuditedError(
            f"the vulnerability service has no data for {', '.join(missing)} ({len(missing)} of "
            f"{len(wanted)} packages): check these packages by hand, or rerun"
        )
    return found


def check_audit() -> Iterator[Outcome]:
    """Checks all images for known vulnerabilities."""
    lock = {}
    for device in DEVICES:
        lock |= parse_lock(read_device(device))
    try:
        found = audit(str(TOOLS / "bin" / "pip-audit"), lock)
    except NotAuditedError as error:
        yield Outcome("not checked", f"vulnerabilities: {error}")
        return
    for text in found:
        yield Outcome("failed", text)
    if not found:
        yield Outcome("passed", f"vulnerabilities: none known in {len(lock)} distributions")


def check_base(path: Path) -> Outcome:
    """Checks that the base image is pinned by digest."""
    base = dict(line.split("=", 1) for line in path.read_text().splitlines() if line)
    image = f"python:{base['PYTHON']}"
    if _DIGEST.fullmatch(base["PYTHON_DIGEST"]):
        return Outcome("passed", f"base image {image}@{base['PYTHON_DIGEST']}")
    return Outcome(
        "failed",
        f"base image {image} is not pinned: set PYTHON_DIGEST in {path.name} to the digest that "
        f"`docker buildx imagetools inspect {image}` prints",
    )


def check_values(paths: Sequence[Path]) -> Iterator[Outcome]:
    """Checks that chart values pin their image by digest."""
    if not paths:
        yield Outcome(
            "not checked", "chart values: pass those of the release, ARGS='--values FILE'"
        )
    for path in paths:
        values = yaml.safe_load(path.read_text()) or {}
        digest = (values.get("image") or {}).get("digest") or ""
        if _DIGEST.fullmatch(str(digest)):
            yield Outcome("passed", f"{path} pins the image to {digest}")
        else:
            yield Outcome("failed", f"{path} does not set image.digest: tags can be moved")


def outcomes(values: Sequence[Path]) -> Iterator[Outcome]:
    """Results of all checks."""
    locks = {device: parse_lock(read_device(device)) for device in DEVICES}
    yield from check_locks(pins(ROOT / "constraints.txt"), locks, ("torch", "ray", "setuptools"))
    try:
        install_tools()
        for device in DEVICES:
            yield write_sbom(device)
        yield from check_audit()
    except (OSError, subprocess.SubprocessError) as error:
        yield Outcome("not checked", f"bills of materials and vulnerabilities: {error}")
    yield check_base(FOLDER / "base.env")
    yield from check_values(values)


def exit_code(verdicts: Sequence[str]) -> int:
    """Exit status: 1 if a check failed, otherwise 2 if something was not checked, otherwise 0."""
    return 1 if "failed" in verdicts else 2 if "not checked" in verdicts else 0


def _run(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, text=True, capture_output=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise subprocess.SubprocessError(f"{Path(command[0]).name} failed: {reason}")


def main(argv: list[str] | None = None) -> int:
    """Prints all outcomes; returns the exit status."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--values", type=Path, nargs="*", default=[], help="chart values files of a release"
    )
    arguments = parser.parse_args(argv)
    verdicts = []
    for verdict, text in outcomes(arguments.values):
        print(f"{verdict}: {text}", flush=True)
        verdicts.append(verdict)
    return exit_code(verdicts)


if __name__ == "__main__":
    sys.exit(main())
