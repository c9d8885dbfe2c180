"""LoRA adapters as PEFT saves them: logits and tokens of PEFT's own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.dense import VOCAB_SIZE, write_checkpoint
from tests.support.engines.adapter_engine import load_adapters
from tests.support.engines.plan_driver import Request, generate, make_runner
from worker.models.config.peft import read_peft_config

NUM_TOKENS = 5
FORMS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "MLP of one layer, rsLoRA": {
        "r": 8,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
        "layers_to_transform": [1],
        "use_rslora": True,
    },
    "all linear, patterns": {
        "r": 3,
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 16, "0.self_attn.o_proj": 1},
        "alpha_pattern": {"down_proj": 9, r"model\.layers\.0\.self_attn\.k_proj": 1},
    },
    "embedding and LM head": {
        "r": 5,
        "target_modules": ["embed_tokens", "lm_head", "v_proj"],
        "rank_pattern": {"lm_head": 2},
        "use_rslora": True,
    },
}
"""Configurations by what they adapt."""


def save(base: Path, folder: Path, seed: int = 0, **config: Any) -> torch.nn.Module:
    """Saves an adapter with random weights by PEFT; returns PEFT's model with it."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    settings = {"lora_alpha": 6, "task_type": "CAUSAL_LM", **config}
    found = peft.get_peft_model(model, peft.LoraConfig(**settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in found.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:  # zeros at first
                weight.normal_(0.0, 0.1)
    found.save_pretrained(folder)
    return found


@torch.inference_mode()
def decode(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their logits [n, vocab]."""
    tokens, rows = list(prompt), []
    for _ in range(NUM_TOKENS):
        rows.append(model(torch.tensor([tokens])).logits[0, -1])
        tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(rows)


def test_logits_equal_those_of_peft(tmp_path: Path) -> None:
    """All forms in one batch, and a request without an adapter. Embedding and LM head are tied, but
    not their adapters; PEFT saves their weights, too."""
    torch.set_num_threads(1)
    base = tmp_path / "base"
    write_checkpoint("qwen3", base)
    folders = [tmp_path / str(number) for number in range(len(FORMS))]
    models = [
        save(base, folder, seed, **form)
        for seed, (folder, form) in enumerate(zip(folders, FORMS.values(), strict=True))
    ]
    options = {"enable_lora": True, "enable_lora_embeddings": True, "max_loras": len(FORMS)}
    runner = make_runner(str(base), cpu_backend="torch", **options)
    load_adapters(runner, folders)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, VOCAB_SIZE, (len(FORMS) + 1, 19), generator=generator).tolist()
    requests = [
        Request(prompt=prompt, slot=number, adapter=number, new_tokens=NUM_TOKENS)
        for number, prompt in enumerate(prompts)
    ]
    generate(runner, requests)
    models[0].disable_adapter_layers()
    expected = [decode(models[0], prompts[0])]
    models[0].enable_adapter_layers()
    expected += [decode(*pair) for pair in zip(models, prompts[1:], strict=True)]
    for request, (tokens, logits) in zip(requests, expected, strict=True):
        assert request.tokens == tokens
        torch.testing.assert_close(torch.stack(request.logits), logits, atol=1e-4, rtol=0)


def test_modules_to_save_and_dora_are_rejected(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_checkpoint("qwen3", base)
    modules = {"r": 2, "target_modules": ["q_proj"]}
    for key, value in (("modules_to_save", ["lm_head"]), ("use_dora", True)):
        save(base, tmp_path / key, **modules, **{key: value})
        with pytest.raises(ValueError, match=f"{key} .* is not supported: train without"):
            read_peft_config(tmp_path / key, 16)
