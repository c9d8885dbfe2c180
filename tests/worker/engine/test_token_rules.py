"""Penalties, biases, masks and log-probabilities: their effects on outputs, with any batches,
chunks, pages, ranks and steps in flight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.checkpoints.dense import VOCAB_SIZE, write_checkpoint
from tests.support.engines.engine_driver import Engine, Outcome
from worker.protocol.messages import TokenLogprobs
from worker.protocol.sampling import SamplingParams

NUM_NEW = 28
SCARCE_TOKENS = 384
NEAR_TIE = 1e-4
STOPS = tuple(range(0, VOCAB_SIZE, 2))
BAD = (*((token,) for token in range(0, 60)), *((a, b) for a in range(60, 200) for b in (1, a)))
FEATURES: tuple[dict[str, object], ...] = (
    {"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 0},
    {"temperature": 1.0, "top_p": 0.9, "logit_bias": {3: 4.0, 7: -100.0, 11: 3.5}},
    {"temperature": 1.2, "allowed_token_ids": (5, 9, 100, 101, 102), "presence_penalty": 1.5},
    {"temperature": 0.9, "min_tokens": 17, "stop_token_ids": STOPS, "top_k": 300},
    {"temperature": 0.7, "bad_words_token_ids": BAD, "logprobs": 20},
    {"temperature": 0.9, "logprobs": 0, "logprob_token_ids": (7, 508, 0)},
    {"temperature": 1.0, "prompt_logprobs": 3, "logprobs": 4},
    {
        "temperature": 1.0,
        "min_p": 0.001,
        "repetition_penalty": 0.9,
        "frequency_penalty": 1.0,
        "min_tokens": 20,
        "stop_token_ids": STOPS,
        "bad_words_token_ids": BAD,
        "logit_bias": {4: 2.0},
        "logprobs": 2,
        "prompt_logprobs": 1,
    },
    {"temperature": 0.0},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("qwen3")
    return str(folder), write_checkpoint("qwen3", Path(folder))


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB_SIZE, n).tolist() for n in np.geomspace(3, 300, 18).astype(int)]


def make_params() -> list[SamplingParams]:
    return [
        SamplingParams(seed=i, max_tokens=NUM_NEW, ignore_eos=True, **FEATURES[i % len(FEATURES)])
        for i in range(18)
    ]


def test_outputs_are_bitwise_equal_in_every_setting(
    checkpoint: tuple[str, PreTrainedModel],
) -> None:
    prompts, params = make_prompts(), make_params()

    def outcomes(run: Callable[[Engine], list[Outcome]], **options: object) -> list[Outcome]:
        options = {"kv_cache_tokens": 16384, "batch_invariant": True, **options}
        with Engine(checkpoint[0], **options) as engine:
            return run(engine)

    def together(engine: Engine) -> list[Outcome]:
        return engine.outcomes(prompts, params)

    def one_by_one(engine: Engine) -> list[Outcome]:
        """Every other prompt alone, which includes each of the features."""
        pairs = list(zip(prompts, params, strict=True))[::2]
        return [engine.outcomes([prompt], [one])[0] for prompt, one in pairs]

    def scarce(engine: Engine) -> list[Outcome]:
        found = together(engine)
        assert engine.num_preemptions > 0, "pages were not scarce"
        return found

    hitting = outcomes(lambda engine: together(engine) and together(engine))
    assert all(len(one.token_ids) >= 17 for one in hitting)
    assert outcomes(one_by_one, enable_prefix_caching=False, overlap_depth=0) == hitting[::2]
    assert outcomes(together, overlap_depth=0, max_num_batched_tokens=48) == hitting
    assert outcomes(scarce, max_num_batched_tokens=32, kv_cache_tokens=SCARCE_TOKENS) == hitting

    def scarce_then_alone(engine: Engine) -> list[Outcome]:
        found = scarce(engine)
        assert one_by_one(engine) == found[::2]
        return found

    outcomes(scarce_then_alone, tensor_parallel_size=2, kv_cache_tokens=SCARCE_TOKENS)


def last_logits(model: PreTrainedModel, tokens: list[int], num_prompt: int) -> torch.Tensor:
    """Logits from which each token after the prompt was sampled."""
    with torch.inference_mode():
        return model(torch.tensor([tokens[:-1]])).logits[0, num_prompt - 1 :].float()


def expected_logits(
    raw: torch.Tensor, prompt: list[int], output: list[int], sampling: SamplingParams
) -> torch.Tensor:
    """One row by the parameters' documentation, token by token."""
    row = raw.tolist()
    known = {*prompt, *output}
    allowed = sampling.allowed_token_ids
    bad = {
        word[-1]
        for word in sampling.bad_words_token_ids
        if len(word) == 1 or list(word[:-1]) == output[-len(word) + 1 :]
    }
    for token in range(len(row)):
        early = len(output) < sampling.min_tokens and token in sampling.stop_token_ids
        if token in bad or early or (allowed is not None and token not in allowed):
            row[token] = float("-inf")
        row[token] += (sampling.logit_bias or {}).get(token, 0.0)
        if token in known:
            factor = sampling.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        count = output.count(token)
        row[token] -= count * sampling.frequency_penalty
        row[token] -= (count > 0) * sampling.presence_penalty
    return torch.tensor(row)


