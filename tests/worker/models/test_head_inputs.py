"""The command that finds out which hidden states an MTP head reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.head_inputs import head_inputs
from tests.support.checkpoints.mtp import write_with_head
from worker.models.config.model_config import load_model_config


def write_copying_head(folder: Path, *, reads_normed: bool) -> None:
    """Writes a model whose head predicts with the model's own hidden state, which is right where a
    text repeats a token."""
    write_with_head("mimo", folder)
    file = folder / "model.safetensors"
    tensors, mtp = load_file(file), load_model_config(str(folder)).mtp
    assert mtp is not None
    norm = tensors["model.norm.weight"]
    norm.normal_(generator=torch.Generator().manual_seed(3))
    size = len(norm)
    tensors[f"{mtp.projection}.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    tensors[f"{mtp.hidden_norm}.weight"] = torch.ones(size) if reads_normed else norm.clone()
    tensors[f"{mtp.final_norm}.weight"] = torch.ones(size)
    for key, tensor in tensors.items():
        if key.startswith(mtp.layer) and key.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("reads_normed", [True, False])
def test_the_input_of_a_head_is_found(tmp_path: Path, reads_normed: bool) -> None:
    write_copying_head(tmp_path, reads_normed=reads_normed)
    found = head_inputs(str(tmp_path), [[token] * 20 for token in range(8, 40)], max_model_len=64)
    assert found.num_positions == 32 * 19
    shares = (found.after_norm, found.before_norm)
    right, wrong = shares if reads_normed else shares[::-1]
    assert right > 0.9
    assert wrong < 0.5
    assert str(found).endswith(f"it reads those {'after' if reads_normed else 'before'} the norm")
