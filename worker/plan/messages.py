"""Messages between the coordinator of a worker group and its ranks.

rank ──Hello──> coordinator ──Start──> rank ──Ready──> coordinator ──(Plan Sample? Fetch?)*──> rank
rank 0 ──(Drafts? Result)*──> coordinator;   any rank ──Failure──> coordinator
"""

from __future__ import annotations

import msgspec

from worker.plan.plan import Plan, StepResult
from worker.protocol.page_groups import ONE_GROUP, PageGroups


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First message of a rank, sent after loading its shard: the loaded model, and the rank's
    limits."""

    rank: int
    num_pages: int
    """Number of KV cache pages that fit in the rank's memory, including the dummy page."""
    max_model_len: int
    vocab_size: int
    num_host_pages: int = 0
    """Number of pages that fit in the rank's share of host memory; 0 if there is no host-memory
    tier."""
    device: str = ""
    """Device type of the rank: "cuda" or "cpu"."""
    dtype: str = ""
    """Data type of weights, activations and, by default, KV cache, such as "bfloat16"."""
    kv_cache_dtype: str = ""
    """Data type of the KV cache if it differs from `dtype` ("fp8_e4m3"); otherwise empty."""
    startup: dict[str, float] = {}
    """Seconds by phase until this message (see `worker.rank.rank.Rank`)."""
    process: int = 0
    """Id of the rank's process; 0 if it is the coordinator's, or if ranks are on several nodes."""
    page_groups: PageGroups = ONE_GROUP
    """Layer groups with separate pages."""
    max_num_seqs: int = 0
    """Maximum number of running requests, with the device's default applied; equal on all ranks."""
    max_num_batched_tokens: int = 0
    """Token budget of one step, with the device's default applied; equal on all ranks."""


class Start(msgspec.Struct, tag="start", frozen=True):
    """Request that a rank allocate its KV cache; sent after every rank's `Hello`."""

    num_pages: int
    """Number of pages to allocate on the device, including the dummy page."""
    num_host_pages: int = 0
    """Number of pages to allocate in host memory."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Reply to Start: the rank has allocated its KV cache and waits for Plans."""

    rank: int
    startup: dict[str, float] = {}
    """Seconds by phase since `Start`."""


class Failure(msgspec.Struct, tag="failure", frozen=True):
    """Last message of a failed rank."""

    rank: int
    error: str
    """Traceback; its last line is the root cause."""
    heals: bool = False
    """Whether a restart may succeed."""


class Result(msgspec.Struct, tag="result", frozen=True):
    """Rank 0's result of one step."""

    step: StepResult


class Drafts(msgspec.Struct, tag="drafts", frozen=True):
    """Rank 0's drafts for masked rows, which also need a mask for the token after each draft."""

    seq: int
    """Number of the Plan."""
    token_ids: list[list[int]]
    """Drafts of each masked row, in row order."""


class PlanMessage(msgspec.Struct, tag="plan", frozen=True):
    """Message with the Plan of the next step."""

    plan: Plan


class Sample(msgspec.Struct, tag="sample", frozen=True):
    """Masks for a Plan with masked rows, sent after the Plan and before the next one.

    If masked rows may draft, this message is sent after rank 0's `Drafts`.
    """

    seq: int
    """Number of the Plan."""
    masks: bytes
    """Concatenated masks of all tokens of the masked rows. Each mask has ceil(vocab / 32)
    little-endian int32 words, in which a set bit allows a token."""


class Fetch(msgspec.Struct, tag="fetch", frozen=True):
    """Request for rank 0's result of the last Plan if its step was launched a round ahead. Rank 0
    holds back the result of such a step until it receives another message, since it may have to
    launch the next Plan first. Sent if the coordinator needs the result before it has another Plan.
    """

    seq: int
    """Number of the Plan."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Request that the rank exit."""


ToRank = Start | PlanMessage | Sample | Fetch | Stop
FromRank = Hello | Ready | Failure | Result | Drafts
