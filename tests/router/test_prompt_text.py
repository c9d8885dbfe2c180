"""The text of a completion continues that of its prompt, and `text_offset` indexes into it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import cases
from tests.support.router.rig import Rig
from tests.support.router.sentencepiece import DECODERS, build_sentencepiece
from worker.protocol.text.detokenizer import RequestText
from worker.protocol.text.stop import StopStrings
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer

PROMPT = "The capital of France is"
WORDS = " Paris. of France"
BYTES = " Paris. é✓🙂 of France"


@pytest.fixture(params=DECODERS)
async def spm(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    """A rig with a SentencePiece vocabulary, which generates `rig.answer` for PROMPT."""
    build_sentencepiece(tmp_path, request.param)
    tokenizer = load_tokenizer(str(tmp_path))
    rig = Rig(tmp_path, tokenizer)
    rig.answer = WORDS if request.param == "Metaspace" else BYTES
    whole = tokenizer.encode(PROMPT + rig.answer)
    answers(rig, [*whole[len(tokenizer.encode(PROMPT)) :], 2])
    yield rig
    await rig.stop()


def answers(rig: Rig, token_ids: list[int]) -> None:
    for worker in rig.workers:
        worker.script = lambda _: token_ids


def answer_of(rig: Rig) -> list[int]:
    return rig.workers[0].script(None)


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_word_keeps_its_space(spm, events, stream, echo, as_tokens):
    await spm.start()
    prompt = spm.tokenizer.encode(PROMPT) if as_tokens else PROMPT
    for _ in range(2):  # the second time with a prefix hit
        response = await spm.complete(prompt, n=3, stream=stream, echo=echo)
        bodies = events(response) if stream else [response.json()]
        texts = ["", "", ""]
        for choice in (choice for body in bodies for choice in body["choices"]):
            texts[choice["index"]] += choice["text"]
        before = spm.tokenizer.decode(spm.tokenizer.encode(PROMPT)) if as_tokens else PROMPT
        assert texts == [(before if echo else "") + spm.answer] * 3


@pytest.mark.parametrize("num_steps", [0, 1, 4])
async def test_it_keeps_it_at_another_worker(spm, num_steps):
    await spm.start(running=False)
    task = asyncio.create_task(spm.complete(PROMPT))
    await spm.until(lambda: any(worker.running for worker in spm.workers))
    [first] = [worker for worker in spm.workers if worker.running]
    for _ in range(num_steps):
        first.step()
    first.vanish()
    [second] = [worker for worker in spm.workers if worker is not first]
    await spm.until(lambda: bool(second.running))
    while second.running:
        second.step()
    assert (await task).json()["choices"][0]["text"] == spm.answer


async def test_chats_and_prefills_keep_it(spm):
    await spm.start()
    messages = [{"role": "user", "content": "capital"}]
    response = await spm.client.post(
        "/v1/chat/completions", json={"model": "stub", "messages": messages}
    )
    assert response.json()["choices"][0]["message"]["content"] == spm.answer
    messages.append({"role": "assistant", "content": PROMPT})
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    response = await spm.client.post(
        "/v1/chat/completions", json={"model": "stub", "messages": messages, **continued}
    )
    assert response.json()["choices"][0]["message"]["content"] == spm.answer
    response = await spm.client.post(
        "/v1/messages", json={"model": "stub", "max_tokens": 50, "messages": messages}
    )
    assert response.json()["content"][0]["text"] == spm.answer


async def test_stop_strings_see_the_first_space(spm):
    await spm.start()
    choice = (await spm.complete(PROMPT, stop=" Paris")).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def slices(text: str, offsets: list[int]) -> list[str]:
    """The parts of `text` at the tokens' `text_offset`."""
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    return [text[start:end] for start, end in pairwise([*offsets, len(text)])]


