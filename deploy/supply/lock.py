"""`make lock`: writes the images' lock files, with versions and hashes.

cuda.txt has torch from PyPI and its CUDA dependencies, cpu.txt has torch from PyTorch's index, and
common.txt has everything else. An image installs common.txt and one of the other two. Versions come
from constraints.txt. Distributions that constraints.txt does not pin keep their versions unless
--upgrade is given. tools.txt has the tools of `make check-supply`.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from cluster.cli.parser import CommandParser
from deploy.supply.index import (
    MACHINES,
    IndexUnreachableError,
    Lock,
    Locked,
    NoSolutionError,
    compiled,
    parse_lock,
    pins,
    render_lock,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
PYTHON = "3.11"
"""Python version of the images."""
EXTRAS = ("tracing", "plots")
"""Extras that images install."""
TOOLS = ("cyclonedx-bom", "pip-audit")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OF_CUDA = ("nvidia-", "cuda-")
"""Prefixes of torch's CUDA-only dependencies."""
HEADER = "Written by `make lock` for Python {python} on Linux, {machines}.\n{text}"


def resolve(arguments: Sequence[str], home: Path, kept: Lock, lines: str) -> dict[str, Locked]:
    """uv's resolution, which must be the same for all machines.

    Args:
        arguments: additional arguments of `uv pip compile`.
        home: see `compiled`.
        kept: versions to keep if possible.
        lines: requirements in addition to those in `arguments`.

    Raises:
        NoSolutionError: there is no solution, or it differs between machines.
        IndexUnreachableError: the index did not respond.
    """
    found = []
    for machine in MACHINES:
        output = home / f"{machine}.txt"
        output.write_text(render_lock(kept, ""))
        options = ["--generate-hashes", "--output-file", str(output), *arguments]
        compiled(options, home=home, python=PYTHON, machine=machine, lines=lines)
        found.append(parse_lock(output.read_text()))
    if any(other != found[0] for other in found):
        names = {
            name for lock in found for name, entry in lock.items() if entry != found[0].get(name)
        }
        raise NoSolutionError(
            f"versions differ between {' and '.join(MACHINES)}: {', '.join(sorted(names))}"
        )
    return found[0]


def resolve_project(home: Path, kept: Lock) -> tuple[Lock, Lock]:
    """Contents of common.txt and cuda.txt: the dependencies and the build requirements."""
    project = ROOT / "pyproject.toml"
    requires = tomllib.loads(project.read_text())["build-system"]["requires"]
    arguments = ["--constraints", str(ROOT / "constraints.txt"), str(project)]
    arguments += [word for extra in EXTRAS for word in ("--extra", extra)]
    found = resolve(arguments, home, kept, "\n".join(requires))
    cuda = {name for name in found if name == "torch" or name.startswith(OF_CUDA)}
    common = {name: entry for name, entry in found.items() if name not in cuda}
    return common, {name: found[name] for name in cuda}


def resolve_torch(home: Path, index: str, common: Lock) -> Lock:
    """torch from one of PyTorch's indexes, and its dependencies that are not in common.txt."""
    torch_version = f"torch=={pins(ROOT / 'constraints.txt')['torch']}"
    found = resolve(["--default-index", index], home, {}, torch_version)
    return {name: entry for name, entry in found.items() if name not in common}


def read(name: str) -> dict[str, Locked]:
    """Reads the lock file with this name; empty if it does not exist yet."""
    path = FOLDER / f"{name}.txt"
    return parse_lock(path.read_text()) if path.is_file() else {}


def write(name: str, lock: Lock, text: str) -> None:
    """Writes the lock file with this name, replacing the previous one."""
    comment = HEADER.format(python=PYTHON, machines=" and ".join(MACHINES), text=text)
    (FOLDER / f"{name}.txt").write_text(render_lock(lock, comment))
    print(f"{name}.txt: {len(lock)} distributions")


def update_torch(home: Path, index: str, common: Lock) -> None:
    """Writes the lock file of torch from PyTorch's index; keeps the old file if the index is
    unreachable.

    Raises:
        IndexUnreachableError: the index is unreachable, and no lock file has the same version.
    """
    name = index.rstrip("/").rpartition("/")[2]
    try:
        write(name, resolve_torch(home, index, common), f"torch from PyTorch's index for {name}.")
    except IndexUnreachableError as error:
        kept = read(name).get("torch")
        torch_version = pins(ROOT / "constraints.txt")["torch"]
        if kept is None or kept.version.partition("+")[0] != torch_version:
            raise
        print(f"{name}.txt: kept, {index} did not respond: {str(error).splitlines()[0]}")


def main(argv: list[str] | None = None) -> int:
    """Writes the lock files; returns the exit status."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--upgrade",
        action="store_true",
        help="upgrade everything that constraints.txt does not pin",
    )
    parser.add_argument(
        "--torch-index",
        default=TORCH_INDEX,
        help="PyTorch's index for a device; its last part names the file (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        kept = {} if arguments.upgrade else read("common") | read("cuda")
        kept_tools = {} if arguments.upgrade else read("tools")
        try:
            common, cuda = resolve_project(home, kept)
            write("common", common, "All distributions except torch and its CUDA dependencies.")
            write("cuda", cuda, "torch from PyPI, and its CUDA dependencies.")
            update_torch(home, arguments.torch_index, common)
            tools = resolve([], home, kept_tools, "\n".join(TOOLS))
            write("tools", tools, "Tools that `make check-supply` runs.")
        except (IndexUnreachableError, NoSolutionError) as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
