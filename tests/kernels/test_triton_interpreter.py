from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_triton_kernels_match_references_under_interpreter() -> None:
    """Spawn the interpreter tests, as their variable must be set before Triton is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    root = Path(__file__).parents[2]
    folder = Path(__file__).parent / "interpreter"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(folder)],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
