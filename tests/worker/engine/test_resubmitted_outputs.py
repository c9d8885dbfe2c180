"""A request that is resumed on another worker generates what a single worker would have."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.checkpoints.dense import VOCAB_SIZE
from tests.support.engines.engine_driver import Engine, Outcome
from worker.core.grammar import matcher_state
from worker.protocol.messages import Submit
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams
from worker.protocol.text.tokenizer import load_tokenizer

PROMPT = [3 + (7 * i) % (VOCAB_SIZE - 3) for i in range(21)]
NUM_TOKENS = 24


def sampling(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 9, **fields})


CASES = {
    "greedy": sampling(temperature=0.0, logprobs=2),
    "seeded": sampling(temperature=1.0, top_k=40, top_p=0.95, logprobs=0),
    "penalties": sampling(
        temperature=1.0,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias={5: 2.0, 6: -3.0},
    ),
    "min_tokens": sampling(
        temperature=1.5,
        min_tokens=NUM_TOKENS - 4,
        ignore_eos=False,
        stop_token_ids=tuple(range(0, VOCAB_SIZE, 3)),
    ),
    "bad_words": sampling(temperature=0.0, bad_words_token_ids=((5, 6), (7,), (8, 9, 10))),
    "prompt_logprobs": sampling(temperature=0.0, prompt_logprobs=1),
}


def go_on(
    engine: Engine,
    name: str,
    params: SamplingParams,
    done: list[int],
    prompt: list[int] = PROMPT,
) -> Outcome:
    """Output of a worker for a request with `done` tokens from another one."""
    submit = Submit(
        request_id=name,
        gateway_id="g",
        prompt=np.asarray(prompt + done, "<i4").tobytes(),
        sampling=params,
        attempt=1,
        num_resumed=len(done),
        is_resubmitted=True,
    )
    outputs = {name: Outcome()}
    engine.core.receive(engine._with_grammar(submit))
    while engine.core.grammars.num_due:
        engine.core.take_grammars(wait=True)
    engine.drain(outputs)
    return outputs[name]


@pytest.mark.parametrize("case", CASES)
def test_it_continues_as_if_nothing_had_happened(folder: str, case: str) -> None:
    params = CASES[case]
    with Engine(folder, batch_invariant=True, kv_cache_tokens=4096) as engine:
        [whole] = engine.outcomes([PROMPT], params)
    total = len(whole.token_ids)
    assert total > NUM_TOKENS - 5
    with Engine(folder, batch_invariant=True, kv_cache_tokens=4096) as engine:
        for cut in (1, 2, 11, total - 1):
            rest = go_on(engine, f"{case}{cut}", params, whole.token_ids[:cut])
            assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
            assert rest.logprobs == whole.logprobs[cut:]
            assert rest.finish_reason == whole.finish_reason
            assert rest.prompt_logprobs is None  # the gateway has them


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize(
    "form", [{"regex": r"\d{3}-\d{4}( ext \d{1,3})?"}, {"choice": ["yes, sir"]}]
)
def test_its_grammar_continues_where_it_was(
    form: dict[str, object], is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its masks are computed within the steps or, if slow, beside them."""
    if is_slow:
        monkeypatch.setattr(matcher_state, "SLOW_S", -1.0)
    model = "deploy/models/demo"
    prompt = load_tokenizer(model).encode("Tell me")
    params = sampling(
        temperature=1.0,
        ignore_eos=False,
        structured_outputs=StructuredOutputsParams(**form),  # type: ignore[arg-type]
    )
    with Engine(model, batch_invariant=True, kv_cache_tokens=4096) as engine:
        [whole] = engine.outcomes([prompt], params)
        assert whole.finish_reason == "stop"
        for cut in range(1, len(whole.token_ids)):
            rest = go_on(engine, f"again{cut}", params, whole.token_ids[:cut], prompt)
            assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
            assert (rest.finish_reason, rest.error) == ("stop", None)
            assert rest.ended_by_grammar == whole.ended_by_grammar
