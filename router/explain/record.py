"""Lines of decision logs. They contain keyed hashes of blocks, and no text or tokens."""

from __future__ import annotations

import msgspec

from worker.protocol.step_time import StepCosts


class Decided(msgspec.Struct, kw_only=True, tag="decided"):
    """A completion and its routing decision, written when it has ended."""

    request_id: str
    at: float
    """Time of arrival in seconds on the gateway's clock."""
    num_tokens: int
    """Tokens of the prompt."""
    num_output: int
    """Tokens generated."""
    page_size: int
    hashes: bytes
    """Block hashes of the prompt, little-endian uint64; in a log keyed, and the first ones only."""
    session: str
    """The client's name of the conversation, empty for none; in a log keyed."""
    worker_id: str
    """Id of the worker that the decision chose."""
    attempt: int
    """Number of the last attempt; 0 if no worker was lost or refused the completion."""
    hit_tokens: int
    """Prompt tokens expected in the chosen worker's prefix cache."""
    achievable_hit_tokens: int
    """Prompt tokens expected in the prefix cache of the worker with the longest hit."""
    pooled_hit_tokens: int
    """Prompt tokens that one cache of the size of all workers' caches together would have had."""
    cached_tokens: int
    """Prompt tokens found in the worker's prefix cache."""
    predicted_s: float
    """Expected seconds to the first token, from the decision."""
    first_token_s: float
    """Seconds from arrival to the first token; negative if there was none."""
    regret_s: float
    """Expected seconds to the first token, less the fewest at any worker."""


class WorkerSeen(msgspec.Struct, kw_only=True, tag="worker"):
    """A worker that has attached, and can be chosen from then on."""

    worker_id: str
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int


class FleetSpeed(msgspec.Struct, kw_only=True, tag="speed"):
    """Step times as the fleet has learned them so far."""

    costs: StepCosts
    factors: dict[str, float]
    """Step times of each worker over those of `costs`, by worker id."""


LogLine = Decided | WorkerSeen | FleetSpeed
