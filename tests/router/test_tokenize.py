"""Routes for tokens and about the gateway itself, and browsers' preflight requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.router.rig import Rig

ORIGIN = "https://page.example:8443"
MESSAGES = [{"role": "user", "content": "hello"}]


async def post(rig: Rig, path: str, **body: Any) -> Any:
    response = await rig.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_prompt(rig: Any) -> None:
    await rig.start()
    found = await post(rig, "/tokenize", prompt="wörld 🙂", return_token_strs=True)
    ids = rig.tokenizer.encode("wörld 🙂")
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 256)
    assert found["token_strs"] == [rig.tokenizer.token(token_id) for token_id in ids]
    assert "wÃ¶rld" in "".join(found["token_strs"])  # as byte-level vocabularies write it
    assert await post(rig, "/detokenize", tokens=ids) == {"prompt": "wörld 🙂"}
    found = await post(rig, "/tokenize", prompt="x", model="alias")
    assert found["token_strs"] is None


async def test_a_chat_has_the_tokens_that_it_is_served_with(rig: Any) -> None:
    await rig.start()
    thinks = {"chat_template_kwargs": {"thinking": True}}
    found = await post(rig, "/tokenize", messages=MESSAGES, **thinks)
    await rig.chat("hello", **thinks)
    assert found["tokens"] == memoryview(rig.submits()[0].prompt).cast("i").tolist()
    text = await post(rig, "/detokenize", tokens=found["tokens"])
    assert text == {"prompt": "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>"}


async def test_what_is_too_long_to_be_served_is_counted(rig: Any) -> None:
    await rig.start()
    found = await post(rig, "/tokenize", prompt="hello " * 300)
    assert found["count"] > found["max_model_len"]
    response = await rig.client.post("/tokenize", json={"prompt": "hello " * 100_000})
    assert response.status_code == 400, "no tokenizer needs to look at so much"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "temperature": 1}, "temperature"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, None),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [5000]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_what_is_malformed_is_named(rig: Any, path: str, body: Any, param: Any) -> None:
    await rig.start()
    response = await rig.client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == (param or "continue_final_message")


async def test_load_and_ping(rig: Any) -> None:
    await rig.start(running=False)
    assert (await rig.client.get("/ping")).status_code == 200
    assert (await rig.client.post("/ping")).status_code == 200
    idle = {"server_load": 0, "models": {"stub": 0}}
    assert (await rig.client.get("/load")).json() == idle
    task = asyncio.create_task(rig.chat(n=3))
    await rig.until(lambda: len(rig.submits()) == 3)
    assert (await rig.client.get("/load")).json() == {"server_load": 3, "models": {"stub": 3}}
    rig.tasks = [asyncio.create_task(worker.run()) for worker in rig.workers]
    await task
    assert (await rig.client.get("/load")).json() == idle


async def test_keys_are_required(rig: Any) -> None:
    await rig.start(api_keys=("key",))
    for path in ("/tokenize", "/detokenize"):
        assert (await rig.client.post(path, json={"prompt": "x"})).status_code == 401
    assert (await rig.client.get("/load")).status_code == 401
    assert (await rig.client.get("/ping")).status_code == 200


@pytest.mark.parametrize("allowed", [("*",), (ORIGIN, "https://other.example")])
async def test_pages_of_allowed_origins_may_ask(rig: Any, allowed: tuple[str, ...]) -> None:
    await rig.start(api_keys=("key",), allowed_origins=allowed)
    preflight = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    response = await rig.client.options("/v1/chat/completions", headers=preflight)
    assert response.status_code == 200, response.text
    assert response.headers["access-control-allow-origin"] in ("*", ORIGIN)
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    headers = {"origin": ORIGIN, "authorization": "Bearer key"}
    response = await rig.client.post(
        "/v1/chat/completions", json={"messages": MESSAGES}, headers=headers
    )
    assert response.headers["access-control-allow-origin"] in ("*", ORIGIN)
    assert "x-request-id" in response.headers["access-control-expose-headers"]
    refused = await rig.client.post("/v1/chat/completions", json={}, headers={"origin": ORIGIN})
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (401, True)


async def test_pages_of_other_origins_may_not(rig: Any) -> None:
    await rig.start(allowed_origins=("https://other.example",))
    preflight = {"origin": ORIGIN, "access-control-request-method": "POST"}
    response = await rig.client.options("/v1/chat/completions", headers=preflight)
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers
