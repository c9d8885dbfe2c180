"""BlockWriter: responses as a sequence of blocks of reasoning, text and tool calls.

Used by Anthropic's Messages API and OpenAI's Responses API.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from router.api.http.slices import encode, slices
from router.api.openai.tools import OutputParsing, ToolUse
from router.errors import ApiError
from router.parsers import Call, Content, Dialect, Piece, Thought
from router.serving import Completion, Generation
from worker.protocol.text.tokenizer import Tokenizer

PLAIN = OutputParsing(dialect=Dialect(), use=ToolUse(), is_thinking=False)
"""Output parsing that treats all output as text."""


@dataclass(kw_only=True, slots=True)
class Block:
    """A block of a response: reasoning, text or a tool call."""

    kind: Literal["thought", "text", "call"]
    index: int
    """Index of the block in the response."""
    name: str = ""
    """Name of the called function; empty for reasoning and text."""
    parts: list[str] = field(default_factory=list)
    """The block's text or the call's arguments, in the parts received."""
    extras: list[Any] = field(default_factory=list)
    """Log-probabilities of the text's tokens."""

    @property
    def text(self) -> str:
        """The text or arguments so far."""
        return "".join(self.parts)


class BlockWriter(ABC):
    """Writes a generation with a single completion as blocks.

    Non-streaming responses are assembled from the same blocks as streams.

    Args:
        generation: the generation of one completion.
        parsing: how reasoning and tool calls are parsed; None for plain text.
        tokenizer: tokenizer of the model.
        response_id: `id` of the response.
        model: model name in the response.
    """

    headers: Sequence[tuple[bytes, bytes]] = ()
    """Additional headers of the response."""

    def __init__(
        self,
        generation: Generation,
        *,
        parsing: OutputParsing | None,
        tokenizer: Tokenizer,
        response_id: str,
        model: str,
    ) -> None:
        [self.completion] = generation.completions
        self.generation = generation
        self.response_id = response_id
        self.model = model
        self.blocks: list[Block] = []
        self.is_open = False
        """Whether text can still be appended to the last block."""
        self._parsing = parsing or PLAIN
        self._parser = self._parsing.new_parser()
        self._tokenizer = tokenizer
        self.is_begun = False
        """Whether the events of `begun` have been written."""

    def first(self) -> bytes:
        """Empty: the first events include the number of cached tokens, known only with the first
        token."""
        return b""

    def ping(self) -> bytes:
        """No-op events that keep a stream alive; the events of `begun` if none have been sent."""
        if self.is_begun:
            return self.idle()
        self.is_begun = True
        return self.begun()

    def chunk(self, completion: Completion) -> Iterator[bytes]:
        """Server-sent events for all new tokens of the completion."""
        text = self.take()
        if not self.is_begun:
            self.is_begun = True
            yield self.begun()
        is_end = completion.finish_reason is not None
        for piece in self._parsing.pieces(self._parser, text, is_end=is_end):
            yield from self._take(piece)
        if is_end:
            yield from self.end_block()

    def take(self) -> str:
        """Removes and returns the new text of the completion."""
        text, _ = self.completion.take()
        return text

    def whole(self) -> Iterator[bytes]:
        """JSON of a non-streaming response, in slices."""
        for _ in self.chunk(self.completion):
            pass
        yield from slices(self.answer())

    @property
    def has_calls(self) -> bool:
        """Whether the model has called a function."""
        return self._parser.num_calls > 0

    @property
    def num_thought_tokens(self) -> int:
        """Number of reasoning tokens."""
        if not self._parser.has_thoughts:
            return 0
        return self._parsing.num_thought_tokens(self._tokenizer, self.completion.token_ids)

    @abstractmethod
    def begun(self) -> bytes:
        """Events at the start of the response."""

    @abstractmethod
    def idle(self) -> bytes:
        """A no-op event that keeps a stream alive."""

    @abstractmethod
    def opened(self, block: Block) -> bytes:
        """Events at the start of a block."""

    @abstractmethod
    def added(self, block: Block, text: str) -> bytes:
        """The event for `text` appended to a block."""

    @abstractmethod
    def closed(self, block: Block) -> bytes:
        """Events at the end of a block."""

    @abstractmethod
    def last(self) -> bytes:
        """Events at the end of the response."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Events at the end of a failed response."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """The complete response as a JSON-serializable dict."""

    def _take(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, Thought):
            yield from self._add("thought", piece.text)
        elif isinstance(piece, Content):
            yield from self._add("text", piece.text)
        elif isinstance(piece, Call):
            yield from self._open("call", piece.name)
        else:
            yield from self._add("call", piece.text)

    def _add(self, kind: Literal["thought", "text", "call"], text: str) -> Iterator[bytes]:
        if not self.is_open or self.blocks[-1].kind != kind:
            yield from self._open(kind)
        block = self.blocks[-1]
        block.parts.append(text)
        yield self.added(block, text)

    def _open(self, kind: Literal["thought", "text", "call"], name: str = "") -> Iterator[bytes]:
        yield from self.end_block()
        self.is_open = True
        self.blocks.append(Block(kind=kind, index=len(self.blocks), name=name))
        yield self.opened(self.blocks[-1])

    def end_block(self) -> Iterator[bytes]:
        """Events at the end of the open block, if any."""
        if self.is_open:
            self.is_open = False
            yield self.closed(self.blocks[-1])


def event(name: str, /, **fields: Any) -> bytes:
    """A server-sent event; its JSON data is `fields` plus the event's name as `type`."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields}))
