"""The Plan of one step, broadcast from rank 0 to every rank, and what comes back.

A Plan is a diff against tables that live on the device (token pool, page table, one stable row
per request slot); it never carries a token that the device sampled itself.
"""

from __future__ import annotations

import msgspec

from worker.wire.diffusion import DiffusionParams
from worker.wire.messages import TokenLogprobs


class TokenRules(msgspec.Struct, array_like=True, frozen=True):
    """What a request asks for beyond plain draws; most ask for nothing."""

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
    """The same for each prompt token after the first."""


class BlockAdmit(msgspec.Struct, array_like=True, frozen=True):
    """What a request of a block-diffusion model asks for."""

    params: DiffusionParams | None
    """None takes the server's defaults."""
    end_token_ids: list[int]
    """Tokens that end it."""
    limit: int
    """Position at which it ends."""
    state: bytes = b""
    """Its running block, where it was taken back in the middle of one: as `BlockOutcome` had it."""


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
    rules: TokenRules | None = None
    block: BlockAdmit | None = None
    """Of a block-diffusion model's request."""
    end_token_ids: list[int] = []
    """Tokens of which each ends it, for certain: nothing need be computed after one."""


class PageWrite(msgspec.Struct, array_like=True, frozen=True):
    """Writes page ids into the page-table row of a slot, from column `start`."""

    slot: int
    start: int
    page_ids: list[int]


class PageCopies(msgspec.Struct, array_like=True, frozen=True):
    """Copies between device pages and slots in host memory, one to one; each rank has its part."""

    pages: list[int]
    slots: list[int]


class Row(msgspec.Struct, array_like=True, frozen=True):
    """One request's share of a step: compute positions [start, start + length)."""

    slot: int
    start: int
    length: int
    sample: bool
    """Whether the last position draws a token, written to position start + length. Of a
    block-diffusion model: whether the row's last block is a running one, to be decided."""
    num_drafts: int = -1
    """-1 for a row as planned. Otherwise the row floats: it begins with the slot's newest token,
    wherever in [start, start + length) that stands by then, and goes on with up to so many drafts,
    all within that range; each of its positions draws. Where the newest token stands beyond it,
    nothing is computed. Of a block-diffusion model, a row that floats computes, within that range,
    what is not in the cache yet up to the end of the slot's running block; where the step before
    ended that one, the next; where it ended the request, nothing."""

    @property
    def floats(self) -> bool:
        """Whether the steps before it decide where it stands."""
        return self.num_drafts >= 0

    @property
    def num_draws(self) -> int:
        """Positions that draw, of a row whose drafts are known."""
        return self.sample * (1 + max(0, self.num_drafts))

    @property
    def most_tokens(self) -> int:
        """Positions that it computes at most."""
        return self.length if self.num_drafts < 0 else min(self.length, 1 + self.num_drafts)


class Accept(msgspec.Struct, array_like=True, frozen=True):
    """Decides positions of a slot's running block that a round under a grammar proposed."""

    slot: int
    end: int
    """Those before this one."""


class Plan(msgspec.Struct, array_like=True, frozen=True):
    """One step. Rows of length 1 come first (decodes), then those that float, then the chunks."""

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
    """Rows under a grammar, counted over the rows with `sample`: where there are any, a Sample
    message with the masks of their draws follows, and no rank samples before it."""
    draft_threshold: float = 0.0
    """Drafts that are less likely to count than this are not worth their cost."""
    max_rounds: int = 1
    """Of running blocks: most forward passes before control returns without any being done."""
    accepts: list[Accept] = []
    """Of running blocks under a grammar; applied before the admits."""
    stores: PageCopies | None = None
    """Pages that leave for host memory: copied before anything else writes to them."""
    loads: PageCopies | None = None
    """Pages that come back: after the stores, which may touch the same pages and slots, and before
    the rows."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, at most."""
        return sum(row.most_tokens for row in self.rows)

    @property
    def drafts_under_grammar(self) -> bool:
        """Whether masked rows may draft: then the masks depend on the drafts."""
        if not self.masked:
            return False
        sampling = [row for row in self.rows if row.sample]
        return any(sampling[sample].num_drafts > 0 for sample in self.masked)

    @property
    def has_prompts(self) -> bool:
        """Whether it computes part of a prompt."""
        return bool(self.rows) and self.rows[-1].num_drafts < 0 and self.rows[-1].length > 1


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
    """Of a block that is not done: opaque to all but the rank that is to go on with it."""
    draft: list[int] | None = None
    """Of such a block, where its request asks for it: its tokens, -1 where undecided."""


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """What a Plan's execution yields on rank 0."""

    seq: int
    token_ids: list[int]
    """In the order of the Plan's rows: one per row with `sample`, and of a row that floats those
    up to the first that differs from its draft."""
    compute_ms: float
    """Time the rank spent on the step, apart from copies to and from host memory."""
    times: RankTimes | None = None
    """None from an executor that measures nothing."""
    logprobs: list[TokenLogprobs | None] | None = None
    """One per token, None for those whose request asks for none; None where nobody asks."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    """By index of the Plan's row: the prompt tokens that its positions predict."""
    drafted: list[int] | None = None
    """Per row that floats: the number of its drafts."""
    drawn: list[int] | None = None
    """Per row that floats: the number of its tokens in `token_ids`."""
    draft_ms: float = 0.0
    """Time the rank spent on drafting; part of `compute_ms`."""
    blocks: list[BlockOutcome] | None = None
    """One per row with `sample`, of a block-diffusion model: `token_ids` are those of all of them
    that are done, one after another."""
    num_forwards: int = 1
    """Forward passes of the step."""
    load_ms: float = 0.0
    """Time that the Plan's loads took."""
