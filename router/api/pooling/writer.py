"""Writers of the responses of pooling models, each in the format of its API."""

from __future__ import annotations

import base64
import time
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from router.api.http.slices import encode
from router.api.openai.whole import WholeWriter
from router.api.pooling.protocol import CohereFormat, Format
from router.api.pooling.scores import activated, cosine
from router.serving import Completion, Generation
from worker.protocol.pooling import PoolingInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """Properties that the responses of all pooling routes have."""

    response_id: str
    model: str
    info: PoolingInfo


class PooledWriter(WholeWriter):
    """Writes an object with a list of items, one part per item.

    Args:
        generation: the generation, with a vector per prompt.
        response: properties of the response.
    """

    items_name = "data"
    """Name of the field with the list of items."""

    def __init__(self, generation: Generation, response: Response) -> None:
        self.generation = generation
        self.response = response
        self.info = response.info

    def whole(self) -> Iterator[bytes]:
        """JSON of the response, an item at a time."""
        head = encode({**self.header(), self.items_name: []})
        yield head[:-2]
        before = b""
        for item in self.items():
            yield before + item
            before = b","
        yield b"]," + encode({"usage": self.usage()})[1:]

    def header(self) -> dict[str, Any]:
        """Fields that precede the list of items."""
        return {
            "id": self.response.response_id,
            "object": "list",
            "created": int(time.time()),
            "model": self.response.model,
        }

    def usage(self) -> dict[str, Any]:
        """Token counts."""
        number = self.generation.num_prompt_tokens
        return {
            "prompt_tokens": number,
            "total_tokens": number,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": self.generation.num_cached_tokens},
        }

    @abstractmethod
    def items(self) -> Iterator[bytes]:
        """JSON of each item."""


class VectorWriter(PooledWriter):
    """Writes vectors in the format of /v1/embeddings and /pooling.

    Args:
        response: properties of the response.
        kind: `object` of an item.
        name: field of an item that contains the vector.
        encoding: encoding of the vectors.
    """

    def __init__(
        self,
        generation: Generation,
        response: Response,
        *,
        kind: str,
        name: str,
        encoding: Format,
    ) -> None:
        super().__init__(generation, response)
        self._start = b'{"object":%b,"index":' % encode(kind)
        self._middle = b",%b:" % encode(name)
        self._encoding = encoding

    def items(self) -> Iterator[bytes]:
        """A vector per prompt."""
        for index, completion in enumerate(self.generation.completions):
            start = b"%b%d%b" % (self._start, index, self._middle)
            if self._encoding == "base64":
                yield start + b'"%b"}' % base64.b64encode(completion.pooled)
            else:
                yield start + encode(vector(completion)) + b"}"


class CohereWriter(WholeWriter):
    """Writes vectors in one or more encodings, as Cohere's /v2/embed does.

    Args:
        generation: the generation, with a vector per text.
        response: properties of the response.
        texts: the embedded texts, which the response repeats.
        kinds: encodings of the vectors.
    """

    def __init__(
        self,
        generation: Generation,
        response: Response,
        *,
        texts: Sequence[str],
        kinds: Sequence[CohereFormat],
    ) -> None:
        self._generation = generation
        self._response = response
        self._texts = texts
        self._kinds = kinds

    def whole(self) -> Iterator[bytes]:
        """JSON of the response, a text or vector at a time."""
        head = {"id": self._response.response_id, "response_type": "embeddings_by_type"}
        yield encode(head)[:-1] + b',"texts":'
        yield from _listed(self._texts)
        yield b',"embeddings":{'
        for number, kind in enumerate(self._kinds):
            yield b"%b%b:" % (b"," if number else b"", encode(kind))
            vectors = (_in_form(one.pooled, kind) for one in self._generation.completions)
            yield from _listed(vectors)
        tokens = {"input_tokens": self._generation.num_prompt_tokens}
        meta = {"api_version": {"version": "2"}, "billed_units": tokens, "tokens": tokens}
        yield b'},"meta":' + encode(meta) + b"}"


