"""A tiny chat checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_chat(folder: Path) -> Path:
    """Writes Qwen3 with random weights, a byte vocabulary, a chat template and 2,048 positions;
    returns the folder."""
    tokenizer = _write_tokenizer(folder)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**_sizes(tokenizer))).save_pretrained(folder)
    return folder


def write_tiny_experts(folder: Path) -> Qwen3MoeForCausalLM:
    """Writes a tiny chat checkpoint with experts, which two ranks can share equally; returns the
    model in fp32."""
    sizes = _sizes(_write_tokenizer(folder))
    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # initial weights would make experts almost irrelevant
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def write_letters(folder: Path, tokens: Sequence[bytes], merges: Sequence[str]) -> None:
    """Writes a tokenizer with the given tokens to a checkpoint.

    Args:
        folder: the checkpoint's folder.
        tokens: tokens in printable ASCII; the empty one is the end token.
        merges: merged tokens of two letters.
    """
    names = [token.decode().replace(" ", "\u0120") or "<end>" for token in tokens]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(one[0], one[1]) for one in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def _write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def _sizes(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }
