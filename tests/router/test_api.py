from __future__ import annotations

import asyncio
import json

import pytest

from router.config import RoutingConfig

KEYS = ("key-one", "key-two")


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_chat_answers(rig):
    await rig.start()
    response = await rig.chat("hello", max_tokens=50)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "stub"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": rig.answer}
    assert choice["finish_reason"] == "stop"
    prompt = rig.tokenizer.render_chat([{"role": "user", "content": "hello"}])
    num_prompt = len(rig.tokenizer.encode(prompt, add_special_tokens=False))
    num_output = len(rig.tokenizer.encode(rig.answer)) + 1
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert response.headers["x-rayfleet-worker"] in ("w0", "w1")
    assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"


async def test_chat_streams_in_order(rig, events):
    await rig.start()
    rig.answer = "grüße 🙂 ok"
    response = await rig.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-rayfleet-worker"] in ("w0", "w1")
    chunks = events(response)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *texts, usage = chunks[1:]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in texts) == rig.answer
    assert not any("\ufffd" in chunk["choices"][0]["delta"]["content"] for chunk in texts)
    assert [chunk["choices"][0]["finish_reason"] for chunk in texts][-1] == "stop"
    assert all(chunk["usage"] is None for chunk in texts)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(rig.tokenizer.encode(rig.answer)) + 1


async def test_completion_streams(rig, events):
    await rig.start()
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await rig.complete(stream=True, stream_options=options))
    *texts, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in texts) == rig.answer
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [len(rig.script(None))] * 2
    assert (last["choices"], last["object"]) == ([], "text_completion")


async def test_continuous_usage_is_in_every_chunk_if_requested(rig, events):
    await rig.start()
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await rig.chat(stream=True, n=2, stream_options=options))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
    chunks = events(await rig.chat(stream=True, stream_options={"continuous_usage_stats": True}))
    assert not any("usage" in chunk for chunk in chunks)


async def test_continuous_usage_counts_the_tokens_that_were_streamed(rig, events):
    await rig.start()
    options = {"include_usage": True, "continuous_usage_stats": True}
    for call in (rig.chat, rig.complete):
        response = await call(stream=True, n=2, return_token_ids=True, stream_options=options)
        num_tokens = 0
        for chunk in events(response):
            num_tokens += sum(len(choice.get("token_ids", ())) for choice in chunk["choices"])
            assert chunk["usage"]["completion_tokens"] == num_tokens
        assert num_tokens == 2 * len(rig.script(None))


@pytest.mark.parametrize("prompt", ["hello", ["hello", "one two"], [5, 6, 7], [[5, 6], [7, 8, 9]]])
async def test_prompt_shapes(rig, prompt):
    await rig.start()
    body = (await rig.complete(prompt, n=2, return_token_ids=True)).json()
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    ids = [rig.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(prompts)))
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [
        i for i in ids for _ in "12"
    ]
    assert all(choice["text"] == rig.answer for choice in body["choices"])
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    expected = len(rig.script(None)) * 2 * len(prompts)
    assert body["usage"]["completion_tokens"] == expected


async def test_n_streams_every_choice_with_its_own_seed(rig, events):
    await rig.start()
    chunks = events(await rig.chat(stream=True, n=3, seed=7))
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["delta"]["content"] for choice in mine) == rig.answer
        assert mine[-1]["finish_reason"] == "stop"
    assert sorted(submit.seed for submit in rig.submits()) == [7, 8, 9]
    assert {submit.sampling.n for submit in rig.submits()} == {1}


