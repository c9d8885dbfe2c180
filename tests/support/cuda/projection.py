"""Projected step times on an H100, not measured.

    python -m tests.support.cuda.projection

Launches, bytes of weights, keys and values, and keys of the longest attention program are counted,
with the real classes on tensors without storage. The rates below are assumed. A step takes the time
to move its bytes at the memory bandwidth, or to compute its matmuls if that takes longer, plus a
gap per launch. For a peer, the step has the number of launches of other engines.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support.cuda.budgets import BUDGETS
from tests.support.cuda.counted import Counts, count_launches, write_config
from tests.support.kernels.schedule_cases import NUM_SMS, STEPS
from tests.support.worker.real_configs import load_corpus
from worker.models.config.model_config import ModelConfig, load_model_config

BANDWIDTH = 3.0e12
"""Achieved memory bandwidth of an H100 SXM in bytes per second; the data sheet says 3.35e12."""
PRODUCTS = 600e12
"""Achieved bfloat16 FLOP/s of large matmuls; the data sheet says 989e12."""
GAP_S = 1.5e-6
"""Seconds between two kernels of a graph, in addition to the rates above: launch latency and tails,
1 to 2 microseconds on an H100."""
PROMPT_ATTENTION = (250e12, 550e12)
"""FLOP/s of attention within a prompt on an H100, as published for Triton kernels and for
FlashAttention 3, which peers use."""
PEER_LAYER = {"LlamaForCausalLM": 9.5, "Qwen3ForCausalLM": 9.5, "Qwen3MoeForCausalLM": 16.5}
"""Launches per layer of peers: 9 to 10, or 15 to 18 with experts. Outside of layers, peers are
assumed to need as many launches as this engine."""
_BYTES = 2
"""Bytes per weight, key or value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The projected step."""

    architecture: str
    label: str
    rows: int
    context: int
    """Total number of positions over all rows."""
    longest_walk: int = 0
    """Keys of the longest attention program; 0 if all programs are equal."""


STEPS_PROJECTED: Sequence[Step] = (
    *(
        Step(architecture=name, label=f"{rows} x 1k", rows=rows, context=rows << 10)
        for name in PEER_LAYER
        for rows in (1, 32, 256)
    ),
    Step(
        architecture="LlamaForCausalLM",
        label="64 rows, one of 100k",
        rows=64,
        context=63_000 + 100_000,
        longest_walk=STEPS["a row of 100k among 64"][0].keys,
    ),
)


class Projection(NamedTuple):
    """Projection of one step."""

    step: Step
    launches: int
    peer_launches: int
    work_ms: float
    """Time for bytes and matmuls, which is the same for a peer."""

    @property
    def ms(self) -> float:
        return self.work_ms + 1e3 * GAP_S * self.launches

    @property
    def peer_ms(self) -> float:
        return self.work_ms + 1e3 * GAP_S * self.peer_launches


def project(step: Step) -> Projection:
    """Projects the step's time."""
    model, counts = model_counts(step.architecture)
    rest = counts.rest + counts.draw
    launches = model.num_layers * counts.layer + rest
    peers = round(model.num_layers * PEER_LAYER[step.architecture]) + rest
    return Projection(step, launches, peers, 1e3 * _work_s(model, step))


def _work_s(model: ModelConfig, step: Step) -> float:
    """Seconds for bytes and matmuls."""
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    in_all_tokens = model.num_layers * model.hidden_size * heads
    in_all_tokens += model.vocab_size * model.hidden_size
    read = multiplied = in_all_tokens
    own = model.num_layers * 3 * model.hidden_size
    if model.moe is None:
        read, multiplied = (size + own * model.intermediate_size for size in (read, multiplied))
    else:
        chosen, count = model.moe.top_k, model.moe.num_experts
        touched = count * (1 - (1 - chosen / count) ** step.rows)
        read += round(own * model.moe.intermediate_size * touched)
        multiplied += own * model.moe.intermediate_size * chosen
    products = max(_BYTES * read / BANDWIDTH, 2 * step.rows * multiplied / PRODUCTS)
    per_key = 2 * _BYTES * model.head_dim
    walks = (
        model.num_kv_heads * step.context * per_key / BANDWIDTH,
        # One program has the bandwidth of one multiprocessor.
        step.longest_walk * per_key * NUM_SMS / BANDWIDTH,
    )
    return products + model.num_layers * max(walks)


@cache
def model_counts(architecture: str) -> tuple[ModelConfig, Counts]:
    """Model of the architecture's budget, and the launches of its steps."""
    name = BUDGETS[architecture].model
    real = next(one for one in load_corpus() if one.name == name)
    with tempfile.TemporaryDirectory() as folder:
        real.write(Path(folder))
        config = load_model_config(folder, weights=False)
        counts = count_launches(write_config(Path(folder), dict(real.config), num_layers=2))
    return config, counts


def layer_weights(model: ModelConfig) -> int:
    """Weights of a layer without experts."""
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    return model.hidden_size * (heads + 3 * model.intermediate_size)


def prompt_ms(num_tokens: int, attention: float) -> float:
    """Milliseconds for a prompt of Llama, given the FLOP/s of attention, which cannot be
    counted."""
    model, _ = model_counts("LlamaForCausalLM")
    products = 2 * num_tokens * model.num_layers * layer_weights(model) / PRODUCTS
    scores = 2 * num_tokens**2 * model.num_layers * model.num_heads * model.head_dim
    return 1e3 * (products + scores / attention)


def table() -> str:
    """All steps as Markdown rows."""
    lines = [
        "| projected, not measured | launches (peers) | ms (peers) |",
        "|---|---|---|",
    ]
    for one in map(project, STEPS_PROJECTED):
        model = BUDGETS[one.step.architecture].model.rpartition("/")[2]
        lines.append(
            f"| {model}, {one.step.label} | {one.launches} ({one.peer_launches}) "
            f"| {one.ms:.2f} ({one.peer_ms:.2f}) |"
        )
    slow, quick = (prompt_ms(8192, rate) for rate in PROMPT_ATTENTION)
    lines.append(f"| Llama-3.1-8B-Instruct, a prompt of 8k | | {slow:.0f} to {quick:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
