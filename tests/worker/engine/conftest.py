"""A small checkpoint that engine tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints.dense import write_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a Llama; tests with it compute on one thread."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", Path(path))
    return str(path)
