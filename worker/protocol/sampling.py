"""Sampling parameters of one request, sent from the gateway to the worker."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from worker.protocol.diffusion import DiffusionParams
from worker.protocol.pooling import PoolingParams
from worker.protocol.structured import StructuredOutputsParams, ThoughtTokens

if TYPE_CHECKING:
    from worker.protocol.text.tokenizer import Tokenizer

MAX_TOKEN_ID = _INT32_MAX = 2**31 - 1
"""Maximum value of counts and token ids, which ranks store as int32."""

MAX_LOGPROBS = 20
"""Maximum number of alternatives reported per token. This many are always computed, so that the
choice among equally likely tokens does not depend on other requests."""
MAX_LOGPROB_TOKENS = 128
"""Maximum number of tokens in `logprob_token_ids`, as in vLLM."""
MAX_LOGIT_BIASES = 1024
"""Maximum number of biased tokens per request. Ranks reserve 8 bytes for each in every slot.
OpenAI's clients send up to 300."""
MAX_BAD_WORDS_TOKENS = 4096
"""Maximum total number of tokens in a request's bad words. Ranks reserve 6 bytes for each in every
slot. Enough for 256 words of 8 tokens, since a word may be stored twice: as it is tokenized at the
start of a text, and after a space."""
MAX_LOGIT_BIAS = 100.0
"""Maximum magnitude of biases; larger ones are clamped to it."""


class InvalidParameter(ValueError):
    """A sampling parameter is out of range.

    Args:
        param: name of the field of SamplingParams.
        message: message that includes the value and the range.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(param, message)  # both, since exceptions are pickled by their arguments
        self.param = param
        self.message = message

    def __str__(self) -> str:
        return self.message


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request. Names and defaults follow vLLM.

    Stop strings are matched in the text by the process that detokenizes (the gateway, or `LLM`).
    The worker applies all other parameters to the tokens.

    Raises:
        InvalidParameter: a value is out of range; the message names the field and the range.
    """

    n: int = 1
    """Number of completions of the prompt; each becomes a separate request."""
    temperature: float = 1.0
    """Temperature, which divides logits before sampling; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose total probability reaches this; 1 disables
    it.
    """
    top_k: int = 0
    """Sample from the k most likely tokens; 0 or -1 disables it."""
    min_p: float = 0.0
    """Drop tokens whose probability is below this fraction of the most likely token's; 0 disables
    it."""
    seed: int | None = None
    """Random seed of the request; if None, the gateway (or `LLM`) chooses one at random."""
    max_tokens: int | None = 16
    """Maximum number of tokens to generate; None for no limit other than the model's maximum
    length."""
    min_tokens: int = 0
    """Minimum number of tokens to generate, before which EOS and stop tokens are not sampled."""
    frequency_penalty: float = 0.0
    """Penalty subtracted from a token's logit for each time that it was generated."""
    presence_penalty: float = 0.0
    """Penalty subtracted from the logit of each token that was generated."""
    repetition_penalty: float = 1.0
    """Penalty by which the logits of tokens that occur in the prompt or output are divided if they
    are positive, and multiplied if they are negative; 1 disables it."""
    logit_bias: dict[int, float] | None = None
    """Biases added to logits, by token id; clamped to [-100, 100]."""
    bad_words: tuple[str, ...] = ()
    """Texts that must not be generated: the last token of a text is not sampled if it would
    complete the text."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """`bad_words` as tokens, set by `with_bad_words`."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Tokens that may be sampled; None allows all."""
    logprobs: int | None = None
    """Number of most likely tokens to report with each generated token; None reports no
    log-probabilities. Log-probabilities are computed from the model's logits, before temperature,
    penalties and other processing."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens to report with each generated token instead of the most likely ones, in this order;
    requires `logprobs`."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report per prompt token except the first; None disables
    it."""
    stop: tuple[str, ...] = ()
    """Stop strings, which end the request when they appear in the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens, which end the request like the model's EOS tokens."""
    include_stop_str_in_output: bool = False
    """Whether the text includes the stop string that ended the completion."""
    ignore_eos: bool = False
    """Whether to continue after an EOS token (for benchmarks)."""
    skip_special_tokens: bool = True
    """Whether special tokens are omitted from the text."""
    structured_outputs: StructuredOutputsParams | None = None
    """Format of the text for structured output; None for free text."""
    thought: ThoughtTokens | None = None
    """Tokens around reasoning that may precede structured output; None if there is no reasoning."""
    diffusion: DiffusionParams | None = None
    """Parameters of block diffusion; None to use the server's defaults."""
    pooling: PoolingParams | None = None
    """Parameters of a request for a vector, which generates no tokens; None to generate text."""

    def __post_init__(self) -> None:
        self._normalize()
        self._check_draws()
        self._check_end()
        _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._check_logprob_tokens()

    def amended(self, **changes: object) -> SamplingParams:
        """Copy with changed values, which are not validated.

        `msgspec.structs.replace` would validate all fields again for each of a request's many
        completions, and they may be as large as the vocabulary.
        """
        amended = copy.copy(self)
        for name, value in changes.items():
            msgspec.structs.force_setattr(amended, name, value)
        return amended

    @property
    def num_entries(self) -> int:
        """Number of texts and token ids that every completion has to keep track of."""
        return (
            len(self.stop)
            + len(self.stop_token_ids)
            + len(self.logit_bias or ())
            + len(self.bad_words)
            + sum(map(len, self.bad_words_token_ids))
            + len(self.allowed_token_ids or ())
        )

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty applies, so that sampling depends on earlier tokens."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def _normalize(self) -> None:
        """Converts shorthands such as stop="a" to tuples, removes duplicate token ids, and clamps
        biases."""
        changed: dict[str, object] = {
            "stop_token_ids": tuple(self.stop_token_ids),
            "logprob_token_ids": tuple(dict.fromkeys(self.logprob_token_ids)),
        }
        for name in ("stop", "bad_words"):
            words: Iterable[str] | str = getattr(self, name)
            changed[name] = (words,) if isinstance(words, str) else tuple(words)
        if self.bad_words_token_ids:
            changed["bad_words_token_ids"] = tuple(tuple(ids) for ids in self.bad_words_token_ids)
        if self.allowed_token_ids is not None:
            changed["allowed_token_ids"] = tuple(dict.fromkeys(self.allowed_token_ids))
        if self.logit_bias is not None:
            changed["logit_bias"] = _clamped(self.logit_bias) or None
        for name, value in changed.items():
            msgspec.structs.force_setattr(self, name, value)

    def _check_draws(self) -> None:
        if self.n < 1:
            raise InvalidParameter("n", f"n must be at least 1, got {self.n}")
        _check_range("temperature", self.temperature, 0.0, 100.0)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidParameter("top_p", f"top_p must be in (0, 1], got {self.top_p}")
        if not -1 <= self.top_k <= _INT32_MAX:
            raise InvalidParameter(
                "top_k", f"top_k must be -1 or 0 (off) or in [1, {_INT32_MAX}], got {self.top_k}"
            )
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidParameter("seed", f"seed must fit in 64 bits, got {self.seed}")
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise InvalidParameter(
                "repetition_penalty",
                f"repetition_penalty must be in (0, 100], got {self.repetition_penalty}",
            )
        _check_tokens("logit_bias", self.logit_bias or ())
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter(
                "allowed_token_ids",
                "allowed_token_ids must not be empty: omit it to allow all",
            )
        _check_tokens("allowed_token_ids", self.allowed_token_ids or ())
        if not all(self.bad_words) or not all(self.bad_words_token_ids):
            raise InvalidParameter("bad_words", "bad_words must not contain empty strings")
        for token_ids in self.bad_words_token_ids:
            _check_tokens("bad_words_token_ids", token_ids)

    def _check_logprob_tokens(self) -> None:
        name, token_ids = "logprob_token_ids", self.logprob_token_ids
        if token_ids and self.logprobs is None:
            raise InvalidParameter(name, f"{name} requires logprobs")
        if len(token_ids) > MAX_LOGPROB_TOKENS:
            raise InvalidParameter(
                name, f"{name} has {len(token_ids)} tokens; the maximum is {MAX_LOGPROB_TOKENS}"
            )
        _check_tokens(name, token_ids)

    def _check_end(self) -> None:
        _check_range("max_tokens", self.max_tokens, 1, _INT32_MAX)
        _check_range("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens",
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
            )
        if any(not s for s in self.stop):
            raise InvalidParameter("stop", "stop strings must not be empty")
        _check_tokens("stop_token_ids", self.stop_token_ids)


