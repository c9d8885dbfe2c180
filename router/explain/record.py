"""The lines of a decision log. They hold no text and no tokens, only keyed hashes of blocks."""

from __future__ import annotations

import msgspec

from worker.wire.step_time import StepCosts


class Decided(msgspec.Struct, kw_only=True, tag="decided"):
    """One request, written when it has ended."""

    request_id: str
    at: float
    """Arrival, in seconds of the gateway's clock."""
    num_tokens: int
    """Tokens of the prompt."""
    num_output: int
    """Tokens generated."""
    page_size: int
    hashes: bytes
    """Hashes of the prompt's full blocks, little-endian uint64; in a log the first ones, keyed."""
    session: str
    """Empty where the client names none; in a log a keyed hash."""
    worker_id: str
    """Worker that took it at last."""
    attempt: int
    """0 where the first worker did."""
    hit_tokens: int
    """Prompt tokens expected in that worker's cache."""
    achievable_hit_tokens: int
    """Prompt tokens expected in the cache of the worker that had most."""
    pooled_hit_tokens: int
    """Prompt tokens that one cache as large as all workers' together would have had."""
    cached_tokens: int
    """Prompt tokens found in the worker's cache."""
    predicted_s: float
    """Time to the first token, as expected."""
    first_token_s: float
    """Time to the first token, as it was; negative if there was none."""
    regret_s: float
    """Expected time to the first token, over the shortest expected at any worker."""


class WorkerSeen(msgspec.Struct, kw_only=True, tag="worker"):
    """A worker that can be chosen from now on."""

    worker_id: str
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int


class FleetSpeed(msgspec.Struct, kw_only=True, tag="speed"):
    """How long steps take, as learned so far."""

    costs: StepCosts
    factors: dict[str, float]
    """Times of each worker, over those of `costs`."""


LogLine = Decided | WorkerSeen | FleetSpeed
