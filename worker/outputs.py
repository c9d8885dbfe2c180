"""What `LLM` returns, in vLLM's shape, and how one choice of a request grows into it."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.wire.detokenizer import RequestText
from worker.wire.messages import FinishReason, Submit, TokenDelta
from worker.wire.tokenizer import Tokenizer


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    """Which of the `n` choices."""
    text: str = ""
    """Generated text; empty where detokenization is off."""
    token_ids: list[int] = field(default_factory=list)
    """Generated tokens, the ending one included."""
    finish_reason: FinishReason | None = None
    """Why it ended; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it, where one did."""


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """A prompt and its completions so far."""

    request_id: str
    prompt: str | None
    """The text, where the prompt was one."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens of the first choice that the prefix cache held."""


class ChoiceState:
    """Applies the engine's deltas to one completion, text and stop strings included.

    Args:
        submit: the request as the engine has it.
        index: which of the prompt's choices this is.
        tokenizer: None leaves the text empty.
    """

    def __init__(self, submit: Submit, index: int, tokenizer: Tokenizer | None) -> None:
        self.submit = submit
        self.output = CompletionOutput(index=index)
        self.num_cached_tokens = 0
        self._text: RequestText | None = None
        if tokenizer is not None:
            sampling = submit.sampling
            self._text = RequestText(
                tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens),
                stop=sampling.stop,
                include_stop_str_in_output=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
            )

    @property
    def finished(self) -> bool:
        """Whether the completion has ended, by the engine or by a stop string."""
        return self.output.finish_reason is not None

    def apply(self, delta: TokenDelta) -> None:
        """Takes one step's tokens. A stop string ends the completion before the engine does."""
        output = self.output
        output.token_ids.extend(delta.token_ids)
        if delta.num_cached_tokens >= 0:
            self.num_cached_tokens = delta.num_cached_tokens
        if self._text is not None:
            before = self._text.num_tokens
            output.text += self._text.push(delta.token_ids, stopped=delta.finish_reason == "stop")
            if self._text.stop_reason is not None:
                beyond = len(delta.token_ids) - (self._text.num_tokens - before)
                del output.token_ids[len(output.token_ids) - beyond :]
                output.finish_reason = "stop"
                output.stop_reason = self._text.stop_reason
                return
        if delta.finish_reason is not None:
            if self._text is not None:
                output.text += self._text.flush()
            output.finish_reason = delta.finish_reason
            output.stop_reason = delta.stop_reason
