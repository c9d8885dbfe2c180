from __future__ import annotations

import pytest

from tests.support.interpreter import TIMEOUT_S, run_interpreted

pytest.importorskip("triton", reason="Triton is not installed")

FOLDERS = ("tests/kernels/interpreter", "tests/worker/rank/interpreter")


@pytest.mark.randomized  # with more variants and longer prompts
@pytest.mark.timeout(TIMEOUT_S + 200)
@pytest.mark.parametrize("selection", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_kernels_and_runners_match_references_under_interpreter(selection: str) -> None:
    """All in one process, since imports take 5 s of CPU time."""
    run_interpreted(*FOLDERS, selection=selection)
