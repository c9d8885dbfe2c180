"""Messages between a gateway and a worker group, and between a worker's frontend and rank 0.

They are msgpack, by msgspec, and never pickled. Structs on the per-step path are arrays on the
wire.

    gateway ──SubmitBatch──> WorkerGroup ──SubmitBatch──> rank 0
    gateway <──WorkerItem─── WorkerGroup <──StepReport─── rank 0
"""

from __future__ import annotations

import copy
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Literal, Self

import msgspec

from worker.protocol.admission import AdmissionChange
from worker.protocol.diffusion import BlockTotals
from worker.protocol.host_cache import HostCacheTotals
from worker.protocol.page_groups import ONE_GROUP, PageGroups
from worker.protocol.sampling import SamplingParams
from worker.protocol.slo import Slo
from worker.protocol.speculation import SpeculationTotals
from worker.protocol.times import FirstTokenTimes, StepTimes

PROTOCOL_VERSION = 14
"""Raised whenever a message changes shape or meaning; both sides reject another version."""

DEFAULT_PRIORITY = 4
"""Priority of requests that name none; priorities are 0 to 9, higher is more urgent."""

FinishReason = Literal["stop", "length", "abort", "error"]

Tier = Literal["device", "host"]
"""Memory in which a worker's prefix cache holds a block."""


IN_BATCH = SamplingParams()
"""Placeholder in a submit on the wire whose parameters are in its batch's `samplings`."""


