"""Warm-up: steps that launch every kernel of serving, so that all are compiled at startup.

Triton compiles a kernel at its first launch with new constants, types or alignments, which blocks
the rank for up to several seconds. A step's constants depend on its number of tokens (tiles of
attention and of experts) and on its requests' options (filters, processors, masks, scores, drafts),
so one step of each kind runs before the first request. The constants do not depend on positions,
except in sparse attention; all other warm-up rows therefore begin at position 0.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from rich.progress import MofNCompleteColumn

from worker.config import EngineConfig
from worker.plan.plan import (
    Admit,
    BlockAdmit,
    BlockRow,
    DraftRow,
    LogitsParams,
    Plan,
    PlannedRow,
    Row,
)
from worker.progress import progress
from worker.protocol.diffusion import DiffusionParams
from worker.rank.profiling import PROCESSORS

logger = logging.getLogger(__name__)

CACHE_VARIABLE: Final = "TRITON_CACHE_DIR"
"""Triton's environment variable for the cache folder of compiled kernels."""
Execute = Callable[[Plan, bytes], object]
"""Runs a step to completion, with the masks of its masked samples."""


class _Options(NamedTuple):
    """Sampling options of a warm-up request."""

    temperature: float = 0.0
    top_p: float = 1.0
    params: LogitsParams | None = None


_GREEDY: Final = _Options()
_RANDOM: Final = _Options(temperature=1.0)
_FILTERED: Final = _Options(temperature=1.0, top_p=0.5)
_PROCESSED: Final = _Options(params=PROCESSORS)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUpLimits:
    """Limits of a rank's steps, for which kernels are compiled."""

    max_num_seqs: int
    max_num_tokens: int
    """Maximum number of tokens of a step."""
    longest_row: int
    """Maximum number of tokens of a row."""
    max_model_len: int
    block_size: int
    """Block size of a block-diffusion model; otherwise 1."""
    canvas_length: int = 0
    """Number of tokens per canvas; 0 for models without canvases."""
    num_drafts: int
    """Maximum number of drafts per row; 0 if speculative decoding is disabled."""
    top_k: int = 0
    """Number of tokens that sparse attention selects; 0 if queries attend to all tokens."""
    has_adapters: bool = False
    """Whether requests may have LoRA adapters."""


def choose_kernel_cache() -> None:
    """Makes Triton cache compiled kernels in its default folder if the configured one is not
    writable.

    Triton would otherwise fail; the cache may be on a volume that is mounted read-only.
    """
    folder = os.environ.get(CACHE_VARIABLE)
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        logger.warning(
            "%s %s is not writable (%s); using the default folder", CACHE_VARIABLE, folder, error
        )
        del os.environ[CACHE_VARIABLE]


def warm_up_limits(
    config: EngineConfig,
    *,
    max_model_len: int,
    block_size: int,
    canvas_length: int = 0,
    top_k: int = 0,
) -> WarmUpLimits:
    """The limits of one rank's steps.

    Args:
        config: the group's engine configuration.
        max_model_len: maximum number of tokens of a request in the rank's tables.
        block_size: block size of a block-diffusion model; otherwise 1.
        canvas_length: as in WarmUpLimits.
        top_k: as in WarmUpLimits.
    """
    limits, speculative = config.scheduling, config.speculative
    longest = min(limits.max_num_batched_tokens, max_model_len - 1)
    most_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    return WarmUpLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_tokens=limits.max_num_batched_tokens,
        longest_row=longest // block_size * block_size,
        max_model_len=max_model_len,
        block_size=block_size,
        canvas_length=canvas_length,
        num_drafts=min(most_drafts, longest - 1),
        top_k=top_k if top_k < max_model_len else 0,
        has_adapters=config.lora is not None,
    )


