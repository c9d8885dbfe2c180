"""Whatever a client sends: 200 or an error in OpenAI's shape; workers see sound submits only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.api import body as body_module
from worker.wire.chat_template import ChatTemplate
from worker.wire.limits import refuse
from worker.wire.messages import Submit, SubmitBatch

numbers = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**400]),
    st.floats(-2, 2),
    st.sampled_from([0.0, 1e-320, 1e-30, 1e-6, 1.0, 1e30, 1e308, float("nan"), float("inf")]),
)
texts = st.one_of(
    st.text(max_size=8), st.sampled_from(["", "hi", "\ud800", "a\udfffb", "\0", "🙂"])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
token_ids = st.lists(st.one_of(st.integers(-2, 1002), numbers, st.booleans()), max_size=4)
FIELDS = {
    "stream": st.booleans(),
    "stream_options": st.sampled_from([{}, {"include_usage": True}, {"include_usage": None}]),
    "n": st.integers(-1, 3) | numbers,
    "max_tokens": numbers,
    "max_completion_tokens": numbers,
    "temperature": numbers,
    "top_p": numbers,
    "top_k": numbers,
    "min_p": numbers,
    "min_tokens": numbers,
    "seed": numbers,
    "stop": texts | st.lists(texts, max_size=6),
    "stop_token_ids": token_ids,
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "return_token_ids": st.booleans(),
    "cache_salt": texts,
    "priority": numbers,
    "add_special_tokens": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["thinking", "self", "bos_token", "messages", "strftime_now", "x y"]),
        anything,
        max_size=2,
    ),
    "response_format": anything,
    "tools": anything,
    "logprobs": scalars | numbers | st.booleans(),
    "top_logprobs": numbers,
    "prompt_logprobs": numbers,
    "echo": st.booleans(),
    "frequency_penalty": numbers,
    "presence_penalty": numbers,
    "repetition_penalty": numbers,
    "logit_bias": st.dictionaries(texts | st.integers(-2, 2000).map(str), numbers, max_size=3),
    "bad_words": st.lists(texts, max_size=4),
    "allowed_token_ids": token_ids,
    "model": st.sampled_from(["stub", "alias", "nope", None, 5]),
}
prompts = st.one_of(texts, token_ids, st.lists(st.one_of(texts, token_ids), max_size=3), anything)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "x", None, 3])},
        optional={
            "content": texts | st.just([{"type": "text", "text": "a"}]) | anything,
            "name": anything,
        },
    ),
    max_size=2,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Mostly sound requests with a few fields that may be anything."""
    chat = draw(st.booleans())
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    if not chat:
        body = {"prompt": "hi"}
    if draw(st.integers(0, 2)) == 0:
        body = {"messages": draw(messages)} if chat else {"prompt": draw(prompts)}
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True)):
        body[name] = draw(anything if draw(st.integers(0, 5)) == 0 else FIELDS[name])
    return ("/v1/chat/completions" if chat else "/v1/completions"), body


@pytest.fixture
def loop(rig: Any) -> Iterator[asyncio.AbstractEventLoop]:
    """Hypothesis calls plain functions: they drive the gateway's loop themselves."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(rig.start())
    yield loop
    loop.run_until_complete(rig.stop())
    rig.tasks.clear()
    del rig.gateway
    loop.close()


def check_error(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]


def check_submit(submit: Submit, rig: Any) -> None:
    ids = np.frombuffer(submit.prompt, "<i4")
    assert len(ids)
    assert ids.min() >= 0
    assert ids.max() < rig.workers[0].info.vocab_size
    assert submit.sampling.n == 1
    assert submit.seed is not None
    assert refuse(submit, rig.workers[0].info) is None


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(request=bodies())
def test_any_body_is_answered_and_reaches_workers_sound(
    rig: Any, loop: asyncio.AbstractEventLoop, request: tuple[str, dict[str, Any]]
) -> None:
    path, body = request
    content = json.dumps(body)  # with NaN and lone surrogates, as Python clients write them
    response = loop.run_until_complete(rig.client.post(path, content=content))
    submits = rig.submits()
    for worker in rig.workers:
        worker.batches.clear()
    for submit in submits:
        check_submit(submit, rig)
    if response.status_code == 200:
        assert submits
        assert '"error"' not in response.text
    else:
        check_error(response)


async def test_deep_nesting_is_a_bad_request(rig):
    await rig.start()
    for text in ("[" * 100_000, '{"prompt":' + "[" * 5000 + "]" * 5000 + "}"):
        check_error(await rig.client.post("/v1/completions", content=text))


async def test_depth_that_decodes_but_exhausts_a_template_is_a_bad_request(rig):
    await rig.start()
    tokenizer = rig.gateway.model("stub").tokenizer
    tokenizer._template = ChatTemplate("{{ messages[0] | tojson }}", {})
    for depth in (10, 300, 900, 980, 2000):
        nested = "[" * depth + "]" * depth
        body = '{"messages": [{"role": "user", "content": "x", "name": %s}]}'
        response = await rig.client.post("/v1/chat/completions", content=body.replace("%s", nested))
        if response.status_code != 200:
            check_error(response)


async def test_bodies_have_a_limit(rig, monkeypatch):
    monkeypatch.setattr(body_module, "MAX_BODY_BYTES", 1000)
    await rig.start()
    assert (await rig.complete("x" * 100)).status_code == 200
    response = await rig.complete("x" * 1000)
    check_error(response)
    assert response.status_code == 413

    async def chunks():
        for _ in range(20):
            yield b"x" * 100

    response = await rig.client.post("/v1/completions", content=chunks())
    check_error(response)
    assert response.status_code == 413
    for length in ("1001", "9" * 5000):
        headers = {"content-length": length}
        response = await rig.client.post("/v1/completions", content=b"{}", headers=headers)
        assert response.status_code == 413


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 129}, "n"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": ["x" * 100_000]}, "stop"),
        ({"stop_token_ids": [1] * 100_000}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
        ({"cache_salt": "x" * 10_000}, "cache_salt"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 2**70}, "top_k"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [[1], [1000]]}, "prompt"),
    ],
)
async def test_absurd_values_are_named(rig, fields, param):
    await rig.start()
    body = {"prompt": "hi", **fields}
    response = await rig.client.post("/v1/completions", json=body)
    check_error(response)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert rig.submits() == []


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 400])
async def test_numbers_that_are_none(rig, literal):
    await rig.start()
    content = f'{{"prompt": "hi", "temperature": {literal}}}'
    check_error(await rig.client.post("/v1/completions", content=content))


@pytest.mark.parametrize("text", ["\\ud800", "\\ud800abcdefgh", "a\\udfffb", "\\ud83dx"])
async def test_lone_surrogates_are_no_text(rig, text):
    await rig.start()
    for name in ("prompt", "cache_salt", "stop"):
        body = f'{{"prompt": "hi", "{name}": "{text}"}}'
        check_error(await rig.client.post("/v1/completions", content=body))
    assert rig.submits() == []


async def test_a_submit_that_is_too_long_to_encode_harms_no_other(rig):
    """Every value of a batch that rides together must fit the wire."""
    await rig.start()
    works = [rig.complete(max_tokens=2**70), rig.complete(), rig.complete(top_k=2**65)]
    responses = await asyncio.gather(*works)
    assert [response.status_code for response in responses] == [400, 200, 400]
    for batch in (batch for worker in rig.workers for batch in worker.batches):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=SubmitBatch) == batch
