"""Request bodies of the routes of pooling models: OpenAI's, Cohere's, Jina's and vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.api.openai.fields import IGNORED, KnownFields, UnsupportedField
from router.api.openai.protocol import MAX_CACHE_SALT
from worker.protocol.slo import Slo
from worker.protocol.text.truncation import Side

_MAX_TOKENS = 2**31 - 1
_TRUNCATED = "use truncate_prompt_tokens"
KNOWN = KnownFields(
    IGNORED | {"client_name"},
    {
        "images": UnsupportedField(([],), "only text is supported"),
        "inputs": UnsupportedField((), "use texts"),
        "max_chunks_per_doc": UnsupportedField(instead="use max_tokens_per_doc"),
        "mm_processor_kwargs": UnsupportedField(({},), "only text is supported"),
        "rank_fields": UnsupportedField((["text"],), "only the text of documents is ranked"),
        "truncate": UnsupportedField((False, "NONE"), _TRUNCATED),
        "truncation": UnsupportedField((False,), _TRUNCATED),
    },
)
"""Fields of the pooling APIs that are not supported."""
COHERE = KnownFields(
    KNOWN.ignored,
    {name: field for name, field in KNOWN.unsupported.items() if name != "truncate"},
)
"""Fields of /v2/embed that are not supported."""

Format = Literal["float", "base64"]
"""Encoding of a vector: JSON numbers, or little-endian float32 in base64."""


CohereFormat = Literal["float", "base64", "binary", "ubinary"]
"""Encoding of a vector: as in Format, or its signs as one bit per dimension (1 for values >= 0),
packed into signed (binary) or unsigned (ubinary) bytes."""
COHERE_PREFIXES: Mapping[str, Sequence[str]] = {
    "search_query": ("query",),
    "search_document": ("document", "passage", "corpus"),
    "classification": (),
    "clustering": (),
}
"""Names that checkpoints give to the prompt prefix of each of Cohere's input types, in the order in
which sentence-transformers looks for them."""


class PooledRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of all routes of pooling models. None means the default."""

    model: str | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=0, le=9)] | None = None
    slo: Slo | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=_MAX_TOKENS)] | None = None
    """Maximum tokens of a prompt, including special tokens; longer prompts are truncated. -1 for
    the model's maximum; None to reject prompts that exceed the model's maximum."""
    truncation_side: Side | None = None
    """Side from which tokens are removed; None for right."""


class InputRequest(PooledRequest, kw_only=True, frozen=True):
    """Fields of routes with one vector per input."""

    input: str | list[Any]
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    add_special_tokens: bool | None = True


class EmbeddingRequest(InputRequest, kw_only=True, frozen=True):
    """Body of /v1/embeddings."""

    encoding_format: Format | None = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Number of leading dimensions to return; None for all."""
    normalize: bool | None = None
    """Whether to L2-normalize embeddings; None for the model's default."""
    prompt_name: str | None = None
    """Name of the checkpoint's prompt prefix that is prepended to the texts; None for the default
    prefix."""


class CohereEmbedRequest(PooledRequest, kw_only=True, frozen=True):
    """Body of Cohere's /v2/embed."""

    texts: list[str]
    input_type: str | None = None
    """Name of a prompt prefix in the checkpoint, or one of COHERE_PREFIXES; None for the default
    prefix."""
    embedding_types: list[CohereFormat] | None = None
    """Encodings in which each vector is returned; None for float."""
    output_dimension: Annotated[int, Meta(ge=1)] | None = None
    """Number of leading dimensions to return; None for all."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """End at which texts that exceed the model's maximum are truncated; None for END, as in
    Cohere's API. With NONE they are rejected."""


class PoolingRequest(InputRequest, kw_only=True, frozen=True):
    """Body of /pooling."""

    encoding_format: Format | None = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    normalize: bool | None = None


class ClassifyRequest(InputRequest, kw_only=True, frozen=True):
    """Body of /classify."""

    use_activation: bool | None = True
    """Whether to return probabilities instead of logits."""


class PairRequest(PooledRequest, kw_only=True, frozen=True):
    """Fields of routes for pairs of texts."""

    max_tokens_per_query: Annotated[int, Meta(ge=0, le=_MAX_TOKENS)] | None = None
    """Maximum tokens per query; longer queries are truncated. None or 0 for no limit."""
    max_tokens_per_doc: Annotated[int, Meta(ge=0, le=_MAX_TOKENS)] | None = None
    """Maximum tokens per document; longer documents are truncated. None or 0 for no limit."""
    instruction: str | None = None
    """Instruction for rerankers whose prompt has one; None for the model's default."""


class ScoreRequest(PairRequest, kw_only=True, frozen=True):
    """Body of /score, which scores one text against several, or pairs of texts."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    """Same as `text_1`."""
    documents: str | list[str] | None = None
    """Same as `text_2`."""


class RerankDocument(msgspec.Struct, frozen=True):
    """A document given as an object."""

    text: str


class RerankRequest(PairRequest, kw_only=True, frozen=True):
    """Body of /v1/rerank."""

    query: str
    documents: list[str | RerankDocument]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Number of results; None or 0 for all."""
    return_documents: bool | None = True
