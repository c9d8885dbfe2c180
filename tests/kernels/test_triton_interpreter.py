from __future__ import annotations

import pytest

from tests.support.interpreter import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.randomized  # with more variants
def test_triton_kernels_match_references_under_interpreter() -> None:
    run_interpreted("tests/kernels/interpreter")
