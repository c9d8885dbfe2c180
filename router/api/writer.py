"""Bodies of completion responses: bytes for chunks of a stream, or one JSON object.

Streams are the hot path: everything around a chunk's text is prepared once per choice, and only the
text is encoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from router.api.protocol import StreamOptions
from router.serving import Completion, Generation

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class ResponseWriter(ABC):
    """Writes the completions of one generation.

    Args:
        generation: what is written.
        response_id: `id` of the response.
        created: Unix seconds.
        model: the name that the client used.
        options: of the stream.
        return_token_ids: add token ids to every choice.
    """

    object: str
    chunk_object: str
    opening: bytes
    """JSON between a choice's index and its text."""
    closing: bytes
    """JSON after its text."""

    def __init__(
        self,
        generation: Generation,
        *,
        response_id: str,
        created: int,
        model: str,
        options: StreamOptions | None = None,
        return_token_ids: bool = False,
    ) -> None:
        self.generation = generation
        self.response_id = response_id
        self._created = created
        self._model = model
        self._options = options or StreamOptions()
        self._return_token_ids = return_token_ids
        self._plain = not (return_token_ids or self._options.continuous_usage_stats)
        head = _encode(self._header(self.chunk_object))[:-1]
        self._start = b"data: " + head + b',"choices":[{"index":'
        self._heads = [
            b"%b%d%b" % (self._start, completion.spec.index, self.opening)
            for completion in generation.completions
        ]
        usage = b',"usage":null}\n\n' if self._options.include_usage else b"}\n\n"
        self._middle = self.closing + b',"logprobs":null,"finish_reason":null}]' + usage

    def first(self) -> bytes:
        """What a stream begins with, before any text."""
        return b""

    def chunk(self, completion: Completion) -> bytes:
        """Everything new about a completion as one server-sent event; empty if nothing shows."""
        text, token_ids = completion.take()
        if self._plain and completion.finish_reason is None:
            if not text:
                return b""
            return self._heads[completion.spec.index] + _encode(text) + self._middle
        return self._full_chunk(completion, text, token_ids)

    def last(self) -> bytes:
        """What a stream ends with."""
        if not self._options.include_usage:
            return DONE
        body = {**self._header(self.chunk_object), "choices": [], "usage": self.usage()}
        return b"data: " + _encode(body) + b"\n\n" + DONE

    def whole(self) -> bytes:
        """The response of a request that is not streamed."""
        choices = []
        for completion in self.generation.completions:
            text, _ = completion.take()
            choice = {
                "index": completion.spec.index,
                **self.content(text),
                "logprobs": None,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            if self._return_token_ids:
                choice["token_ids"] = completion.token_ids
                choice["prompt_token_ids"] = _prompt_ids(completion)
            choices.append(choice)
        body = {**self._header(self.object), "choices": choices, "usage": self.usage()}
        return _encode(body)

    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        generation = self.generation
        prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        }

    @abstractmethod
    def content(self, text: str) -> dict[str, Any]:
        """A whole choice's text."""

    def _header(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _full_chunk(self, completion: Completion, text: str, token_ids: list[int]) -> bytes:
        tail: dict[str, Any] = {"logprobs": None, "finish_reason": completion.finish_reason}
        if completion.finish_reason is not None:
            tail["stop_reason"] = completion.stop_reason
        if self._return_token_ids:
            tail["token_ids"] = token_ids
            if token_ids and len(token_ids) == len(completion.token_ids):
                tail["prompt_token_ids"] = _prompt_ids(completion)
        usage = b""
        if self._options.continuous_usage_stats:
            usage = b',"usage":' + _encode(self.usage())
        elif self._options.include_usage:
            usage = b',"usage":null'
        return b"%b%b%b,%b]%b}\n\n" % (
            self._heads[completion.spec.index],
            _encode(text),
            self.closing,
            _encode(tail)[1:],
            usage,
        )


class ChatWriter(ResponseWriter):
    """chat.completion and its chunks."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    opening = b',"delta":{"content":'
    closing = b"}"

    def first(self) -> bytes:
        """The role of each choice."""
        return b"".join(
            b'%b%d,"delta":{"role":"assistant","content":""%b'
            % (self._start, completion.spec.index, self._middle)
            for completion in self.generation.completions
        )

    def content(self, text: str) -> dict[str, Any]:
        """See ResponseWriter."""
        return {"message": {"role": "assistant", "content": text}}


class TextWriter(ResponseWriter):
    """text_completion, streamed or not."""

    object = "text_completion"
    chunk_object = "text_completion"
    opening = b',"text":'
    closing = b""

    def content(self, text: str) -> dict[str, Any]:
        """See ResponseWriter."""
        return {"text": text}


def _prompt_ids(completion: Completion) -> list[int]:
    return memoryview(completion.spec.prompt.token_ids).cast("i").tolist()
