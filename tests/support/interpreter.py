"""Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT

TIMEOUT_S = 1000
"""A minute on an idle machine."""


def run_interpreted(folder: str, selection: str = "not long") -> None:
    """A pytest run under Triton's interpreter, whose variable must be set before the import.

    Args:
        folder: of the tests.
        selection: by markers, as pytest's `-m` takes it.
    """
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            selection,
            folder,
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
