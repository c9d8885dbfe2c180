"""Plan of one step, sent by the coordinator to every rank, and the result of the step.

A Plan is a diff against tables on the device (token pool, page table, one stable row per request
slot). The device writes the tokens that it samples to the token pool itself, so Plans only repeat
them when a request is readmitted.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from worker.protocol.diffusion import DiffusionParams
from worker.protocol.messages import TokenLogprobs
from worker.protocol.pooling import PoolingParams

_DIGESTS_KEPT = 512
"""Number of digests kept, one per step. Plans carry digests of far more recent steps."""


class LogitsParams(msgspec.Struct, array_like=True, frozen=True):
    """Logits processors of a request, and the log-probabilities that it needs."""

    num_prompt: int
    """Number of prompt tokens in the slot's row."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_token_ids: list[int] = []
    biases: list[float] = []
    """Biases added to logits, one per token in `bias_token_ids`."""
    allowed_token_ids: bytes = b""
    """Tokens that may be sampled, little-endian int32; empty allows all."""
    bad_words: list[list[int]] = []
    """Token sequences that must not be generated: the last token of a sequence is not sampled after
    the other tokens."""
    min_tokens: int = 0
    """Minimum number of output tokens before any of `stop_token_ids` is sampled."""
    stop_token_ids: list[int] = []
    """EOS and stop tokens of the request, if `min_tokens` is set."""
    num_logprobs: int = -1
    """Number of most likely tokens to report with each sampled token; -1 if log-probabilities are
    not requested."""
    num_prompt_logprobs: int = -1
    """Number of most likely tokens to report for each prompt token after the first; -1 if they are
    not requested."""
    logprob_token_ids: list[int] = []
    """Tokens to report with each sampled token instead of the most likely ones; empty to report the
    most likely ones."""


class BlockAdmit(msgspec.Struct, array_like=True, frozen=True):
    """Part of an Admit that only requests to block-diffusion models have."""

    params: DiffusionParams | None
    """Parameters of the request; None to use the server's defaults."""
    end_token_ids: list[int]
    """EOS and stop tokens of the request."""
    limit: int
    """Length in tokens at which the request ends."""
    state: bytes = b""
    """Running block of a request that was preempted within it (`BlockOutcome.state`)."""


class Admit(msgspec.Struct, array_like=True, frozen=True):
    """Admission or readmission of a request to the running set: fills the row of its slot."""

    slot: int
    token_ids: bytes
    """All tokens known so far (prompt and generated), as little-endian int32."""
    temperature: float
    top_k: int
    """Number of most likely tokens to keep; 0 keeps all."""
    top_p: float
    min_p: float
    seed: int
    """Signed 64-bit random seed of the request."""
    logits_params: LogitsParams | None = None
    """Logits processors and log-probabilities that the request needs; None if it needs none."""
    block: BlockAdmit | None = None
    """Block-diffusion parameters; None for an autoregressive model."""
    end_token_ids: list[int] = []
    """Tokens that are certain to end the request, so that nothing is computed after them. Empty if
    `min_tokens` makes that uncertain."""
    pooling: PoolingParams | None = None
    """Parameters of a request to a pooling model, whose rows sample nothing. The row that computes
    the last token returns the vector. None for a request that generates text."""
    adapter: int = 0
    """1-based slot of the request's LoRA adapter on the device; 0 if it has none."""
    second_text: int = 0
    """Index of the first token of a pair's second text, whose token type is 1; 0 if there is
    none."""


class AdapterRead(msgspec.Struct, array_like=True, frozen=True):
    """Command to start reading a LoRA adapter into host memory, in the background."""

    key: int
    """Key of this version of the adapter; different content has a different key."""
    folder: str
    """Folder of the adapter."""
    version: str = ""
    """Version that the folder must have; empty to accept any version."""


class AdapterLoad(msgspec.Struct, array_like=True, frozen=True):
    """Copy of a LoRA adapter from host memory to a slot on the device, made before the Plan's rows
    are computed. A rank that is still reading the adapter waits until it has been read."""

    slot: int
    """1-based slot on the device, which no row in flight uses."""
    key: int
    """The adapter's key in its AdapterRead."""


class PageWrite(msgspec.Struct, array_like=True, frozen=True):
    """Write of page ids to a slot's page-table row for a group of layers, starting at column
    `start`."""

    slot: int
    start: int
    page_ids: list[int]
    group: int = 0


class PageCopies(msgspec.Struct, array_like=True, frozen=True):
    """Pairwise copies between device pages and host-memory slots; each rank copies its shard."""

    pages: list[int]
    slots: list[int]


class StateLoad(msgspec.Struct, array_like=True, frozen=True):
    """Copy of a snapshot to a slot's state, made before the row that continues from that state is
    computed."""

    slot: int
    snapshot: int
    """Number of the snapshot."""


