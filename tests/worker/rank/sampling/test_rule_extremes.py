"""No logits processors of clients crash a rank: every sample is a valid token, every score is
returned."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import cases
from worker.core.request import Request
from worker.core.scheduler.logits_params import logits_params
from worker.plan.plan import Admit, Plan, PlannedRow, StepResult
from worker.protocol.messages import Submit
from worker.protocol.sampling import SamplingParams
from worker.rank.batch import BatchBuilder
from worker.rank.sampler import sample
from worker.rank.tables import DeviceTables

VOCAB = 37
CPU = torch.device("cpu")
tokens = st.integers(0, VOCAB - 1)
penalties = st.sampled_from([-2.0, -1e-30, 0.0, 0.5, 2.0])

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 1.0]),
    top_p=st.sampled_from([1e-30, 0.5, 1.0]),
    seed=st.just(3),
    max_tokens=st.just(50),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1) | tokens, max_size=40),
    frequency_penalty=penalties,
    presence_penalty=penalties,
    repetition_penalty=st.sampled_from([1e-30, 0.5, 1.0, 100.0]),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=VOCAB),
    bad_words_token_ids=st.lists(st.lists(tokens, min_size=1, max_size=6), max_size=5),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1),
    logprobs=st.none() | st.integers(0, 20),
)


def admit(slot: int, sampling: SamplingParams, token_ids: list[int], num_output: int) -> Admit:
    prompt = np.asarray(token_ids, "<i4").tobytes()
    submit = Submit(
        request_id="r", gateway_id="g", prompt=prompt, sampling=sampling, num_resumed=num_output
    )
    request = Request(submit, arrival=1, arrived_s=0, max_total_tokens=99, eos_token_ids=(2, 99))
    rules = logits_params(request)
    return Admit(slot, prompt, sampling.temperature, 0, sampling.top_p, 0.0, 3, rules)


def make_tables(admits: list[Admit]) -> DeviceTables:
    tables = DeviceTables(
        max_num_seqs=8, max_model_len=64, page_size=4, vocab_size=VOCAB, device=CPU
    )
    tables.apply(Plan(1, admits, [], []))
    return tables


@settings(max_examples=cases(150), deadline=None)
@given(
    rows=st.lists(
        st.tuples(params, st.lists(tokens, min_size=1, max_size=20), st.integers(0, 19)),
        min_size=1,
        max_size=4,
    ),
    broken=st.sampled_from([None, float("inf"), float("-inf"), float("nan")]),
)
def test_every_draw_is_a_token_and_rows_do_not_depend_on_each_other(
    rows: list[tuple[SamplingParams, list[int], int]], broken: float | None
) -> None:
    admits = [
        admit(slot, sampling, token_ids, min(num_output, len(token_ids) - 1))
        for slot, (sampling, token_ids, num_output) in enumerate(rows)
    ]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1)) * 5
    if broken is not None:
        logits[:, 0] = broken

    def run(chosen: list[int]) -> StepResult:
        tables = make_tables([])
        own = [PlannedRow(slot, len(rows[slot][1]) - 1, 1, 1) for slot in chosen]
        batch = BatchBuilder(tables).build(Plan(1, [admits[slot] for slot in chosen], [], own))
        assert batch is not None
        assert batch.sampling is not None
        output = sample(logits[chosen].clone(), batch.sampling, tables)
        assert output.tokens is not None
        return output.add_logprobs(StepResult(1, output.tokens.tolist(), 0.0))

    together = run(list(range(len(rows))))
    assert all(0 <= token < VOCAB for token in together.token_ids)
    for slot, (sampling, _, _) in enumerate(rows):
        alone = run([slot])
        assert alone.token_ids == [together.token_ids[slot]]
        found = together.logprobs and together.logprobs[slot]
        assert (found is not None) == (sampling.logprobs is not None)
        if broken is None and found is not None:
            assert alone.logprobs == [found]


def test_counts_follow_the_draws_and_start_anew_with_the_slot() -> None:
    sampling = SamplingParams(frequency_penalty=1.0, max_tokens=50)
    first, again = admit(1, sampling, [4, 5, 6, 6], 2), admit(1, sampling, [5, 5, 7], 1)
    tables = make_tables([first])
    state = tables.sampling
    table = state._penalties
    assert table._counts is not None
    assert table._in_prompt is not None
    for drawn in (6, 8):
        rules = state.gather(np.array([[0, 0, 3, 1], [1, 3, 1, 1]]))
        assert rules is not None
        state.count(torch.tensor([9, drawn]), rules)
    assert table._counts[1].nonzero().flatten().tolist() == [6, 8]
    assert table._counts[1, 6] == 3
    assert table._in_prompt[1].nonzero().flatten().tolist() == [4, 5]
    tables.apply(Plan(2, [again], [], []))
    assert table._counts[1].nonzero().flatten().tolist() == [7]
    assert table._in_prompt[1].nonzero().flatten().tolist() == [5]
    assert state.gather(np.array([[0, 0, 3, 1]])) is None
