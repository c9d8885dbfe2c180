"""OpenAI's official client with a real HTTP server: parsed responses and raised errors."""

from __future__ import annotations

import pytest

from router.api.http import body as body_module
from tests.support.router.official_client import MESSAGES, client_of


async def test_streams_of_several_choices(rig):
    await rig.start()
    async with client_of(rig) as client:
        stream = await client.chat.completions.create(
            model="stub",
            messages=MESSAGES,
            n=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    assert (last.choices, last.usage.prompt_tokens > 0) == ([], True)
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert last.usage.completion_tokens == 3 * len(rig.script(None))
    assert all(part.usage is None and part.object == "chat.completion.chunk" for part in parts)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    for index in range(3):
        mine = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert [choice.delta.role for choice in mine[1:]] == [None] * (len(mine) - 1)
        assert "".join(choice.delta.content or "" for choice in mine) == rig.answer
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]
        assert mine[-1].finish_reason == "stop"


async def test_completions_of_several_prompts(rig):
    await rig.start()
    async with client_of(rig) as client:
        whole = await client.completions.create(
            model="stub", prompt=[[5, 6], [7, 8]], n=2, max_tokens=3
        )
        stream = await client.completions.create(
            model="stub", prompt=["a", "b"], n=2, max_tokens=3, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert whole.object == "text_completion"
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    text = rig.tokenizer.decode(rig.script(None)[:3])
    assert [choice.text for choice in whole.choices] == [text] * 4
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    for index in range(4):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == text
        assert mine[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "stop_reason"),
    [({}, None), ({"stop": ["quick"]}, "quick"), ({"stop": "brown"}, "brown")],
)
async def test_stop_reasons(rig, fields, stop_reason):
    await rig.start()
    async with client_of(rig) as client:
        answer = await client.chat.completions.create(model="stub", messages=MESSAGES, **fields)
    [choice] = answer.choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop_reason)
    if stop_reason is not None:
        assert choice.message.content == rig.answer[: rig.answer.index(stop_reason)]


async def test_error_classes(rig, monkeypatch):
    import openai

    monkeypatch.setattr(body_module, "MAX_BODY_BYTES", 10_000)
    await rig.start(api_keys=("secret",))
    async with client_of(rig, "secret") as client:
        complete = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            await complete(model="stub", messages=MESSAGES, temperature=3000)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 256"):
            await client.completions.create(model="stub", prompt=[5] * 300)
        with pytest.raises(openai.NotFoundError) as unknown:
            await complete(model="nope", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="this model generates text"):
            await client.embeddings.create(model="stub", input="hi")
        with pytest.raises(openai.APIStatusError) as large:
            await client.completions.create(model="stub", prompt="x" * 20_000)
        with pytest.raises(openai.AuthenticationError) as key:
            await client.with_options(api_key="wrong").models.list()
        for worker in rig.workers:
            worker.rejection = "this worker is loading"
        with pytest.raises(openai.InternalServerError) as loading:
            await complete(model="stub", messages=MESSAGES)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert (large.value.status_code, large.value.type) == (413, "invalid_request_error")
    assert key.value.code == "invalid_api_key"
    assert loading.value.status_code == 503
