"""Copies vLLM's tests together with the stand-ins, and runs them in a separate pytest."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.vllm_shim import plugin, servers

PLUGIN = "rayfleet_shim"
TIMEOUT_S = 600
"""Timeout per test in seconds; reached only if a test hangs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of one test, or of a file whose tests could not be collected."""

    test: str
    """Test id, such as `entrypoints/openai/test_x.py::test_y[parameters]`."""
    outcome: str
    """passed, skipped or failed."""
    detail: str
    """Reason for the skip or failure."""


def files_with_tests(checkout: Path, folders: Sequence[str]) -> list[str]:
    """Files with tests in folders of a checkout's `tests`, as relative paths.

    Raises:
        ValueError: there are no tests.
    """
    tests = checkout / "tests"
    found = sorted(
        path.relative_to(tests).as_posix()
        for folder in folders
        for path in (tests / folder).rglob("test_*.py")
    )
    if not found:
        raise ValueError(
            f"{checkout} has no {folders[0]} in its folder tests: give a checkout of vLLM, or an "
            "unpacked source distribution"
        )
    return found


def lay_out(checkout: Path, folders: Sequence[str], stage: Path) -> None:
    """Copies folders of a checkout's `tests`, the files that they need, and the stand-ins.

    Args:
        checkout: folder that contains the folder `tests`.
        folders: paths relative to `tests`.
        stage: empty target folder.
    """
    for folder in folders:
        shutil.copytree(checkout / "tests" / folder, stage / "tests" / folder, dirs_exist_ok=True)
        for parent in Path(folder).parents:
            for name in ("__init__.py", "conftest.py"):
                # The top-level ones are about vLLM's own code.
                if parent != Path() and (file := checkout / "tests" / parent / name).is_file():
                    shutil.copy(file, stage / "tests" / parent / name)
    (stage / "tests" / "__init__.py").write_text("")
    (stage / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(servers.__file__, stage / "tests" / "utils.py")
    shutil.copy(plugin.__file__, stage / f"{PLUGIN}.py")


def run(
    stage: Path, files: Sequence[str], *, url: str, models: Sequence[str], model: Path
) -> list[Outcome]:
    """Runs copied tests against a server.

    Args:
        stage: folder of the copies.
        files: paths relative to its `tests`.
        url: URL of the server without a path.
        models: served model names.
        model: folder of the served model.

    Raises:
        RuntimeError: pytest failed to run.
    """
    results = stage / "results.jsonl"
    results.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-q"),
        *("--tb=short", "--continue-on-collection-errors"),
        *(f"--timeout={TIMEOUT_S}", *(f"tests/{file}" for file in files)),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(stage),
        servers.URL_VARIABLE: url,
        servers.MODELS_VARIABLE: ",".join(models),
        plugin.MODEL_VARIABLE: str(model),
        plugin.RESULTS_VARIABLE: str(results),
    }
    with (stage / "pytest.log").open("w") as log:
        code = subprocess.run(
            command, cwd=stage, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    # 1: tests failed; 2: files could not be collected, which is an outcome.
    if code not in (0, 1, 2):
        raise RuntimeError(
            f"pytest ended with {code}: {(stage / 'pytest.log').read_text()[-2000:]}"
        )
    return read_outcomes(results)


def read_outcomes(results: Path) -> list[Outcome]:
    """Outcomes recorded by the plugin; for tests that are recorded twice, the worse one."""
    found: dict[str, Outcome] = {}
    for line in results.read_text().splitlines():
        entry = json.loads(line)
        outcome = Outcome(**{**entry, "test": entry["test"].removeprefix("tests/")})
        if outcome.test not in found or outcome.outcome == "failed":
            found[outcome.test] = outcome
    return list(found.values())
