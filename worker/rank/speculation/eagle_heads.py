"""Drafting with an EAGLE-3 head, on CPU and CUDA. `heads.py` describes what a head caches."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels.attention import AttentionBackend
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.eagle import EagleHead
from worker.models.layers.context import KVCache
from worker.models.layers.kv_cache import KVCacheGroup
from worker.rank.speculation.heads import HeadProposer
from worker.rank.tables import DeviceTables


class EagleProposer(HeadProposer):
    """Drafts with an EAGLE-3 head, which is sharded like the model.

    Args:
        model: the model, which passes hidden states to the head.
        head: the head.
        tables: the rank's tables; drafts are written to the token pool, which the model reads.
        kv_caches: KV caches by layer, the head's included.
        group: group of the head's layer, whose pages are those of the model's first group.
        backend: attention backend of the head.
        most_tokens: maximum number of tokens in a step.
    """

    def __init__(
        self,
        model: DecoderModel,
        head: EagleHead,
        tables: DeviceTables,
        kv_caches: Mapping[int, KVCache],
        group: KVCacheGroup,
        backend: AttentionBackend,
        *,
        most_tokens: int,
    ) -> None:
        super().__init__(model, [head], tables, kv_caches, [group], backend)
        self._eagle = head
        head.allocate(most_tokens)

    def _inputs(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._eagle.inputs(len(hidden))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._eagle.embed(token_ids)
