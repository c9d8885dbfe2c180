"""Pooling models, which return a vector per prompt: options, request parameters, properties."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

Task = Literal["auto", "generate", "embed", "classify", "score"]
Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]
PoolingType = Literal["last", "mean", "cls"]
"""Pooling method: hidden state of the last token, mean of all hidden states, or hidden state of the
first token."""
PoolingTypeName = Literal["last", "mean", "cls", "LAST", "MEAN", "CLS"]
"""Pooling type as users write it, including vLLM's names, which are in capitals."""
Activation = Literal["none", "sigmoid", "softmax"]
"""Function that converts the logits of a classification head to scores."""

_IN_POOLER_CONFIG = {"within": "--pooler-config"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingOptions:
    """Options of models that return vectors instead of text.

    Raises:
        ValueError: options contradict each other; the message names them.
    """

    task: Task = "auto"
    """Task of the model: generate text, embed (vectors), classify (probabilities of labels), or
    score (relevance of a document to a query, for rerankers that answer yes or no). auto selects
    embed for sentence-transformers checkpoints, classify for *ForSequenceClassification, otherwise
    generate."""
    runner: Runner = "auto"
    """Alternative to --task, as in vLLM: generate to generate text, or pooling for the task that
    --convert selects."""
    convert: Convert = "auto"
    """Task of --runner pooling, as in vLLM: embed or classify; auto selects the one that suits the
    checkpoint."""
    pooling_type: PoolingTypeName | None = field(default=None, metadata=_IN_POOLER_CONFIG)
    """Pooling: hidden state of the last token, mean over all tokens, or hidden state of the first
    token (cls). If unset, as the checkpoint specifies, or last if it specifies nothing."""
    normalize: bool | None = field(default=None, metadata=_IN_POOLER_CONFIG)
    """Whether to L2-normalize embeddings. If unset, as the checkpoint specifies, or true if it
    specifies nothing."""

    def __post_init__(self) -> None:
        is_converted = self.convert not in ("auto", "none")
        if self.task != "auto" and (self.runner != "auto" or self.convert != "auto"):
            raise ValueError(
                f"--task {self.task} cannot be combined with --runner or --convert: remove one"
            )
        if self.runner == "generate" and is_converted:
            raise ValueError(
                f"--convert {self.convert} needs --runner pooling, got --runner generate"
            )
        if self.runner == "pooling" and self.convert == "none":
            raise ValueError("--convert none needs --runner generate, got --runner pooling")

    @property
    def requested(self) -> Task | Literal["pooling"]:
        """The requested task: "pooling" for the pooling task that suits the checkpoint, "auto" if
        no task is requested."""
        if self.task != "auto":
            return self.task
        if self.convert in ("embed", "classify"):
            return self.convert
        if self.convert == "none":
            return "generate"
        return self.runner


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one request to a pooling model.

    Raises:
        ValueError: a value is out of range; the message names the field and the range.
    """

    dimensions: int | None = None
    """Number of leading dimensions of the embedding to return (matryoshka); None for all. If
    embeddings are L2-normalized, this applies to the shortened embedding."""
    normalize: bool | None = None
    """Whether to L2-normalize the embedding; None for the model's default."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.dimensions < 1:
            raise ValueError(f"dimensions must be at least 1, got {self.dimensions}")


class PoolingInfo(msgspec.Struct, array_like=True, frozen=True):
    """Properties of a pooling model, which are part of EngineInfo."""

    task: Literal["embed", "classify"]
    """Task of the model: embed returns the pooled hidden state, classify the logits of a head."""
    pooling_type: PoolingType
    size: int
    """Size of a vector: the hidden size, or the number of labels."""
    normalize: bool = True
    """Whether embeddings are L2-normalized by default."""
    activation: Activation = "none"
    """Function that converts logits to scores."""
    labels: tuple[str, ...] = ()
    """Names of the labels, by index; empty for embeddings."""
    dimensions: tuple[int, ...] = ()
    """Supported numbers of dimensions (matryoshka); empty if all are supported."""
    prompts: tuple[tuple[str, str], ...] = ()
    """Prefixes of texts by name, as in config_sentence_transformers.json."""
    default_prompt: str = ""
    """Name of the prefix for texts if the request names none; may be empty."""
    pair_template: str = ""
    """Prompt for a pair of texts, with the fields instruction, query and document; empty if the
    tokenizer joins the texts."""
    instruction: str = ""
    """Default instruction of `pair_template`."""
    is_bidirectional: bool = False
    """Whether tokens also attend to later ones (encoders). If so, prompts are computed in one step,
    and prefixes are not cached."""

    @property
    def reuses_prefixes(self) -> bool:
        """Whether cached prefixes save work: not if pooling needs the hidden states of all tokens,
        which are not cached."""
        return self.pooling_type == "last" and not self.is_bidirectional

    @property
    def answers_yes(self) -> bool:
        """Whether the labels are the tokens "no" and "yes", in this order."""
        return bool(self.pair_template)
