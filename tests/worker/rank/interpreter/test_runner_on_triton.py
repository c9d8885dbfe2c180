"""A runner with all ops on Triton samples transformers' tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints.dense import FEW_HEADS, SPECS, WINDOWED, write_checkpoint
from tests.support.checkpoints.families import SPECIMENS, write_specimen
from tests.support.checkpoints.specimen import Model, write
from tests.support.effort import IS_LONG
from tests.support.engines.plan_driver import Request, generate, make_runner

SHORT = {("llama", False), ("qwen3", True), ("qwen3-windows", False)}
"""Architectures that `make test` runs, with or without batch-invariant kernels: biases and a scaled
rotary embedding; norms of heads and tied embeddings; three groups of layers. Others only differ in
sizes, tables and multipliers, and run in `make check-long`."""
KINDS = (
    *("gemma4", "gemma4-images", "gemma4-small", "gemma3n", "llama4", "deepseek-v2-lite"),
    *("deepseek-v3", "mistral4", "longcat", "qwen2-moe", "glm4-moe", "ministral3", "glm4"),
    *("olmo2", "nemotron", "apertus", "deepseek-v3.2", "glm-5"),
)
FEW = {"gemma4": 12, "llama4": 30, "deepseek-v2-lite": 16}
"""Architectures in `make test`, and prompt tokens: over a page, or two chunks."""
NUM_NEW = 3 if IS_LONG else 2
"""Tokens of a request: the first from the prompt's last step, the others from decodes."""
LENGTH = 19 if IS_LONG else 12
WINDOW = 17 if IS_LONG else 9
"""Window in tokens: more than a page or two, but few programs."""


@pytest.mark.checks("triton", of=[*SPECS, *WINDOWED], against="transformers")
@pytest.mark.parametrize(
    ("name", "batch_invariant"),
    [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
        for case in (
            *((name, invariant) for name in SPECS for invariant in (False, True)),
            *((name, False) for name in WINDOWED),
            ("qwen3-windows", True),
        )
    ],
)
def test_logits_equal_transformers(name: str, batch_invariant: bool, tmp_path: Path) -> None:
    window = {"sliding_window": WINDOW} if name in WINDOWED else {}
    model = write_checkpoint(name, tmp_path, **FEW_HEADS, **window)
    length = WINDOW + 7 if name in WINDOWED else LENGTH
    check_tokens(tmp_path, model, length, batch_invariant=batch_invariant)


@pytest.mark.checks("triton", of=KINDS, against="transformers")
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in FEW else pytest.mark.long) for one in KINDS]
)
def test_layers_of_several_kinds(name: str, tmp_path: Path) -> None:
    """Heads of several sizes, some of which share pages by twos; chunks, the second of which starts
    with a prompt; latents, all or a selection; shared experts of the routed ones' size or smaller,
    gated or not; norms after blocks, and LayerNorm; activations without a gate."""
    model = write_specimen(name, tmp_path)
    check_tokens(tmp_path, model, 30 if IS_LONG else FEW.get(name, 30), batch_invariant=False)


@pytest.mark.long
def test_a_shared_expert_as_several_of_the_others(tmp_path: Path) -> None:
    """Computed with the routed experts, scaled by its gate."""
    specimen = SPECIMENS["qwen2-moe"]
    settings = {**specimen.settings, "shared_expert_intermediate_size": 64}
    model = write(replace(specimen, settings=settings), tmp_path)
    check_tokens(tmp_path, model, 30, batch_invariant=False)


def check_tokens(folder: Path, model: Model, length: int, *, batch_invariant: bool) -> None:
    """Chunks of a prompt, mixed steps, and a decode with random sampling in the same batch."""
    options = {"batch_invariant": batch_invariant, "cpu_backend": "torch", "page_size": 8}
    runner = make_runner(str(folder), **options)
    assert runner.model.native is None
    first = Request(prompt=list(range(5, 5 + length)), new_tokens=NUM_NEW)
    second = Request(
        prompt=[9, 4, 4], slot=2, arrival=1, new_tokens=NUM_NEW, temperature=0.8, top_p=0.9, seed=4
    )
    generate(runner, [first, second], chunk=len(first.prompt) - 8)
    for request in (first, second):
        with torch.inference_mode():
            sequence = torch.tensor([request.prompt + request.tokens[:-1]])
            expected = model(sequence).logits[0, len(request.prompt) - 1 :]
        torch.testing.assert_close(torch.stack(request.logits), expected, atol=1e-4, rtol=0)
    assert first.tokens == [int(row.argmax()) for row in first.logits]
