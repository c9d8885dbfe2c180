"""AnthropicWriter: responses of Anthropic's Messages API, streaming or not."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from router.api.http.slices import encode
from router.api.openai.blocks import Block, BlockWriter, event
from router.errors import ApiError, anthropic_body
from router.parsers import closed

_DELTA = b"event: content_block_delta\ndata: %b%d%b%b}}\n\n"
_START = b'{"type":"content_block_delta","index":'
_ADDED = {
    "thought": b',"delta":{"type":"thinking_delta","thinking":',
    "text": b',"delta":{"type":"text_delta","text":',
    "call": b',"delta":{"type":"input_json_delta","partial_json":',
}


class AnthropicWriter(BlockWriter):
    """Writes a message and its server-sent events.

    Args:
        args: positional arguments of BlockWriter.
        request_id: id of the request, sent as request-id.
        kwargs: keyword arguments of BlockWriter.
    """

    def __init__(self, *args: Any, request_id: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_id = request_id
        self.headers = ((b"request-id", request_id.encode("latin-1")),)
        self._ids: dict[int, str] = {}
        """Tool call ids by block index."""

    def begun(self) -> bytes:
        """The event message_start, whose message has no content yet, and the event ping."""
        usage = {**self._usage(), "output_tokens": 0}
        message = {**self._message([], None, None), "usage": usage}
        return event("message_start", message=message) + event("ping")

    def idle(self) -> bytes:
        """The event ping."""
        return event("ping")

    def opened(self, block: Block) -> bytes:
        """The event content_block_start, with an empty block."""
        if block.kind == "call":
            self._ids[block.index] = f"toolu_{secrets.token_hex(12)}"
        return event("content_block_start", index=block.index, content_block=self._block(block))

    def added(self, block: Block, text: str) -> bytes:
        """The event content_block_delta, with the text of a block or the arguments of a call."""
        return _DELTA % (_START, block.index, _ADDED[block.kind], encode(text))

    def closed(self, block: Block) -> bytes:
        """The event content_block_stop. For reasoning, a signature delta precedes it, with the
        message's id as the signature."""
        signed = b""
        if block.kind == "thought":
            delta = {"type": "signature_delta", "signature": self.response_id}
            signed = event("content_block_delta", index=block.index, delta=delta)
        return signed + event("content_block_stop", index=block.index)

    def last(self) -> bytes:
        """The events message_delta, with the stop reason and token counts, and message_stop."""
        reason, sequence = self._ending()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return event("message_delta", delta=delta, usage=self._usage()) + event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        """The event `error`."""
        return b"event: error\ndata: %b\n\n" % anthropic_body(error, self._request_id)

    def answer(self) -> dict[str, Any]:
        """The complete message as a JSON-serializable dict."""
        content = [self._block(block, block.text) for block in self.blocks]
        return self._message(content, *self._ending())

    def _block(self, block: Block, text: str = "") -> dict[str, Any]:
        """A content block; `text` is empty when the block starts."""
        if block.kind == "thought":
            signature = self.response_id if text else ""
            return {"type": "thinking", "thinking": text, "signature": signature}
        if block.kind == "text":
            return {"type": "text", "text": text}
        # Truncated arguments end after the last complete value, as clients parse partial streams.
        given = msgspec.Raw(closed(text).encode())
        return {
            "type": "tool_use",
            "id": self._ids[block.index],
            "name": block.name,
            "input": given,
        }

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _ending(self) -> tuple[str, str | None]:
        """The message's stop_reason and stop_sequence."""
        completion = self.completion
        if completion.finish_reason == "length":
            return "max_tokens", None
        if self.has_calls:
            return "tool_use", None
        if isinstance(completion.stop_reason, str):
            return "stop_sequence", completion.stop_reason
        return "end_turn", None

    def _usage(self) -> dict[str, Any]:
        """Token counts so far; input_tokens excludes cached tokens."""
        generation = self.generation
        cached = generation.num_cached_tokens
        return {
            "input_tokens": generation.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "cache_read_input_tokens": cached,
            "output_tokens": generation.num_completion_tokens,
            "output_tokens_details": {"thinking_tokens": self.num_thought_tokens},
        }