def joined(choices: list[dict[str, Any]]) -> tuple[str, list[str], list[int]]:
    """Text, tokens and text offsets of the chunks of a choice."""
    return (
        "".join(choice["text"] for choice in choices),
        [token for choice in choices for token in choice["logprobs"]["tokens"]],
        [offset for choice in choices for offset in choice["logprobs"]["text_offset"]],
    )


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_slice_the_text(spm, events, stream, as_tokens):
    """With BOS, which has no text, characters of several tokens, and an end token."""
    await spm.start()
    ids = spm.tokenizer.encode(PROMPT)
    for echo in (False, True):
        response = await spm.complete(
            ids if as_tokens else PROMPT, logprobs=1, echo=echo, stream=stream
        )
        bodies = events(response) if stream else [response.json()]
        text, tokens, offsets = joined([body["choices"][0] for body in bodies])
        parts = slices(text, offsets)
        assert len(parts) == len(tokens) == echo * len(ids) + len(answer_of(spm))
        if echo:
            assert tokens[0] == "<s>"
            assert parts[0] == ""
            assert parts[1].strip() == "The"
            parts, tokens = parts[len(ids) :], tokens[len(ids) :]
        assert parts[:2] == [" Paris", "."] == tokens[:2]
        assert parts[-3:] == [" of", " France", ""]
        if spm.answer == BYTES:
            assert [part for part in parts[3:-3] if part] == ["é", "✓", "🙂"]
            assert parts.index("é") == 4, "the text of its last byte"


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_of_byte_level_vocabularies_slice_the_text(rig, events, stream):
    rig.answer = "one ✓ two 🙂 wörld"
    await rig.start()
    prompt = "<|im_start|>the 🙂 fox<|im_end|> ✓"
    response = await rig.complete(prompt, logprobs=0, echo=True, stream=stream)
    bodies = events(response) if stream else [response.json()]
    text, tokens, offsets = joined([body["choices"][0] for body in bodies])
    assert text == prompt + rig.answer
    parts = slices(text, offsets)
    for token, part in zip(tokens[:-1], parts, strict=False):
        assert part == token or "\ufffd" in token
    num_prompt = len(rig.tokenizer.encode(prompt))
    assert "".join(parts[:num_prompt]) == prompt
    assert (parts[-1], tokens[-1]) == ("", "<|im_end|>")


async def test_a_character_that_the_prompt_begins_is_the_completions(rig):
    ids = rig.tokenizer.encode("x 🦄")
    answers(rig, [ids[-1], *rig.tokenizer.encode(" one"), 2])
    await rig.start()
    for echo, before in ((False, ""), (True, "x ")):
        body = (await rig.complete(ids[:-1], echo=echo, logprobs=0)).json()
        text, _, offsets = joined(body["choices"])
        assert text == before + "🦄 one"
        assert slices(text, offsets)[echo * len(ids[:-1])] == "🦄"
    body = (await rig.complete(ids[:-1], echo=True, max_tokens=0)).json()
    assert body["choices"][0]["text"] == "x \ufffd"


@given(data=st.data())
@settings(max_examples=cases(300), deadline=None)
def test_offsets_of_any_completion_slice_its_text(tokenizer: Tokenizer, data: st.DataObject):
    """For any tokens, however they arrive and wherever a stop string ends the text."""
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), min_size=1, max_size=20))
    stops = data.draw(st.lists(st.text(alphabet="eo t\ufffd", min_size=1, max_size=3), max_size=2))
    stopped = data.draw(st.booleans())
    reader, plain = (
        RequestText(tokenizer.detokenizer(), stop=StopStrings(stops), with_offsets=with_offsets)
        for with_offsets in (True, False)
    )
    size = data.draw(st.integers(1, 20))
    text = before = ""
    for start in range(0, len(token_ids), size):
        batch = token_ids[start : start + size]
        is_last = stopped and start + size >= len(token_ids)
        text += reader.push(batch, stopped=is_last)
        before += plain.push(batch, stopped=is_last)
        if reader.stop_reason is not None:
            break
    else:
        text += reader.flush()
        before += plain.flush()
    assert text == before
    assert reader.num_tokens == len(reader.offsets or ())
    parts = slices(text, reader.offsets or [])
    detokenizer = tokenizer.detokenizer()
    for place, part in enumerate(parts[:-1]):
        whole = detokenizer.push([token_ids[place]])
        if stopped and place == len(token_ids) - 2:
            whole += detokenizer.flush()
        assert part == whole or (reader.stop_reason is not None and whole.startswith(part))
