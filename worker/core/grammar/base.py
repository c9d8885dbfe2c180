"""What the packages around it know of a grammar: its life from a client's words to masks.

front        StructuredOutputsParams ──compile──> CompiledGrammar      (in a bounded process)
coordinator  CompiledGrammar ──load──> Matcher, one per request        (in a thread)
scheduler    GrammarState: a token in, the next mask out
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from worker.wire.structured import StructuredOutputsParams

MAX_WHITESPACE = 8
"""Most characters of white space in a row in JSON: small models fall into endless runs."""

Words = npt.NDArray[np.int32]
"""A mask: ceil(vocab / 32) words, bit 1 allows."""


MAX_MESSAGE_BYTES = 1024
"""Of an error message to a client: libraries quote the whole grammar, some of them three times."""


class GrammarError(ValueError):
    """The grammar cannot be served; the message is for the client."""


class GrammarTooHeavy(GrammarError):
    """The grammar went beyond a limit of time or memory, which it may keep the next time."""


class GrammarFault(RuntimeError):
    """The worker cannot follow a grammar that is sound."""


def words_of(token_ids: list[int], vocab_size: int) -> Words:
    """A mask with the bits of these tokens; those that the model does not have are left out."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[[token_id for token_id in token_ids if token_id < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def shortened(message: str) -> str:
    """A message of at most MAX_MESSAGE_BYTES in UTF-8: what is in the middle is left out."""
    octets = message.encode(errors="replace")
    if len(octets) <= MAX_MESSAGE_BYTES:
        return message
    gap = f" ... ({len(octets)} bytes) ... "
    available = MAX_MESSAGE_BYTES - len(gap)
    head, tail = octets[: available * 3 // 4], octets[-(available // 4) :]
    return head.decode(errors="ignore") + gap + tail.decode(errors="ignore")


class Matcher(Protocol):
    """One request's state in its grammar, by whichever library."""

    def accept(self, token_id: int) -> bool:
        """Takes one token; False if it cannot follow."""
        ...

    def rollback(self, count: int) -> None:
        """Undoes the last `count` tokens."""
        ...

    def may_end(self) -> bool:
        """Whether the tokens so far are a whole text of the grammar."""
        ...

    def fill(self, words: Words) -> None:
        """Writes the mask of the next token, end tokens included where the text may end."""
        ...


LoadedGrammar = Callable[[], Matcher]
"""A compiled grammar, ready to be followed by any number of requests: each call makes a fresh
matcher, before the first token."""


class GrammarBackend(Protocol):
    """A library that compiles and follows grammars over one vocabulary."""

    def compile(self, params: StructuredOutputsParams) -> str:
        """The grammar as `load` takes it. Raises GrammarError."""
        ...

    def load(self, payload: str) -> LoadedGrammar:
        """The grammar that `compile` returned, in this process or another. Raises GrammarError."""
        ...
