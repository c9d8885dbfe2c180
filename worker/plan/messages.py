"""Messages between the coordinator of a worker group and its ranks.

rank ──Hello──> coordinator ──Start──> rank ──Ready──> coordinator ──(Plan Sample?)*──> rank
rank 0 ──(Drafts? Result)*──> coordinator;   any rank ──Failure──> coordinator
"""

from __future__ import annotations

import msgspec

from worker.plan.plan import Plan, StepResult
from worker.protocol.page_groups import ONE_GROUP, PageGroups


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First message of a rank, once its shard is loaded: what was loaded, and its limits."""

    rank: int
    num_pages: int
    """KV pages that the rank's memory can hold, the dummy page included."""
    max_model_len: int
    vocab_size: int
    num_host_pages: int = 0
    """Pages that the rank's share of host memory can hold; 0 without a host-memory tier."""
    device: str = ""
    """Type of the rank's device: "cuda" or "cpu"."""
    dtype: str = ""
    """Data type of weights, activations and KV cache, such as "bfloat16"."""
    startup: dict[str, float] = {}
    """Seconds by phase until this message, see `worker.rank.rank.Rank`."""
    process: int = 0
    """Id of the rank's process; 0 for one in the coordinator's, or where ranks are on several
    nodes."""
    page_groups: PageGroups = ONE_GROUP
    """Groups of the model's layers, which have pages of their own."""
    max_num_seqs: int = 0
    """Most requests in the running set, the device's default filled in; equal on all ranks."""
    max_num_batched_tokens: int = 0
    """Token budget of one step, the device's default filled in; equal on all ranks."""


class Start(msgspec.Struct, tag="start", frozen=True):
    """Answer to the hellos of all ranks: allocate the KV cache."""

    num_pages: int
    """Pages to allocate on the device, the dummy page included."""
    num_host_pages: int = 0
    """Pages to allocate in host memory."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Answer to Start: the rank has allocated its KV cache and awaits Plans."""

    rank: int
    startup: dict[str, float] = {}
    """Seconds by phase since `Start`."""


class Failure(msgspec.Struct, tag="failure", frozen=True):
    """Last message of a rank that fails."""

    rank: int
    error: str
    """Traceback, which ends with the root cause."""
    heals: bool = False
    """Whether another start may succeed."""


class Result(msgspec.Struct, tag="result", frozen=True):
    """Rank 0's result of one step."""

    step: StepResult


class Drafts(msgspec.Struct, tag="drafts", frozen=True):
    """Rank 0's drafts for masked rows: masks are needed for the draw after each draft, too."""

    seq: int
    """Number of the Plan."""
    token_ids: list[list[int]]
    """Drafts of each masked row, in the order of the rows."""


class PlanMessage(msgspec.Struct, tag="plan", frozen=True):
    """Message with the Plan of one step to execute."""

    plan: Plan


class Sample(msgspec.Struct, tag="sample", frozen=True):
    """Masks of a Plan with masked draws; sent after it and before the next Plan.

    Where masked rows may draft it is sent after rank 0's `Drafts`.
    """

    seq: int
    """Number of the Plan."""
    masks: bytes
    """Masks of all draws of the masked rows, one after another: each has ceil(vocab / 32)
    little-endian int32 words, in which bit 1 allows a token."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Asks the rank to end."""


ToRank = Start | PlanMessage | Sample | Stop
FromRank = Hello | Ready | Failure | Result | Drafts
