"""`make serve` installs no development tools; other targets add them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of a clean clone that `make` reads."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def plan(folder: Path, target: str) -> str:
    """Commands that `make` would run in a folder."""
    command = ["make", "--dry-run", "PYTHON=python3", target]
    # `make test` runs this, and a nested make prints its directory.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=folder, env=outside, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_serving_installs_no_development_tools(clone: Path) -> None:
    commands = plan(clone, "serve")
    assert "pip install -c constraints.txt -e ." in commands
    assert "[dev]" not in commands
    assert commands.rstrip().endswith("rayfleet serve")


@pytest.mark.parametrize("target", ["install", "style", "unit", "test", "check-long"])
def test_tests_install_both(clone: Path, target: str) -> None:
    commands = plan(clone, target)
    assert commands.index("-e .\n") < commands.index("-e '.[dev]'")


def test_what_is_installed_is_not_installed_again(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / ".serving").touch()
    assert "pip" not in plan(clone, "serve")
    assert "[dev]" in plan(clone, "unit")
    (clone / ".venv" / ".installed").touch()
    assert "pip" not in plan(clone, "unit")
