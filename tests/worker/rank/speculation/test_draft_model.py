"""Unsupported draft models are rejected before weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints.dense import write_checkpoint
from tests.support.engines.plan_driver import make_runner
from worker.rank import loaded_model


def test_a_draft_model_with_windows_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_checkpoint("qwen2", target)
    write_checkpoint("qwen2-window", draft)
    monkeypatch.delattr(loaded_model, "load_weights")
    options = {"speculative_method": "draft", "speculative_model": str(draft)}
    with pytest.raises(ValueError, match=r"sliding windows \(48 tokens\) .* --max-model-len 48"):
        make_runner(str(target), **options)
