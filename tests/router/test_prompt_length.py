"""Texts that cannot fit are never tokenized; long ones are never tokenized on the event loop."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.config import RoutingConfig
from worker.protocol.text.chat_template import ChatTemplate

PRINTS_ALL = (
    "{{ date_string }}{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}"
    "{{ m.name }}{{ m.reasoning_content }}{{ m.calls | tojson }}<|im_end|>{% endfor %}"
)
LIMIT = 256
"""Tokens of the stub's model."""


def body(place: str, text: str) -> dict[str, Any]:
    """A chat with the text in one of the places that templates write."""
    message: dict[str, Any] = {"role": "user", "content": "hi"}
    chat: dict[str, Any] = {"messages": [message]}
    if place == "template arguments":
        chat["chat_template_kwargs"] = {"date_string": text}
    elif place == "parts":
        message["content"] = [{"type": "text", "text": text[:40]}] * (len(text) // 40)
    elif place == "calls":
        message["calls"] = [{"function": {"name": "f", "arguments": {"x": [text]}}}]
    elif place == "names":
        message["calls"] = {text: 1}
    elif place == "numbers":
        message["calls"] = [1234567] * (len(text) // 8)
    elif place == "many messages":
        chat["messages"] = [{"role": "user", "content": text[:20]}] * (len(text) // 40)
    else:
        message[place] = text
    return chat


PLACES = ["content", "parts", "name", "reasoning_content", "template arguments", "calls", "names"]


@pytest.fixture
async def watched(rig: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A gateway whose template writes everything; `rig.calls` has (method, thread)."""
    await rig.start()
    tokenizer = rig.gateway.model("stub").tokenizer
    monkeypatch.setattr(tokenizer, "_template", ChatTemplate(PRINTS_ALL, {}))
    rig.calls = []
    for name in ("encode", "encode_texts", "encode_pieces", "render_chat"):
        plain = getattr(tokenizer, name)

        def call(*args: Any, name: str = name, plain: Any = plain, **kwargs: Any) -> Any:
            rig.calls.append((name, threading.current_thread()))
            return plain(*args, **kwargs)

        monkeypatch.setattr(tokenizer, name, call)
    return rig


@pytest.mark.parametrize("place", PLACES)
async def test_a_text_that_cannot_fit_reaches_no_template(watched: Any, place: str) -> None:
    text = "word " * (LIMIT * watched.tokenizer.longest_token // 5 + 20)
    response = await watched.client.post("/v1/chat/completions", json=body(place, text))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert f"maximum context length is {LIMIT} tokens" in error["message"]
    assert watched.calls == []


@pytest.mark.parametrize("place", [*PLACES, "numbers", "many messages"])
async def test_a_long_text_is_worked_on_beside_the_event_loop(watched: Any, place: str) -> None:
    response = await watched.client.post("/v1/chat/completions", json=body(place, "ab " * 700))
    assert response.status_code == 400, "too many tokens, or characters once they are written"
    assert watched.calls
    for name, thread in watched.calls:
        assert thread is not threading.main_thread(), f"{name} on the event loop"


async def test_what_a_template_makes_long_reaches_no_tokenizer(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = watched.gateway.model("stub").tokenizer
    template = "{% for n in range(2000) %}{{ messages[0].content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "_template", ChatTemplate(template, {}))
    response = await watched.chat("words and words")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert {name for name, _ in watched.calls} == {"render_chat"}


async def test_one_prompt_of_several_that_cannot_fit(watched: Any) -> None:
    response = await watched.complete(["a short one", "x" * LIMIT * 100])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert watched.calls == []


async def test_a_prompt_of_the_longest_tokens_fits(rig: Any) -> None:
    await rig.start()
    longest = rig.tokenizer.longest_token
    vocabulary = rig.tokenizer._backend.get_vocab(with_added_tokens=True)
    assert max(map(len, vocabulary)) == longest
    # Of equally long ones, bytes beyond ASCII are written differently from their names.
    token = min(token for token in vocabulary if len(token) == longest and token.isascii())
    response = await rig.complete(token * (LIMIT - 1))
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] == LIMIT - 1


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
async def test_without_workers_the_checkpoint_limits_prompts(
    rig: Any, checkpoint: Path, tmp_path: Path, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled to zero: new requests wait for a worker, and may be as long as any."""
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    config = {"max_position_embeddings": LIMIT, "rope_scaling": {"factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(config))
    rig.transport.set_members_quietly()
    [served] = rig.config.models
    routing = RoutingConfig(no_worker_timeout_s=0.2)
    served = replace(served, model=str(folder), on_demand=True, routing=routing)
    await rig.start(attached=0, models=(served,))
    model = rig.gateway.model("stub")
    tokenized: list[str] = []
    for name in ("encode", "encode_texts", "encode_pieces", "render_chat"):
        monkeypatch.setattr(
            model.tokenizer, name, lambda *_, name=name, **__: tokenized.append(name)
        )
    text = "x" * (2 * LIMIT * model.tokenizer.longest_token)
    field, value = "prompt", text
    if "chat" in route:
        field, value = "messages", [{"role": "user", "content": text}]
    response = await rig.client.post(route, json={field: value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field
    assert f"context length is {2 * LIMIT} tokens" in response.json()["error"]["message"]
    assert (await rig.complete([5] * 2 * LIMIT)).status_code == 400
    assert tokenized == []
    assert model.stats.pending_requests == 0


@pytest.mark.parametrize("keep", [1, 7, 200])
async def test_a_prompt_may_be_cut_to_its_last_tokens(rig: Any, keep: int) -> None:
    await rig.start()
    fields = {"truncate_prompt_tokens": keep, "max_tokens": 5}
    text = "hello world, the quick brown fox " * 60
    ids = rig.tokenizer.encode(text)
    assert len(ids) > 256
    for prompt in (text, ids):
        assert (await rig.complete(prompt, **fields)).status_code == 200
        cut = memoryview(rig.submits()[-1].prompt).cast("i").tolist()
        assert cut == ids[-keep:]
    response = await rig.chat(text, **fields)
    assert response.json()["usage"]["prompt_tokens"] == keep
    for wrong in ({"truncate_prompt_tokens": 0}, {**fields, "echo": True}):
        response = await rig.complete("hi", **wrong)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "truncate_prompt_tokens"
    assert (await rig.complete(ids, truncate_prompt_tokens=300)).status_code == 400


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_beyond_the_model_length_are_accepted(rig: Any, field: str) -> None:
    """As documented in router/README.md: generation ends at the context length."""
    await rig.start()
    response = await rig.chat(**{field: 100 * LIMIT})
    assert response.status_code == 200, response.text
