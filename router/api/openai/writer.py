"""ResponseWriter: writes completions as chunks of a stream or as one JSON object.

Streams are the hot path: the JSON around a chunk's text is encoded once per choice, and only the
text per chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from router.api.http.slices import Rows, slices
from router.api.http.slices import encode as _encode
from router.api.openai.logprobs import (
    EchoedPrompt,
    LogprobFormat,
    Scored,
    prompt_logprobs,
    token_text,
)
from router.api.openai.pings import COMMENT
from router.api.openai.protocol import StreamOptions
from router.errors import ApiError
from router.fleet import PromptBlocks
from router.serving import Completion, Generation
from router.tokens.encoder import PromptText
from worker.protocol.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
UNFINISHED = b',"logprobs":null,"finish_reason":null}]'


@dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """Optional parts of a response besides the text."""

    tokenizer: Tokenizer
    """Tokenizer of the model."""
    return_token_ids: bool = False
    """Whether choices include token ids."""
    logprobs: LogprobFormat | None = None
    """Format of log-probabilities in choices; None to omit them."""
    prompt_logprobs: bool = False
    """Whether non-streaming responses include log-probabilities of the prompts."""
    echo: Sequence[PromptText] | None = None
    """Prompt texts that are echoed at the start of choices; None to echo none."""
    echo_only: bool = False
    """Whether choices consist of the echoed prompt only, without generated tokens."""


class ResponseWriter(ABC):
    """Writes the completions of one generation.

    Args:
        generation: the completions to write.
        response_id: `id` of the response.
        created: `created` of the response, in Unix seconds.
        model: model name in the response.
        options: stream options; None for the defaults.
        extras: optional parts of the response besides the text.
    """

    prefix: str
    """Prefix of the response's id."""
    object: str
    """`object` of a non-streaming response."""
    chunk_object: str
    """`object` of chunks."""
    opening: bytes
    """JSON that precedes the text of a choice, after its index."""
    closing: bytes
    """JSON that follows the text of a choice, before its other fields."""
    choices_have_prompts: bool
    """Whether the prompt's token ids are in each choice instead of once in the response."""
    headers: Sequence[tuple[bytes, bytes]] = ()
    """Additional headers of the response."""

    def __init__(
        self,
        generation: Generation,
        *,
        response_id: str,
        created: int,
        model: str,
        extras: Extras,
        options: StreamOptions | None = None,
    ) -> None:
        self.generation = generation
        self.response_id = response_id
        self._created = created
        self._model = model
        self._options = options or StreamOptions()
        self._extras = extras
        self._echoed: set[int] = set()
        """Indices of choices whose echoed prompt has been written."""
        self._echo: tuple[PromptBlocks, EchoedPrompt] | None = None
        """The last echoed prompt, reused for the following choices of the same prompt."""
        self._counts_always = bool(
            self._options.include_usage and self._options.continuous_usage_stats
        )
        self._plain = not (
            extras.return_token_ids
            or extras.logprobs is not None
            or extras.echo is not None
            or self._counts_always
        )
        head = _encode(self._header(self.chunk_object))[:-1]
        self._start = b"data: " + head + b',"choices":[{"index":'
        self._heads = [
            b"%b%d%b" % (self._start, completion.spec.index, self.opening)
            for completion in generation.completions
        ]
        self._middle = self.closing + UNFINISHED + self._usage_so_far() + b"}\n\n"

    def first(self) -> bytes:
        """Events at the start of a stream, before any text."""
        return b""

    def ping(self) -> bytes:
        """A no-op event that keeps a stream alive."""
        return COMMENT

    def chunk(self, completion: Completion) -> Iterable[bytes]:
        """A server-sent event with all new output of a completion, in slices; empty if there is no
        new output."""
        text, token_ids = completion.take()
        if completion.draft is not None:
            draft = completion.take_draft()
            if draft is not None and not token_ids and completion.finish_reason is None:
                return (self._draft_chunk(completion, draft),)
        if self._plain and completion.finish_reason is None:
            plain = self._plain_text(completion, text)
            if plain is not None:
                head = self._heads[completion.spec.index]
                return (head + _encode(plain) + self._middle,) if plain else ()
        return self._full_chunk(completion, text, token_ids)

    def _plain_text(self, completion: Completion, text: str) -> str | None:
        """The text of a chunk that consists only of text; otherwise None."""
        return text

    def last(self) -> bytes:
        """Events at the end of a stream."""
        if not self._options.include_usage:
            return DONE
        body = {**self._header(self.chunk_object), "choices": [], "usage": self.usage()}
        return b"data: " + _encode(body) + b"\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        """The event at the end of a failed stream."""
        return b"data: " + error.body() + b"\n\n"

    def whole(self) -> Iterator[bytes]:
        """JSON of a non-streaming response, in slices."""
        yield _encode(self._header(self.object))[:-1]
        before = b',"choices":['
        for completion in self.generation.completions:
            text, token_ids = completion.take()
            text, logprobs = self._with_extras(completion, text, token_ids)
            choice = {
                "index": completion.spec.index,
                **self.content(completion, text),
                "logprobs": logprobs,
                **self._ending(completion),
            }
            if self._extras.return_token_ids:
                choice["token_ids"] = completion.token_ids
                if self.choices_have_prompts:
                    choice["prompt_token_ids"] = _prompt_ids(completion)
            self.amend(choice, completion)
            yield before
            yield from slices(choice)
            before = b","
        yield b'],"usage":' + _encode(self.usage())
        yield from self.ending()
        yield b"}"

    def usage(self) -> dict[str, Any]:
        """`usage` for the tokens written so far; more may have been generated."""
        generation = self.generation
        prompt = generation.num_prompt_tokens
        completion = sum(completion.num_taken for completion in generation.completions)
        if self._extras.echo_only:
            completion = 0
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        }
        rounds, forwards = generation.num_rounds, generation.num_forwards
        if forwards:
            usage["diffusion"] = {
                "rounds": rounds,
                "forwards": forwards,
                "tokens_per_forward": round(generation.num_completion_tokens / forwards, 4),
            }
        return usage

    @abstractmethod
    def content(self, completion: Completion, text: str) -> dict[str, Any]:
        """Fields of a complete choice that hold its text."""

    @abstractmethod
    def amend(self, choice: dict[str, Any], completion: Completion) -> None:
        """Adds further fields to a complete choice."""

    def ending(self) -> Iterable[bytes]:
        """JSON of the last fields of a non-streaming response, after `usage`, in slices."""
        return ()

    def prompt_logprobs(self, completion: Completion) -> Rows | None:
        """Log-probabilities of a completion's prompt; None if not requested."""
        found = self.generation.prompt_logprobs(completion)
        return prompt_logprobs(self._extras.tokenizer, found)

    def _with_extras(
        self, completion: Completion, text: str, token_ids: list[int]
    ) -> tuple[str, dict[str, Any] | None]:
        """New text and log-probabilities of a choice, preceded by those of its prompt if echoed."""
        extras, index = self._extras, completion.spec.index
        scored: list[Scored] = []
        offsets = completion.offsets(token_ids)
        echoed: EchoedPrompt | None = None
        if extras.logprobs is not None:
            scored += zip(token_ids, completion.take_logprobs(), strict=True)
        if extras.echo_only:
            text, scored, offsets = "", [], ()
        if extras.echo is not None:
            prompt = extras.echo[index // self.generation.request.feasibility.sampling.n]
            offsets = [len(prompt.text) + offset for offset in offsets]
            if index not in self._echoed:
                self._echoed.add(index)
                text = prompt.text + text
                if extras.logprobs is not None:
                    echoed = self._echo_of(completion, prompt, extras.logprobs)
        if extras.logprobs is None:
            return text, None
        return text, extras.logprobs.entries(scored, offsets, echoed)

    def _echo_of(
        self, completion: Completion, text: PromptText, logprobs: LogprobFormat
    ) -> EchoedPrompt:
        prompt = completion.spec.prompt
        if self._echo is None or self._echo[0] is not prompt:
            before = (None, *(self.generation.prompt_logprobs(completion) or ()))
            tokens = list(zip(_prompt_ids(completion), before, strict=False))
            self._echo = prompt, logprobs.echoed(tokens, text.offsets)
        return self._echo[1]

    def _ending(self, completion: Completion) -> dict[str, Any]:
        if self._extras.echo_only and completion.finish_reason == "stop":
            return {"finish_reason": "length", "stop_reason": None}
        ending: dict[str, Any] = {
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.slo is not None:
            ending["slo"] = completion.slo
        return ending

    def _header(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _draft_chunk(self, completion: Completion, draft: list[int]) -> bytes:
        """A chunk without text, with the tokens of the running block (null for undecided ones)."""
        tokenizer = self._extras.tokenizer
        texts = [None if token < 0 else token_text(tokenizer, token) for token in draft]
        return b'%b""%b,"draft":%b%b%b}\n\n' % (
            self._heads[completion.spec.index],
            self.closing,
            _encode(texts),
            UNFINISHED,
            self._usage_so_far(),
        )

    def _full_chunk(
        self, completion: Completion, text: str, token_ids: list[int]
    ) -> Iterator[bytes]:
        text, logprobs = self._with_extras(completion, text, token_ids)
        tail: dict[str, Any] = {"logprobs": logprobs, **self._ending(completion)}
        if completion.finish_reason is None:
            del tail["stop_reason"]
        if self._extras.return_token_ids:
            tail["token_ids"] = token_ids
            is_first = token_ids and len(token_ids) == len(completion.token_ids)
            if is_first and self.choices_have_prompts:
                tail["prompt_token_ids"] = _prompt_ids(completion)
        yield self._heads[completion.spec.index] + _encode(text) + self.closing
        yield from self._rest_of_chunk(tail)

    def _rest_of_chunk(self, tail: dict[str, Any]) -> Iterator[bytes]:
        """JSON of a chunk after its choice's text: the `tail` of the choice, and the usage."""
        rest = slices(tail)
        yield b"," + next(rest).removeprefix(b"{")
        yield from rest
        yield b"]" + self._usage_so_far() + b"}\n\n"

    def _usage_so_far(self) -> bytes:
        """JSON of `usage` in all chunks but the last."""
        if self._counts_always:
            return b',"usage":' + _encode(self.usage())
        return b',"usage":null' if self._options.include_usage else b""


class ChatWriter(ResponseWriter):
    """Writes chat.completion and its chunks."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    opening = b',"delta":{"content":'
    closing = b"}"
    choices_have_prompts = False

    def first(self) -> bytes:
        """Chunks with the role of each choice; the first also has the prompt's token ids."""
        end = UNFINISHED + self._usage_so_far()
        events = [
            b'%b%d,"delta":{"role":"assistant","content":""}%b'
            % (self._start, completion.spec.index, end)
            for completion in self.generation.completions
        ]
        events[0] += self._prompt_tokens()
        return b"".join(event + b"}\n\n" for event in events)

    def content(self, completion: Completion, text: str) -> dict[str, Any]:
        """The field `message`: an assistant message with the text."""
        return {"message": {"role": "assistant", "content": text}}

    def amend(self, choice: dict[str, Any], completion: Completion) -> None:
        """Does nothing: choices of chats have no further fields."""

    def ending(self) -> Iterable[bytes]:
        """Token ids and log-probabilities of the prompt, if requested."""
        yield self._prompt_tokens()
        if self._extras.prompt_logprobs:
            yield b',"prompt_logprobs":'
            yield from slices(self.prompt_logprobs(self.generation.completions[0]))

    def _prompt_tokens(self) -> bytes:
        if not self._extras.return_token_ids:
            return b""
        return b',"prompt_token_ids":' + _encode(_prompt_ids(self.generation.completions[0]))


class TextWriter(ResponseWriter):
    """Writes text_completion of /v1/completions, streaming or not."""

    prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"
    opening = b',"text":'
    closing = b""
    choices_have_prompts = True
    _scored: tuple[PromptBlocks, Rows | None] | None = None
    """Prompt of the last written choice, and the prompt's log-probabilities; reused for the
    following choices of the same prompt."""

    def content(self, completion: Completion, text: str) -> dict[str, Any]:
        """The field `text`."""
        return {"text": text}

    def amend(self, choice: dict[str, Any], completion: Completion) -> None:
        """Adds the log-probabilities of the choice's prompt, if requested."""
        if self._extras.prompt_logprobs:
            prompt = completion.spec.prompt
            if self._scored is None or self._scored[0] is not prompt:
                self._scored = prompt, self.prompt_logprobs(completion)
            choice["prompt_logprobs"] = self._scored[1]


def _prompt_ids(completion: Completion) -> list[int]:
    return memoryview(completion.spec.prompt.token_ids).cast("i").tolist()
