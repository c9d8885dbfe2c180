"""Routes of pooling models: embeddings, scores, reranking and classification."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array

import httpx
import msgspec
import pytest

from tests.support.router.official_client import client_of
from tests.support.router.pooling_rig import CLASSIFY, CROSS, EMBED, RERANK, post, start
from tests.support.router.rig import Rig


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


async def test_the_default_prefix_is_for_texts_without_a_name(rig: Rig) -> None:
    await start(rig, msgspec.structs.replace(EMBED, default_prompt="query"))
    ids = rig.tokenizer.encode("ids")
    for body in ({"input": "one"}, {"input": "two", "prompt_name": "document"}, {"input": ids}):
        await post(rig, "/v1/embeddings", **body)
    assert {*prompts(rig)} == {"fox: one", "two", "ids"}


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


async def test_embeddings_as_in_cohere_s_api(rig: Rig) -> None:
    await start(rig, EMBED)
    texts = ["hello", "one"]
    kinds = ["float", "base64", "binary", "ubinary"]
    found = await post(
        rig, "/v2/embed", model="stub", texts=texts, input_type="document", embedding_types=kinds
    )
    assert found["id"].startswith("embd-")
    assert (found["response_type"], found["texts"]) == ("embeddings_by_type", texts)
    vectors = [expected(rig, text) for text in texts]
    assert list(found["embeddings"]) == kinds
    assert found["embeddings"]["float"] == vectors
    decoded = [base64.b64decode(text) for text in found["embeddings"]["base64"]]
    assert [array("f", octets).tolist() for octets in decoded] == vectors
    assert found["embeddings"]["ubinary"] == [[255], [255]], "no value is negative"
    assert found["embeddings"]["binary"] == [[127], [127]]
    tokens = sum(len(rig.tokenizer.encode(text)) for text in texts)
    assert found["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": tokens},
        "tokens": {"input_tokens": tokens},
    }
    short = await post(rig, "/v2/embed", texts=["hello"], output_dimension=4, truncate="END")
    assert short["embeddings"] == {"float": [expected(rig, "hello", 4)]}


@pytest.mark.parametrize(
    ("input_type", "prefix"),
    [
        (None, "any: "),
        ("query", "fox: "),
        ("search_query", "fox: "),
        ("search_document", "doc: "),
        ("classification", "any: "),
    ],
)
async def test_input_types_of_cohere_s_api_select_prefixes(
    rig: Rig, input_type: str | None, prefix: str
) -> None:
    prompts_by_name = (("query", "fox: "), ("passage", "doc: "), ("default", "any: "))
    pooling = msgspec.structs.replace(EMBED, prompts=prompts_by_name, default_prompt="default")
    await start(rig, pooling)
    await post(rig, "/v2/embed", texts=["hello"], input_type=input_type)
    assert prompts(rig) == [rig.tokenizer.decode(rig.tokenizer.encode(f"{prefix}hello"))]


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
        ("/score", {"text_1": "a", "queries": "b"}, "set exactly one of text_1 and queries"),
        ("/score", {"text_1": "a"}, "set exactly one of text_2 and documents"),
        ("/v2/embed", {}, "texts is missing"),
        ("/v2/embed", {"inputs": [{"content": []}]}, "use texts"),
        ("/v2/embed", {"texts": []}, "texts must not be empty"),
        ("/v2/embed", {"texts": ["x"], "input_type": "y"}, "unknown input_type 'y'"),
        ("/v2/embed", {"texts": ["x"], "embedding_types": ["int8"]}, "embedding_types"),
        ("/v2/embed", {"texts": ["x"], "images": ["y"]}, "only text is supported"),
        ("/v2/embed", {"texts": ["x" * 300], "truncate": "NONE"}, "maximum context length is 256"),
        ("/v2/embed", {"texts": ["x"], "output_dimension": 9}, "must be at most 8, got 9"),
        (
            "/v2/embed",
            {"texts": ["x"], "output_dimension": 4, "embedding_types": ["binary"]},
            "a multiple of 8 dimensions, got 4",
        ),
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
