"""The Plan of one step, broadcast from rank 0 to every rank, and what comes back.

A Plan is a diff against tables that live on the device (token pool, page table, one stable row
per request slot); it never carries a token that the device sampled itself.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from worker.wire.diffusion import DiffusionParams
from worker.wire.messages import TokenLogprobs

_DIGESTS_KEPT = 512
"""Far more steps than a digest can lag behind."""


class LogitsParams(msgspec.Struct, array_like=True, frozen=True):
    """Logits processors of a request and the log-probabilities that it asks for; most have none."""

    num_prompt: int
    """Tokens of its row that count as prompt."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_token_ids: list[int] = []
    biases: list[float] = []
    """One per token of `bias_token_ids`."""
    allowed_token_ids: list[int] = []
    """Only these are drawn; empty for all."""
    bad_words: list[list[int]] = []
    """The last token of each is not drawn after the others."""
    min_tokens: int = 0
    """While there is less output, none of `stop_token_ids` is drawn."""
    stop_token_ids: list[int] = []
    num_logprobs: int = -1
    """Likeliest tokens to report beside each draw; -1 reports nothing."""
    num_prompt_logprobs: int = -1
    """Alternatives to report for each prompt token after the first; -1 for none."""


class BlockAdmit(msgspec.Struct, array_like=True, frozen=True):
    """What a request of a block-diffusion model asks for."""

    params: DiffusionParams | None
    """None takes the server's defaults."""
    end_token_ids: list[int]
    """Tokens that end it."""
    limit: int
    """Position at which it ends."""
    state: bytes = b""
    """The running block of a request that was preempted in the middle of one: as `BlockOutcome` had
    it."""


class Admit(msgspec.Struct, array_like=True, frozen=True):
    """Fills the row of a slot when a request enters the running set, first or again."""

    slot: int
    token_ids: bytes
    """All tokens known so far, prompt and generated, little-endian int32, from position 0."""
    temperature: float
    top_k: int
    """0 keeps all."""
    top_p: float
    min_p: float
    seed: int
    """Signed 64-bit key of the request's draws."""
    logits_params: LogitsParams | None = None
    block: BlockAdmit | None = None
    """Of a block-diffusion model's request."""
    end_token_ids: list[int] = []
    """Tokens of which each ends it, for certain: nothing need be computed after one."""


class PageWrite(msgspec.Struct, array_like=True, frozen=True):
    """Writes page ids into the page-table row that a slot has for a group of layers, from column
    `start`."""

    slot: int
    start: int
    page_ids: list[int]
    group: int = 0


class PageCopies(msgspec.Struct, array_like=True, frozen=True):
    """Copies between device pages and slots in host memory, one to one; each rank has its part."""

    pages: list[int]
    slots: list[int]


class StateLoad(msgspec.Struct, array_like=True, frozen=True):
    """Copies a snapshot into the state of a slot, whose row begins behind position 0."""

    slot: int
    snapshot: int


class StateStore(msgspec.Struct, array_like=True, frozen=True):
    """Copies the state of a slot that has seen so many positions into a snapshot; the slot's row
    computes the last of them."""

    slot: int
    position: int
    snapshot: int


