"""What the coordinator of a worker group and its ranks say to each other, besides Plans.

rank ──Hello──> coordinator ──Start──> rank ──Ready──> coordinator ──(Plan Sample?)*──> rank
rank 0 ──(Drafts? Result)*──> coordinator;   any rank ──Failure──> coordinator
"""

from __future__ import annotations

import msgspec

from worker.plan.plan import Plan, StepResult
from worker.wire.page_groups import ONE_GROUP, PageGroups


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First word of a rank, once its shard is loaded."""

    rank: int
    num_pages: int
    """KV pages that its memory could hold, one dummy page included."""
    max_model_len: int
    vocab_size: int
    num_host_pages: int = 0
    """Pages for which it has host memory."""
    device: str = ""
    """Type of the rank's device: "cuda" or "cpu"."""
    dtype: str = ""
    """Of weights, activations and KV cache, such as "bfloat16"."""
    startup: dict[str, float] = {}
    """Seconds by phase up to here, see `worker.rank.rank.Rank`."""
    process: int = 0
    """Id of the rank's process, where all ranks are on one node; 0 elsewhere."""
    page_groups: PageGroups = ONE_GROUP
    """How the model's layers share pages."""
    max_num_seqs: int = 0
    """Requests that may run, by its configuration or else its device; equal on all ranks."""
    max_num_batched_tokens: int = 0
    """Tokens of a step: likewise."""


class Start(msgspec.Struct, tag="start", frozen=True):
    """The coordinator's answer when all ranks said hello: allocate this many pages."""

    num_pages: int
    num_host_pages: int = 0


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The rank has its KV cache and awaits Plans."""

    rank: int
    startup: dict[str, float] = {}
    """Seconds by phase since `Start`."""


class Failure(msgspec.Struct, tag="failure", frozen=True):
    """A rank's last word: the root cause, with its traceback."""

    rank: int
    error: str
    heals: bool = False
    """Whether another try may succeed."""


class Result(msgspec.Struct, tag="result", frozen=True):
    """Rank 0's result of one step."""

    step: StepResult


class Drafts(msgspec.Struct, tag="drafts", frozen=True):
    """Rank 0's drafts under a grammar: the masks must cover what follows them in the text."""

    seq: int
    """Of the Plan."""
    token_ids: list[list[int]]
    """Of each masked row."""


class PlanMessage(msgspec.Struct, tag="plan", frozen=True):
    """One step to execute."""

    plan: Plan


class Sample(msgspec.Struct, tag="sample", frozen=True):
    """What the Plan left open: follows every Plan that has masked draws, before the next Plan.

    Where masked rows may draft it answers rank 0's `Drafts`.
    """

    seq: int
    """Of the Plan."""
    masks: bytes
    """For each draw of the masked rows ceil(vocab / 32) little-endian words; bit 1 allows."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Ends the rank in good order."""


ToRank = Start | PlanMessage | Sample | Stop
FromRank = Hello | Ready | Failure | Result | Drafts
