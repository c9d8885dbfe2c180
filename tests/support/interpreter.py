"""Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT


def run_interpreted(folder: str) -> None:
    """A pytest run under Triton's interpreter, whose variable must be set before the import."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", folder],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
