"""Truncation of the inputs of pooling models, and the token types of pairs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.pair_tokenizer import CLS, SEP, save_pair_tokenizer
from tests.support.router.pooling_rig import CROSS, EMBED, RERANK, post, start
from tests.support.router.rig import Rig
from worker.protocol.text.tokenizer import load_tokenizer

LIMIT = 12
ALPHABET = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
A, B, D, Z = (4 + index for index in (0, 1, 3, 25))


@pytest.fixture(params=["bert"])
async def bert(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    """A rig of workers with a context of LIMIT tokens, and a tokenizer for pairs."""
    save_pair_tokenizer(request.param, tmp_path)
    rig = Rig(tmp_path, load_tokenizer(str(tmp_path)))
    for worker in rig.workers:
        worker.info = msgspec.structs.replace(worker.info, max_model_len=LIMIT)
    yield rig
    await rig.stop()


def sent(rig: Rig) -> list[list[int]]:
    """Tokens of all prompts, the longest first."""
    prompts = [memoryview(submit.prompt).cast("i").tolist() for submit in rig.submits()]
    return sorted(prompts, key=lambda prompt: (-len(prompt), prompt))


async def test_special_tokens_are_kept(bert: Rig) -> None:
    await start(bert, EMBED)
    found = await post(bert, "/v1/embeddings", input=ALPHABET, truncate_prompt_tokens=5)
    assert found["usage"]["prompt_tokens"] == 5
    await post(bert, "/pooling", input=ALPHABET, truncate_prompt_tokens=4, truncation_side="left")
    await post(bert, "/v1/embeddings", input="a b", truncate_prompt_tokens=-1)
    await post(bert, "/v1/embeddings", input=[[A, B, D]], truncate_prompt_tokens=2)
    assert sent(bert) == [[CLS, A, B, B + 1, SEP], [CLS, A, B, SEP], [CLS, Z - 1, Z, SEP], [A, B]]


async def test_cohere_embeddings_are_truncated_at_the_end_by_default(bert: Rig) -> None:
    await start(bert, EMBED)
    await post(bert, "/v2/embed", texts=[ALPHABET])
    await post(bert, "/v2/embed", texts=[ALPHABET], truncate="START")
    room = LIMIT - 2
    assert sent(bert) == [
        [CLS, *range(A, A + room), SEP],
        [CLS, *range(Z + 1 - room, Z + 1), SEP],
    ]
    body = {"texts": [ALPHABET], "truncate": "NONE"}
    response = await bert.client.post("/v2/embed", json=body)
    assert response.status_code == 400
    assert "maximum context length" in response.json()["error"]["message"]


async def test_prompts_of_completions_keep_special_tokens(bert: Rig) -> None:
    await bert.start()
    response = await bert.complete(ALPHABET * 99, truncate_prompt_tokens=4, max_tokens=1)
    assert response.status_code == 200, response.text
    assert sent(bert) == [[CLS, Z - 1, Z, SEP]]


async def test_inputs_as_long_as_the_context(bert: Rig) -> None:
    await start(bert, EMBED)
    await post(bert, "/v1/embeddings", input=ALPHABET * 99, truncate_prompt_tokens=-1)
    assert len(sent(bert)[0]) == LIMIT
    response = await bert.client.post("/v1/embeddings", json={"input": ALPHABET})
    assert response.status_code == 400
    assert "maximum context length is 12 tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize("value", [0, -2, LIMIT + 1, 2, "x"])
async def test_invalid_maxima(bert: Rig, value: Any) -> None:
    await start(bert, EMBED)
    body = {"input": ALPHABET, "truncate_prompt_tokens": value}
    response = await bert.client.post("/v1/embeddings", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"
    assert not bert.submits()


async def test_both_texts_of_a_pair_are_truncated(bert: Rig) -> None:
    await start(bert, CROSS)
    await post(bert, "/score", text_1=ALPHABET, text_2=ALPHABET, truncate_prompt_tokens=-1)
    [submit] = bert.submits()
    assert sent(bert) == [[CLS, A, B, B + 1, D, SEP, A, B, B + 1, D, D + 1, SEP]]
    assert submit.second_text == 6


async def test_maxima_of_queries_and_documents(bert: Rig) -> None:
    await start(bert, CROSS)
    limits = {"max_tokens_per_query": 1, "max_tokens_per_doc": 2}
    found = await post(bert, "/rerank", query="a b", documents=[ALPHABET, "z"], **limits)
    assert found["results"][0]["document"]["text"] in (ALPHABET, "z")
    assert sent(bert) == [[CLS, A, SEP, A, B, SEP], [CLS, A, SEP, Z, SEP]]


async def test_a_text_is_shortened_between_characters(rig: Rig) -> None:
    await start(rig, EMBED)
    text = "hello wörld 🙂🙂 привет, the quick brown fox"
    ids = rig.tokenizer.encode(text)
    for number in range(1, len(ids) + 2):
        [cut] = await rig.gateway.model("stub").encoder.shortened([text], number)
        found = rig.tokenizer.encode(cut)
        assert text.startswith(cut)
        assert found == ids[: len(found)]
        assert number - 4 < len(found) <= number  # a character has at most 4 bytes


async def test_a_separator_in_a_query_does_not_end_it(bert: Rig) -> None:
    await start(bert, CROSS)
    await post(bert, "/score", text_1="a [SEP] b", text_2="d")
    await post(bert, "/pooling", input="a [SEP] b")
    pair, text = sorted(bert.submits(), key=lambda submit: -submit.second_text)
    assert memoryview(pair.prompt).cast("i").tolist() == [CLS, A, SEP, B, SEP, D, SEP]
    assert (pair.second_text, text.second_text) == (5, 0)


@pytest.mark.parametrize("bert", ["plain"], indirect=True)
async def test_a_prompt_keeps_what_follows_the_document(bert: Rig) -> None:
    template = "{instruction} {query} {document} [SEP] y z"
    await start(bert, msgspec.structs.replace(RERANK, pair_template=template, instruction="x"))
    body = {"query": "a b", "documents": [ALPHABET], "truncate_prompt_tokens": 8}
    await post(bert, "/rerank", **body)
    assert sent(bert) == [[Z - 2, A, B, A, B, SEP, Z - 1, Z]]
    for wrong, message in (
        ({"truncation_side": "left"}, "would remove the model's instruction"),
        ({"truncate_prompt_tokens": 6}, "have 6 tokens, which leaves no room for the document"),
    ):
        response = await bert.client.post("/rerank", json={**body, **wrong})
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
