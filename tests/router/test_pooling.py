"""Routes of pooling models: embeddings, scores, reranking and classification."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.router.official_client import client_of
from tests.support.router.rig import Rig
from worker.protocol.pooling import PoolingInfo

EMBED = PoolingInfo(
    task="embed",
    pooling_type="last",
    size=8,
    prompts=(("query", "fox: "), ("document", "")),
)
RERANK = PoolingInfo(
    task="classify",
    pooling_type="last",
    size=2,
    activation="softmax",
    labels=("no", "yes"),
    pair_template="<{instruction}> {query} {document}",
    instruction="rank",
)
CLASSIFY = PoolingInfo(
    task="classify", pooling_type="last", size=2, activation="softmax", labels=("bad", "good")
)
CROSS = PoolingInfo(
    task="classify", pooling_type="last", size=1, activation="sigmoid", labels=("LABEL_0",)
)


async def start(rig: Rig, pooling: PoolingInfo, **config: Any) -> None:
    for worker in rig.workers:
        worker.info = msgspec.structs.replace(worker.info, pooling=pooling)
    await rig.start(**config)


async def post(rig: Rig, path: str, **body: Any) -> Any:
    response = await rig.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def prompts(rig: Rig) -> list[str]:
    return [
        rig.tokenizer.decode(memoryview(s.prompt).cast("i"), skip_special_tokens=False)
        for s in rig.submits()
    ]


def expected(rig: Rig, text: str, size: int = 8) -> list[float]:
    return [*map(float, rig.tokenizer.encode(text)), *[0.0] * size][:size]


async def test_embeddings_of_all_kinds_of_inputs(rig: Rig) -> None:
    await start(rig, EMBED)
    for given, texts in (
        ("hello", ["hello"]),
        (["one", "the quick brown fox"], ["one", "the quick brown fox"]),
        (rig.tokenizer.encode("hello"), ["hello"]),
        ([rig.tokenizer.encode("two"), rig.tokenizer.encode("one")], ["two", "one"]),
    ):
        found = await post(rig, "/v1/embeddings", model="alias", input=given)
        assert (found["object"], found["model"]) == ("list", "alias")
        assert [item["index"] for item in found["data"]] == list(range(len(texts)))
        assert {item["object"] for item in found["data"]} == {"embedding"}
        vectors = [item["embedding"] for item in found["data"]]
        assert vectors == [expected(rig, text) for text in texts]
        number = sum(len(rig.tokenizer.encode(text)) for text in texts)
        assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] == number


async def test_base64_dimensions_and_prefixes(rig: Rig) -> None:
    await start(rig, EMBED)
    found = await post(
        rig,
        "/v1/embeddings",
        input="hello",
        dimensions=3,
        encoding_format="base64",
        prompt_name="query",
    )
    vector = array("f", base64.b64decode(found["data"][0]["embedding"])).tolist()
    assert vector == expected(rig, "fox: hello", 3)
    assert prompts(rig) == ["fox: hello"]
    found = await post(rig, "/pooling", input="hello")
    assert found["data"][0]["data"] == expected(rig, "hello")


async def test_the_official_client(rig: Rig) -> None:
    await start(rig, EMBED)
    async with client_of(rig) as client:
        found = await client.embeddings.create(model="stub", input=["hello", "one"], dimensions=4)
        assert [item.embedding for item in found.data] == [
            expected(rig, "hello", 4),
            expected(rig, "one", 4),
        ]
        assert found.usage.total_tokens > 0
        [card] = [card async for card in client.models.list() if card.id == "stub"]
    assert (card.task, card.embedding_size) == ("embed", 8)  # type: ignore[attr-defined]


async def test_scores_of_embeddings_are_cosines(rig: Rig) -> None:
    await start(rig, EMBED)
    found = await post(rig, "/score", text_1="one", text_2=["one", "hello there"])
    first, second = expected(rig, "one"), expected(rig, "hello there")
    cosine = sum(a * b for a, b in zip(first, second, strict=True))
    cosine /= math.hypot(*first) * math.hypot(*second)
    assert [item["score"] for item in found["data"]] == pytest.approx([1.0, cosine])
    found = await post(rig, "/v1/score", queries=["one", "two"], documents=["one", "two"])
    assert [item["score"] for item in found["data"]] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked(rig: Rig, path: str) -> None:
    await start(rig, EMBED)
    documents = ["hello there", "one", {"text": "one two"}]
    found = await post(rig, path, query="one", documents=documents, top_n=2)
    first = found["results"][0]
    assert (first["index"], first["document"]) == (1, {"text": "one"})
    scores = [result["relevance_score"] for result in found["results"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    bare = await post(rig, path, query="one", documents=["one"], return_documents=False)
    assert "document" not in bare["results"][0]


async def test_a_reranker_gets_its_prompt(rig: Rig) -> None:
    await start(rig, RERANK)
    await post(rig, "/rerank", query="one", documents=["two {x}"])
    await post(rig, "/score", text_1="one", text_2="two", instruction="find")
    assert {*prompts(rig)} == {"<rank> one two {x}", "<find> one two"}


async def test_probabilities_of_labels(rig: Rig) -> None:
    await start(rig, CLASSIFY)
    found = await post(rig, "/classify", input=["hello"])
    logits = expected(rig, "hello", 2)
    weights = [math.exp(value - max(logits)) for value in logits]
    [item] = found["data"]
    assert item["probs"] == pytest.approx([weight / sum(weights) for weight in weights])
    assert item["label"] == CLASSIFY.labels[logits.index(max(logits))]
    assert item["num_classes"] == 2
    raw = await post(rig, "/classify", input="hello", use_activation=False)
    assert raw["data"][0]["probs"] == logits


async def test_a_cross_encoder_gets_pairs(rig: Rig) -> None:
    await start(rig, CROSS)
    found = await post(rig, "/score", text_1="one", text_2=["two"])
    [logit] = expected(rig, "one", 1)
    assert found["data"][0]["score"] == pytest.approx(1.0 / (1.0 + math.exp(-logit)))
    assert prompts(rig) == ["onetwo"]
    [submit] = rig.submits()
    assert submit.sampling.pooling is not None
    assert submit.sampling.pooling.is_pair


async def test_what_a_model_does_not_support(rig: Rig) -> None:
    await start(rig, EMBED)
    for path, body, message in (
        ("/v1/completions", {"prompt": "x"}, "does not generate text: use /v1/embeddings"),
        ("/classify", {"input": "x"}, "does not support /classify"),
        ("/v1/embeddings", {"input": "x", "dimensions": 9}, "dimensions must be at most 8, got 9"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "y"}, "unknown prompt_name 'y'"),
        ("/v1/embeddings", {"input": []}, "input must be a string"),
        ("/v1/embeddings", {"input": "x" * 300}, "maximum context length is 256"),
        ("/v1/embeddings", {"input": "x", "temperature": 1}, "unknown field temperature"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "got 2 queries for 1 documents"),
        ("/rerank", {"query": "a", "documents": []}, "got 1 queries for 0 documents"),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "instruction": "c"},
            "does not support instruction",
        ),
    ):
        response = await rig.client.post(path, json=body)
        assert response.status_code == 400, (path, body, response.text)
        assert message in response.json()["error"]["message"]
    assert not rig.submits()


async def test_an_input_may_be_as_long_as_the_context(rig: Rig) -> None:
    await start(rig, EMBED)
    await post(rig, "/v1/embeddings", input=[[5] * 256])


async def test_a_model_that_generates_has_no_vectors(rig: Rig) -> None:
    await rig.start()
    for path in ("/v1/embeddings", "/pooling", "/classify"):
        response = await rig.client.post(path, json={"input": "hi"})
        assert response.status_code == 400
        assert "this model generates text" in response.json()["error"]["message"]


async def test_a_lost_request_is_repeated_on_another_worker(rig: Rig) -> None:
    await start(rig, EMBED, running=False)
    request = rig.client.post("/v1/embeddings", json={"input": "hello"})
    task: asyncio.Task[httpx.Response] = asyncio.create_task(request)
    await rig.until(lambda: bool(rig.submits()))
    [first] = [worker for worker in rig.workers if worker.running]
    first.send(ConnectionError("lost"))
    [second] = [worker for worker in rig.workers if worker is not first]
    await rig.until(lambda: bool(second.running))
    second.step()
    response = await task
    assert response.json()["data"][0]["embedding"] == expected(rig, "hello")
