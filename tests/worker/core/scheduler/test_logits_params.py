"""Logits parameters: shared values are computed once for all completions of a request."""

from __future__ import annotations

from array import array

from tests.support.worker.fake_device import make_submit
from worker.core.request import Request
from worker.core.scheduler.logits_params import logits_params
from worker.plan.plan import LogitsParams
from worker.protocol.sampling import SamplingParams


def params_of(name: str, sampling: SamplingParams) -> LogitsParams:
    submit = make_submit(name, [3, 4, 5, 6])
    submit.sampling = sampling
    request = Request(submit, arrival=1, arrived_s=0, max_total_tokens=99, eos_token_ids=())
    params = logits_params(request)
    assert params is not None
    return params


def test_allowed_tokens_are_packed_once_for_all_completions() -> None:
    sampling = SamplingParams(allowed_token_ids=tuple(range(1000)))
    first, second = (params_of(name, sampling).allowed_token_ids for name in "ab")
    assert first is second
    assert array("i", first).tolist() == list(range(1000))
