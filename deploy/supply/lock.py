"""`make lock`: what images install, by version and hash.

common.txt is all but torch and what comes with it, cuda.txt is torch of the public index, cpu.txt
that of PyTorch's own index; an image takes the first and one of the others. Versions are those of
constraints.txt; what it does not name stays as it is unless --upgrade says otherwise. tools.txt is
what `make check-supply` runs.
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
"""What images have besides the dependencies themselves."""
TOOLS = ("cyclonedx-bom", "pip-audit")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OF_CUDA = ("nvidia-", "cuda-")
"""What names begin with that torch brings for CUDA alone."""
HEADER = "Written by `make lock` for Python {python} on Linux, {machines}.\n{text}"


def resolve(arguments: Sequence[str], home: Path, kept: Lock, lines: str) -> dict[str, Locked]:
    """What uv chooses for all machines alike.

    Args:
        arguments: for `uv pip compile`.
        home: see `compiled`.
        kept: versions that stay where they can.
        lines: requirements besides those that `arguments` name.

    Raises:
        NoSolutionError: there is none, or not the same for all.
        IndexUnreachableError: nobody could tell.
    """
    found = []
    for machine in MACHINES:
        output = home / f"{machine}.txt"
        output.write_text(render_lock(kept, ""))
        options = ["--generate-hashes", "--output-file", str(output), *arguments]
        compiled(options, home=home, python=PYTHON, machine=machine, lines=lines)
        found.append(parse_lock(output.read_text()))
    if any(other != found[0] for other in found):
        names = {name for lock in found for name, one in lock.items() if one != found[0].get(name)}
        raise NoSolutionError(f"machines would differ in {', '.join(sorted(names))}")
    return found[0]


def resolve_project(home: Path, kept: Lock) -> tuple[Lock, Lock]:
    """What common.txt and cuda.txt hold: the dependencies, and what builds the project itself."""
    project = ROOT / "pyproject.toml"
    requires = tomllib.loads(project.read_text())["build-system"]["requires"]
    arguments = ["--constraints", str(ROOT / "constraints.txt"), str(project)]
    arguments += [word for extra in EXTRAS for word in ("--extra", extra)]
    found = resolve(arguments, home, kept, "\n".join(requires))
    cuda = {name for name in found if name == "torch" or name.startswith(OF_CUDA)}
    common = {name: one for name, one in found.items() if name not in cuda}
    return common, {name: found[name] for name in cuda}


def resolve_torch(home: Path, index: str, common: Lock) -> Lock:
    """torch of one of PyTorch's own indexes, with what it brings that is not in common.txt."""
    wanted = f"torch=={pins(ROOT / 'constraints.txt')['torch']}"
    found = resolve(["--default-index", index], home, {}, wanted)
    return {name: one for name, one in found.items() if name not in common}


def read(name: str) -> dict[str, Locked]:
    """The lock of that name as it is; empty where there is none yet."""
    path = FOLDER / f"{name}.txt"
    return parse_lock(path.read_text()) if path.is_file() else {}


def write(name: str, lock: Lock, text: str) -> None:
    """Replaces it."""
    comment = HEADER.format(python=PYTHON, machines=" and ".join(MACHINES), text=text)
    (FOLDER / f"{name}.txt").write_text(render_lock(lock, comment))
    print(f"{name}.txt: {len(lock)} distributions")


def update_torch(home: Path, index: str, common: Lock) -> None:
    """Writes torch of PyTorch's index; where that cannot be reached, keeps the same version.

    Raises:
        IndexUnreachableError: there is none to keep.
    """
    name = index.rstrip("/").rpartition("/")[2]
    try:
        write(name, resolve_torch(home, index, common), f"torch of PyTorch's index of {name}.")
    except IndexUnreachableError as error:
        kept = read(name).get("torch")
        wanted = pins(ROOT / "constraints.txt")["torch"]
        if kept is None or kept.version.partition("+")[0] != wanted:
            raise
        print(f"{name}.txt: kept, as {index} does not answer: {str(error).splitlines()[0]}")


def main(argv: list[str] | None = None) -> int:
    """Writes the locks; the exit code."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest of what is no pin")
    parser.add_argument(
        "--torch-index",
        default=TORCH_INDEX,
        help="PyTorch's index of a device, which names the file (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        kept = {} if arguments.upgrade else read("common") | read("cuda")
        kept_tools = {} if arguments.upgrade else read("tools")
        try:
            common, cuda = resolve_project(home, kept)
            write("common", common, "All but torch and what comes with it.")
            write("cuda", cuda, "torch of the public index, with CUDA.")
            update_torch(home, arguments.torch_index, common)
            tools = resolve([], home, kept_tools, "\n".join(TOOLS))
            write("tools", tools, "What `make check-supply` runs.")
        except (IndexUnreachableError, NoSolutionError) as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
