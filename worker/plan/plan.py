"""The Plan of one step, which the coordinator sends to every rank, and the result of the step.

A Plan is a diff against tables that live on the device (token pool, page table, one stable row
per request slot); it never carries a token that the device sampled itself.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from worker.protocol.diffusion import DiffusionParams
from worker.protocol.messages import TokenLogprobs

_DIGESTS_KEPT = 512
"""Digests that are kept, one per step; a Plan's digest lags behind by far fewer steps."""


class LogitsParams(msgspec.Struct, array_like=True, frozen=True):
    """Logits processors of a request, and the log-probabilities that it asks for."""

    num_prompt: int
    """Tokens of the slot's row that count as prompt."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_token_ids: list[int] = []
    biases: list[float] = []
    """Biases added to logits, one per token of `bias_token_ids`."""
    allowed_token_ids: bytes = b""
    """Tokens that may be drawn, little-endian int32; empty allows all."""
    bad_words: list[list[int]] = []
    """Token sequences whose last token is not drawn after the others."""
    min_tokens: int = 0
    """Output tokens before which none of `stop_token_ids` is drawn."""
    stop_token_ids: list[int] = []
    """End and stop tokens of the request, where `min_tokens` is set."""
    num_logprobs: int = -1
    """Likeliest tokens to report beside each drawn one; -1 reports no log-probabilities."""
    num_prompt_logprobs: int = -1
    """Likeliest tokens to report beside each prompt token after the first; -1 reports none."""


class BlockAdmit(msgspec.Struct, array_like=True, frozen=True):
    """Part of an Admit for requests of a block-diffusion model."""

    params: DiffusionParams | None
    """Parameters of the request; None takes the server's defaults."""
    end_token_ids: list[int]
    """End and stop tokens of the request."""
    limit: int
    """Length in tokens at which the request ends."""
    state: bytes = b""
    """Running block of a request that was preempted within it, from `BlockOutcome.state`."""


class Admit(msgspec.Struct, array_like=True, frozen=True):
    """Admission of a request to the running set, first or again: fills the row of its slot."""

    slot: int
    token_ids: bytes
    """All tokens known so far, prompt and generated, little-endian int32, from position 0."""
    temperature: float
    top_k: int
    """Number of likeliest tokens to keep; 0 keeps all."""
    top_p: float
    min_p: float
    seed: int
    """Signed 64-bit key of the request's draws."""
    logits_params: LogitsParams | None = None
    """Logits processors and log-probabilities; None for a request without any."""
    block: BlockAdmit | None = None
    """Block diffusion's part; None for an autoregressive model."""
    end_token_ids: list[int] = []
    """Tokens each of which surely ends the request: nothing is computed after one. Empty where
    `min_tokens` makes that uncertain."""


class PageWrite(msgspec.Struct, array_like=True, frozen=True):
    """Write of page ids, from column `start` on, to a slot's page-table row for a group of
    layers."""

    slot: int
    start: int
    page_ids: list[int]
    group: int = 0


class PageCopies(msgspec.Struct, array_like=True, frozen=True):
    """Copies between device pages and slots in host memory, pairwise; each rank copies its
    shard."""

    pages: list[int]
    slots: list[int]


class StateLoad(msgspec.Struct, array_like=True, frozen=True):
    """Copy of a snapshot to the state of a slot, before the slot's row, which continues it."""

    slot: int
    snapshot: int
    """Number of the snapshot."""


class StateStore(msgspec.Struct, array_like=True, frozen=True):
    """Copy of the state of a slot to a snapshot, within the step whose row computes it."""

    slot: int
    position: int
    """Number of positions that the state has seen then."""
    snapshot: int
    """Number of the snapshot."""