class PlannedRow(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """Computes positions [start, start + length) of one request."""

    slot: int
    start: int
    length: int
    sample: bool
    """Whether the last position draws a token, written to position start + length."""

    @property
    def num_draws(self) -> int:
        """Positions that draw a token."""
        return int(self.sample)

    @property
    def max_tokens(self) -> int:
        """Positions that it computes at most."""
        return self.length


class DraftRow(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A speculative row: one request's newest token and the drafts after it, verified together.

    It begins with the newest token, wherever in [start, start + length) the steps before it leave
    that, and continues with up to `num_drafts` drafts, all within that range; each position draws.
    Where the newest token stands beyond it, nothing is computed.
    """

    slot: int
    start: int
    length: int
    num_drafts: int
    """0 where it is speculative only since the step before leaves its position open."""

    @property
    def num_draws(self) -> int:
        """Positions that draw a token, of a row that has all its drafts."""
        return 1 + self.num_drafts

    @property
    def max_tokens(self) -> int:
        """Positions that it computes at most."""
        return min(self.length, 1 + self.num_drafts)


class BlockRow(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Positions [start, start + length) of a block-diffusion model's request, of which the last
    block is a running one: a pass decides some of its positions."""

    slot: int
    start: int
    length: int
    is_window: bool = False
    """Whether the step before decides what of the range is computed: whatever the cache lacks, up
    to the end of the running block; of the next block where that step ended the running one;
    nothing where it ended the request."""

    @property
    def num_draws(self) -> int:
        """1: the running block has one outcome, and one mask where there is a grammar."""
        return 1

    @property
    def max_tokens(self) -> int:
        """Positions that it computes at most."""
        return self.length


Row = PlannedRow | DraftRow | BlockRow
"""One request's part of a step."""


class Accept(msgspec.Struct, array_like=True, frozen=True):
    """Decides positions of a slot's running block that a round under a grammar proposed."""

    slot: int
    end: int
    """Positions before this one are decided."""


class Plan(msgspec.Struct, array_like=True, frozen=True):
    """One step. Planned rows of length 1 come first (decodes), then speculative rows and windows of
    blocks, then all other rows."""

    seq: int
    """Counts from 1 without gaps; a rank that sees a gap ends."""
    admits: list[Admit]
    """Applied before the page writes; page writes before the rows."""
    page_writes: list[PageWrite]
    rows: list[Row]
    digest_seq: int = 0
    """Every 64th Plan: `digest` covers all sampled tokens of steps up to this one; 0 for none."""
    digest: int = 0
    masked: list[int] = []
    """Rows under a grammar, counted over the rows that draw: where there are any, a Sample message
    with the masks of their draws follows, and no rank samples before it."""
    draft_threshold: float = 0.0
    """Drafts that are less likely to count than this do not pay for their cost."""
    max_rounds: int = 1
    """Of running blocks: most forward passes before control returns without any being done."""
    accepts: list[Accept] = []
    """Of running blocks under a grammar; applied before the admits."""
    stores: PageCopies | None = None
    """Pages that leave for host memory: copied before anything else writes to them."""
    loads: PageCopies | None = None
    """Pages that come back: after the stores, which may touch the same pages and slots, and before
    the rows."""
    state_loads: list[StateLoad] = []
    """Of models whose layers keep a state; before the rows."""
    state_stores: list[StateStore] = []
    """Of these, too; as the rows get there. No step before reads or writes these snapshots."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, at most."""
        return sum(row.max_tokens for row in self.rows)

    @property
    def drafts_under_grammar(self) -> bool:
        """Whether masked rows may draft: then the masks depend on the drafts."""
        if not self.masked:
            return False
        drawing = [row for row in self.rows if row.num_draws]
        return any(drawing[number].num_draws > 1 for number in self.masked)

    @property
    def has_prompts(self) -> bool:
        """Whether it computes part of a prompt."""
        last = self.rows[-1] if self.rows else None
        return isinstance(last, PlannedRow) and last.length > 1


class RankTimes(msgspec.Struct, array_like=True, frozen=True):
    """When a rank did what in a step: seconds of CLOCK_MONOTONIC, which all processes share.

    On CUDA it is the device that did it: launching, which takes the host's time, shows in the
    coordinator's.
    """

    started: float
    """The Plan is at hand. On CUDA: the step before is over, and this one's first launch is in."""
    prepared: float
    """Tables updated, inputs staged."""
    forwarded: float
    finished: float
    """The drawn tokens are on the host."""


class BlockOutcome(msgspec.Struct, array_like=True, frozen=True):
    """What a step came to for one running block."""

    num_tokens: int
    """Tokens that the block adds to its request; 0 where it is not done. Under a grammar, tokens
    that a round proposes from the leftmost undecided position on: the first fits."""
    is_committed: bool
    """Whether the cache holds the block as it is now: it was done before the last pass."""
    num_rounds: int
    """Passes that found something to decide in it."""
    num_forwards: int
    """All passes it was in."""
    state: bytes = b""
    """Of a block that is not done: opaque to all but the rank that is to continue it."""
    draft: list[int] | None = None
    """Of such a block, where its request asks for it: its tokens, -1 where undecided."""


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """What a Plan's execution yields on rank 0."""

    seq: int
    token_ids: list[int]
    """In the order of the Plan's rows: one per planned row that draws, and of a speculative row
    those up to the first that differs from its draft."""
    compute_ms: float
    """Time the rank spent on the step, apart from copies to and from host memory."""
    times: RankTimes | None = None
    """None from an executor that measures nothing."""
    logprobs: list[TokenLogprobs | None] | None = None
    """One per token, None for those whose request asks for none; None where nobody asks."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    """By index of the Plan's row: the prompt tokens that its positions predict."""
    drafted: list[int] | None = None
    """Per speculative row: the number of its drafts."""
    drawn: list[int] | None = None
    """Per speculative row: the number of its tokens in `token_ids`."""
    blocks: list[BlockOutcome] | None = None
    """One per BlockRow: `token_ids` are those of all blocks that are done, one after another."""
    num_forwards: int = 1
    """Forward passes of the step."""
    load_ms: float = 0.0
    """Time that the Plan's loads took."""


class SampleDigest:
    """Hashes (step, sampled tokens) of every step into one number; every rank keeps its own."""

    def __init__(self) -> None:
        self._values: OrderedDict[int, int] = OrderedDict({0: 0})
        self._last = 0

    def update(self, seq: int, token_ids: Sequence[int]) -> None:
        """Adds the tokens that step `seq` drew, in the order of its rows. Steps come in order."""
        assert seq > self._last, f"step {seq} after step {self._last}"
        data = array("q", (seq, *token_ids)).tobytes()
        self._values[seq] = xxh3_64_intdigest(data, self._values[self._last])
        self._last = seq
        if len(self._values) > _DIGESTS_KEPT:
            self._values.popitem(last=False)

    def value(self, seq: int) -> int:
        """Digest of all steps up to `seq`, as a signed 64-bit number.

        Raises:
            KeyError: step `seq` was not added, or is hundreds of steps old.
        """
        value = self._values[seq]
        return value - 2**64 if value >= 2**63 else value
