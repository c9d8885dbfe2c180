"""What a step draws, with all that its requests ask for beyond the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from worker.plan.plan import StepResult
from worker.rank.sampling.logprobs import Scores, score
from worker.rank.sampling.masks import MaskRows
from worker.rank.sampling.rules import StepRules
from worker.rank.sampling.sampler import RandomRows, sample
from worker.rank.tables import DeviceTables
from worker.wire.messages import TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """What a launched step yields, on the device."""

    tokens: torch.Tensor | None
    """[S] int64; None where no row samples."""
    scores: Scores | None = None
    scored_rows: Sequence[int] = ()
    """Which of the draws are scored."""
    prompt_scores: dict[int, list[Scores]] | None = None
    """By row of the Plan."""

    @property
    def is_scored(self) -> bool:
        """Whether any request asks for log-probabilities."""
        return self.scores is not None or self.prompt_scores is not None

    def add_logprobs(self, result: StepResult) -> StepResult:
        """The result with the log-probabilities that requests ask for; waits for the device."""
        if self.scores is not None:
            logprobs: list[TokenLogprobs | None] = [None] * len(result.token_ids)
            for row, scored in zip(self.scored_rows, self.scores.to_host(), strict=True):
                logprobs[row] = scored
            result = msgspec.structs.replace(result, logprobs=logprobs)
        if self.prompt_scores is not None:
            prompts = {
                index: [scored for block in blocks for scored in block.to_host()]
                for index, blocks in self.prompt_scores.items()
            }
            result = msgspec.structs.replace(result, prompt_logprobs=prompts)
        return result


def sample_with_rules(
    logits: torch.Tensor,
    random: RandomRows | None,
    rules: StepRules,
    tables: DeviceTables,
    masks: MaskRows | None = None,
) -> Draws:
    """Draws [S] tokens from fp32 logits [S, vocab], which it edits in place.

    The order is vLLM's: grammar, edits, penalties, then what `sample` does. Scores are of the
    logits as they came.
    """
    scored = rules.logprobs
    raw = None if scored is None else logits.index_select(0, scored.rows)
    if masks is not None:
        masks.apply(logits, native=tables.native_draws)
    if rules.device_edits is not None:
        assert tables.rules.device_edits is not None, "edited rows come from the table of edits"
        tables.rules.device_edits.apply(logits, rules.device_edits, tables.token_pool)
    for edit in rules.edits:
        edit.edits.apply(logits, edit, tables.flat_tokens)
    if rules.penalties is not None:
        tables.rules.penalties.apply(logits, rules.penalties, tables.token_pool)
    tokens = sample(logits, random, native=tables.native_draws)
    if rules.penalties is not None:
        tables.rules.penalties.count(tokens, rules.penalties)
    if scored is None or raw is None:
        return Draws(tokens=tokens)
    scores = score(raw, tokens.index_select(0, scored.rows), scored.num_top)
    return Draws(tokens=tokens, scores=scores, scored_rows=scored.rows_host)
