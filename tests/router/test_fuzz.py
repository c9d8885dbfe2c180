"""Any input gets a 200 or an error in OpenAI's format; workers only receive valid submits."""

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

from router.api.http import body as body_module
from router.api.openai.protocol import ChatRequest, CompletionRequest
from tests.campaigns.hostile.bodies import FIELDS, bodies
from tests.support.effort import cases
from worker.protocol.limits import refuse
from worker.protocol.messages import Submit, SubmitBatch
from worker.protocol.text.chat_template import ChatTemplate


@pytest.fixture
def loop(rig: Any) -> Iterator[asyncio.AbstractEventLoop]:
    """Hypothesis calls plain functions, which drive the gateway's loop themselves."""
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
    max_examples=cases(400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(request=bodies(("stub", "alias", "nope", None, 5)))
def test_any_body_is_answered_and_reaches_workers_sound(
    rig: Any, loop: asyncio.AbstractEventLoop, request: tuple[str, dict[str, Any]]
) -> None:
    path, body = request
    content = json.dumps(body)  # with NaN and lone surrogates, as sent by Python clients
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


def test_every_field_is_drawn() -> None:
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert known - {"model", "prompt", "messages"} <= set(FIELDS)


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
    """Every value of a batch must be encodable."""
    await rig.start()
    works = [rig.complete(max_tokens=2**70), rig.complete(), rig.complete(top_k=2**65)]
    responses = await asyncio.gather(*works)
    assert [response.status_code for response in responses] == [400, 200, 400]
    for batch in (batch for worker in rig.workers for batch in worker.batches):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=SubmitBatch) == batch
