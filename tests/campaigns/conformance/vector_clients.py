"""Cases with clients of vectors: OpenAI's, Cohere's, LangChain's and LlamaIndex'.

Vectors must be those of a plain request, and scores their cosines. `python -m` runs it in a
separate environment.
"""

from __future__ import annotations

import json
import math
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import cohere
from langchain_cohere import CohereRerank as LangChainRerank
from langchain_core.documents import Document
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.postprocessor.cohere_rerank import CohereRerank as LlamaIndexRerank
from openai import OpenAI
from pydantic import SecretStr

from tests.campaigns.conformance.cases import (
    TIMEOUT_S,
    Case,
    Endpoint,
    Outcome,
    main,
    raised,
    try_cases,
)

QUERY = "Who opens before dawn?"
TEXTS = ["The baker is up first.", "The ferry leaves at seven.", "Mira found a bell."]
_TOLERANCE = 1e-6
_DIMENSIONS = 16

SKIPPED = {
    "LangChain: check_embedding_ctx_length": "sends token ids of OpenAI's tokenizer, which is not "
    "the model's",
    "LangChain: Cohere's embeddings": "sent to /v1/embed, of the first version of the API",
    "LlamaIndex: Cohere's embeddings": "only accepts names of Cohere's own models",
    "Cohere: images": "text only",
}