async def test_token_ids_in_a_stream(rig, events):
    await rig.start()
    chunks = events(await rig.complete([5, 6, 7], stream=True, return_token_ids=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [i for choice in choices for i in choice["token_ids"]] == rig.script(None)
    assert [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c] == [[5, 6, 7]]


async def test_token_ids_of_a_chat(rig, events):
    """The prompt's are next to the choices, once."""
    await rig.start()
    body = (await rig.chat(n=2, return_token_ids=True)).json()
    prompt = memoryview(rig.submits()[0].prompt).cast("i").tolist()
    assert body["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in body["choices"]] == [rig.script(None)] * 2
    assert not any("prompt_token_ids" in choice for choice in body["choices"])
    chunks = events(await rig.chat(n=2, stream=True, return_token_ids=True))
    assert chunks[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    choices = [chunk["choices"][0] for chunk in chunks]
    assert not any("prompt_token_ids" in choice for choice in choices)
    for index in (0, 1):
        mine = [c["token_ids"] for c in choices if c["index"] == index and "token_ids" in c]
        assert [i for ids in mine for i in ids] == rig.script(None)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_across_tokens_aborts_the_worker(rig, events, stream):
    await rig.start(running=False)
    work = asyncio.create_task(rig.complete(stop=["o wor", "zzz"], stream=stream))
    await rig.until(lambda: bool(rig.submits()))
    [worker] = [w for w in rig.workers if w.running]
    while worker.running:  # ended by an abort or the end of the script
        worker.step()
        await asyncio.sleep(0)
    response = await work
    await rig.until(lambda: bool(worker.aborted))
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)]
        assert "".join(choice["text"] for choice in choices) == "hell"
        last = choices[-1]
    else:
        [last] = response.json()["choices"]
        assert last["text"] == "hell"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "o wor")
    assert worker.aborted == [rig.submits()[0].request_id]


async def test_stop_string_may_stay(rig):
    await rig.start()
    body = (await rig.complete(stop="quick", include_stop_str_in_output=True)).json()
    assert body["choices"][0]["text"] == "hello world, the quick"


async def test_length_and_held_text(rig):
    """Text held back as a possible stop string is sent if the completion ends first."""
    await rig.start()
    first = rig.tokenizer.encode(rig.answer)[:2]
    text = rig.tokenizer.decode(first)
    body = (await rig.complete(max_tokens=2, stop=[text + "!!"])).json()
    assert body["choices"][0]["text"] == text
    assert body["choices"][0]["finish_reason"] == "length"


async def test_sampling_defaults_come_from_the_checkpoint(rig):
    await rig.start()
    await rig.chat()
    await rig.complete(temperature=0, top_k=-1, min_p=0.25, stop_token_ids=[9], ignore_eos=True)
    chat, plain = (submit.sampling for submit in rig.submits())
    if chat.max_tokens is not None:
        chat, plain = plain, chat
    assert (chat.temperature, chat.top_k, chat.max_tokens) == (0.5, 20, None)
    assert (plain.temperature, plain.top_k, plain.min_p) == (0, -1, 0.25)
    assert (plain.stop_token_ids, plain.ignore_eos) == ((9,), True)


async def test_content_parts_and_template_arguments(rig):
    await rig.start()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "add_generation_prompt": False,
        "chat_template_kwargs": {"thinking": True},
        "user": "somebody",
        "metadata": {"a": "b"},
        "cache_salt": "salt",
        "priority": 7,
    }
    response = await rig.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    [submit] = rig.submits()
    ids = memoryview(submit.prompt).cast("i").tolist()
    text = rig.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\none\ntwo<|im_end|>\n<think>"
    assert (submit.cache_salt, submit.priority) == ("salt", 7)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages"),
        ({"priority": 10}, "priority"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1000]}, "allowed_token_ids"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"echo": True}, "echo"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_bad_chat_fields_are_named(rig, fields, param):
    await rig.start()
    error = error_of(await rig.chat(**fields), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert rig.submits() == []


async def test_wrong_keys_are_named_all_together(rig):
    await rig.start()
    error = error_of(await rig.chat(logit_bias={"bad1": 5, "7": 1, "bad2": 2}), 400)
    assert "'bad1', 'bad2'" in error["message"]
    error = error_of(await rig.chat(logit_bias={f"k{n}" * 100: 1 for n in range(100)}), 400)
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("application/octet-stream", 200),
        ("application/x-www-form-urlencoded", 415),
        ("Multipart/Form-Data; boundary=x", 415),
        ("text/plain;charset=UTF-8", 415),
    ],
)
async def test_what_browsers_send_unasked_for_other_origins_is_refused(rig, kind, status):
    await rig.start()
    for path, body in (("/v1/completions", {"prompt": "hi"}), ("/tokenize", {"prompt": "hi"})):
        response = await rig.client.post(
            path, content=json.dumps(body), headers={"content-type": kind}
        )
        assert response.status_code == status, response.text
    assert (rig.submits() == []) == (status == 415)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"echo": "yes"}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_k": 1.5}, "top_k"),
    ],
)
async def test_bad_completion_fields_are_named(rig, fields, param):
    await rig.start()
    prompt = fields.pop("prompt", "hi")
    assert error_of(await rig.complete(prompt, **fields), 400)["param"] == param


async def test_neutral_values_of_unsupported_fields_pass(rig):
    await rig.start()
    response = await rig.chat(
        logprobs=False, presence_penalty=0, response_format={"type": "text"}, tools=[], top_p=None
    )
    assert response.status_code == 200, response.text


async def test_malformed_bodies(rig):
    await rig.start()
    for body in (b"{", b"[]", b"\xff"):
        response = await rig.client.post("/v1/chat/completions", content=body)
        assert error_of(response, 400)["type"] == "invalid_request_error"
    response = await rig.client.post("/v1/chat/completions", json={"model": "stub"})
    assert error_of(response, 400)["param"] == "messages"


