"""Log-probabilities, echo and other optional fields of choices."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from typing import Any

import pytest

from tests.support.router.official_client import MESSAGES, client_of
from worker.protocol.sampling import MAX_BAD_WORDS_TOKENS


async def test_chat_logprobs(rig):
    await rig.start()
    async with client_of(rig) as client:
        whole = await client.chat.completions.create(
            model="stub", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
        stream = await client.chat.completions.create(
            model="stub", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True
        )
        chunks = [chunk async for chunk in stream]
    [choice] = whole.choices
    content = choice.logprobs.content
    token_ids = rig.script(None)
    assert [bytes(entry.bytes) for entry in content] == [
        rig.tokenizer.token_bytes(token_id) for token_id in token_ids
    ]
    assert "".join(entry.token for entry in content[:-1]) == rig.answer
    assert all(entry.logprob == -1.0 for entry in content)
    tops = [[top.token for top in entry.top_logprobs] for entry in content]
    assert all(len(top) == 2 for top in tops)
    assert [top[1] for top in tops] == [entry.token for entry in content]
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content
    assert chunks[0].choices[0].logprobs is None


async def test_completion_logprobs(rig):
    await rig.start()
    async with client_of(rig) as client:
        whole = await client.completions.create(
            model="stub", prompt="hi", max_tokens=5, logprobs=1, n=2
        )
        stream = await client.completions.create(
            model="stub", prompt="hi", max_tokens=5, logprobs=1, stream=True
        )
        parts = [part.choices[0] async for part in stream]
    for choice in whole.choices:
        logprobs = choice.logprobs
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.token_logprobs == [-1.0] * 5
        for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
            assert list(top.values()) == [-1.0, -0.5]
            assert next(iter(top)) == token
        offsets = [choice.text.index(token) for token in logprobs.tokens[:2]]
        assert logprobs.text_offset[:2] == offsets
    assert [o for part in parts for o in part.logprobs.text_offset] == logprobs.text_offset
    assert [t for part in parts for t in part.logprobs.tokens] == logprobs.tokens


async def test_log_probabilities_of_named_tokens(rig: Any) -> None:
    await rig.start()
    fields = {"logprob_token_ids": [9, 7], "max_tokens": 1}
    chat = (await rig.chat(logprobs=True, **fields)).json()["choices"][0]["logprobs"]
    [entry] = chat["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx([-0.9, -0.7])
    response = await rig.complete(logprobs=0, return_tokens_as_token_ids=True, **fields)
    [top] = response.json()["choices"][0]["logprobs"]["top_logprobs"]
    sampled = rig.script(None)[0]
    expected = {f"token_id:{token}": -0.1 * token for token in (sampled, 9, 7)}
    assert top == pytest.approx(expected)
    for wrong in ({}, {"logprobs": 0, "logprob_token_ids": [1000]}):
        response = await rig.complete(**{**fields, **wrong})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "logprob_token_ids"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(rig, events, stream):
    await rig.start()
    prompts = ["one two", "the quick fox"]
    response = await rig.complete(prompts, echo=True, logprobs=0, max_tokens=3, stream=stream)
    assert response.status_code == 200, response.text
    bodies = events(response) if stream else [response.json()]
    for index, prompt in enumerate(prompts):
        choices = [c for body in bodies for c in body["choices"] if c["index"] == index]
        text = "".join(choice["text"] for choice in choices)
        assert text.startswith(prompt)
        assert len(text) > len(prompt)
        columns: dict[str, list[Any]] = {name: [] for name in choices[0]["logprobs"]}
        for choice in choices:
            for name, values in choice["logprobs"].items():
                columns[name] += values
        assert "".join(columns["tokens"]) == text
        assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
        assert set(columns["token_logprobs"][1:]) == {-1.0}
        num_prompt = len(rig.tokenizer.encode(prompt))
        assert len(columns["tokens"]) == num_prompt + 3
        assert columns["text_offset"][num_prompt] == len(prompt)


async def test_echo_alone_scores_a_prompt(rig):
    await rig.start()
    token_ids = rig.tokenizer.encode("score me")
    body = (await rig.complete(token_ids, echo=True, max_tokens=0, logprobs=2)).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("score me", "length")
    assert len(choice["logprobs"]["tokens"]) == len(token_ids)
    assert body["usage"]["completion_tokens"] == 0
    body = (await rig.complete("score me", echo=True, max_tokens=2)).json()
    assert body["choices"][0]["text"].startswith("score me")
    assert body["choices"][0]["logprobs"] is None


async def test_prompt_logprobs(rig):
    await rig.start()
    body = (await rig.complete([5, 6, 7], prompt_logprobs=1)).json()
    first, *others = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [list(entry) for entry in others] == [["6", "7"], ["7", "8"]]
    assert others[0]["6"] == {
        "logprob": -1.0,
        "rank": 2,
        "decoded_token": rig.tokenizer.decode([6]),
    }
    assert body["choices"][0]["logprobs"] is None
    body = (await rig.chat(prompt_logprobs=0)).json()
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in (await rig.chat()).json()


async def test_prompt_logprobs_of_a_worker_lost_within_a_prompt_are_not_kept(rig):
    await rig.start(running=False)
    work = asyncio.create_task(rig.complete([5, 6, 7, 8, 9], prompt_logprobs=0))
    await rig.until(lambda: bool(rig.submits()))
    for worker in rig.workers:
        worker.step()  # sends the prompt's first half
    [lost] = [worker for worker in rig.workers if worker.running]
    [other] = [worker for worker in rig.workers if worker is not lost]
    lost.vanish()
    await rig.until(lambda: bool(other.running))
    while other.running:
        other.step()
    _, *scored = (await work).json()["choices"][0]["prompt_logprobs"]
    assert [list(entry) for entry in scored] == [["6"], ["7"], ["8"], ["9"]]


async def test_logprobs_end_at_a_stop_string(rig):
    await rig.start()
    body = (await rig.chat(logprobs=True, stop="quick")).json()
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == body["usage"]["completion_tokens"]
    assert "".join(entry["token"] for entry in entries).endswith("quick")


async def test_parameters_reach_the_worker(rig):
    await rig.start()
    async with client_of(rig) as client:
        await client.chat.completions.create(
            model="stub",
            messages=MESSAGES,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={"7": 200, "8": -1.5},
            extra_body={
                "repetition_penalty": 1.2,
                "allowed_token_ids": [7, 8],
                "min_tokens": 2,
                "bad_words": ["quick"],
            },
        )
    [submit] = rig.submits()
    sampling = submit.sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.2, 2)
    assert sampling.logit_bias == {7: 100.0, 8: -1.5}
    assert sampling.allowed_token_ids == (7, 8)
    assert sampling.bad_words == ()
    texts = [rig.tokenizer.decode(word) for word in sampling.bad_words_token_ids]
    assert texts[0] == "quick"
    assert set(texts) <= {"quick", " quick"}


async def test_too_many_of_a_kind_are_refused(rig):
    import openai

    await rig.start()
    async with client_of(rig) as client:
        for name, value in (
            ("logit_bias", {str(token): 1 for token in range(2000)}),
            ("bad_words", ["x"] * 300),
            ("bad_words", ["x" * 10_000]),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(
                    model="stub", messages=MESSAGES, extra_body={name: value}
                )
            assert error.value.param == name


async def test_bad_words_are_limited_in_tokens(rig):
    """The number of characters is no bound: one may take four tokens, in each completion."""
    await rig.start()
    most = MAX_BAD_WORDS_TOKENS
    word = "\N{DNA DOUBLE HELIX}" * 8000
    num_tokens = len(rig.tokenizer.encode(word, add_special_tokens=False))
    assert num_tokens > most
    num_tokens *= 2  # without a space before it, and with one
    response = await rig.complete("a", bad_words=[word])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "bad_words"
    message = response.json()["error"]["message"]
    assert f"Requested bad_words of {num_tokens} tokens (each word without and with" in message
    assert f"greater than max allowed: {most}" in message
    allowed = word[: 8000 * most // num_tokens - 1]
    assert (await rig.complete("a", bad_words=[allowed])).status_code == 200
    assert (await rig.complete(["a"] * 16, n=128, bad_words=[allowed])).status_code == 400


TOKENS_AT_ONCE = 10_000
"""Other tasks may run before its texts are written: 0.25 s of work exceeds 100,000."""


@pytest.mark.parametrize("kind", ["prompt", "completion", "stream"])
async def test_long_replies_are_written_in_slices(rig, monkeypatch, kind):
    length, n = 1000, 4
    for worker in rig.workers:
        worker.info.max_model_len = worker.info.max_total_tokens = 2 * length
        worker.script = lambda _: [7] * 40
    fields: dict[str, Any] = {
        "prompt": {"prompt_logprobs": 20, "max_tokens": 1},
        "completion": {"logprobs": 20, "max_tokens": 40, "n": 32},
        "stream": {"logprobs": 20, "echo": True, "max_tokens": 1, "stream": True},
    }[kind]
    await rig.start()
    model = rig.gateway.model("stub")
    plain, count, most = model.tokenizer.token_bytes, 0, 0

    def counted(token_id: int) -> bytes:
        nonlocal count, most
        count += 1
        most = max(most, count)
        return plain(token_id)

    monkeypatch.setattr(model.tokenizer, "token_bytes", counted)
    prompt = "hi" if kind == "completion" else [5] * length
    task = asyncio.create_task(rig.complete(prompt, **{"n": n, **fields}))
    while not task.done():
        count = 0
        await asyncio.sleep(0)
    response = await task
    assert response.status_code == 200, response.text[:300]
    assert 0 < most < TOKENS_AT_ONCE
    if kind == "stream":
        assert response.text.endswith("data: [DONE]\n\n")
        return
    first, *others = response.json()["choices"]
    assert [{**other, "index": 0} for other in others] == [first] * len(others)
    if kind == "prompt":
        assert len(first["prompt_logprobs"]) == length
        requested = [submit.sampling.prompt_logprobs for submit in rig.submits()]
        assert sorted(requested, key=str) == [20, None, None, None], "once per prompt"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_choices_echo_is_encoded_once(rig, events, monkeypatch, stream):
    await rig.start()
    tokenizer = rig.gateway.model("stub").tokenizer
    plain, named = tokenizer.token_bytes, []

    def noted(token_id: int) -> bytes:
        named.append(token_id)
        return plain(token_id)

    monkeypatch.setattr(tokenizer, "token_bytes", noted)
    prompts = [[5] * 30, [6] * 20]
    response = await rig.complete(prompts, echo=True, logprobs=2, max_tokens=3, n=8, stream=stream)
    assert response.status_code == 200, response.text
    bodies = events(response) if stream else [response.json()]
    for index in range(16):
        columns: dict[str, list[Any]] = {}
        for choice in (c for body in bodies for c in body["choices"] if c["index"] == index):
            for name, values in choice["logprobs"].items():
                columns.setdefault(name, []).extend(values)
        prompt, tokens = prompts[index // 8], columns["tokens"]
        assert tokens[: len(prompt)] == [plain(token).decode() for token in prompt]
        assert {len(values) for values in columns.values()} == {len(prompt) + 3}
        places = accumulate(map(len, tokens[:-1]), initial=0)
        assert columns["text_offset"] == list(places)
    # Its length, its name, and those of three candidates, one of which is the token itself.
    if not stream:
        assert named.count(5) < 30 * 8


async def test_tokens_may_be_named_by_their_ids(rig):
    await rig.start()
    ids = rig.script(None)
    named = [f"token_id:{token_id}" for token_id in ids]
    fields = {"return_tokens_as_token_ids": True}
    [choice] = (await rig.chat(logprobs=True, top_logprobs=1, **fields)).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == named
    assert all(e["token"].startswith("token_id:") for x in entries for e in x["top_logprobs"])
    assert bytes(entries[0]["bytes"]) == rig.tokenizer.token_bytes(ids[0])
    [choice] = (await rig.complete(logprobs=1, **fields)).json()["choices"]
    assert choice["logprobs"]["tokens"] == named
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[1] == len(rig.tokenizer.token_bytes(ids[0]))
