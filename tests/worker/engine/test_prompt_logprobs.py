"""Prompt log-probabilities are returned chunk by chunk, each position once."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.support.checkpoints.adapters import merge_adapter, write_adapter
from tests.support.checkpoints.dense import VOCAB_SIZE, write_checkpoint
from tests.support.engines.adapter_engine import adapter_of, engine_with
from tests.support.engines.engine_driver import Engine, Outcome
from worker.protocol.messages import TokenLogprobs
from worker.protocol.sampling import SamplingParams

CHUNK = 16
SCORED = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
URGENT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def prompt_of(length: int) -> list[int]:
    return [random.Random(length).randrange(VOCAB_SIZE) for _ in range(length)]


def whole(folder: str, prompt: list[int]) -> list[TokenLogprobs] | None:
    with Engine(folder, batch_invariant=True, kv_cache_tokens=512) as engine:
        [outcome] = engine.outcomes([prompt], SCORED)
    return outcome.prompt_logprobs


def test_a_delta_holds_at_most_a_chunk(folder: str) -> None:
    prompt = prompt_of(100)
    sizes: list[int] = []
    scored: list[TokenLogprobs] = []
    with Engine(
        folder, batch_invariant=True, kv_cache_tokens=512, max_num_batched_tokens=CHUNK
    ) as engine:
        engine.submit(prompt, SCORED)
        while engine.core.has_work():
            for delta in engine.core.step().deltas.get("g", ()):
                if delta.prompt_logprobs is not None:
                    sizes.append(len(delta.prompt_logprobs))
                    scored += delta.prompt_logprobs
    assert max(sizes) <= CHUNK, f"deltas of {sizes} positions"
    assert scored == whole(folder, prompt)


def test_a_prefill_that_is_preempted_sends_no_position_twice(folder: str) -> None:
    prompt = prompt_of(200)
    outputs: dict[str, Outcome] = {}
    with Engine(
        folder, batch_invariant=True, kv_cache_tokens=256, max_num_batched_tokens=CHUNK
    ) as engine:
        request_id, outcome = engine.submit(prompt, SCORED)
        outputs[request_id] = outcome
        while len(outcome.prompt_logprobs or ()) < 4 * CHUNK:
            engine.step(outputs)
        outputs.update([engine.submit(prompt_of(150), URGENT, priority=9)])
        engine.drain(outputs)
        assert engine.num_preemptions == 1
    assert outcome.prompt_logprobs == whole(folder, prompt)


def test_a_prompt_of_one_token_has_none(folder: str) -> None:
    assert whole(folder, [5]) in ([], None)


def test_adapters_of_the_lm_head_are_applied_to_prompts(tmp_path: Path) -> None:
    """Log-probabilities are those of transformers with merged weights, in a batch of adapters."""
    torch.set_num_threads(1)
    base = tmp_path / "base"
    write_checkpoint("qwen3", base, tie_word_embeddings=False)
    folders = [
        write_adapter(
            base, tmp_path / str(slot), 2 + slot, targets=("lm_head", "v_proj"), seed=slot
        )
        for slot in (1, 2)
    ]
    merged = [merge_adapter(base, folder, tmp_path / f"m{folder.name}") for folder in folders]
    prompts = [[slot + 3 * slot, *prompt_of(20 + slot)] for slot in range(3)]
    assert [adapter_of(prompt, 2) for prompt in prompts] == [0, 1, 2]
    options = {"cpu_backend": "torch", "enable_lora_embeddings": True, "kv_cache_tokens": 512}
    with engine_with(folders)(str(base), max_num_batched_tokens=CHUNK, **options) as engine:
        outcomes = engine.outcomes(prompts, SCORED)
    for prompt, outcome, folder in zip(prompts, outcomes, [base, *merged], strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for found, row, token in zip(
            outcome.prompt_logprobs or (), expected, prompt[1:], strict=False
        ):
            assert found.token_ids[0] == token
            np.testing.assert_allclose(found.logprobs, row[found.token_ids], atol=1e-4)
        assert len(outcome.prompt_logprobs or ()) == len(prompt) - 1