async def test_unknown_model_and_route(rig):
    await rig.start()
    error = error_of(await rig.chat(model="nope"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    error_of(await rig.client.get("/v2/nothing"), 404)
    error_of(await rig.client.get("/v1/completions"), 405)
    assert (await rig.chat(model="alias")).json()["model"] == "alias"


async def test_too_long_and_empty_prompts_are_refused_with_the_numbers(rig):
    await rig.start()
    error = error_of(await rig.complete([5] * 300), 400)
    assert "300" in error["message"]
    assert "256" in error["message"]
    assert error_of(await rig.complete(""), 400)["param"] == "prompt"


async def test_models_health_ready_version(rig):
    await rig.start()
    body = (await rig.client.get("/v1/models")).json()
    assert [card["id"] for card in body["data"]] == ["stub", "alias"]
    assert body["data"][0]["max_model_len"] == 256
    assert {card["root"] for card in body["data"]} == {"stub"}, "no folder of the server"
    assert (await rig.client.get("/v1/models/stub")).json()["object"] == "model"
    error_of(await rig.client.get("/v1/models/nope"), 404)
    assert (await rig.client.get("/health")).status_code == 200
    assert (await rig.client.get("/ready")).status_code == 200
    assert "version" in (await rig.client.get("/version")).json()


async def test_not_ready_while_workers_load(rig):
    for worker in rig.workers:
        worker.ready = False
    rig.transport.set_members_quietly("w0")
    await rig.start(attached=0)
    await rig.until(lambda: rig.workers[0].num_attached == 1)
    assert (await rig.client.get("/health")).status_code == 200
    assert (await rig.client.get("/ready")).status_code == 503
    waiting = {"name": "stub", "reason": "the model folder /models/stub does not exist"}

    async def delayed():
        return [waiting]

    rig.gateway.delayed = delayed
    body = (await rig.client.get("/ready")).json()
    assert (body["models"], body["delayed"]) == (["stub"], [waiting])
    response = await rig.chat()
    assert error_of(response, 503)["code"] == "no_worker_available"
    assert response.headers["retry-after"] == "1"
    rig.workers[0].ready = True
    rig.workers[0].send(rig.workers[0].snapshot())
    await rig.until(lambda: rig.gateway.ready)
    assert (await rig.client.get("/ready")).status_code == 200


async def test_api_keys(rig):
    await rig.start(api_keys=KEYS)
    for path in ("/v1/models", "/metrics", "/version", "/nothing"):
        response = await rig.client.get(path)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    error_of(await rig.chat(), 401)
    for header in ("Bearer nope", "Basic key-one", "key-one", "Bearer "):
        response = await rig.client.get("/v1/models", headers={"authorization": header})
        error_of(response, 401)
    for key in KEYS:
        headers = {"authorization": f"Bearer {key}"}
        assert (await rig.client.get("/v1/models", headers=headers)).status_code == 200
    for path in ("/health", "/ready"):
        assert (await rig.client.get(path)).status_code == 200


async def test_holders_of_a_key_see_why_nothing_is_ready(rig):
    """Reasons contain folders, repositories and processes; probes only need the status."""
    for worker in rig.workers:
        worker.ready = False
    await rig.start(attached=0, api_keys=KEYS, admin_api_key="admin")

    async def delayed():
        return [{"name": "stub", "reason": "the model folder /models/stub does not exist"}]

    rig.gateway.delayed = delayed
    for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Bearer admin"}):
        response = await rig.client.get("/ready", headers=headers)
        assert (response.status_code, response.json()) == (503, {"status": "not ready"})
    response = await rig.client.get("/ready", headers={"authorization": f"Bearer {KEYS[0]}"})
    assert response.status_code == 503
    assert response.json()["models"] == ["stub"]
    assert "/models/stub" in response.json()["delayed"][0]["reason"]


async def test_request_id_of_the_client(rig):
    await rig.start()
    headers = {"x-request-id": "mine-1"}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for _ in range(2):
        response = await rig.client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.headers["x-request-id"] == "mine-1"
        assert response.json()["id"] == "chatcmpl-mine-1"
    ids = [submit.request_id for submit in rig.submits()]
    assert len(set(ids)) == 2
    assert all(request_id.startswith("mine-1.") for request_id in ids)


async def test_a_slash_at_the_end_is_none(rig):
    await rig.start(api_keys=KEYS)
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/chat/completions", "/v1/chat/completions/", "/v1/chat/completions//"):
        error_of(await rig.client.post(path, json=body), 401)
        response = await rig.client.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
    counts = rig.gateway.http.counts
    assert counts["/v1/chat/completions", "POST", 200] == 3
    assert (await rig.client.get("/health/")).status_code == 200
    assert (await rig.client.get("/")).status_code == 200, "the page"
    error_of(await rig.client.get("/nothing/", headers=headers), 404)


async def test_error_event_ends_a_stream(rig):
    await rig.start(running=False, routing=RoutingConfig(max_request_attempts=1))
    work = asyncio.create_task(rig.chat(stream=True))
    await rig.until(lambda: bool(rig.submits()))
    [worker] = [w for w in rig.workers if w.running]
    worker.step()
    worker.crash()
    lines = [line for line in (await work).text.split("\n\n") if line]
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert "rank 0 was killed" in error["message"]
    assert error["type"] == "internal_server_error"