def _expected(endpoint: Endpoint, texts: Sequence[str]) -> list[list[float]]:
    """Vectors of a plain request."""
    body = json.dumps({"model": endpoint.model, "input": texts}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {endpoint.key}"}
    request = urllib.request.Request(f"{endpoint.base_url}/v1/embeddings", body, headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return [item["embedding"] for item in json.load(response)["data"]]


def _shortened(endpoint: Endpoint) -> list[float]:
    """Leading dimensions of the first text's vector, scaled to length 1."""
    [whole] = _expected(endpoint, TEXTS[:1])
    length = math.hypot(*whole[:_DIMENSIONS])
    return [value / length for value in whole[:_DIMENSIONS]]


def _packed(vector: Sequence[float]) -> list[int]:
    """Signs of a vector: eight dimensions per byte, the first one in the highest bit."""
    bits = "".join("1" if value >= 0.0 else "0" for value in vector)
    return [int(bits[start : start + 8], 2) for start in range(0, len(bits), 8)]


def _ranking(endpoint: Endpoint) -> list[tuple[int, float]]:
    """Index and score of each text, by descending score."""
    query, *documents = _expected(endpoint, [QUERY, *TEXTS])
    scores = [sum(a * b for a, b in zip(query, one, strict=True)) for one in documents]
    return sorted(enumerate(scores), key=lambda pair: -pair[1])


def _assert_vectors(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        assert all(math.isclose(a, b, abs_tol=_TOLERANCE) for a, b in zip(one, other, strict=True))


def _assert_ranking(
    found: Sequence[tuple[int, float]], expected: Sequence[tuple[int, float]]
) -> None:
    assert [index for index, _ in found] == [index for index, _ in expected]
    for (_, score), (_, other) in zip(found, expected, strict=True):
        assert math.isclose(score, other, abs_tol=_TOLERANCE)
    assert all(first[1] >= second[1] for first, second in pairwise(found))


def openai_vectors(endpoint: Endpoint) -> None:
    client = _openai(endpoint)
    # The client's default is base64, which it decodes.
    answer = client.embeddings.create(model=endpoint.model, input=TEXTS)
    _assert_vectors([item.embedding for item in answer.data], _expected(endpoint, TEXTS))
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
    [alone] = client.embeddings.create(
        model=endpoint.model, input=TEXTS[0], encoding_format="float"
    ).data
    _assert_vectors([alone.embedding], _expected(endpoint, TEXTS[:1]))


def openai_dimensions(endpoint: Endpoint) -> None:
    [item] = (
        _openai(endpoint)
        .embeddings.create(model=endpoint.model, input=TEXTS[0], dimensions=_DIMENSIONS)
        .data
    )
    _assert_vectors([item.embedding], [_shortened(endpoint)])


def langchain_vectors(endpoint: Endpoint) -> None:
    embeddings = OpenAIEmbeddings(
        model=endpoint.model,
        base_url=f"{endpoint.base_url}/v1",
        api_key=SecretStr(endpoint.key),
        check_embedding_ctx_length=False,
    )
    _assert_vectors(embeddings.embed_documents(TEXTS), _expected(endpoint, TEXTS))
    _assert_vectors([embeddings.embed_query(QUERY)], _expected(endpoint, [QUERY]))


def llamaindex_vectors(endpoint: Endpoint) -> None:
    embeddings = OpenAILikeEmbedding(
        model_name=endpoint.model,
        api_base=f"{endpoint.base_url}/v1",
        api_key=endpoint.key,
        embed_batch_size=2,
    )
    _assert_vectors(embeddings.get_text_embedding_batch(TEXTS), _expected(endpoint, TEXTS))
    _assert_vectors([embeddings.get_query_embedding(QUERY)], _expected(endpoint, [QUERY]))


def cohere_vectors(endpoint: Endpoint) -> None:
    answer = _cohere(endpoint).embed(
        model=endpoint.model,
        input_type="search_document",
        texts=TEXTS,
        embedding_types=["float", "ubinary", "binary"],
    )
    expected = _expected(endpoint, TEXTS)
    assert answer.embeddings.float_ is not None
    _assert_vectors(answer.embeddings.float_, expected)
    assert answer.texts == TEXTS
    signs = [_packed(vector) for vector in expected]
    assert answer.embeddings.ubinary == signs
    assert answer.embeddings.binary == [[value - 128 for value in one] for one in signs]
    assert answer.meta is not None
    assert answer.meta.billed_units is not None
    assert answer.meta.billed_units.input_tokens


def cohere_dimensions(endpoint: Endpoint) -> None:
    answer = _cohere(endpoint).embed(
        model=endpoint.model,
        input_type="search_query",
        texts=TEXTS[:1],
        output_dimension=_DIMENSIONS,
        embedding_types=["float"],
    )
    assert answer.embeddings.float_ is not None
    _assert_vectors(answer.embeddings.float_, [_shortened(endpoint)])


def cohere_ranking(endpoint: Endpoint) -> None:
    answer = _cohere(endpoint).rerank(model=endpoint.model, query=QUERY, documents=TEXTS)
    found = [(result.index, result.relevance_score) for result in answer.results]
    _assert_ranking(found, _ranking(endpoint))
    assert answer.id


def cohere_top(endpoint: Endpoint) -> None:
    answer = _cohere(endpoint).rerank(model=endpoint.model, query=QUERY, documents=TEXTS, top_n=1)
    found = [(result.index, result.relevance_score) for result in answer.results]
    _assert_ranking(found, _ranking(endpoint)[:1])


def cohere_first_version(endpoint: Endpoint) -> None:
    client = cohere.Client(endpoint.key, base_url=endpoint.base_url, timeout=TIMEOUT_S)
    documents = [{"text": text} for text in TEXTS]
    answer = client.rerank(
        model=endpoint.model, query=QUERY, documents=documents, return_documents=True
    )
    found = [(result.index, result.relevance_score) for result in answer.results]
    _assert_ranking(found, _ranking(endpoint))
    for result in answer.results:
        assert result.document is not None
        assert result.document.text == TEXTS[result.index]


def cohere_errors(endpoint: Endpoint) -> None:
    client = _cohere(endpoint)
    call = {"query": QUERY, "documents": TEXTS}
    error = raised(cohere.NotFoundError, client.rerank, model="none", **call)
    assert "none" in str(error.body)
    raised(cohere.BadRequestError, client.rerank, model=endpoint.model, query=QUERY, documents=[])
    stranger = _cohere(endpoint._replace(key="other"))
    raised(cohere.UnauthorizedError, stranger.rerank, model=endpoint.model, **call)


def langchain_ranking(endpoint: Endpoint) -> None:
    rerank = LangChainRerank(client=_cohere(endpoint), model=endpoint.model, top_n=2)
    found = rerank.compress_documents([Document(page_content=text) for text in TEXTS], QUERY)
    expected = _ranking(endpoint)[:2]
    assert [one.page_content for one in found] == [TEXTS[index] for index, _ in expected]
    scores = [one.metadata["relevance_score"] for one in found]
    _assert_ranking(list(zip([i for i, _ in expected], scores, strict=True)), expected)


def llamaindex_ranking(endpoint: Endpoint) -> None:
    rerank = LlamaIndexRerank(
        top_n=2, model=endpoint.model, api_key=endpoint.key, base_url=endpoint.base_url
    )
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    found = rerank.postprocess_nodes(nodes, QueryBundle(QUERY))
    expected = _ranking(endpoint)[:2]
    assert [one.node.get_content() for one in found] == [TEXTS[index] for index, _ in expected]


def _openai(endpoint: Endpoint) -> OpenAI:
    return OpenAI(
        base_url=f"{endpoint.base_url}/v1",
        api_key=endpoint.key,
        timeout=TIMEOUT_S,
        max_retries=0,
    )


def _cohere(endpoint: Endpoint) -> cohere.ClientV2:
    return cohere.ClientV2(endpoint.key, base_url=endpoint.base_url, timeout=TIMEOUT_S)


CASES: Mapping[str, Case] = {
    "OpenAI: vectors": openai_vectors,
    "OpenAI: dimensions": openai_dimensions,
    "LangChain: vectors": langchain_vectors,
    "LangChain: ranking": langchain_ranking,
    "LlamaIndex: vectors": llamaindex_vectors,
    "LlamaIndex: ranking": llamaindex_ranking,
    "Cohere: vectors": cohere_vectors,
    "Cohere: dimensions": cohere_dimensions,
    "Cohere: ranking": cohere_ranking,
    "Cohere: top_n": cohere_top,
    "Cohere: ranking, version 1 of the API": cohere_first_version,
    "Cohere: errors": cohere_errors,
}


def _try_all(endpoint: Endpoint) -> Iterator[Outcome]:
    yield from try_cases("vectors", CASES, SKIPPED, endpoint)


if __name__ == "__main__":
    sys.exit(main(_try_all))
