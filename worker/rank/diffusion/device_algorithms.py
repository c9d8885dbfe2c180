"""Diffusion algorithms on the device: one round of blocks whose requests may use different
algorithms.

Decisions are the same as those of `algorithms.py` on the host, but are made without waiting for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from worker.protocol.diffusion import DllmAlgorithm
from worker.rank.diffusion.base import BlockParams
from worker.rank.transfer import Tensors

ON_DEVICE: Final[tuple[DllmAlgorithm, ...]] = (
    "LowConfidence",
    "LowConfidenceStatic",
    "Sequential",
    "EntropyBounded",
    "JointThreshold",
)
"""Algorithms whose rounds can run on the device; JointThreshold only if it has no penalty."""
_WITH_THRESHOLD: Final = ("LowConfidence", "JointThreshold")


class DeviceProposal(NamedTuple):
    """Proposed tokens for all positions of N blocks, [N, B] each."""

    token_ids: torch.Tensor
    """int32: the tokens."""
    confidence: torch.Tensor
    """fp32: probability of each token."""
    entropy: torch.Tensor | None
    """fp32: entropy, in nats, of the distribution of each token; None if no block needs it."""


class Decisions(NamedTuple):
    """State of blocks after a round."""

    ids: torch.Tensor
    """[N, B] int32: tokens; the mask token if undecided."""
    undecided: torch.Tensor
    """[N, B] bool: positions without a token."""
    states: torch.Tensor
    """[N, 2] int64: states of editing algorithms."""
    done: torch.Tensor
    """[N] bool: blocks for which the keys and values of this forward pass are final."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceParams:
    """Algorithms and parameters of N blocks, [N, 1] each, on the device."""

    threshold: torch.Tensor
    """fp32: confidence threshold; infinite for algorithms without one."""
    quotient: torch.Tensor
    """int64: minimum number of positions that a round decides."""
    remainder: torch.Tensor
    """int64: number of initial rounds whose minimum is one more than `quotient`."""
    entropy_bound: torch.Tensor
    edit_threshold: torch.Tensor
    max_post_edit_steps: torch.Tensor
    is_sequential: torch.Tensor | None
    """bool: blocks that use Sequential; None if no block does."""
    is_entropy_bounded: torch.Tensor | None
    """bool: blocks that use EntropyBounded; None if no block does."""
    edits: torch.Tensor | None
    """bool: blocks that use JointThreshold; None if no block does."""


def columns_of(
    names: Sequence[DllmAlgorithm], params: BlockParams, block_size: int
) -> dict[str, npt.NDArray[np.generic]]:
    """Algorithms and parameters of N blocks, as arrays [N] for `params_on_device`."""
    kinds = np.array(names)
    edits = kinds == "JointThreshold"
    # An editing round decides at least one position, as does one of `block_size` steps.
    steps = np.where(edits, block_size, params.steps[:, 0]).astype(np.int64)
    quotient, remainder = np.divmod(block_size, steps)
    threshold = np.where(np.isin(kinds, _WITH_THRESHOLD), params.threshold[:, 0], np.inf)
    return {
        "threshold": threshold.astype(np.float32),
        "quotient": quotient,
        "remainder": remainder,
        "entropy_bound": params.entropy_bound[:, 0],
        "edit_threshold": params.edit_threshold[:, 0],
        "max_post_edit_steps": params.max_post_edit_steps[:, 0].astype(np.int64),
        "is_sequential": (kinds == "Sequential").astype(np.uint8),
        "is_entropy_bounded": (kinds == "EntropyBounded").astype(np.uint8),
        "edits": edits.astype(np.uint8),
    }