class ClassWriter(PooledWriter):
    """Writes the labels of texts in the format of vLLM's /classify.

    Args:
        response: properties of the response.
        use_activation: whether to write probabilities instead of logits.
    """

    def __init__(self, generation: Generation, response: Response, *, use_activation: bool) -> None:
        super().__init__(generation, response)
        self._activation = response.info.activation if use_activation else "none"

    def items(self) -> Iterator[bytes]:
        """The most likely label of each prompt, and the probabilities or logits of all labels."""
        for index, completion in enumerate(self.generation.completions):
            values = activated(vector(completion), self._activation)
            label = self.info.labels[values.index(max(values))]
            yield encode(
                {"index": index, "label": label, "probs": values, "num_classes": len(values)}
            )


class ScoreWriter(PooledWriter):
    """Writes the scores of pairs in the format of vLLM's /score.

    Args:
        response: properties of the response.
        pairs: for embedding models, the indices of the two prompts of each pair; empty for other
            models, for which each prompt is a pair.
    """

    def __init__(
        self, generation: Generation, response: Response, pairs: Sequence[tuple[int, int]]
    ) -> None:
        super().__init__(generation, response)
        self._pairs = pairs

    def scores(self) -> Iterator[float]:
        """The score of each pair."""
        completions = self.generation.completions
        if self.info.task == "classify":
            for completion in completions:
                yield activated(vector(completion), self.info.activation)[-1]
            return
        vectors = [array("f", completion.pooled) for completion in completions]
        for first, second in self._pairs:
            yield cosine(vectors[first], vectors[second])

    def items(self) -> Iterator[bytes]:
        """The scores in the order of the request."""
        for index, score in enumerate(self.scores()):
            yield encode({"index": index, "object": "score", "score": score})


class RerankWriter(ScoreWriter):
    """Writes documents by descending relevance, in the format common to Cohere, Jina and vLLM.

    Args:
        response: properties of the response.
        pairs: see ScoreWriter.
        documents: the texts; None to omit them.
        top_n: number of results.
    """

    items_name = "results"

    def __init__(
        self,
        generation: Generation,
        response: Response,
        pairs: Sequence[tuple[int, int]],
        *,
        documents: Sequence[str] | None,
        top_n: int,
    ) -> None:
        super().__init__(generation, response, pairs)
        self._documents = documents
        self._top_n = top_n

    def header(self) -> dict[str, Any]:
        """Fields that precede the results."""
        return {"id": self.response.response_id, "model": self.response.model}

    def items(self) -> Iterator[bytes]:
        """The most relevant documents; equally relevant ones are in the order of the request."""
        ranked = sorted(enumerate(self.scores()), key=lambda pair: -pair[1])
        for index, score in ranked[: self._top_n]:
            item: dict[str, Any] = {"index": index, "relevance_score": score}
            if self._documents is not None:
                item["document"] = {"text": self._documents[index]}
            yield encode(item)


def _listed(items: Iterable[Any]) -> Iterator[bytes]:
    """JSON of a list, an item at a time."""
    yield b"["
    before = b""
    for item in items:
        yield before + encode(item)
        before = b","
    yield b"]"


def _in_form(pooled: bytes, kind: CohereFormat) -> str | list[float] | list[int]:
    """Converts a little-endian float32 vector to an encoding of Cohere's API."""
    if kind == "base64":
        return base64.b64encode(pooled).decode()
    if kind == "float":
        return array("f", pooled).tolist()
    packed = np.packbits(np.frombuffer(pooled, "<f4") >= 0.0)
    signs: list[int] = packed.tolist()
    return signs if kind == "ubinary" else [value - 128 for value in signs]


def vector(completion: Completion) -> list[float]:
    """The vector of a finished completion."""
    return array("f", completion.pooled).tolist()
