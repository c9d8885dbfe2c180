"""Factory of one rank's drafter."""

from __future__ import annotations

from collections.abc import Mapping

from kernels import registry
from kernels.attention import AttentionBackend
from worker.config import EngineConfig
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.eagle import EagleHead
from worker.models.architectures.mtp import MtpHead
from worker.models.layers.context import KVCache
from worker.models.layers.kv_cache import KVCacheLayout
from worker.rank.speculation.device_model import DeviceModelProposer
from worker.rank.speculation.draft_model import DraftModelProposer, load_draft_model
from worker.rank.speculation.drafter import Drafter
from worker.rank.speculation.eagle_heads import EagleProposer
from worker.rank.speculation.heads import HeadProposer
from worker.rank.speculation.native_heads import NativeHeadProposer
from worker.rank.speculation.ngram import NgramProposer
from worker.rank.tables import DeviceTables


def create_drafter(
    config: EngineConfig,
    tables: DeviceTables,
    backend: AttentionBackend,
    num_pages: int,
    own: DeviceModelProposer | HeadProposer | NativeHeadProposer | None,
) -> Drafter | None:
    """One rank's drafter, as configured; None if speculative decoding is disabled.

    Args:
        config: the group's engine configuration.
        tables: the rank's tables.
        backend: attention backend of the target model.
        num_pages: number of pages of the KV cache.
        own: proposer with a draft model on CUDA or with the model's head; None if there is neither.
    """
    speculative = config.speculative
    if speculative is None:
        return None
    if speculative.method == "ngram":
        ngram = NgramProposer(tables)
        return Drafter(tables, ngram, ngram if drafts_on_device(tables, backend) else None)
    if isinstance(own, NativeHeadProposer):
        return Drafter(tables, own)
    if own is not None:
        return Drafter(tables, own, own if drafts_on_device(tables, backend) else None)
    model = load_draft_model(config, tables.device, tables.max_model_len)
    most = speculative.num_speculative_tokens
    return Drafter(tables, DraftModelProposer(model, tables, num_pages, most))


def create_heads(
    config: EngineConfig,
    model: DecoderModel,
    head: MtpHead | EagleHead,
    tables: DeviceTables,
    kv_caches: Mapping[int, KVCache],
    layout: KVCacheLayout,
    backend: AttentionBackend,
) -> HeadProposer | NativeHeadProposer:
    """The proposer that drafts with a head.

    Args:
        config: the engine's configuration.
        model: the model.
        head: the model's MTP head, in torch or in the compiled library, or an EAGLE-3 head.
        tables: the rank's tables.
        kv_caches: KV caches by layer, the head's included.
        layout: KV caches of the model's layers and the head's.
        backend: attention backend of the head's layer.
    """
    if isinstance(head, EagleHead):
        return EagleProposer(
            *(model, head, tables, kv_caches, layout.beside[0], backend),
            most_tokens=config.scheduling.max_num_batched_tokens,
        )
    if head.native is None:
        heads = (head, *head.further)
        own = {one.layer_index for one in heads}
        groups = [group for group in layout.groups if own.intersection(group.layers)]
        return HeadProposer(model, heads, tables, kv_caches, groups, backend)
    assert config.speculative is not None, "a head is loaded to draft"
    most = config.speculative.num_speculative_tokens
    return NativeHeadProposer(head.native, tables, kv_caches[head.layer_index], most)


def drafts_on_device(tables: DeviceTables, backend: AttentionBackend) -> bool:
    """Whether the device may compute the positions of rows and verify drafts; the rows' sequence
    lengths, which some attention backends need, are then not known on the host."""
    return registry.uses_triton(tables.device) and not backend.needs_exact_lengths