def params_on_device(names: Sequence[DllmAlgorithm], staged: Tensors) -> DeviceParams:
    """Parameters of blocks with the algorithms `names`, from the arrays of `columns_of` on the
    device.
    """

    def column(name: str) -> torch.Tensor:
        return staged[name].unsqueeze(1)

    def mask(name: str, algorithm: DllmAlgorithm) -> torch.Tensor | None:
        return column(name).bool() if algorithm in names else None

    return DeviceParams(
        threshold=column("threshold"),
        quotient=column("quotient"),
        remainder=column("remainder"),
        entropy_bound=column("entropy_bound"),
        edit_threshold=column("edit_threshold"),
        max_post_edit_steps=column("max_post_edit_steps"),
        is_sequential=mask("is_sequential", "Sequential"),
        is_entropy_bounded=mask("is_entropy_bounded", "EntropyBounded"),
        edits=mask("edits", "JointThreshold"),
    )


def decide(
    ids: torch.Tensor,
    undecided: torch.Tensor,
    fixed: torch.Tensor,
    rounds: torch.Tensor,
    states: torch.Tensor,
    proposal: DeviceProposal,
    params: DeviceParams,
    *,
    report_at_once: bool,
) -> Decisions:
    """Runs one round of N blocks.

    Args:
        ids: [N, B] int32: tokens, the mask token if undecided.
        undecided: [N, B] bool: positions without a token.
        fixed: [N, B] bool: positions that hold tokens of the prompt.
        rounds: [N, 1] int64: completed rounds.
        states: [N, 2] int64: states of editing algorithms.
        proposal: proposed tokens for all positions.
        params: algorithms and parameters.
        report_at_once: as in BlockBatch.
    """
    is_complete = ~undecided.any(dim=1, keepdim=True)
    take = _to_decide(undecided, rounds, proposal, params)
    done = is_complete
    if params.edits is not None:
        edit = ~undecided & ~fixed & (proposal.token_ids != ids)
        edit &= proposal.confidence > params.edit_threshold
        was_finished = states[:, 1:] > 0
        num_steps = states[:, :1] + (is_complete & ~was_finished)
        is_over = was_finished | (num_steps > params.max_post_edit_steps)
        take = torch.where(params.edits, (take | edit) & ~is_over, take)
        finished = is_over | ~take.any(dim=1, keepdim=True)
        done = torch.where(params.edits, finished if report_at_once else was_finished, done)
        states = torch.where(params.edits, torch.cat((num_steps, finished.long()), dim=1), states)
    return Decisions(
        ids=torch.where(take, proposal.token_ids, ids),
        undecided=undecided & ~take,
        states=states,
        done=done.squeeze(1),
    )


def _to_decide(
    undecided: torch.Tensor, rounds: torch.Tensor, proposal: DeviceProposal, params: DeviceParams
) -> torch.Tensor:
    """Mask [N, B] of the undecided positions that a round decides."""
    order = -proposal.confidence
    counts = (params.quotient + (rounds < params.remainder)).clamp(min=1)
    if params.is_sequential is not None:
        places = torch.arange(undecided.shape[1], device=undecided.device)
        order = torch.where(params.is_sequential, places, order)
    if params.is_entropy_bounded is not None:
        assert proposal.entropy is not None, "this algorithm needs entropies"
        entropy = proposal.entropy.masked_fill(~undecided, torch.inf)
        sums = entropy.sort(dim=1).values.cumsum(dim=1, dtype=torch.float64)
        num_within = (sums <= params.entropy_bound).sum(dim=1, keepdim=True)
        order = torch.where(params.is_entropy_bounded, entropy, order)
        counts = torch.where(params.is_entropy_bounded, num_within.clamp(min=1), counts)
    is_sure = undecided & (proposal.confidence > params.threshold)
    return is_sure | _lowest(order, undecided, counts)


def _lowest(values: torch.Tensor, undecided: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mask [N, B] as in `base.lowest`."""
    # NaN, of positions whose tokens are all excluded, would be sorted behind decided positions.
    finite = values.nan_to_num(nan=torch.finfo(torch.float32).max)
    order = finite.masked_fill(~undecided, torch.inf).argsort(dim=1, stable=True)
    places = torch.arange(values.shape[1], device=values.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(1, order, places)
    return undecided & (ranks < counts)
