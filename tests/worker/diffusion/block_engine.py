"""An engine over a block-diffusion model, and what its deltas say of every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from engine_driver import Engine

from worker.wire.messages import Submit
from worker.wire.sampling import SamplingParams


@dataclass
class BlockOutput:
    token_ids: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    """By block, as deltas come block by block."""
    finish_reason: str | None = None
    num_forwards: int = 0
    drafts: list[list[int]] = field(default_factory=list)
    """In the order in which they came, each followed by its number of known tokens then."""


class BlockEngine(Engine):
    """Counts forward passes and rows besides."""

    def serve(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[BlockOutput]:
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        outputs: dict[str, BlockOutput] = {}
        for prompt, one in zip(prompts, params, strict=True):
            self._num_submitted += 1
            request_id = str(self._num_submitted)
            outputs[request_id] = BlockOutput()
            self.core.add(
                Submit(
                    request_id=request_id,
                    gateway_id="g",
                    prompt=np.asarray(prompt, dtype="<i4").tobytes(),
                    sampling=one,
                )
            )
        while self.core.has_work():
            for delta in self.core.step().deltas.get("g", ()):
                output = outputs[delta.request_id]
                output.token_ids += delta.token_ids
                if delta.draft is not None:
                    output.drafts.append([*delta.draft, len(output.token_ids)])
                    continue
                output.rounds.append(delta.num_rounds - sum(output.rounds))
                output.finish_reason = delta.finish_reason
                output.num_forwards = delta.num_forwards
            self.core.scheduler.check_invariants()
            self.after_step()
        return list(outputs.values())
