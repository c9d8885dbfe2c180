"""Draft model: loading, and drafting on CPU in the compiled library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from kernels.native import DraftTables, NativeDrafter
from worker.config import EngineConfig
from worker.models.architectures.decoder import DecoderModel
from worker.models.config.model_config import load_model_config
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.loader import build_model, load_weights
from worker.models.loading.native import NativeOptions
from worker.rank.cpu import lazy_zeros
from worker.rank.speculation.base import DraftRequest, Guesses, Proposer
from worker.rank.speculation.calibration import Calibration
from worker.rank.tables import DeviceTables

DRAFT_DTYPE: Final = torch.bfloat16
"""Data type of the draft model's weights and KV cache, independent of the target's, since drafts
need not be exact."""

_MOST_ENDS: Final = 4
"""Maximum number of EOS and stop tokens per request at which drafting stops; others are ignored."""

LEAST_PROBABILITIES: Final = np.array(
    [0.995, 0.98, 0.95, 0.9, 0.8, 0.65, 0.5, 0.35, 0.0], dtype=np.float32
)
"""Minimum probability of a guess under the draft model, by level."""
PRIORS: Final = (0.995, 0.98, 0.96, 0.92, 0.85, 0.72, 0.58, 0.42, 0.2)
"""Assumed fractions of right guesses before any outcome, by level; suitable for two models that
mostly agree."""
PRIOR_WEIGHT: Final = 3.0


class NativeProposer(Proposer):
    """Base of proposers on CPU that draft in the compiled library, with a probability for each
    draft.

    Args:
        tables: the rank's tables; drafts are written to the token pool, which the model reads.
    """

    needs_pages = True

    def __init__(self, tables: DeviceTables) -> None:
        num_slots = tables.token_pool.shape[0]
        super().__init__(Calibration(num_slots, PRIORS, PRIOR_WEIGHT))
        self._ends = np.full((num_slots, _MOST_ENDS), -1, dtype=np.int64)
        sampling = tables.sampling
        self._slots = DraftTables(
            token_pool=tables.token_pool,
            page_table=tables.page_table,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            log_min_p=sampling.log_min_p,
            top_k=sampling.top_k,
            seeds=sampling.seeds,
            end_tokens=self._ends,
            shares=self.calibration.shares,
            bounds=LEAST_PROBABILITIES,
        )

    def admit(self, slot: int, end_token_ids: Sequence[int] = ()) -> None:
        """Resets the slot's state."""
        super().admit(slot, end_token_ids)
        known = end_token_ids[:_MOST_ENDS]
        self._ends[slot] = [*known, *[-1] * (_MOST_ENDS - len(known))]


class DraftModelProposer(NativeProposer):
    """Drafts on CPU with a draft model, replicated on every rank.

    The draft model's KV cache has as many pages as the target's, with the same ids. Keys and values
    only depend on tokens, so requests that share pages write the same values. The proposer samples
    with the parameters, seeds and keyed noise that the target uses at the same position: if the two
    models' logits agree, so do their tokens, at any temperature.

    Args:
        model: the draft model, loaded into the compiled library.
        tables: the rank's tables; drafts are written to the token pool, which the model reads.
        num_pages: number of pages of the target's KV cache.
        most: maximum number of drafts per row.
    """

    def __init__(
        self, model: DecoderModel, tables: DeviceTables, num_pages: int, most: int
    ) -> None:
        super().__init__(tables)
        config = model.config
        shape = (num_pages, tables.page_size, config.num_kv_heads, config.head_dim)
        # HAZARD: the library only keeps their addresses, so they must outlive it.
        self._caches = [
            (lazy_zeros(shape, model.options.dtype), lazy_zeros(shape, model.options.dtype))
            for _ in range(config.num_layers)
        ]
        assert model.native is not None, "a draft model runs in the compiled library"
        model.native.bind(self._caches)
        self._num_computed = np.zeros(len(self._ends), dtype=np.int64)
        """[slots]: number of positions in the KV cache, excluding those of wrong guesses."""
        self._drafter = NativeDrafter(model.native, self._slots, most)

    def admit(self, slot: int, end_token_ids: Sequence[int] = ()) -> None:
        """Resets the slot's state; its KV cache is recomputed from the first position."""
        super().admit(slot, end_token_ids)
        self._num_computed[slot] = 0

    def propose(self, requests: Sequence[DraftRequest], threshold: float) -> list[Guesses]:
        """Drafts for each request, as many as are worth verifying."""
        rows = np.empty((len(requests), 4), dtype=np.int64)
        for number, request in enumerate(requests):
            num_computed = int(self._num_computed[request.slot])
            num_pending = request.num_tokens - num_computed
            assert num_pending > 0, "these tokens already have drafts"
            rows[number] = request.slot, num_computed, num_pending, request.num_drafts
            self._num_computed[request.slot] = request.num_tokens
        drafts = self._drafter.draft(rows, threshold)
        return list(map(Guesses, drafts.tokens, drafts.levels, drafts.drafted))

    def observe(self, slot: int, guesses: Guesses, num_right: int, num_known: int) -> None:
        """Updates estimates with the outcome, and keeps the positions of right guesses in the KV
        cache."""
        super().observe(slot, guesses, num_right, num_known)
        # The last guess has not been computed, only those before it.
        self._num_computed[slot] += min(num_right, len(guesses.token_ids) - 1)


def draft_page_bytes(config: EngineConfig) -> int:
    """Size of one page in the draft model's KV cache on CPU, in bytes; 0 if there is no draft
    model."""
    if not config.draft_checkpoint:
        return 0
    model = load_model_config(config.draft_checkpoint)
    values = model.num_kv_heads * model.head_dim * config.cache.page_size
    return 2 * model.num_layers * values * DRAFT_DTYPE.itemsize


def load_draft_model(
    config: EngineConfig, device: torch.device, max_model_len: int
) -> DecoderModel:
    """Loads the draft model, which is replicated on every rank; on CPU, into the compiled library.

    Args:
        config: the engine's configuration, validated by `check_draft_model`.
        device: the rank's device.
        max_model_len: maximum number of tokens of a request.
    """
    model_config = load_model_config(config.draft_checkpoint)
    options = LayerOptions(
        group=TensorParallelGroup.alone(device),
        dtype=DRAFT_DTYPE,
        device=device,
        batch_invariant=config.batch_invariant,
    )
    model = build_model(model_config, options, max_model_len)
    native = None
    if device.type == "cpu":
        native = NativeOptions(
            page_size=config.cache.page_size,
            num_threads=torch.get_num_threads(),
            required=True,
            weight_cache=config.execution.enable_weight_caching,
        )
    load_weights(model, model_config, show_progress=False, native=native)
    return model
