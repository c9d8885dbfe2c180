"""Sampling parameters of one request, as they travel from the gateway to the worker."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

_INT32_MAX = 2**31 - 1
"""Bound of everything that counts or names tokens: ranks keep such values in fixed-size columns."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request draws its tokens and when it ends. Names and defaults follow vLLM.

    Stop strings are matched on text by whoever detokenizes (the gateway, or `LLM`), never by the
    scheduler; everything else here is decided on tokens by the worker.

    Raises:
        ValueError: a value is out of range; the message names the field and the range.
    """

    n: int = 1
    """How many completions of the same prompt; each becomes a request of its own."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it before the draw."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest; 0 drops none."""
    seed: int | None = None
    """Key of the request's random draws; None lets the front draw one at random."""
    max_tokens: int | None = 16
    """Most tokens to generate; None means up to the model's maximum length."""
    min_tokens: int = 0
    """End tokens and stop tokens do not end the request before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the request where they appear in the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request, besides the model's own end tokens."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string that ended it."""
    ignore_eos: bool = False
    """Go on after an end token (benchmarks)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        # Callers in Python write stop="\n" or stop=["a", "b"]; the wire always has tuples.
        stop: Iterable[str] | str = self.stop
        msgspec.structs.force_setattr(
            self, "stop", (stop,) if isinstance(stop, str) else tuple(stop)
        )
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be in [0, 100], got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not -1 <= self.top_k <= _INT32_MAX:
            raise ValueError(
                f"top_k must be -1 or 0 (off) or in [1, {_INT32_MAX}], got {self.top_k}"
            )
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= _INT32_MAX:
            raise ValueError(f"max_tokens must be in [1, {_INT32_MAX}], got {self.max_tokens}")
        if not 0 <= self.min_tokens <= _INT32_MAX:
            raise ValueError(f"min_tokens must be in [0, {_INT32_MAX}], got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        if any(not s for s in self.stop):
            raise ValueError("stop strings must not be empty")
        for token_id in self.stop_token_ids:
            if not 0 <= token_id <= _INT32_MAX:
                raise ValueError(f"stop_token_ids must be in [0, {_INT32_MAX}], got {token_id}")
