"""Outputs of `LLM` in vLLM's format, built from the engine's deltas."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from worker.protocol.messages import FinishReason, Submit, TokenDelta, TokenLogprobs
from worker.protocol.text.detokenizer import RequestText
from worker.protocol.text.stop import StopStrings
from worker.protocol.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token."""

    logprob: float
    rank: int
    """Rank of the token in the vocabulary; 1 is the most likely."""
    decoded_token: str | None
    """Text of the token; None if detokenization is disabled."""


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    """Index of the choice, 0 to n - 1."""
    text: str = ""
    """Generated text; empty if detokenization is disabled."""
    token_ids: list[int] = field(default_factory=list)
    """Generated tokens, including the EOS or stop token that ended the completion."""
    finish_reason: FinishReason | None = None
    """Reason why the completion ended, such as "stop" or "length"; None while it is running."""
    stop_reason: int | str | None = None
    """Stop token or stop string that ended the completion; None if none did."""
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict per generated token, which maps the token itself and the most likely tokens, in this
    order, to their log-probabilities. None unless requested."""
    cumulative_logprob: float | None = None
    """Sum of the generated tokens' log-probabilities; None unless they are requested."""
    num_rounds: int = 0
    """Block diffusion: number of forward passes that decoded positions of the completion's blocks.
    0 for other models."""
    num_forwards: int = 0
    """Block diffusion: total number of forward passes of the completion. 0 for other models."""
    pooled: bytes | None = None
    """Vector of a pooling model, little-endian float32; None while it is computed, and for models
    that generate text."""


@dataclass(kw_only=True, slots=True)
class PoolingOutput:
    """The vector of one prompt."""

    data: npt.NDArray[np.float32]
    """Embedding, or the logits of the labels."""


@dataclass(kw_only=True, slots=True)
class PoolingRequestOutput:
    """A prompt and its vector."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    num_cached_tokens: int
    """Number of cached prompt tokens."""


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """A prompt and its completions so far."""

    request_id: str
    prompt: str | None
    """Text of the prompt; None if it was given as tokens."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Number of cached prompt tokens of the first choice."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One dict per prompt token, as in `CompletionOutput.logprobs`, but None for the first token.
    None as a whole unless requested."""


class ChoiceState:
    """Applies the engine's deltas to one completion, including its text and stop strings.

    Args:
        submit: the request as sent to the engine.
        index: index of the choice.
        tokenizer: detokenizes the output; None leaves the text empty.
    """

    def __init__(self, submit: Submit, index: int, tokenizer: Tokenizer | None) -> None:
        self.submit = submit
        self.output = CompletionOutput(index=index)
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._tokenizer = tokenizer
        if submit.sampling.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._text: RequestText | None = None
        if tokenizer is not None:
            sampling = submit.sampling
            skip = sampling.skip_special_tokens
            prompt = memoryview(submit.prompt).cast("i")
            context = tokenizer.context(prompt, skip_special_tokens=skip)
            self._text = RequestText(
                tokenizer.detokenizer(context=context, skip_special_tokens=skip),
                stop=StopStrings(sampling.stop),
                include_stop_str_in_output=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
            )

    @property
    def finished(self) -> bool:
        """Whether the completion has ended, in the engine or by a stop string."""
        return self.output.finish_reason is not None

    def apply(self, delta: TokenDelta) -> None:
        """Applies one step's tokens. A stop string ends the completion before the engine does."""
        output = self.output
        output.token_ids.extend(delta.token_ids)
        output.pooled = delta.pooled
        output.num_rounds, output.num_forwards = delta.num_rounds, delta.num_forwards
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = self.prompt_logprobs or [None]
            self.prompt_logprobs.extend(map(self._by_token, delta.prompt_logprobs))
        if delta.num_cached_tokens >= 0:
            self.num_cached_tokens = delta.num_cached_tokens
        if self._text is not None:
            before = self._text.num_tokens
            output.text += self._text.push(delta.token_ids, stopped=delta.ends_with_stop_token)
            if self._text.stop_reason is not None:
                beyond = len(delta.token_ids) - (self._text.num_tokens - before)
                del output.token_ids[len(output.token_ids) - beyond :]
                self._take_logprobs(delta, len(delta.token_ids) - beyond)
                output.finish_reason = "stop"
                output.stop_reason = self._text.stop_reason
                return
        self._take_logprobs(delta, len(delta.token_ids))
        if delta.finish_reason is not None:
            if self._text is not None:
                output.text += self._text.flush()
            output.finish_reason = delta.finish_reason
            output.stop_reason = delta.stop_reason

    def _take_logprobs(self, delta: TokenDelta, count: int) -> None:
        output = self.output
        if delta.logprobs is None or output.logprobs is None:
            return
        for entry in delta.logprobs[:count]:
            output.logprobs.append(self._by_token(entry))
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry.logprobs[0]

    def _by_token(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        token_ids = entry.token_ids
        ranks = (entry.rank, *range(1, len(token_ids)))
        found: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(token_ids, entry.logprobs, ranks, strict=True):
            if token_id not in found:
                found[token_id] = Logprob(logprob, rank, self._decode(token_id))
        return found

    def _decode(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")
