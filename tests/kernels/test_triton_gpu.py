from __future__ import annotations

import pytest
import torch
from triton_cases import CASES, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_kernel_on_gpu(case: Case, dtype: torch.dtype) -> None:
    case("cuda", dtype)
