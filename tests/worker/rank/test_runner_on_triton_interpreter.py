from __future__ import annotations

import pytest

from tests.support.interpreter import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.randomized  # with longer prompts
@pytest.mark.parametrize("selection", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_runner_on_triton_kernels_under_interpreter(selection: str) -> None:
    run_interpreted("tests/worker/rank/interpreter", selection)
