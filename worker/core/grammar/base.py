"""Grammar interfaces, from a client's parameters to masks of allowed tokens.

frontend     StructuredOutputsParams ──compile──> CompiledGrammar      (in a bounded process)
coordinator  CompiledGrammar ──load──> Matcher, one per request        (in a thread)
engine core  GrammarState: a token in, the next mask out
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from worker.protocol.structured import StructuredOutputsParams

MAX_WHITESPACE = 8
"""Maximum number of consecutive white-space characters in JSON. Without a limit, small models
generate them endlessly."""

Words = npt.NDArray[np.int32]
"""Token mask: ceil(vocab / 32) words, in which a set bit allows a token."""


MAX_MESSAGE_BYTES = 1024
"""Maximum length of an error message to a client, in bytes. Libraries quote the whole grammar,
some of them up to three times."""


class GrammarError(ValueError):
    """A grammar is invalid or unsupported; the message is for the client."""


class GrammarTooHeavy(GrammarError):
    """A grammar exceeded the time or memory limit; a retry may succeed."""


class GrammarFault(RuntimeError):
    """Internal error while advancing a supported grammar."""


def words_of(token_ids: list[int], vocab_size: int) -> Words:
    """Mask that allows `token_ids`; ids greater than or equal to `vocab_size` are ignored."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[[token_id for token_id in token_ids if token_id < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def shortened(message: str) -> str:
    """Truncates a message to MAX_MESSAGE_BYTES of UTF-8, omitting its middle if necessary."""
    octets = message.encode(errors="replace")
    if len(octets) <= MAX_MESSAGE_BYTES:
        return message
    gap = f" ... ({len(octets)} bytes) ... "
    available = MAX_MESSAGE_BYTES - len(gap)
    head, tail = octets[: available * 3 // 4], octets[-(available // 4) :]
    return head.decode(errors="ignore") + gap + tail.decode(errors="ignore")


class Matcher(Protocol):
    """Grammar state of one request, implemented with one of the grammar libraries."""

    def accept(self, token_id: int) -> bool:
        """Advances by one token; returns False if the grammar does not allow it."""
        ...

    def rollback(self, count: int) -> None:
        """Undoes the last `count` tokens."""
        ...

    def may_end(self) -> bool:
        """Whether the tokens so far form a complete text of the grammar."""
        ...

    def fill(self, words: Words) -> None:
        """Writes the mask for the next token, including EOS tokens if the text may end."""
        ...


LoadedGrammar = Callable[[], Matcher]
"""A compiled grammar for any number of requests: each call creates a matcher in its initial
state."""


class GrammarBackend(Protocol):
    """A library that compiles grammars and matches tokens of one vocabulary."""

    def compile(self, params: StructuredOutputsParams) -> str:
        """Compiles a grammar to a payload for `load`. Raises GrammarError."""
        ...

    def load(self, payload: str) -> LoadedGrammar:
        """Loads a payload of `compile`, in this process or another. Raises GrammarError."""
        ...
