"""gpt-oss with MXFP4 experts gives the results of its dequantized checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import BlockScales, dequantize
from tests.support.checkpoints.families import write_specimen
from tests.support.engines.plan_driver import Request, generate, make_runner
from tests.support.engines.threaded_group import run_ranks
from worker.models.config.model_config import load_model_config
from worker.models.layers.tensor_parallel import TensorParallelGroup

PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": PLAIN}


@pytest.mark.parametrize("place", range(32))
def test_each_place_of_a_block(place: int) -> None:
    """The first of two values is in the low bits; their highest bit is the sign."""
    for code, value in enumerate((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)):
        for sign in (0, 8):
            codes = torch.zeros(1, 32, dtype=torch.uint8)
            codes[0, 16 + place // 2] = (code | sign) << (4 * (place % 2))
            scaling = BlockScales(torch.tensor([[1.0, 0.25]]), 32, 0, "e2m1")
            expected = torch.zeros(1, 64)
            expected[0, 32 + place] = (-value if sign else value) / 4
            assert torch.equal(dequantize(codes, scaling, dtype=torch.float32), expected)


def multiplied_out(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values fp32 [..., 32 * B] of blocks [..., B, 16] and exponents [..., B]."""
    scaling = BlockScales(2.0 ** (scales.float() - 127), 32, 0, "e2m1")
    return dequantize(blocks.flatten(-2), scaling, dtype=torch.float32)


def write_mxfp4(folder: Path, dequantized: Path) -> None:
    """Writes both checkpoints: random experts of 64 columns, rows first in the former."""
    write_specimen("gpt-oss", folder)
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(key).shape
        inputs = 64 if key.endswith("down_proj") else inputs
        outputs = outputs if key.endswith("down_proj") else 128
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors[f"{key}_blocks"], tensors[f"{key}_scales"] = blocks, scales
        values = multiplied_out(blocks, scales)
        plain[key] = values.transpose(1, 2).contiguous()
    for key in [key for key in tensors if key.endswith("gate_up_proj_bias")]:
        tensors[key] = plain[key] = torch.randn(tensors[key].shape[0], 128)
    raw = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 64}
    dequantized.mkdir()
    for path, content, further in (
        (folder, tensors, {"quantization_config": QUANTIZATION}),
        (dequantized, plain, {}),
    ):
        save_file(content, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(raw | further))


@pytest.mark.checks(formats=["gpt-oss-mxfp4"], of="gpt-oss", against="the same weights dequantized")
def test_logits_are_those_of_the_dequantized_checkpoint(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(4)
    write_mxfp4(tmp_path / "mxfp4", tmp_path / "plain")
    found = []
    for folder in ("mxfp4", "plain"):
        request = Request(prompt=[5, 17, 30, 4, 8])
        generate(make_runner(str(tmp_path / folder)), [request])
        found.append(request)
    assert found[0].tokens == found[1].tokens
    assert torch.equal(torch.stack(found[0].logits), torch.stack(found[1].logits))

    def work(group: TensorParallelGroup) -> Request:
        request = Request(prompt=[5, 17, 30, 4, 8])
        folder = str(tmp_path / "mxfp4")
        generate(make_runner(folder, group, tensor_parallel_size=2), [request])
        return request

    for request in run_ranks(2, work):
        torch.testing.assert_close(request.logits, found[0].logits, atol=1e-4, rtol=0)

    def work_of_four(group: TensorParallelGroup) -> None:
        make_runner(str(tmp_path / "mxfp4"), group, tensor_parallel_size=4)

    with pytest.raises(ValueError, match="leaves 16 columns"):
        run_ranks(4, work_of_four)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"modules_to_not_convert": PLAIN[1:]}, "without self_attn"),
        ({"modules_to_not_convert": [*PLAIN, "model.layers.3.mlp"]}, r"model\.layers\.3\.mlp"),
        ({"bits": 4}, "bits"),
    ],
)
def test_other_mxfp4_is_rejected_with_its_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    write_specimen("gpt-oss", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = QUANTIZATION | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=named):
        load_model_config(str(tmp_path))