class Submit(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One completion that a worker is to generate; a request with `n` > 1 becomes several."""

    request_id: str
    """Id of the completion, unique in the fleet; logs of all processes carry it."""
    gateway_id: str
    """Gateway whose attach stream gets the tokens."""
    prompt: bytes
    """Prompt token ids, little-endian int32."""
    sampling: SamplingParams = IN_BATCH
    """Sampling parameters; completions of one request share the object."""
    sampling_index: int = -1
    """Index of the parameters in the batch's `samplings`, on the wire; -1 where they are here."""
    seed: int | None = None
    """Seed of this completion, which the gateway draws so that another attempt repeats its tokens;
    None takes that of `sampling`."""
    attempt: int = 0
    """Number of the attempt, raised on each resubmission; deltas of an older one are dropped."""
    cache_salt: str = ""
    """Salt that separates prefix caches: equal prompts with different salts share nothing."""
    priority: int = DEFAULT_PRIORITY
    """Priority, 0 to 9; higher is more urgent."""
    num_resumed: int = 0
    """Number of tokens at the end of `prompt` that an earlier attempt generated."""
    is_resubmitted: bool = False
    """Whether a worker that had taken the request was lost: it is then not turned away for a full
    queue, and goes before requests of its level that have not run."""
    grammar: str = ""
    """Key of the compiled grammar to follow, from the frontend to rank 0; empty for none."""
    num_expected_cached: int = 0
    """Prompt tokens that the gateway expects in the worker's prefix cache."""
    slo: Slo | None = None
    """Service-level objective, by which tokens are due; None for none."""
    waited_ms: float = 0.0
    """Milliseconds since the request reached its gateway: deadlines count from then."""
    tenant: str = ""
    """Tenant, in order that equally urgent requests of several share service evenly; empty for all
    without one."""
    traceparent: str = ""
    """W3C trace context of the gateway's span; empty where the request is not traced."""


class Abort(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Abort of a request in whatever state. Unknown ids are ignored: it may just have finished."""

    request_id: str
    attempt: int = 0


class Vocabulary(msgspec.Struct, array_like=True, frozen=True):
    """The model's tokens as grammar libraries need them."""

    tokens: list[bytes]
    """Bytes of each token; empty for tokens that no grammar may yield."""
    eos_token_ids: list[int]
    xgrammar: str
    """The vocabulary as prepared by xgrammar, serialized; empty where that is not in use."""


class CompiledGrammar(msgspec.Struct, array_like=True, frozen=True):
    """A grammar that the frontend has compiled."""

    key: str
    """Hash of the grammar's content."""
    backend: str
    """Library that has compiled it: "xgrammar" or "guidance"."""
    payload: str
    """Compiled grammar, serialized by that library."""


class SubmitBatch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All that a gateway has for one worker: what arrived while its last batch was in flight.

    From the frontend to rank 0 it also has the grammars that its submits name.
    """

    submits: list[Submit] = []
    aborts: list[Abort] = []
    vocabulary: Vocabulary | None = None
    """Vocabulary that grammars need, with the first of them."""
    grammars: list[CompiledGrammar] = []
    """Compiled grammars that rank 0 does not have."""
    dropped_grammars: list[str] = []
    """Keys of grammars that rank 0 may drop: a later submit that names one brings it again."""
    admission: AdmissionChange | None = None
    """Change of the rules of admission, from now on."""
    samplings: list[SamplingParams] = []
    """Parameters that several submits share, on the wire; see `share_sampling`."""

    def __post_init__(self) -> None:
        for submit in self.submits:
            if submit.sampling_index >= 0:
                submit.sampling = self.samplings[submit.sampling_index]
                submit.sampling_index = -1
        self.samplings = []


def share_sampling(batch: SubmitBatch) -> SubmitBatch:
    """A copy of the batch, to be encoded, that has sampling parameters which submits share once.

    Parameters are shared where they are one object; decoding restores that. A request may ask for
    thousands of completions, and its parameters may be as large as the vocabulary: repeated for
    each completion, they would take seconds to encode and decode.
    """
    uses = Counter(id(submit.sampling) for submit in batch.submits)
    indices: dict[int, int] = {}
    samplings: list[SamplingParams] = []
    submits = []
    for submit in batch.submits:
        sampling = submit.sampling
        if uses[id(sampling)] > 1:
            if id(sampling) not in indices:
                indices[id(sampling)] = len(samplings)
                samplings.append(sampling)
            submit = copy.copy(submit)
            submit.sampling, submit.sampling_index = IN_BATCH, indices[id(sampling)]
        submits.append(submit)
    if not samplings:
        return batch
    shorter = copy.copy(batch)  # not a new one, which would be unpacked as it is made
    shorter.submits, shorter.samplings = submits, samplings
    return shorter


class Rejection(msgspec.Struct, kw_only=True):
    """Rejection of a submit that this worker cannot serve; `message` has the reason and numbers."""

    request_id: str
    attempt: int
    message: str
    status: int
    """HTTP status for the client: 400, the request can never be served; 429, the queue is full;
    503, the worker cannot serve it now."""
    retry_after_s: int = 0
    """Seconds after which there should be room again, with 429."""
    param: str = ""
    """Field at fault, with 400: one of SamplingParams, or `prompt`; empty for none."""
    is_final: bool = False
    """Whether this worker would refuse the request at any time, with 400 for a grammar."""


class SubmitReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Answer to a SubmitBatch. A submit without a rejection was handed to rank 0."""

    epoch: int
    rejections: list[Rejection] = []
    last_ordinal: int = 0
    """Ordinal of the last submit that was handed over, counted within the epoch over all gateways;
    the others of the batch have the ordinals before it, in their order. 0 if all were rejected."""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log-probabilities of one token and of the likeliest alternatives, packed.

    A response holds one of these for each of its tokens until its client has read it, and lists of
    twenty numbers would take five times the memory, and as much longer to free.
    """

    packed_ids: bytes
    """`token_ids` as little-endian int32."""
    packed_logprobs: bytes
    """`logprobs` as little-endian float32."""
    rank: int
    """Rank of the token itself; 1 is the likeliest."""

    @classmethod
    def pack(cls, token_ids: Sequence[int], logprobs: Sequence[float], rank: int) -> Self:
        """Packs token ids, the token itself first, and as many log-probabilities."""
        return cls(array("i", token_ids).tobytes(), array("f", logprobs).tobytes(), rank)

    @property
    def token_ids(self) -> list[int]:
        """The token itself, then the likeliest tokens, best first; it may be among these again."""
        return array("i", self.packed_ids).tolist()

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities, one per token of `token_ids`."""
        return array("f", self.packed_logprobs).tolist()


class TokenDelta(msgspec.Struct, array_like=True):
    """Progress of one request: new tokens, or its end, since its last delta."""

    request_id: str
    attempt: int
    token_ids: list[int]
    """New tokens, oldest first; empty if only other fields are new."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """Stop token that ended the request, where one of `stop_token_ids` did."""
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache, in the first delta of the request; -1 in others."""
    error: str | None = None
    """Message of the error, where `finish_reason` is "error"."""
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities, one entry per new token, where the request asks for them."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of further prompt tokens, the first one left out, where the request asks
    for them: a chunk of the prompt at a time, the last one with the first new token."""
    ended_by_grammar: bool = False
    """Whether it stopped since its grammar allows nothing more: the last token is then part of the
    text, not an end or stop token."""
    rejection: Rejection | None = None
    """Answer to the client of a request that ends by an error which is not the worker's: the queue
    is full of more urgent requests, or its parameters contradict each other."""
    num_rounds: int = 0
    """Block diffusion: passes so far that decided positions of the request's blocks."""
    num_forwards: int = 0
    """Block diffusion: forward passes so far."""
    draft: list[int] | None = None
    """Block diffusion: tokens of the running block, -1 where undecided, if the request asks for
    them."""
    times: FirstTokenTimes | None = None
    """Times before the first token that this attempt drew, sent with that token."""

    @property
    def ends_with_stop_token(self) -> bool:
        """Whether the last token is the one that ended the completion."""
        return self.finish_reason == "stop" and not self.ended_by_grammar


class BlockStored(msgspec.Struct, array_like=True, tag="stored"):
    """Blocks (full pages) that entered a tier of the prefix cache, in chain order."""

    block_hashes: list[int]
    parent_hash: int | None
    """Hash of the block before the first; None at the start of a chain."""
    tier: Tier = "device"


class BlockRemoved(msgspec.Struct, array_like=True, tag="removed"):
    """Blocks that left a tier of the prefix cache. A block that moves to another tier is reported
    as stored there first."""

    block_hashes: list[int]
    tier: Tier = "device"


BlockEvent = BlockStored | BlockRemoved


class StepShape(msgspec.Struct, array_like=True, frozen=True):
    """Shape of one engine step: what decides how long it takes."""

    seq: int = 0
    """Number of the step; 0 for no step."""
    prefill_tokens: int = 0
    """Tokens of prompts, or of running blocks (block diffusion)."""
    prefill_attended: int = 0
    """Pairs of such a token and a position that it attends to."""
    decode_rows: int = 0
    """Requests that decoded."""
    decode_context: int = 0
    """Positions that decoding requests attended to, in all."""
    draft_rows: int = 0
    """Decoding requests that were allowed to draft."""
    draft_tokens: int = 0
    """Drafts that were verified."""
    draft_starts: int = 0
    """Requests that were allowed to draft for the first time."""
    scored_tokens: int = 0
    """Prompt tokens whose log-probabilities were computed: each takes a row of logits."""


class LoadSnapshot(msgspec.Struct, array_like=True):
    """Load of a worker when a report was made."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    """Pages that are free or evictable. Pages of one block in several groups of layers count as
    one, as in `num_total_pages`."""
    num_total_pages: int = 0
    queued_prefill_tokens: int = 0
    """Prompt tokens admitted or waiting that are not computed yet."""
    max_num_seqs: int = 0
    num_preemptions: int = 0
    """Requests preempted since the epoch began."""
    step_ms: float = 0.0
    """Milliseconds of rank 0 for the last step, or for its average pass over running blocks."""
    num_step_tokens: int = 0
    """Tokens computed in the last step."""
    num_submits_seen: int = 0
    """Submits that rank 0 has taken since the epoch began: this load includes those up to this
    ordinal (see SubmitReply), and no later ones."""
    step_times: StepTimes = msgspec.field(default_factory=StepTimes)
    """Times of all steps by phase."""
    speculation: SpeculationTotals | None = None
    """Totals of speculative decoding; None without it."""
    step_shape: StepShape = StepShape()
    """Shape of the computation that took `step_ms`."""
    queued_cached_tokens: int = 0
    """Tokens of `queued_prefill_tokens` that gateways expect in the prefix cache."""
    num_reserved: int = 0
    """Requests of all gateways that the frontend has and rank 0 does not yet: not among the
    running and waiting."""
    reserved_prefill_tokens: int = 0
    """Prompt tokens of the reserved requests that gateways do not expect in the prefix cache."""
    num_submits_reserved: int = 0
    """Last ordinal of a reserved request: this load and its reserved part include all up to it."""
    num_queued_tokens: int = 0
    """Tokens of the requests in the queue."""
    least_queued_priority: int = -1
    """Lowest level of requests in the queue that have never run; -1 where there are none."""
    retry_after_s: int = 0
    """Seconds in which the present queue should have drained, at the recent rate; 0 if empty."""
    blocks: BlockTotals | None = None
    """Totals of block diffusion; None for an autoregressive model."""
    prefilling_attended: int = 0
    """Pairs of a token, of running requests' prompts that are not computed yet, and a position that
    it attends to."""
    new_prompt_share: float = 0.0
    """Part of a step's prompt tokens that prompts under way leave to new ones."""
    host_cache: HostCacheTotals | None = None
    """Totals of the host-memory tier; None without one."""
    num_prefix_queries: int = 0
    """Known tokens of requests when they were first admitted, since the epoch began."""
    num_prefix_hits: int = 0
    """Tokens of `num_prefix_queries` that the prefix cache had."""


class TokenizerFingerprint(msgspec.Struct, array_like=True, frozen=True):
    """Digests of a fixed chat as one process renders, tokenizes and hashes it."""

    text: int
    """Digest of the rendered text."""
    num_tokens: int
    tokens: int
    """Digest of the token ids."""
    blocks: int
    """Digest of the block hashes."""


class EngineInfo(msgspec.Struct, array_like=True, tag="info"):
    """What an engine has loaded, and its limits; from rank 0 to its frontend when all are ready."""

    model: str
    """Name (NAME@REVISION on the Hub) or folder of the checkpoint."""
    max_model_len: int
    max_total_tokens: int
    """Most tokens of prompt plus completion of one request that the KV cache holds."""
    vocab_size: int
    page_size: int
    max_num_seqs: int
    eos_token_ids: list[int]
    block_hash_salt: str
    """Salt of block hashes, beside a request's `cache_salt`: the checkpoint and its data type."""
    structured_outputs_backend: str = "auto"
    """Library with which the frontend compiles grammars: auto, xgrammar or guidance."""
    max_num_batched_tokens: int = 0
    """Token budget of one step; 0 where it is not known."""
    tokenizer_fingerprint: TokenizerFingerprint | None = None
    """Fingerprint of the worker's tokenizer; None where it has none."""
    max_queued_requests: int = 0
    """Most requests that may wait at this worker; 0 for any number."""
    max_queued_tokens: int = 0
    """Most tokens of all waiting requests together; 0 for any number."""
    block_size: int = 1
    """Tokens per block of a block-diffusion model; 1 for an autoregressive model."""
    dllm_algorithm: str = ""
    """Decoding algorithm for requests that name none; empty for an autoregressive model."""
    num_host_pages: int = 0
    """Pages of the host-memory tier; 0 for none."""
    device: str = ""
    """Type of the ranks' devices: "cuda" or "cpu"."""
    dtype: str = ""
    """Data type of weights, activations and KV cache."""
    tensor_parallel_size: int = 1
    """Number of ranks."""
    startup: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds by phase of the start-up, which add up to all of it: see `worker.rank.rank.Rank`;
    `launch`, which the frontend adds, is the rest (processes, imports, other ranks)."""
    processes: dict[str, int] = msgspec.field(default_factory=dict)
    """Ids of the engine's processes by name, rank 0's first; where ranks are on several nodes, rank
    0's alone."""
    num_pages: int = 0
    """Pages of the KV cache; 0 for as many as `max_total_tokens` take."""
    page_groups: PageGroups = ONE_GROUP
    """Groups of the model's layers, which have pages of their own."""
    tokenizer: str = ""
    """Name or folder of a tokenizer that replaces the checkpoint's; empty for its own."""


class StepReport(msgspec.Struct, array_like=True, tag="step"):
    """Report of rank 0 to its frontend: all that an engine step did, for all gateways."""

    seq: int
    """Number of the report, from 1 in each epoch and without gaps."""
    deltas: dict[str, list[TokenDelta]]
    """Deltas by gateway id."""
    block_events: list[BlockEvent]
    load: LoadSnapshot
    more: bool = False
    """Whether another report will follow even if the frontend sends nothing more."""


class StepLimit(msgspec.Struct, array_like=True, tag="limit"):
    """Notice of rank 0 to its frontend: the step that it launches next may exceed the timeout."""

    seq: int
    """Number of the Plan."""
    seconds: float
    """Seconds without a report after which the step counts as hung; see
    `worker.core.step_forecast`."""


EngineMessage = EngineInfo | StepReport | StepLimit


class AttachSnapshot(msgspec.Struct, array_like=True, tag="snapshot"):
    """State of a worker: the first item of an attach stream, and again after each rebuild."""

    protocol_version: int
    worker_id: str
    """Id of the worker, as in the response header x-rayfleet-worker."""
    epoch: int
    """Number of the rank group of this worker; all state of earlier ones is void."""
    info: EngineInfo | None
    """The engine; None while the rank group is loading, when the worker takes no requests."""
    blocks: list[BlockStored]
    """All blocks of the prefix cache."""
    load: LoadSnapshot


class WorkerUpdate(msgspec.Struct, array_like=True, tag="update"):
    """Steps of the engine as one gateway sees them; sent at least every 250 ms, empty when idle."""

    epoch: int
    seq: int
    """Number of the update, from 1 in each attach stream and without gaps."""
    deltas: list[TokenDelta]
    block_events: list[BlockEvent]
    load: LoadSnapshot


class WorkerDown(msgspec.Struct, array_like=True, tag="down"):
    """Loss of the rank group of `epoch`, and of its requests. A snapshot follows the rebuild."""

    epoch: int
    reason: str


WorkerItem = AttachSnapshot | WorkerUpdate | WorkerDown
