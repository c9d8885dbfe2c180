"""ResponsesWriter: responses of OpenAI's Responses API, streaming or not."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from router.api.openai.blocks import Block, BlockWriter, event
from router.api.openai.logprobs import ChatLogprobs
from router.api.openai.tools import new_call_id
from router.api.responses.protocol import ResponsesRequest
from router.errors import ApiError
from router.parsers import Dialect, closed

COMPLETED = "completed"
CUT = ("length", "abort", "error")
"""Finish reasons that leave the last item incomplete."""
_PREFIXES = {"thought": "rs", "text": "msg", "call": "fc"}
_DELTAS = {
    "thought": "response.reasoning_text.delta",
    "text": "response.output_text.delta",
    "call": "response.function_call_arguments.delta",
}


class ResponsesWriter(BlockWriter):
    """Writes a response and its server-sent events.

    Args:
        args: positional arguments of BlockWriter.
        body: the body of the request.
        temperature: sampling temperature.
        top_p: top-p of sampling.
        logprobs: format of log-probabilities of the text; None for none.
        dialect: the model's format of reasoning and tool calls.
        ended: called at the end with the complete response and the message that it adds to the
            conversation; None if it is not stored.
        kwargs: keyword arguments of BlockWriter.
    """

    def __init__(
        self,
        *args: Any,
        body: ResponsesRequest,
        temperature: float,
        top_p: float,
        logprobs: ChatLogprobs | None,
        dialect: Dialect,
        ended: Callable[[dict[str, Any], dict[str, Any]], None] | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._body = body
        self._sampled_at = {"temperature": temperature, "top_p": top_p}
        self._logprobs = logprobs
        self._dialect = dialect
        self._ended = ended
        self._created = int(time.time())
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        """Output items, one per block."""
        self._scored: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text is not written yet."""

    def take(self) -> str:
        """Removes and returns new text; keeps its log-probabilities for the event with that
        text."""
        text = super().take()
        if self._logprobs is not None:
            found = self.completion.take_logprobs()
            self._scored += [self._logprobs.entry(scored) for scored in found]
        return text

    def begun(self) -> bytes:
        """response.created and response.in_progress, without output."""
        response = self.response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def opened(self, block: Block) -> bytes:
        """Events for a new item and its text part."""
        item: dict[str, Any] = {"id": f"{_PREFIXES[block.kind]}_{secrets.token_hex(16)}"}
        if block.kind == "thought":
            item |= {"type": "reasoning", "summary": [], "content": []}
        elif block.kind == "text":
            item |= {"type": "message", "role": "assistant", "content": []}
        else:
            call_id = new_call_id(self._dialect)
            item |= {"type": "function_call", "call_id": call_id, "name": block.name}
            item["arguments"] = ""
        item["status"] = "in_progress"
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        part = self._part(block, "", [])
        return added + self._part_event("response.content_part.added", block, part=part)

    def added(self, block: Block, text: str) -> bytes:
        """The delta with text of an item, or arguments of a call."""
        fields: dict[str, Any] = {"delta": text}
        scored, self._scored = self._scored, []
        if block.kind == "text":
            fields["logprobs"] = scored
            block.extras += scored
        return self._part_event(_DELTAS[block.kind], block, **fields)

    def closed(self, block: Block) -> bytes:
        """Events at the end of an item, including the complete item."""
        item, text = self._items[block.index], block.text
        is_cut = self.completion.finish_reason in CUT and block is self.blocks[-1]
        item["status"] = "incomplete" if is_cut else COMPLETED
        if block.kind == "call":
            item["arguments"] = text
            events = self._part_event(
                "response.function_call_arguments.done", block, name=block.name, arguments=text
            )
        else:
            part = self._part(block, text, block.extras)
            item["content"] = [part]
            if block.kind == "text":
                events = self._part_event(
                    "response.output_text.done", block, text=text, logprobs=block.extras
                )
            else:
                events = self._part_event("response.reasoning_text.done", block, text=text)
            events += self._part_event("response.content_part.done", block, part=part)
        return events + self._event(
            "response.output_item.done", output_index=block.index, item=item
        )

    def last(self) -> bytes:
        """The event with the complete response; for a cancelled one preceded by the missing
        events."""
        is_cut = self.is_open or not self.is_begun
        events = b"".join(self.chunk(self.completion)) if is_cut else b""
        response = self.answer()
        return events + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        """response.failed with the error, preceded by the first events if they are not written
        yet."""
        begun = b"" if self.is_begun else self.begun()
        return begun + self._event("response.failed", response=self.failed(error))

    def answer(self) -> dict[str, Any]:
        """The complete response as a JSON-serializable dict."""
        statuses = {"length": "incomplete", "abort": "cancelled"}
        status = statuses.get(self.completion.finish_reason or "", COMPLETED)
        return self._over(self.response(status))

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The response up to an error."""
        for _ in self.end_block():
            pass
        response = self.response("failed")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response["error"] = {"code": code, "message": error.message}
        return self._over(response)

    def _over(self, response: dict[str, Any]) -> dict[str, Any]:
        if self._ended is not None:
            self._ended(response, self._message())
        return response

    def response(self, status: str) -> dict[str, Any]:
        """The response with a status; output and usage are included if the status is final."""
        body = self._body
        is_over = status not in ("queued", "in_progress")
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "status": status,
            "background": bool(body.background),
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": list(self._items) if is_over else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": body.store is not False,
            **self._sampled_at,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if is_over else None,
            "user": body.user,
        }

    def _message(self) -> dict[str, Any]:
        """The output as an assistant message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for block, item in zip(self.blocks, self._items, strict=True):
            if block.kind == "thought":
                message["reasoning"] = message.get("reasoning", "") + block.text
            elif block.kind == "text":
                message["content"] += block.text
            else:
                function = {"name": block.name, "arguments": closed(block.text)}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
        return message

    def _usage(self) -> dict[str, Any]:
        generation = self.generation
        prompt, answer = generation.num_prompt_tokens, generation.num_completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": generation.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": self.num_thought_tokens},
            "total_tokens": prompt + answer,
        }

    def _part(self, block: Block, text: str, logprobs: list[Any]) -> dict[str, Any]:
        if block.kind == "thought":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _part_event(self, name: str, block: Block, /, **fields: Any) -> bytes:
        """An event about the only part of an item, or about a call, which has no parts."""
        place: dict[str, Any] = {
            "item_id": self._items[block.index]["id"],
            "output_index": block.index,
        }
        if block.kind != "call":
            place["content_index"] = 0
        return self._event(name, **place, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        events = event(name, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return events
