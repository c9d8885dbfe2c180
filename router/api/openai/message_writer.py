"""MessageWriter: chat responses with reasoning and tool calls, streaming or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from router.api.http.slices import encode
from router.api.openai.tools import OutputParsing, new_call_id
from router.api.openai.writer import ChatWriter
from router.parsers import Call, Content, Piece, Thought
from router.serving import Completion, Generation


class MessageWriter(ChatWriter):
    """Writes chat.completion and its chunks for reasoning models and chats with tools.

    Complete messages and stream chunks are made from the same pieces of parsed output.

    Args:
        generation: the completions to write.
        parsing: how reasoning and tool calls are parsed.
        options: keyword arguments of ChatWriter.
    """

    def __init__(self, generation: Generation, *, parsing: OutputParsing, **options: Any) -> None:
        self._parsing = parsing
        self._parsers = [parsing.new_parser() for _ in generation.completions]
        super().__init__(generation, **options)  # calls `usage`, which needs the parsers

    def _plain_text(self, completion: Completion, text: str) -> str | None:
        """The content of a text without reasoning and calls; None if it may contain either."""
        return self._parsers[completion.spec.index].content_of(text)

    def _full_chunk(
        self, completion: Completion, text: str, token_ids: list[int]
    ) -> Iterator[bytes]:
        """An event for each piece of the message; none if there is nothing to send."""
        deltas = self._deltas(completion, text)
        _, logprobs = self._with_extras(completion, "", token_ids)
        shows_tokens = self._extras.return_token_ids and token_ids
        if completion.finish_reason is not None or (
            not deltas and (logprobs is not None or shows_tokens)
        ):
            deltas.append({})
        return self._events(completion, deltas, token_ids, logprobs)

    def content(self, completion: Completion, text: str) -> dict[str, Any]:
        """A choice's complete message; content is null if there are only calls or reasoning."""
        thoughts, content = "", ""
        calls: list[dict[str, Any]] = []
        for piece in self._read(completion, text):
            if isinstance(piece, Thought):
                thoughts += piece.text
            elif isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, Call):
                calls.append(self._call(piece))
            else:
                calls[-1]["function"]["arguments"] += piece.text
        is_bare = calls or self._parsers[completion.spec.index].has_thoughts
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if is_bare else ""),
        }
        if thoughts:
            message["reasoning"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def usage(self) -> dict[str, Any]:
        """Token counts so far, including reasoning tokens."""
        usage = super().usage()
        if self._parsing.dialect.thoughts is not None:
            number = sum(map(self._num_reasoning_tokens, self.generation.completions))
            usage["completion_tokens_details"] = {"reasoning_tokens": number}
        return usage

    def _ending(self, completion: Completion) -> dict[str, Any]:
        ending = super()._ending(completion)
        has_calls = self._parsers[completion.spec.index].num_calls > 0
        if has_calls and not self._parsing.use.is_named and ending["finish_reason"] == "stop":
            ending["finish_reason"] = "tool_calls"
        return ending

    def _read(self, completion: Completion, text: str) -> Iterator[Piece]:
        """The pieces of new text that are visible to the client."""
        parser = self._parsers[completion.spec.index]
        return self._parsing.pieces(parser, text, is_end=completion.finish_reason is not None)

    def _deltas(self, completion: Completion, text: str) -> list[dict[str, Any]]:
        """Deltas of the message for new text; a call's name precedes its arguments."""
        deltas: list[dict[str, Any]] = []
        index = self._parsers[completion.spec.index].num_calls - 1
        for piece in self._read(completion, text):
            if isinstance(piece, Thought):
                deltas.append({"reasoning": piece.text})
            elif isinstance(piece, Content):
                deltas.append({"content": piece.text})
            elif isinstance(piece, Call):
                index += 1
                deltas.append({"tool_calls": [{"index": index, **self._call(piece)}]})
            else:
                more = {"index": index, "function": {"arguments": piece.text}}
                deltas.append({"tool_calls": [more]})
        return deltas

    def _call(self, call: Call) -> dict[str, Any]:
        """A tool call of a message, without arguments."""
        return {
            "id": new_call_id(self._parsing.dialect),
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        }

    def _num_reasoning_tokens(self, completion: Completion) -> int:
        """Number of reasoning tokens that `take` has returned."""
        if not self._parsers[completion.spec.index].has_thoughts:
            return 0
        token_ids = completion.token_ids[: completion.num_taken]
        return self._parsing.num_thought_tokens(self._extras.tokenizer, token_ids)

    def _events(
        self,
        completion: Completion,
        deltas: list[dict[str, Any]],
        token_ids: list[int],
        logprobs: dict[str, Any] | None,
    ) -> Iterator[bytes]:
        head = b'%b%d,"delta":' % (self._start, completion.spec.index)
        for place, delta in enumerate(deltas):
            tail: dict[str, Any] = {"logprobs": None if place else logprobs, "finish_reason": None}
            if place == len(deltas) - 1 and completion.finish_reason is not None:
                tail |= self._ending(completion)
            if self._extras.return_token_ids:
                tail["token_ids"] = [] if place else token_ids
            yield head + encode(delta)
            yield from self._rest_of_chunk(tail)