def _check_range(name: str, value: float | None, minimum: float, maximum: float) -> None:
    if value is not None and not minimum <= value <= maximum:
        raise InvalidParameter(
            name, f"{name} must be in [{_format(minimum)}, {_format(maximum)}], got {value}"
        )


def _format(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _check_tokens(name: str, token_ids: Iterable[int]) -> None:
    ids = tuple(token_ids)
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id <= _INT32_MAX:
            raise InvalidParameter(
                name, f"token ids in {name} must be in [0, {_INT32_MAX}], got {token_id}"
            )


def _clamped(logit_bias: Mapping[int, float]) -> dict[int, float]:
    biases = {}
    for token_id, bias in logit_bias.items():
        if math.isnan(bias):
            raise InvalidParameter(
                "logit_bias",
                f"values of logit_bias must be numbers, got {bias} for token {token_id}",
            )
        biases[int(token_id)] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, float(bias)))
    return biases


def with_bad_words(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Sampling parameters with `bad_words` converted to tokens, in the form that the worker needs.

    As in vLLM, a word matches at the start of a text. It also matches after a space if the space
    only changes the word's first token.

    Raises:
        ValueError: a word has no tokens.
    """
    if not sampling.bad_words:
        return sampling
    found = [*sampling.bad_words_token_ids]
    for word in sampling.bad_words:
        text = word.lstrip() or word
        plain = tokenizer.encode(text, add_special_tokens=False)
        if not plain:
            raise ValueError(f"bad_words contains {word!r}, which has no tokens: remove it")
        found.append(tuple(plain))
        spaced = tokenizer.encode(" " + text, add_special_tokens=False)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(tuple(spaced))
    return sampling.amended(bad_words=(), bad_words_token_ids=tuple(found))
