"""rayfleet's wheel, and an environment that contains rayfleet only from the wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support.paths import ROOT

PACKAGES = ("cluster", "router", "worker", "kernels")
PIP_TIMEOUT_S = 900


def build_wheel(folder: Path) -> Path:
    """Builds the wheel from a copy, because the source tree may contain results of earlier
    builds."""
    source = folder / "source"
    clean = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*PACKAGES, "deploy/models/demo"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=clean)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    _pip("wheel", "--quiet", *options, str(source))
    (built,) = folder.glob("*.whl")
    return built


def install_wheel(wheel: Path, environment: Path) -> Path:
    """Creates the environment; returns its folder of executables. The wheel's dependencies come
    from the current environment through a .pth file, so that torch is not installed twice."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    _pip("--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    subprocess.run(command, check=True, timeout=PIP_TIMEOUT_S)