def warm_up(execute: Execute, limits: WarmUpLimits, *, vocab_size: int, show: bool) -> None:
    """Runs one step of each kind.

    Args:
        execute: runs a step; there must be no requests in the tables.
        limits: limits of the rank's steps.
        vocab_size: number of bits of a mask.
        show: whether to show a progress bar.
    """
    kind = _block_steps if limits.block_size > 1 else _steps
    steps = list((_canvas_steps if limits.canvas_length else kind)(limits))
    mask = b"\xff" * (-(-vocab_size // 32) * 4)
    shown = progress(
        "compiling kernels",
        len(steps),
        amount=f"{len(steps)} kinds of steps",
        columns=(MofNCompleteColumn(),),
        show=show,
    )
    with shown as advance:
        for plan in steps:
            num_masks = sum(
                plan.rows[number].num_samples for number in plan.masked
            )  # all rows sample
            execute(plan, num_masks * mask)
            advance(1)


def _steps(limits: WarmUpLimits) -> Iterator[Plan]:
    """Warm-up steps of an autoregressive model, on page tables with only the dummy page."""
    for lengths in _prompts(limits):
        rows: list[Row] = [PlannedRow(slot, 0, length, 1) for slot, length in enumerate(lengths)]
        yield Plan(0, [_admit(row, row.length) for row in rows], [], rows)
    row = PlannedRow(0, 0, 1, 1)
    for options in (_RANDOM, _FILTERED, _PROCESSED):
        yield Plan(0, [_admit(row, 1, options)], [], [row])
    for count in range(1, min(limits.max_num_seqs, 2) + 1):  # all rows masked, or only some
        rows = [PlannedRow(slot, 0, 1, 1) for slot in range(count)]
        yield Plan(0, [_admit(row, 1) for row in rows], [], rows, masked=[0])
    for count in _doubling(1, limits.num_drafts):
        draft = DraftRow(0, 0, 1 + count, count)
        for options in (_GREEDY, _RANDOM, _FILTERED, _PROCESSED):
            yield Plan(0, [_admit(draft, 1, options)], [], [draft])
        yield Plan(0, [_admit(draft, 1)], [], [draft], masked=[0])
    if limits.num_drafts:  # states are advanced by the last drafts
        yield Plan(0, [], [], [PlannedRow(0, 1, 1, 1)])
    if limits.has_adapters:  # LoRA tiles have only one size
        yield Plan(0, [msgspec.structs.replace(_admit(row, 1), adapter=1)], [], [row])
    if limits.top_k:
        for length in (1, min(limits.longest_row, limits.max_model_len - limits.top_k)):
            row = PlannedRow(0, limits.top_k, length, 1)
            yield Plan(0, [_admit(row, limits.top_k + length)], [], [row])


def _block_steps(limits: WarmUpLimits) -> Iterator[Plan]:
    """Warm-up steps of a block-diffusion model, on page tables with only the dummy page."""
    size = limits.block_size
    block = BlockAdmit(None, [], limits.max_model_len)
    for lengths in _prompts(limits):
        rows: list[Row] = [BlockRow(slot, 0, length) for slot, length in enumerate(lengths)]
        admits = [_admit(row, row.length - size, block=block) for row in rows]
        yield Plan(0, admits, [], rows)
    row = BlockRow(0, 0, size)
    for options in (_RANDOM, _FILTERED, _PROCESSED):
        yield Plan(0, [_admit(row, 0, options, block=block)], [], [row])
    yield Plan(0, [_admit(row, 0, block=block)], [], [row], masked=[0])


def _canvas_steps(limits: WarmUpLimits) -> Iterator[Plan]:
    """Warm-up steps of a model with canvases, on page tables with only the dummy page."""
    size = limits.canvas_length
    block = BlockAdmit(DiffusionParams(steps=1), [], limits.max_model_len)
    for lengths in _prompts(limits):
        rows: list[Row] = [PlannedRow(slot, 0, length, 0) for slot, length in enumerate(lengths)]
        yield Plan(0, [_admit(row, row.length, block=block) for row in rows], [], rows)
    for count in _doubling(1, min(limits.max_num_seqs, limits.max_num_tokens // size)):
        rows = [BlockRow(slot, 0, size) for slot in range(count)]
        yield Plan(0, [_admit(row, 0, block=block) for row in rows], [], rows)
    # Both: canvases after a known token, and after several.
    for count in range(1, 1 + min(2, limits.max_num_seqs, limits.max_num_tokens // (size + 2))):
        rows = [BlockRow(slot, 0, slot + 1 + size) for slot in range(count)]
        yield Plan(0, [_admit(row, row.length - size, block=block) for row in rows], [], rows)
    row = BlockRow(0, 0, size)
    for options in (_RANDOM, _FILTERED, _PROCESSED):
        yield Plan(0, [_admit(row, 0, options, block=block)], [], [row])


def _admit(
    row: Row, num_tokens: int, options: _Options = _GREEDY, *, block: BlockAdmit | None = None
) -> Admit:
    """Admission of a request with `num_tokens` tokens to the row's slot."""
    temperature, top_p, params = options
    tokens = bytes(4 * num_tokens)
    return Admit(
        row.slot,
        tokens,
        temperature,
        top_k=0,
        top_p=top_p,
        min_p=0.0,
        seed=row.slot,
        logits_params=params,
        block=block,
    )


def _prompts(limits: WarmUpLimits) -> Iterator[Sequence[int]]:
    """Row lengths of steps with doubling numbers of tokens, up to the maximum of a step: each tile
    size covers at least a factor of two."""
    size, longest = limits.block_size, limits.longest_row
    most = min(limits.max_num_tokens // size * size, limits.max_num_seqs * longest)
    for total in _doubling(size, most):
        rest = total % longest
        yield [*([rest] if rest else []), *[longest] * (total // longest)]


def _doubling(least: int, most: int) -> Iterator[int]:
    """`least`, doubled repeatedly, with `most` last; nothing if `most` is less than `least`."""
    value = least
    while value < most:
        yield value
        value *= 2
    if least <= most:
        yield most