class PlannedRow(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """Row that computes positions [start, start + length) of one request."""

    slot: int
    start: int
    length: int
    sample: bool
    """Whether the last position draws a token, written to position start + length."""

    @property
    def num_draws(self) -> int:
        """Positions that draw a token."""
        return int(self.sample)


class DraftRow(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Speculative row: one request's newest token and the drafts after it, verified together.

    The newest token is where the steps before leave it, within [start, start + length). Up to
    `num_drafts` drafts follow it, within the same range; each position draws. Where the newest
    token is behind the range, nothing is computed.
    """

    slot: int
    start: int
    length: int
    num_drafts: int
    """Most drafts; 0 for a row that is speculative only since its position depends on drafts of
    steps in flight."""

    @property
    def num_draws(self) -> int:
        """Positions that draw a token if the row has all its drafts."""
        return 1 + self.num_drafts


class BlockRow(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Row that computes positions [start, start + length) of a block-diffusion model's request. The
    last block of the range is a running one: each pass decides some of its positions."""

    slot: int
    start: int
    length: int
    is_window: bool = False
    """Whether the step before decides which part of the range is computed: what the cache lacks, up
    to the end of the running block, or of the next one where that step ended the running one;
    nothing where it ended the request."""

    @property
    def num_draws(self) -> int:
        """1: the running block has one outcome, and one mask where there is a grammar."""
        return 1


Row = PlannedRow | DraftRow | BlockRow
"""One request's part of a step."""


class Accept(msgspec.Struct, array_like=True, frozen=True):
    """Acceptance of tokens that a round under a grammar has proposed for a slot's running block."""

    slot: int
    end: int
    """Position before which all are decided."""


class Plan(msgspec.Struct, array_like=True, frozen=True):
    """Plan of one step: updates of the device's tables, and rows.

    Rows of one planned position (decodes) come first, then speculative rows and windows of running
    blocks, then all others.
    """

    seq: int
    """Number of the step, from 1 without gaps; a rank that sees a gap ends."""
    admits: list[Admit]
    """Admissions, applied before the page writes."""
    page_writes: list[PageWrite]
    """Updates of page tables, applied before the rows."""
    rows: list[Row]
    digest_seq: int = 0
    """Last step whose sampled tokens `digest` covers, in every 64th Plan; 0 in others."""
    digest: int = 0
    """SampleDigest of the coordinator, which ranks compare with theirs."""
    masked: list[int] = []
    """Indices, among the rows that draw, of those under a grammar. Where there are any, a Sample
    message with the masks of their draws follows, and no rank samples before it."""
    draft_threshold: float = 0.0
    """Least probability of acceptance at which a draft pays for its cost."""
    max_rounds: int = 1
    """Most forward passes over running blocks before the step ends though none of them is done."""
    accepts: list[Accept] = []
    """Accepted tokens of running blocks under a grammar, applied before the admits."""
    stores: PageCopies | None = None
    """Copies of pages to host memory, made before anything else writes to these pages."""
    loads: PageCopies | None = None
    """Copies of pages from host memory, made after the stores, which may touch the same pages and
    slots, and before the rows."""
    state_loads: list[StateLoad] = []
    """Loads of state snapshots, where layers keep states; made before the rows."""
    state_stores: list[StateStore] = []
    """Stores of state snapshots, where layers keep states; made as the rows get there. No earlier
    step in flight reads or writes these snapshots."""

    @property
    def drafts_under_grammar(self) -> bool:
        """Whether masked rows may draft: then the masks depend on the drafts."""
        drawing = [row for row in self.rows if row.num_draws]
        return any(drawing[number].num_draws > 1 for number in self.masked)


class RankTimes(msgspec.Struct, array_like=True, frozen=True):
    """Moments of a step on a rank, in seconds of CLOCK_MONOTONIC, which all processes share.

    On CUDA they are the device's; launching takes the host's time and shows in the coordinator's.
    """

    started: float
    """Start: the Plan has come. On CUDA the step before has ended, and the first kernel is
    there."""
    prepared: float
    """End of preparation: tables are updated and inputs staged."""
    forwarded: float
    """End of the forward pass."""
    finished: float
    """End of the step: the drawn tokens are on the host."""


class BlockOutcome(msgspec.Struct, array_like=True, frozen=True):
    """Outcome of a step for one running block."""

    num_tokens: int
    """Tokens that the block adds to its request; 0 where it is not done. Under a grammar: tokens
    proposed from the leftmost undecided position on, of which the grammar allows the first."""
    is_committed: bool
    """Whether the KV cache holds the final tokens of the block: it was done before the last
    pass."""
    num_rounds: int
    """Passes that decided positions of the block."""
    num_forwards: int
    """All forward passes that the block was in."""
    state: bytes = b""
    """State of a block that is not done, for the ranks to continue with; opaque to all others."""
    draft: list[int] | None = None
    """Tokens of a block that is not done, -1 where undecided, if its request asks for them."""


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """Result of a step, from rank 0."""

    seq: int
    token_ids: list[int]
    """Drawn tokens in the order of the Plan's rows: one per planned row that draws; of a
    speculative row those up to the first that differs from its draft; of a running block
    `num_tokens`."""
    compute_ms: float
    """Milliseconds of the step on the rank, apart from copies to and from host memory."""
    times: RankTimes | None = None
    """Moments of the step; None from an executor that does not measure them."""
    logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities, one entry per token, None for requests that do not ask for them; None
    where no request does."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    """Log-probabilities of the prompt tokens that a row's positions predict, by index of the
    row."""
    drafted: list[int] | None = None
    """Number of drafts of each speculative row."""
    drawn: list[int] | None = None
    """Number of tokens in `token_ids` of each speculative row."""
    blocks: list[BlockOutcome] | None = None
    """Outcomes of the running blocks, one per BlockRow."""
    num_forwards: int = 1
    """Forward passes of the step."""
    load_ms: float = 0.0
    """Milliseconds of the Plan's loads from host memory."""


class SampleDigest:
    """Running hash of (step, sampled tokens); the coordinator and every rank keep their own."""

    def __init__(self) -> None:
        self._values: OrderedDict[int, int] = OrderedDict({0: 0})
        self._last = 0

    def update(self, seq: int, token_ids: Sequence[int]) -> None:
        """Adds the tokens that step `seq` drew, in row order; steps are added in order."""
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
