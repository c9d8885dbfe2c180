"""Answers in blocks: what a model thinks, says and calls, one behind the other, streamed or whole.

So Anthropic's API and OpenAI's responses give them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from router.api.slices import encode, slices
from router.api.tools import Reading, ToolUse
from router.errors import ApiError
from router.replies import Call, Content, Dialect, Piece, Thought
from router.serving import Completion, Generation
from worker.wire.tokenizer import Tokenizer

PLAIN = Reading(dialect=Dialect(), use=ToolUse(), is_thinking=False)
"""How an answer is read that is text alone."""


@dataclass(kw_only=True, slots=True)
class Block:
    """A stretch of an answer that is of one kind."""

    kind: Literal["thought", "text", "call"]
    index: int
    """Its place in the answer."""
    name: str = ""
    """Name of the function that is called."""
    parts: list[str] = field(default_factory=list)
    """Parts of its text, or of the call's arguments."""
    extras: list[Any] = field(default_factory=list)
    """Log-probabilities of its text."""

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.parts)


class BlockWriter(ABC):
    """Writes the only completion of a generation in blocks.

    A whole answer has the blocks that a stream would have told: both come the same way.

    Args:
        generation: what is written.
        reading: how the text is read; None for plain text.
        tokenizer: of the model.
        response_id: `id` of the response.
        model: the name that the client used.
    """

    headers: Sequence[tuple[bytes, bytes]] = ()

    def __init__(
        self,
        generation: Generation,
        *,
        reading: Reading | None,
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
        """Whether the last block goes on."""
        self._reading = reading or PLAIN
        self._reader = self._reading.reader()
        self._tokenizer = tokenizer
        self.is_begun = False
        """Whether the beginning is told."""

    def first(self) -> bytes:
        """Nothing: what a stream begins with tells of the prompt what the first token brings."""
        return b""

    def chunk(self, completion: Completion) -> Iterator[bytes]:
        """Everything new as server-sent events."""
        text = self.take()
        if not self.is_begun:
            self.is_begun = True
            yield self.begun()
        is_end = completion.finish_reason is not None
        for piece in self._reading.pieces(self._reader, text, is_end=is_end):
            yield from self._take(piece)
        if is_end:
            yield from self.end_block()

    def take(self) -> str:
        """The next text of the completion."""
        text, _ = self.completion.take()
        return text

    def whole(self) -> Iterator[bytes]:
        """The answer of a request that is not streamed, in slices."""
        for _ in self.chunk(self.completion):
            pass
        yield from slices(self.answer())

    @property
    def has_calls(self) -> bool:
        """Whether the model calls a function."""
        return self._reader.num_calls > 0

    @property
    def num_thought_tokens(self) -> int:
        """Tokens of what the model has thought."""
        if not self._reader.has_thoughts:
            return 0
        return self._reading.num_thought_tokens(self._tokenizer, self.completion.token_ids)

    @abstractmethod
    def begun(self) -> bytes:
        """Events at the beginning of the answer."""

    @abstractmethod
    def opened(self, block: Block) -> bytes:
        """Events at the beginning of a block."""

    @abstractmethod
    def added(self, block: Block, text: str) -> bytes:
        """The event for more of a block, which has it already."""

    @abstractmethod
    def closed(self, block: Block) -> bytes:
        """Events at the end of a block."""

    @abstractmethod
    def last(self) -> bytes:
        """Events at the end of the answer."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Events at its end where an error ends it."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """The whole of it, as JSON has it."""

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
        """The end of the block that is open, if one is."""
        if self.is_open:
            self.is_open = False
            yield self.closed(self.blocks[-1])


def event(name: str, /, **fields: Any) -> bytes:
    """A server-sent event of that name, which its JSON has as its type."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields}))
