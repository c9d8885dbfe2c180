"""How the scheduler runs requests whose tokens are decided block by block."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROUNDS = 8
"""Most rounds before the scheduler looks at what has arrived meanwhile, if no block is done."""
MAX_ROUNDS_AHEAD = MAX_ROUNDS // 2
"""The same of a step that waits behind another: two of them are no longer than one by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPolicy:
    """Of a block-diffusion model. Every refinement is exact: it changes no token."""

    size: int
    """Positions of a block."""
    first_done_first_out: bool = True
    """Whether a block that is done leaves its batch at once."""
    inplace: bool = True
    """Whether a running block keeps its slot and pages between rounds, and goes on by itself while
    none of its batch is done."""
    mixed_rounds: bool = True
    """Whether prompts, many blocks at once, are computed beside running blocks; otherwise in
    rounds of their own, before all running blocks, one block each."""
    fused_commit: bool = True
    """Whether a row may end with a running block and begin with what is before it: the last pass
    of a finished block then rides on the first of the next one."""

    def width(self, num_pending: int) -> int:
        """Positions that one row computes of these, if there are tokens for it.

        Args:
            num_pending: positions not computed, those of the running block included.
        """
        if self.fused_commit or num_pending == self.size:
            return num_pending
        return num_pending - self.size