@pytest.mark.parametrize("depth", [0, 1])
def test_greedy_outputs_follow_the_documented_meaning(
    checkpoint: tuple[str, PreTrainedModel], depth: int
) -> None:
    folder, model = checkpoint
    prompts = [prompt[:20] for prompt in make_prompts()[6 : 6 + len(FEATURES)]]
    params = [
        msgspec.structs.replace(
            one, temperature=0.0, max_tokens=20, min_tokens=min(one.min_tokens, 9)
        )
        for one in make_params()[: len(FEATURES)]
    ]
    with Engine(folder, kv_cache_tokens=16384, overlap_depth=depth) as engine:
        outcomes = engine.outcomes(prompts, params)
    for prompt, sampling, outcome in zip(prompts, params, outcomes, strict=True):
        output = outcome.token_ids
        raw = last_logits(model, prompt + output, len(prompt))
        for index, token in enumerate(output):
            row = expected_logits(raw[index], prompt, output[:index], sampling)
            assert row[token] >= row.max() - NEAR_TIE
        if sampling.stop_token_ids:
            assert (outcome.finish_reason == "stop") == (output[-1] in STOPS)
            assert not set(output[:-1]) & set(STOPS)
            assert len(output) > sampling.min_tokens or outcome.finish_reason == "length"


def check_logprobs(found: TokenLogprobs, raw: torch.Tensor, token: int, num_top: int) -> None:
    expected = raw.log_softmax(-1)
    assert found.token_ids[0] == token
    rank = int((raw >= raw[token]).sum())
    assert abs(found.rank - rank) <= int(((raw - raw[token]).abs() < NEAR_TIE).sum()) - 1
    np.testing.assert_allclose(found.logprobs, expected[found.token_ids], atol=1e-4)
    np.testing.assert_allclose(found.logprobs[1:], expected.topk(num_top).values, atol=1e-4)


@pytest.mark.parametrize("chunk", [1024, 17])
def test_logprobs_are_the_models_own(checkpoint: tuple[str, PreTrainedModel], chunk: int) -> None:
    folder, model = checkpoint
    prompt = make_prompts()[11]
    sampling = SamplingParams(
        seed=1, max_tokens=8, ignore_eos=True, logprobs=5, prompt_logprobs=2, presence_penalty=2.0
    )
    named = SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0, logprob_token_ids=(7, 508, 0)
    )
    with Engine(folder, kv_cache_tokens=160, max_num_batched_tokens=chunk) as engine:
        engine.generate([prompt], SamplingParams(max_tokens=1))  # cached prefixes skip nothing
        outcome, read = engine.outcomes([prompt, prompt], [sampling, named])
    tokens = prompt + outcome.token_ids
    raw = last_logits(model, tokens, 1)
    assert outcome.prompt_logprobs is not None
    assert len(outcome.prompt_logprobs) == len(prompt) - 1
    assert len(outcome.logprobs) == 8
    for index, found in enumerate(outcome.prompt_logprobs + outcome.logprobs):
        num_top = 2 if index < len(prompt) - 1 else 5
        check_logprobs(found, raw[index], tokens[index + 1], num_top)
    [found] = read.logprobs
    assert found.token_ids == [*read.token_ids, 7, 508, 0]
    expected = raw[len(prompt) - 1].log_softmax(-1)[found.token_ids]
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)
