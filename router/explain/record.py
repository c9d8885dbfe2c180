"""Lines of decision logs. They contain keyed hashes of blocks, and no text or tokens."""

from __future__ import annotations

import msgspec

from worker.protocol.step_time import StepCosts


class DecisionLine(msgspec.Struct, kw_only=True, tag="decided"):
    """A completion and its routing decision, written when the completion has ended."""

    request_id: str
    at: float
    """Time of arrival in seconds on the gateway's clock."""
    num_tokens: int
    """Number of prompt tokens."""
    num_output: int
    """Number of generated tokens."""
    page_size: int
    hashes: bytes
    """Block hashes of the prompt, little-endian uint64. Logs contain keyed hashes of the first
    blocks only."""
    session: str
    """The client's conversation id, empty if there is none; a keyed hash in logs."""
    worker_id: str
    """Id of the chosen worker."""
    attempt: int
    """Number of the last attempt, starting at 0; each attempt follows a worker's failure or
    rejection."""
    hit_tokens: int
    """Prompt tokens predicted to be in the chosen worker's prefix cache."""
    achievable_hit_tokens: int
    """Prompt tokens predicted to be in the prefix cache of the worker with the longest hit."""
    pooled_hit_tokens: int
    """Prompt tokens that would be hits in one cache with the capacity of all workers' caches."""
    cached_tokens: int
    """Prompt tokens found in the worker's prefix cache."""
    predicted_s: float
    """Seconds to the first token, as predicted when the decision was made."""
    first_token_s: float
    """Seconds from arrival to the first token; negative if there was none."""
    regret_s: float
    """Predicted seconds to the first token minus the minimum over all workers."""
    session_wait_s: float = 0.0
    """Seconds of `first_token_s` spent waiting at the SessionGate."""


class WorkerSeen(msgspec.Struct, kw_only=True, tag="worker"):
    """A worker that has attached and can be chosen from then on."""

    worker_id: str
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int


class FleetSpeed(msgspec.Struct, kw_only=True, tag="speed"):
    """Step-time model of the fleet, as fitted so far."""

    costs: StepCosts
    factors: dict[str, float]
    """Step times of each worker relative to `costs`, by worker id."""


LogLine = DecisionLine | WorkerSeen | FleetSpeed
