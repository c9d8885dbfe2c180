"""Qwen3-MoE equals transformers', autoregressively: chunks, decodes, dense layers among sparse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.engines.plan_driver import Request, generate, make_runner


@pytest.mark.parametrize("normalize", [True, False])
def test_logits_equal_transformers(normalize: bool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=normalize,
        mlp_only_layers=[1],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "layers" in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path)
    runner = make_runner(str(tmp_path))
    assert runner.model.native is None
    request = Request(prompt=list(range(3, 40)), new_tokens=5)
    generate(runner, [request, Request(prompt=[5, 9], slot=1, new_tokens=3)], chunk=16)
    with torch.inference_mode():
        sequence = torch.tensor([request.prompt + request.tokens[:-1]])
        expected = model(sequence).logits[0, len(request.prompt) - 1 :]
    torch.testing.assert_close(torch.stack(request.logits), expected, atol=1e-4, rtol=0)