class StateStore(msgspec.Struct, array_like=True, frozen=True):
    """Copy of the state of a slot to a snapshot, made within the step whose row computes it."""

    slot: int
    position: int
    """Number of positions included in the state."""
    snapshot: int
    """Number of the snapshot."""


class PlannedRow(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """Row that computes positions [start, start + length) of one request."""

    slot: int
    start: int
    length: int
    num_samples: int
    """1 if a token is sampled at the last position, and written to position start + length;
    otherwise 0."""


class DraftRow(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Speculative row: one request's newest token and the drafts after it, verified together.

    The position of the newest token depends on earlier steps, within [start, start + length). Up to
    `num_drafts` drafts follow it within the same range; each position samples a token. If the
    newest token is after the range, nothing is computed.
    """

    slot: int
    start: int
    length: int
    num_drafts: int
    """Maximum number of drafts; 0 for a row that is only speculative because its position depends
    on drafts of steps in flight."""

    @property
    def num_samples(self) -> int:
        """Number of positions that sample a token if the row has all its drafts."""
        return 1 + self.num_drafts


class BlockRow(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Row that computes positions [start, start + length) of one request to a block-diffusion
    model. The last block of the range is a running block: each pass decodes some of its positions.
    """

    slot: int
    start: int
    length: int
    is_window: bool = False
    """Whether the previous step determines which part of the range is computed: the uncached part
    up to the end of the running block (or of the next block if that step finished it), or nothing
    if it ended the request."""

    @property
    def num_samples(self) -> int:
        """Always 1: the running block has one outcome and, with a grammar, one mask."""
        return 1


Row = PlannedRow | DraftRow | BlockRow
"""One request's part of a step."""


class Accept(msgspec.Struct, array_like=True, frozen=True):
    """Command to accept tokens that were proposed for a slot's running block and that its grammar
    allows."""

    slot: int
    end: int
    """Position before which all positions are decoded."""


class Plan(msgspec.Struct, array_like=True, frozen=True):
    """Plan of one step: updates of the device tables, and rows.

    Rows with one planned position (decodes) come first, then speculative rows and windows of
    running blocks, then all others.
    """

    seq: int
    """1-based number of the step, without gaps; a rank that detects a gap exits."""
    admits: list[Admit]
    """Admissions, applied before the page writes."""
    page_writes: list[PageWrite]
    """Updates of page tables, applied before the rows are computed."""
    rows: list[Row]
    digest_seq: int = 0
    """Last step whose sampled tokens `digest` covers. Set in every 64th Plan; otherwise 0."""
    digest: int = 0
    """Value of the coordinator's SampleDigest, which ranks compare with theirs."""
    masked: list[int] = []
    """Indices of the rows with a grammar among the rows that sample. If there are any, a Sample
    message with their masks follows, and no rank samples before it."""
    draft_threshold: float = 0.0
    """Minimum acceptance probability for a draft to be worthwhile."""
    max_rounds: int = 1
    """Maximum number of forward passes over running blocks; the step then ends even if no block is
    finished."""
    accepts: list[Accept] = []
    """Accepted tokens of running blocks with grammars, applied before the admissions."""
    stores: PageCopies | None = None
    """Copies of pages to host memory, made before anything else writes to these pages."""
    loads: PageCopies | None = None
    """Copies of pages from host memory. They are made after the stores, which may use the same
    slots, and while rows of this and later Plans are computed; see `loaded`."""
    state_loads: list[StateLoad] = []
    """Loads of state snapshots, for layers with states; made before the rows are computed."""
    state_stores: list[StateStore] = []
    """Stores of state snapshots, for layers with states; made while the rows are computed. No
    earlier step in flight reads or writes these snapshots."""
    host_state_stores: PageCopies | None = None
    """Copies of state snapshots to host memory, as (snapshot, host snapshot); made before anything
    else writes to these snapshots."""
    host_state_loads: PageCopies | None = None
    """Copies from host memory to states, as (slot of a request, host snapshot); made with `loads`,
    after the stores, which may use the same host snapshots."""
    load_stores: PageCopies | None = None
    """Copies to host memory of pages that `loads` overwrite, made before the loads."""
    loaded: int = 0
    """Last Plan whose loads, like those of all earlier Plans, must have completed before the stores
    and rows of this Plan; this Plan's own number if its rows read what it loads. Each rank waits
    for its own copies."""
    adapter_reads: list[AdapterRead] = []
    """LoRA adapters to read into host memory."""
    adapter_drops: list[int] = []
    """Keys of LoRA adapters whose copies in host memory are dropped, after `adapter_loads`."""
    adapter_loads: list[AdapterLoad] = []
    """Copies of LoRA adapters to slots on the device, made before the admissions and rows."""

    @property
    def has_windows(self) -> bool:
        """Whether the result of the previous step determines which positions this Plan's rows
        compute (block diffusion)."""
        return any(isinstance(row, BlockRow) and row.is_window for row in self.rows)

    @property
    def drafts_under_grammar(self) -> bool:
        """Whether masked rows may draft, so that the masks depend on the drafts."""
        sampling = [row for row in self.rows if row.num_samples]
        return any(sampling[number].num_samples > 1 for number in self.masked)


class RankTimes(msgspec.Struct, array_like=True, frozen=True):
    """Times of a step on a rank, in seconds of CLOCK_MONOTONIC, which all processes of a host
    share.

    On CUDA, these are device times. The time to launch kernels is host time and counts as the
    coordinator's.
    """

    started: float
    """Start of the step: the Plan was received. On CUDA: the previous step has ended, and the first
    kernel is queued."""
    prepared: float
    """End of preparation: tables have been updated and inputs staged."""
    forwarded: float
    """End of the forward pass."""
    finished: float
    """End of the step: the sampled tokens are on the host."""


class BlockOutcome(msgspec.Struct, array_like=True, frozen=True):
    """Outcome of a step for one running block."""

    num_tokens: int
    """Number of tokens that the block adds to its request; 0 if it is not finished. With a grammar:
    number of tokens proposed, starting at the leftmost undecoded position; the grammar allows the
    first one."""
    is_committed: bool
    """Whether the block's final tokens are in the KV cache, because it was finished before the last
    pass."""
    num_rounds: int
    """Number of passes that decoded positions of the block."""
    num_forwards: int
    """Total number of forward passes over the block."""
    state: bytes = b""
    """State of an unfinished block, from which the ranks can continue; opaque to other code."""
    draft: list[int] | None = None
    """Tokens of an unfinished block, if requested; -1 for positions that are not decoded."""


class AdapterReadResult(msgspec.Struct, array_like=True, frozen=True):
    """Result of reading a LoRA adapter into host memory."""

    key: int
    """The adapter's key in its AdapterRead."""
    seconds: float
    """Duration of the read, in seconds."""
    error: str = ""
    """Reason why the adapter cannot be used; empty if it can."""


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """Result of a step, sent by rank 0."""

    seq: int
    token_ids: list[int]
    """Sampled tokens in the order of the Plan's rows: one per planned row that samples; for a
    speculative row, the tokens up to and including the first one that differs from its draft; for a
    running block, `num_tokens` tokens."""
    compute_ms: float
    """Duration of the step on the rank in milliseconds, excluding copies to and from host
    memory.
    """
    times: RankTimes | None = None
    """Times of the step; None if the executor does not measure them."""
    logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities of each token; None for tokens of requests that need none, and None as a
    whole if no request needs any."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    """Log-probabilities of the prompt tokens predicted by a row's positions, by row index."""
    drafted: list[int] | None = None
    """Number of drafts of each speculative row."""
    num_sampled: list[int] | None = None
    """Number of tokens in `token_ids` for each speculative row."""
    blocks: list[BlockOutcome] | None = None
    """Outcomes of the running blocks, one per BlockRow."""
    num_forwards: int = 1
    """Number of forward passes of the step."""
    load_ms: float = 0.0
    """Duration of the loads from host memory that have completed since the previous result, in
    milliseconds."""
    loading: int = 0
    """First Plan whose loads from host memory have not completed; 0 if all have."""
    pooled: dict[int, bytes] | None = None
    """Vectors of rows that computed the last token of a pooling model's request, little-endian
    float32, by row index; None if there are none."""
    adapters_read: list[AdapterReadResult] = []
    """LoRA adapters that this rank has finished reading since the previous result."""


class SampleDigest:
    """Running hash of (step, sampled tokens), computed by the coordinator and every rank."""

    def __init__(self) -> None:
        self._values: OrderedDict[int, int] = OrderedDict({0: 0})
        self._last = 0

    def update(self, seq: int, token_ids: Sequence[int]) -> None:
        """Adds the tokens sampled in step `seq`, in row order; steps must be added in order."""
        assert seq > self._last, f"step {seq} after step {self._last}"
        data = array("q", (seq, *token_ids)).tobytes()
        self._values[seq] = xxh3_64_intdigest(data, self._values[self._last])
        self._last = seq
        if len(self._values) > _DIGESTS_KEPT:
            self._values.popitem(last=False)

    def value(self, seq: int) -> int:
        """Digest of all steps up to `seq`, as a signed 64-bit number.

        Raises:
            KeyError: step `seq` was not added, or was added hundreds of steps ago.
        """
        value = self._values[seq]
        return value - 2**64 if value >= 2**63 else value
