from __future__ import annotations

import pytest
import torch

from tests.support.kernels.triton_cases import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_kernel_under_interpreter(case: Case) -> None:
    case("cpu", torch.float32)
