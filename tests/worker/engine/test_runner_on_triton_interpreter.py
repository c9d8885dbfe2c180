from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_runner_on_triton_kernels_under_interpreter() -> None:
    """Spawn the interpreter tests, as their variable must be set before Triton is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
         str(Path(__file__).parent / "interpreter")],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
