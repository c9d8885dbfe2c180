"""Ranges of sampling parameters, and their encoding."""

from __future__ import annotations

import re

import msgspec
import pytest

from worker.protocol.sampling import SamplingParams


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty must be in [-2, 2]"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be in [-2, 2]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in (0, 100]"),
        ({"logprobs": 21}, "logprobs must be in [0, 20]"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be in [0, 20]"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be in [0, "),
        ({"logit_bias": {1: float("nan")}}, "logit_bias must be numbers"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        ({"allowed_token_ids": [2**31]}, "allowed_token_ids must be in [0, "),
        ({"bad_words": [""]}, "bad_words must not contain empty strings"),
        ({"min_tokens": 20}, "min_tokens (20) must not exceed max_tokens (16)"),
        ({"min_p": 1.5}, "min_p must be in [0, 1]"),
    ],
)
def test_values_out_of_range_are_named(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        SamplingParams(**fields)


def test_shorthands_of_python_callers_are_normalized() -> None:
    params = SamplingParams(
        bad_words="no", logit_bias={5: 1000, 6: -1000}, allowed_token_ids=[3, 1, 3], stop=["a"]
    )
    assert params.bad_words == ("no",)
    assert params.logit_bias == {5: 100.0, 6: -100.0}
    assert params.allowed_token_ids == (3, 1)
    assert SamplingParams(logit_bias={}).logit_bias is None
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params


def test_default_parameters_are_omitted_in_encoding() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {}
