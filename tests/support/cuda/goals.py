"""Projected metrics for the performance goals on one H100; nothing is measured.

    python -m tests.support.cuda.goals

Uses the counts and rates of `projection`, and additional rates: instructions for decoding quantized
weights, FP8 matmuls, and attention of long prompts.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from tests.support.cuda.budgets import BUDGETS
from tests.support.cuda.counted import Counts, count_launches, write_config
from tests.support.cuda.projection import BANDWIDTH, GAP_S, PRODUCTS, layer_weights, model_counts
from tests.support.worker.real_configs import load_corpus
from worker.models.config.model_config import ModelConfig, load_model_config
from worker.models.layers.kv_cache import layout_of
from worker.models.loading.loader import build_without_weights

INSTRUCTIONS = 0.5 * 132 * 128 * 1.755e9
"""Instructions per second of all threads: half of the peak of 132 multiprocessors of 128 lanes at
1.755 GHz."""
DECODING = {"int4": 3.9, "fp8": 4.3}
"""Instructions per weight in matmuls with few rows; `test_projection.py` counts them in the sm_90
binaries."""
WIDTHS = {"int4": (4 + 32 / 128) / 8, "fp8": 1.0, "bf16": 2.0}
"""Bytes per weight; for int4 including an fp32 scale per 128 input features."""
FP8_PRODUCTS = 1190e12
"""FLOP/s of large FP8 matmuls with per-row scales, measured by tritonbench (#1149) on an H100: the
same fraction of the peak as PRODUCTS."""
PROMPT_ATTENTION = 369e12
"""FLOP/s of attention among the tokens of a prompt, measured on an H100."""
_MEMORY = 0.9 * 80e9
_SHARED_BYTES = 4e9
"""Bytes for activations, graphs and libraries."""
_QWEN35 = "Qwen3_5ForCausalLM"


class Goal(NamedTuple):
    """A projected metric and its goal."""

    what: str
    value: float
    unit: str
    goal: float
    is_maximum: bool
    """Whether the metric must be at most the goal; otherwise, it must be at least the goal."""

    @property
    def holds(self) -> bool:
        return self.value <= self.goal if self.is_maximum else self.value >= self.goal


def decode_ms(
    weights: Literal["int4", "fp8", "bf16"], rows: int, *, key_bytes: int = 2, context: int = 1024
) -> float:
    """Milliseconds of a decode step of Llama-3.1-8B with quantized layers.

    Args:
        weights: format of the layers' weights; the LM head is bfloat16.
        rows: number of requests.
        key_bytes: bytes per KV cache element.
        context: tokens per request.
    """
    model, counts = model_counts("LlamaForCausalLM")
    layers, head = model.num_layers * layer_weights(model), model.vocab_size * model.hidden_size
    seconds = layers * WIDTHS[weights] / BANDWIDTH
    if weights != "bf16":
        seconds = max(seconds, layers * DECODING[weights] / INSTRUCTIONS)
    seconds = max(seconds, 2 * rows * layers / PRODUCTS) + 2 * head / BANDWIDTH
    seconds += rows * context * _token_bytes(model, key_bytes) / BANDWIDTH
    launches = model.num_layers * counts.layer + counts.rest + counts.draw
    return 1e3 * (seconds + GAP_S * launches)


def fp8_prompt_rate(num_tokens: int) -> float:
    """Prefill throughput of Llama-3.1-8B with FP8 weights and activations, in tokens per second."""
    model, _ = model_counts("LlamaForCausalLM")
    seconds = 2 * layer_weights(model) / FP8_PRODUCTS
    seconds += 2 * num_tokens * model.num_heads * model.head_dim / PROMPT_ATTENTION
    seconds += _elementwise_bytes(model) / BANDWIDTH
    return 1 / (model.num_layers * seconds)


def _elementwise_bytes(model: ModelConfig) -> int:
    """Bytes per token and layer of all launches except matmuls and attention: two norms (two
    inputs, the sum in bfloat16, and codes), in-place head norms and rotary embedding, the
    activation, and codes of the attention output."""
    attention = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return (
        2 * (2 * 2 + 2 + 1) * model.hidden_size
        + 2 * 2 * attention
        + (2 * 2 + 1) * model.intermediate_size
        + (2 + 1) * model.num_heads * model.head_dim
    )


def fp8_cache_gain() -> float:
    """Throughput gain from an FP8 KV cache, in percent, for Llama-3.1-8B in bfloat16, prompts and
    outputs of 1,024 tokens, and as many requests as fit into memory. The number of requests does
    not affect prefill time."""
    prompt = 1024 / 34_200  # seconds, at the rate measured on an H100
    seconds = []
    for key_bytes in (2, 1):
        model, _ = model_counts("LlamaForCausalLM")
        weights = model.num_layers * layer_weights(model)
        weights += 2 * model.vocab_size * model.hidden_size
        free = _MEMORY - _SHARED_BYTES - 2 * weights
        rows = int(free / (1536 * _token_bytes(model, key_bytes)))
        step = 1e-3 * decode_ms("bf16", rows, key_bytes=key_bytes, context=1536)
        seconds.append(prompt + 1024 * step / rows)
    return 100 * (seconds[0] / seconds[1] - 1)


def _token_bytes(model: ModelConfig, key_bytes: int) -> int:
    """Bytes of a token's keys and values in all layers."""
    return 2 * key_bytes * model.num_layers * model.num_kv_heads * model.head_dim


class Hybrid(NamedTuple):
    """Counts of Qwen3.5-9B."""

    config: ModelConfig
    counts: Counts
    """Launches of one period of layers."""
    num_weights: int
    """Number of weights, without the embedding."""
    state_bytes: int
    """Bytes of a request's states."""


@cache
def hybrid() -> Hybrid:
    """Qwen3.5-9B's counts, with the real classes."""
    real = next(one for one in load_corpus() if one.name == BUDGETS[_QWEN35].model)
    with tempfile.TemporaryDirectory() as folder:
        real.write(Path(folder))
        config = load_model_config(folder, weights=False)
        model = build_without_weights(config, 1)
        slots = {slot.name: slot.destination.numel() for slot in model.weight_slots()}
        counts = count_launches(write_config(Path(folder), dict(real.config), num_layers=4))
    embedding = config.vocab_size * config.hidden_size
    num_weights = sum(slots.values()) - (0 if config.tie_word_embeddings else embedding)
    return Hybrid(config, counts, num_weights, layout_of(model.layers).state_bytes)


def hybrid_decode_ms(rows: int) -> float:
    """Milliseconds of a decode step of Qwen3.5-9B with 1,024 tokens per request. Each state is read
    and written."""
    model, counts, num_weights, state_bytes = hybrid()
    full = model.num_layers // len(counts.layers)
    keys = full * 2 * 2 * model.num_kv_heads * model.head_dim
    num_bytes = 2 * num_weights + rows * (2 * state_bytes + 1024 * keys)
    launches = full * sum(counts.layers) + counts.rest + counts.draw
    return 1e3 * (num_bytes / BANDWIDTH + GAP_S * launches)


def hybrid_prompt_rate(num_tokens: int) -> float:
    """Prefill throughput of Qwen3.5-9B in tokens per second: its matmuls, full attention, and the
    matmuls of linear attention's chunks of 64 tokens, which are a small part."""
    model, counts, num_weights, _ = hybrid()
    full = model.num_layers // len(counts.layers)
    layers = num_weights - model.vocab_size * model.hidden_size
    seconds = 2 * layers / PRODUCTS
    seconds += 2 * num_tokens * full * model.num_heads * model.head_dim / PROMPT_ATTENTION
    # Per value head of 128 x 128: matmuls with the state and among a piece's tokens, in TF32 and 16
    # bits, at 1/8 of PRODUCTS.
    pieces = (model.num_layers - full) * 32 * 2 * (3 * 128 * 128 + 4 * 64 * 128)
    seconds += pieces / (PRODUCTS / 8)
    return 1 / seconds


def goals() -> list[Goal]:
    """All projected metrics with their goals."""
    return [
        Goal("INT4 (groups of 128), 1 x 1k, decode step", decode_ms("int4", 1), "ms", 3.2, True),
        Goal("FP8, 32 x 1k, decode step", decode_ms("fp8", 32), "ms", 5.2, True),
        Goal("FP8, prompts of 8k", fp8_prompt_rate(8192), "tokens/s", 50_000, False),
        Goal("FP8 KV cache, 1k + 1k, throughput gain over bf16", fp8_cache_gain(), "%", 40, False),
        Goal("Qwen3.5-9B, 1 x 1k, decode step", hybrid_decode_ms(1), "ms", 7.5, True),
        Goal("Qwen3.5-9B, prompts of 8k", hybrid_prompt_rate(8192), "tokens/s", 25_000, False),
    ]


def table() -> str:
    """All projected metrics as Markdown rows."""
    lines = ["| projected, not measured | | goal |", "|---|---|---|"]
    for one in goals():
        sign, digits = ("≤" if one.is_maximum else "≥"), 1 if one.unit == "ms" else 0
        value = round(one.value, -2) if one.value > 1000 else one.value
        lines.append(
            f"| {one.what} | {value:,.{digits}f} {one.unit} | {sign} {one.goal:,g} {one.unit} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
