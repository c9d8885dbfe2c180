from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.interpreted("tests/kernels/interpreter")
def test_triton_kernels_match_references_under_interpreter(interpreted: tuple[int, str]) -> None:
    status, output = interpreted
    assert status == 0, output
