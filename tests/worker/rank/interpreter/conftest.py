"""Triton reads TRITON_INTERPRET at import: these tests need a separate process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import registry
from tests.support.interpreter import IS_INTERPRETED, hasten_interpreter

collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]

if IS_INTERPRETED:
    hasten_interpreter()


@pytest.fixture(autouse=True)
def _on_triton() -> Iterator[None]:
    torch.set_num_threads(1)
    with registry.using("triton"):
        yield
