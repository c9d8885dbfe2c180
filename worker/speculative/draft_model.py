"""A small model drafts for a large one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worker.engine.config import EngineConfig
from worker.engine.cpu import lazy_zeros
from worker.engine.sampler import gather_random_rows, sample
from worker.engine.tables import DeviceTables, IntArray
from worker.models.config import load_model_config
from worker.models.decoder import DecoderModel
from worker.models.loader import load_weights
from worker.models.native import NativeOptions
from worker.models.registry import build_model
from worker.parallel.group import TensorParallelGroup
from worker.parallel.layers import LayerOptions
from worker.speculative.base import DraftRequest, Proposer, count_equal


class DraftModelProposer(Proposer):
    """Drafts with a model of its own, whole on every rank.

    Its KV cache has the pages of the target's, under the same ids. It draws with the target's
    parameters and noise, seed and position alike: where the two models' logits agree, so do their
    draws, at any temperature. What a page holds of it follows from the tokens alone, so requests
    that share pages write the same into them.

    Args:
        model: loaded into the compiled library.
        tables: of the rank; drafts are written to the token pool, from which the model reads.
        num_pages: of the target's cache.
    """

    def __init__(self, model: DecoderModel, tables: DeviceTables, num_pages: int) -> None:
        self._model = model
        config = model.config
        shape = (num_pages, tables.page_size, config.num_kv_heads, config.head_dim)
        # HAZARD: the library has their addresses only.
        self._caches = [
            (lazy_zeros(shape, model.options.dtype), lazy_zeros(shape, model.options.dtype))
            for _ in range(config.num_layers)
        ]
        assert model.native is not None, "who else reads the tables"
        model.native.bind(self._caches)
        self._tables = tables
        self._drafted: dict[int, tuple[int, list[int]]] = {}
        """By slot: how many tokens it had when it last drafted, and the drafts, of which all but
        the last are computed."""

    def admit(self, slot: int) -> None:
        """See Proposer."""
        self._drafted.pop(slot, None)

    def propose(self, requests: Sequence[DraftRequest], threshold: float) -> list[list[int]]:
        """See Proposer. How likely a draft is it does not know: it drafts all it may."""
        drafts: list[list[int]] = [[] for _ in requests]
        computed = [self._num_computed(request) for request in requests]
        going_on = list(range(len(requests)))
        while going_on:
            rows = np.array(
                [_row(requests[i], computed[i], len(drafts[i])) for i in going_on], dtype=np.int64
            )
            tokens = self._draw(rows)
            for i, token in zip(going_on, tokens, strict=True):
                computed[i] = len(requests[i].tokens) + len(drafts[i])
                drafts[i].append(token)
            going_on = [i for i in going_on if len(drafts[i]) < requests[i].num_drafts]
        for request, drafted in zip(requests, drafts, strict=True):
            self._drafted[request.slot] = len(request.tokens), drafted
        return drafts

    def _num_computed(self, request: DraftRequest) -> int:
        """Positions of the slot that its own cache holds, those of wrong drafts left out."""
        num_tokens, drafts = self._drafted.get(request.slot, (0, []))
        came = request.tokens[num_tokens : num_tokens + len(drafts)].tolist()
        return num_tokens + count_equal(drafts[:-1], came)

    def _draw(self, rows: IntArray) -> list[int]:
        tables, native = self._tables, self._model.native
        assert native is not None, "it is loaded into the compiled library"
        slots, ends = rows[:, 0], rows[:, 1] + rows[:, 2]
        hidden = native.forward(rows, tables.token_pool, tables.page_table)
        last = torch.from_numpy(np.cumsum(rows[:, 2]) - 1)
        logits = self._model.compute_logits(hidden.index_select(0, last))
        random = gather_random_rows(tables.sampling, slots, ends, logits.device)
        tokens = sample(logits, random, native=tables.native_draws)
        cells = torch.from_numpy(slots * tables.token_stride + ends)
        tables.flat_tokens.index_copy_(0, cells, tokens.int())
        drawn: list[int] = tokens.tolist()
        return drawn


def _row(request: DraftRequest, num_computed: int, num_drafts: int) -> tuple[int, int, int, int]:
    """Slot, first position, length of what is to be computed for the next draft."""
    end = len(request.tokens) + num_drafts
    return request.slot, num_computed, end - num_computed, 1


def draft_page_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes that a page takes in the draft model's cache; 0 without one."""
    if config.speculative_method != "draft":
        return 0
    model = load_model_config(config.speculative_model)
    values = model.num_kv_heads * model.head_dim * config.page_size
    return 2 * model.num_layers * values * dtype.itemsize


def load_draft_model(
    config: EngineConfig, tables: DeviceTables, dtype: torch.dtype
) -> DecoderModel:
    """The draft model, without a cache.

    Raises:
        ValueError: it cannot draft for this model, or not on this device.
    """
    device = tables.token_pool.device
    if device.type != "cpu":
        raise ValueError("--speculative-method draft runs on CPU only; use ngram")
    model_config = load_model_config(config.speculative_model)
    if model_config.block_size > 1:
        raise ValueError(
            "--speculative-model decides blocks of tokens: use one that produces one after another"
        )
    if model_config.vocab_size != tables.vocab_size:
        raise ValueError(
            f"--speculative-model has a vocabulary of {model_config.vocab_size} tokens, the model "
            f"one of {tables.vocab_size}: they must share a tokenizer"
        )
    options = LayerOptions(
        group=TensorParallelGroup.alone(device),
        dtype=dtype,
        device=device,
        batch_invariant=config.batch_invariant,
    )
    model = build_model(model_config, options, tables.max_model_len)
    native = NativeOptions(
        page_size=config.page_size, num_threads=torch.get_num_threads(), required=True
    )
    load_weights(model, model_config, show_progress=False, native=native)
    return model
