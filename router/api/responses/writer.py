"""ResponsesWriter: responses of OpenAI's Responses API, streaming or not."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from router.api.openai.blocks import Block, BlockWriter, event
from router.api.openai.logprobs import ChatLogprobs
from router.api.openai.pings import COMMENT
from router.api.openai.tools import new_call_id
from router.api.responses.protocol import ResponsesRequest
from router.api.responses.response import COMPLETED, error_of, response_of
from router.api.responses.tools import BEGUN, ClientTool, ClientTools, InputText, escaped
from router.errors import ApiError
from router.parsers import Content, Dialect, Piece, closed

KEEPALIVE = 12
"""Number of pings per `keepalive` event; the other pings are comments. With the default interval,
the event is sent every two minutes."""
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
        logprobs: format of log-probabilities of the text; None to omit them.
        dialect: the model's format of reasoning and tool calls.
        tools: the client's tools.
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
        tools: ClientTools,
        ended: Callable[[dict[str, Any], dict[str, Any]], None] | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._body = body
        self._temperature, self._top_p = temperature, top_p
        self._logprobs = logprobs
        self._dialect = dialect
        self._tools = tools
        self._forced = tools.forced_grammar(body.tool_choice)
        """Custom tool whose input is the entire text; None if there is none."""
        self._inputs: dict[int, InputText] = {}
        """Inputs of custom tools by block index."""
        self._ended = ended
        self._created = int(time.time())
        self._num_events = 0
        self._num_idle = 0
        """Number of pings after the first."""
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
        """The events response.created and response.in_progress, without output."""
        response = self.response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def idle(self) -> bytes:
        """A comment, or every KEEPALIVE-th time a `keepalive` event, as in OpenAI's API.

        Codex disconnects after 300 s without an event; other clients reject `keepalive` events.
        """
        self._num_idle += 1
        return self._event("keepalive") if self._num_idle % KEEPALIVE == 0 else COMMENT

    def opened(self, block: Block) -> bytes:
        """Events for a new item and its text part."""
        item: dict[str, Any] = {"id": f"{_PREFIXES[block.kind]}_{secrets.token_hex(16)}"}
        if block.kind == "thought":
            item |= {"type": "reasoning", "summary": [], "content": []}
        elif block.kind == "text":
            item |= {"type": "message", "role": "assistant", "content": []}
        else:
            item |= self._call(block)
        item["status"] = "in_progress"
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        part = self._part(block, "", [])
        return added + self._part_event("response.content_part.added", block, part=part)

    def _call(self, block: Block) -> dict[str, Any]:
        """Fields of the output item for a new call."""
        tool = self._tools.by_name.get(block.name) or ClientTool(kind="function", name=block.name)
        fields: dict[str, Any] = {"call_id": new_call_id(self._dialect), "name": tool.name}
        if tool.namespace is not None:
            fields["namespace"] = tool.namespace
        if tool.kind == "function":
            return {"type": "function_call", **fields, "arguments": ""}
        self._inputs[block.index] = InputText()
        return {
            "id": f"ctc_{secrets.token_hex(16)}",
            "type": "custom_tool_call",
            **fields,
            "input": "",
        }

    def _take(self, piece: Piece) -> Iterator[bytes]:
        """Adds a piece of output. Text generated with a custom tool's grammar becomes the input of
        a call."""
        if self._forced is None or not isinstance(piece, Content):
            yield from super()._take(piece)
            return
        if not self.is_open or self.blocks[-1].kind != "call":
            name = self._forced.name
            yield from self._open("call", name)
            yield from self._add("call", BEGUN)
        yield from self._add("call", escaped(piece.text))

    def added(self, block: Block, text: str) -> bytes:
        """The delta with the text of an item or the arguments of a call."""
        if (given := self._inputs.get(block.index)) is not None:
            return self._input_delta(block, given.push(text))
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
        if (given := self._inputs.get(block.index)) is not None:
            events = self._input_done(block, given)
        elif block.kind == "call":
            item["arguments"] = text
            events = self._part_event(
                "response.function_call_arguments.done", block, name=item["name"], arguments=text
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

    def _input_delta(self, block: Block, text: str) -> bytes:
        """The event with further text of a custom tool's input; empty if there is no text."""
        self._items[block.index]["input"] += text
        name = "response.custom_tool_call_input.delta"
        return self._part_event(name, block, delta=text) if text else b""

    def _input_done(self, block: Block, given: InputText) -> bytes:
        """Events at the end of a custom tool's input."""
        if self._forced is not None:
            given.push('"}')
            block.parts.append('"}')
        rest = self._input_delta(block, given.end())
        text = self._items[block.index]["input"]
        return rest + self._part_event("response.custom_tool_call_input.done", block, input=text)

    def last(self) -> bytes:
        """The event with the complete response. For a cancelled response, the events that are still
        missing precede it."""
        is_cut = self.is_open or not self.is_begun
        events = b"".join(self.chunk(self.completion)) if is_cut else b""
        response = self.answer()
        return events + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        """The event response.failed with the error, preceded by the first events if they are not
        written yet."""
        begun = b"" if self.is_begun else self.begun()
        return begun + self._event("response.failed", response=self.failed(error))

    def answer(self) -> dict[str, Any]:
        """The complete response as a JSON-serializable dict."""
        statuses = {"length": "incomplete", "abort": "cancelled"}
        status = statuses.get(self.completion.finish_reason or "", COMPLETED)
        return self._over(self.response(status))

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The failed response, with its output up to the error."""
        for _ in self.end_block():
            pass
        response = self.response("failed")
        response["error"] = error_of(error)
        return self._over(response)

    def _over(self, response: dict[str, Any]) -> dict[str, Any]:
        if self._ended is not None:
            self._ended(response, self._message())
        return response

    def response(self, status: str) -> dict[str, Any]:
        """The response with a status; output and usage are included if the status is final."""
        is_over = status not in ("queued", "in_progress")
        return response_of(
            self._body,
            status,
            response_id=self.response_id,
            model=self.model,
            created=self._created,
            temperature=self._temperature,
            top_p=self._top_p,
            output=self._items if is_over else (),
            usage=self._usage() if is_over else None,
        )

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
