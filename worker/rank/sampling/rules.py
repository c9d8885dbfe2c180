"""What requests ask for beyond plain draws, by slot, and what a step makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels import PenaltyRows, registry
from worker.plan.plan import Admit, Row, TokenRules
from worker.rank.sampling.device_edits import DeviceEditRows, DeviceEdits
from worker.rank.sampling.logit_edits import RowEdit, SlotEdits
from worker.rank.sampling.logprobs import LogprobRows, PromptChunk
from worker.rank.sampling.penalties import (
    Asking,
    PenaltyTable,
    gather_penalty_rows,
    penalizes,
)
from worker.rank.transfer import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRules:
    """The rules of one step's rows."""

    edits: Sequence[RowEdit]
    penalties: PenaltyRows | None
    logprobs: LogprobRows | None
    prompts: Sequence[PromptChunk]
    device_edits: DeviceEditRows | None = None
    """In place of `edits` where kernels do them."""


class RuleTable:
    """Rules of the slots that have any. Steps of other slots do not touch it.

    Args:
        num_rows: slots, the padding's included.
        token_stride: cells of one slot in the flat token pool.
        vocab_size: tokens that a draw can yield.
        device: where the step runs.
    """

    def __init__(
        self, *, num_rows: int, token_stride: int, vocab_size: int, device: torch.device
    ) -> None:
        self.penalties = PenaltyTable(num_rows, vocab_size, device)
        self._token_stride = token_stride
        self._vocab_size = vocab_size
        self._device = device
        self.device_edits: DeviceEdits | None = None
        """Where kernels run: edits row by row would cost a launch each."""
        if registry.uses_triton(torch.empty(0, device=device)):
            self.device_edits = DeviceEdits(
                num_rows=num_rows, token_stride=token_stride, vocab_size=vocab_size, device=device
            )
        self._rules: dict[int, tuple[TokenRules, SlotEdits | None]] = {}

    def admit(self, admit: Admit) -> None:
        """Replaces the rules of the request's slot."""
        rules = admit.rules
        if rules is None:
            self._rules.pop(admit.slot, None)
            return
        if self.device_edits is None:
            edits = SlotEdits(rules, self._vocab_size, self._device)
            self._rules[admit.slot] = rules, None if edits.is_empty else edits
        else:
            self.device_edits.admit(admit.slot, rules)
            self._rules[admit.slot] = rules, None
        if penalizes(rules):
            token_ids = np.frombuffer(admit.token_ids, dtype="<i4")
            self.penalties.admit(admit.slot, token_ids, rules.num_prompt)

    def has(self, slot: int) -> bool:
        """Whether the slot's request has any."""
        return slot in self._rules

    def gather(self, rows: Sequence[Row]) -> StepRules | None:
        """The rules of a Plan's rows; None where no row has any."""
        if not self._rules:
            return None
        edits: list[RowEdit] = []
        asking: list[Asking] = []
        prompts: list[PromptChunk] = []
        first_token = num_samples = 0
        for index, row in enumerate(rows):
            entry = self._rules.get(row.slot)
            if entry is not None:
                rules, edit = entry
                prompts += self._prompt_chunk(index, row, first_token, rules)
                end = row.start + row.length
                for draw in range(1 - row.num_draws, 1):
                    sample = num_samples + row.num_draws - 1 + draw
                    asking.append(Asking(sample, row.slot, end + draw, rules))
                    if edit is not None:
                        edits.append(self._edit(asking[-1], edit))
            first_token += row.length
            num_samples += row.num_draws
        if not asking and not prompts:
            return None
        return StepRules(
            edits=edits,
            penalties=gather_penalty_rows(asking, self._device),
            logprobs=self._logprob_rows(asking),
            prompts=prompts,
            device_edits=None if self.device_edits is None else self.device_edits.gather(asking),
        )

    def _edit(self, asking: Asking, edits: SlotEdits) -> RowEdit:
        return RowEdit(
            row=asking.sample,
            edits=edits,
            cell=asking.slot * self._token_stride + asking.end,
            num_output=asking.end - asking.rules.num_prompt,
        )

    def _logprob_rows(self, asking: list[Asking]) -> LogprobRows | None:
        found = [one for one in asking if one.rules.num_logprobs >= 0]
        if not found:
            return None
        rows = [one.sample for one in found]
        return LogprobRows(
            rows=to_device(torch.tensor(rows), self._device),
            rows_host=rows,
            num_top=[one.rules.num_logprobs for one in found],
        )

    def _prompt_chunk(
        self, index: int, row: Row, first_token: int, rules: TokenRules
    ) -> list[PromptChunk]:
        # The last prompt token predicts the first of the output.
        length = min(row.start + row.length, rules.num_prompt - 1) - row.start
        if rules.num_prompt_logprobs < 0 or length <= 0:
            return []
        return [
            PromptChunk(
                index=index,
                first_token=first_token,
                first_target=row.slot * self._token_stride + row.start + 1,
                length=length,
                num_top=rules.num_prompt_logprobs,
            )
        ]
