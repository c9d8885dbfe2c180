"""What the scheduler counts for its reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.core.scheduler.step import StepInFlight
from worker.plan.plan import StepResult
from worker.wire.diffusion import BlockTotals
from worker.wire.messages import StepShape


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """What a snapshot tells that is not visible in the scheduler's present state."""

    num_preemptions: int = 0
    """Requests preempted since the scheduler began."""
    num_dropped_tokens: int = 0
    """Tokens that the device drew for requests that had ended or been preempted meanwhile."""
    step_ms: float = 0.0
    """Time of the last completed step."""
    num_step_tokens: int = 0
    """Tokens computed in the last completed step."""
    step_shape: StepShape = field(default_factory=StepShape)
    """What that step computed."""
    blocks: BlockTotals | None = None
    """Of a block-diffusion model."""
    num_submits: int = 0
    """Submits since the scheduler began, those that were ignored included."""

    def observe(self, step: StepInFlight, result: StepResult) -> None:
        """A step has completed. One that turned out to have nothing to compute tells nothing."""
        if not result.num_forwards:
            return
        self.step_shape, self.step_ms = step.measured(result)
        self.num_step_tokens = step.num_tokens
