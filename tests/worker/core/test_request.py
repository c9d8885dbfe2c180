from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from worker.core.request import IllegalMove, Request, RequestState
from worker.protocol.messages import Submit
from worker.protocol.sampling import SamplingParams

LEGAL = {
    ("WAITING", "RUNNING"),
    ("WAITING", "FINISHED_STOPPED"),
    ("WAITING", "FINISHED_LENGTH"),
    ("WAITING", "FINISHED_ERROR"),
    ("WAITING", "FINISHED_ABORTED"),
    ("RUNNING", "PREEMPTED"),
    ("RUNNING", "FINISHED_STOPPED"),
    ("RUNNING", "FINISHED_LENGTH"),
    ("RUNNING", "FINISHED_ABORTED"),
    ("RUNNING", "FINISHED_ERROR"),
    ("PREEMPTED", "RUNNING"),
    ("PREEMPTED", "FINISHED_STOPPED"),
    ("PREEMPTED", "FINISHED_ABORTED"),
    ("PREEMPTED", "FINISHED_ERROR"),
}


def make_request(
    num_tokens: int = 5, *, num_resumed: int = 0, sampling: SamplingParams | None = None
) -> Request:
    submit = Submit(
        request_id="r",
        gateway_id="g",
        prompt=np.arange(num_tokens, dtype="<i4").tobytes(),
        sampling=sampling or SamplingParams(seed=1),
        num_resumed=num_resumed,
    )
    return Request(submit, arrival=1, arrived_s=0.0, max_total_tokens=100, eos_token_ids=(2,))


def test_only_transitions_of_the_table_are_possible() -> None:
    for before, after in product(RequestState, RequestState):
        request = make_request()
        request.state = before
        if (before.name, after.name) in LEGAL:
            request.move_to(after)
            assert request.state is after
        else:
            with pytest.raises(IllegalMove, match=before.name):
                request.move_to(after)
            assert request.state is before


def test_finish_reasons_are_the_apis() -> None:
    reasons = {}
    for state in RequestState:
        request = make_request()
        request.state = state
        reasons[state.name] = request.finish_reason
    assert {name: reason for name, reason in reasons.items() if reason} == {
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH": "length",
        "FINISHED_ABORTED": "abort",
        "FINISHED_ERROR": "error",
    }


def test_max_tokens_none_means_up_to_the_models_maximum() -> None:
    assert make_request(sampling=SamplingParams(max_tokens=None)).limit == 100
    assert make_request(sampling=SamplingParams(max_tokens=500)).limit == 100
    assert make_request(sampling=SamplingParams(max_tokens=7)).limit == 12


def test_resumed_tokens_count_as_output() -> None:
    request = make_request(8, num_resumed=3, sampling=SamplingParams(max_tokens=7))
    assert (request.num_prompt, request.num_output, request.limit) == (5, 3, 12)


def test_end_tokens_follow_ignore_eos() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=(9,))
    assert make_request().end_token_ids == {2}
    assert make_request(sampling=params).end_token_ids == {9}


def test_completions_of_a_request_share_their_end_tokens() -> None:
    stops = tuple(range(100, 200))
    first, second = (
        make_request(sampling=SamplingParams(seed=seed, stop_token_ids=stops)) for seed in (1, 2)
    )
    assert first.end_token_ids is second.end_token_ids
    assert first.end_token_ids == {2, *stops}


def test_nothing_is_pending_if_tokens_in_flight_reach_the_limit() -> None:
    request = make_request(5, sampling=SamplingParams(max_tokens=2))
    assert request.num_pending == 5
    request.num_computed, request.num_placeholders = 5, 1
    assert request.num_pending == 1
    request.num_computed, request.num_placeholders = 6, 2
    assert request.num_pending == 0
