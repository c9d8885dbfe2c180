"""Request bodies of the routes of pooling models: OpenAI's, Cohere's, Jina's and vLLM's fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.api.openai.fields import IGNORED, KnownFields, UnsupportedField
from router.api.openai.protocol import MAX_CACHE_SALT
from worker.protocol.slo import Slo

_SHORTER = UnsupportedField(instead="shorten the input")
KNOWN = KnownFields(
    IGNORED | {"client_name"},
    {
        "max_chunks_per_doc": UnsupportedField(instead="split the documents"),
        "max_tokens_per_doc": _SHORTER,
        "mm_processor_kwargs": UnsupportedField(({},), "only text is supported"),
        "rank_fields": UnsupportedField((["text"],), "only the text of documents is ranked"),
        "truncate": UnsupportedField((False, "NONE"), "shorten the input"),
        "truncate_prompt_tokens": _SHORTER,
        "truncation": UnsupportedField((False,), "shorten the input"),
    },
)
"""Fields of these APIs that are not supported."""

Format = Literal["float", "base64"]
"""Form of a vector: JSON numbers, or little-endian float32 in base64."""


class PooledRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of all routes of pooling models. None means the default."""

    model: str | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=0, le=9)] | None = None
    slo: Slo | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None


class InputRequest(PooledRequest, kw_only=True, frozen=True):
    """Fields of routes with one vector per input."""

    input: str | list[Any]
    """A text, texts, token ids, or lists of token ids."""
    add_special_tokens: bool | None = True


class EmbeddingRequest(InputRequest, kw_only=True, frozen=True):
    """Body of /v1/embeddings."""

    encoding_format: Format | None = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Number of leading dimensions to return; None for all."""
    normalize: bool | None = None
    """Whether to L2-normalize embeddings; None for the model's default."""
    prompt_name: str | None = None
    """Prefix of the texts, by its name in the checkpoint; None for the default one."""


class PoolingRequest(InputRequest, kw_only=True, frozen=True):
    """Body of /pooling."""

    encoding_format: Format | None = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    normalize: bool | None = None


class ClassifyRequest(InputRequest, kw_only=True, frozen=True):
    """Body of /classify."""

    use_activation: bool | None = True
    """Whether probabilities are returned; if false, logits."""


class ScoreRequest(PooledRequest, kw_only=True, frozen=True):
    """Body of /score: one text with several, or pairs of texts."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    """Same as `text_1`."""
    documents: str | list[str] | None = None
    """Same as `text_2`."""
    instruction: str | None = None
    """Instruction of rerankers whose prompt has one; None for the model's default."""


class RerankDocument(msgspec.Struct, frozen=True):
    """A document as an object."""

    text: str


class RerankRequest(PooledRequest, kw_only=True, frozen=True):
    """Body of /v1/rerank."""

    query: str
    documents: list[str | RerankDocument]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Number of results; None or 0 for all."""
    return_documents: bool | None = True
    instruction: str | None = None
    """Instruction of rerankers whose prompt has one; None for the model's default."""
