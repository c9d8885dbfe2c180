from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.interpreted("tests/worker/engine/interpreter")
def test_runner_on_triton_kernels_under_interpreter(interpreted: tuple[int, str]) -> None:
    status, output = interpreted
    assert status == 0, output
