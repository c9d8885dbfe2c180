"""A vocabulary of single bytes, and grammars over it."""

from __future__ import annotations

from typing import Any

import numpy as np

from worker.core.grammar.base import GrammarBackend
from worker.core.grammar.guidance_backend import GuidanceBackend
from worker.core.grammar.matcher_state import MatcherState
from worker.core.grammar.xgrammar_backend import XGrammarBackend
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams

TOKENS = [*(bytes([byte]) for byte in range(256)), b"", b"ab", b""]
EOS = 256
VOCAB_SIZE = len(TOKENS)


def make_backend(name: str) -> GrammarBackend:
    if name == "guidance":
        return GuidanceBackend(TOKENS, [EOS])
    return XGrammarBackend.of_tokens(TOKENS, [EOS])


def make_state(
    backend: GrammarBackend, output: bytes = b"", *, sampling: Any = None, **params: Any
) -> MatcherState:
    """State of a request that has already sampled `output`."""
    loaded = backend.load(backend.compile(StructuredOutputsParams(**params)))
    return MatcherState(
        loaded(),
        sampling or SamplingParams(),
        eos_token_ids=[EOS],
        vocab_size=VOCAB_SIZE,
        output=output,
    )


def allowed(state: MatcherState) -> set[int]:
    """Token ids whose bit is set."""
    octets = np.frombuffer(state.mask, dtype=np.uint8)
    bits = np.unpackbits(octets, bitorder="little", count=VOCAB_SIZE)
    return set(np.nonzero(bits)[0].tolist())
