"""What the gate must know of the engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """Limits of speculation on one worker group; defaults are those of its flags."""

    num_speculative_tokens: int
    """Most drafts in a row of one request."""
    max_num_seqs: int
    """Slots of the worker."""
    max_utilization: float = 0.8
    """Share of the slots in use from which nothing is drafted."""
    max_priority: int = 6
    """Requests above this priority are not drafted for."""
    deadline_margin_s: float = 0.05
    """Nothing is drafted for a request whose next token is due, by its SLO, within so long."""
    stops_itself: bool = True
    """Whether the proposer ends drafts that are not worth their cost; otherwise their number
    follows from how often the request's drafts were accepted."""
    adaptive: bool = True
    """False drafts as many as possible wherever the limits allow it, whatever that costs."""
