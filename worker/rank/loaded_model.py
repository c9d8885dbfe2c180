"""Loading of one rank's model: data types, limits, checks, and weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention import AttentionBackend, AttentionSettings, create_attention_backend
from worker.config import EngineConfig
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.eagle import EagleHead
from worker.models.config.eagle_config import read_eagle
from worker.models.config.model_config import ModelConfig, load_model_config
from worker.models.layers.kv_cache import KVCacheLayout, layout_of
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.loader import (
    build_model,
    fill_dummy_weights,
    load_head,
    load_weights,
)
from worker.rank.adapters import RankAdapters
from worker.rank.cpu import native_options, tune_cpu_process
from worker.rank.dtype import resolve_cache_dtype, resolve_dtype
from worker.rank.limits import resolve_limits, with_whole_prompts
from worker.rank.preflight import check_options
from worker.rank.state_replays import num_replayed


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A rank's model with its weights, and what is derived from it and the engine's
    configuration."""

    config: EngineConfig
    """The engine's configuration with limits filled in."""
    model_config: ModelConfig
    """The model's configuration."""
    model: DecoderModel
    """Model with loaded weights."""
    dtype: torch.dtype
    """Data type of weights and hidden states."""
    cache_dtype: torch.dtype | None
    """Data type of the KV cache if it differs from `dtype`; otherwise None."""
    layout: KVCacheLayout
    """KV caches and states of the model's layers."""
    attention: AttentionBackend
    """Attention backend."""
    adapters: RankAdapters | None
    """LoRA adapters; None if they are disabled."""
    num_positions: int
    """Maximum number of positions of a request, including those computed after its end."""
    num_replayed: int
    """Maximum number of tokens that are replayed into a state."""
    eagle: EagleHead | None
    """EAGLE-3 head; None if there is none."""
    head_attention: AttentionBackend
    """Attention backend of a head that drafts: the model's, unless the head is an EAGLE-3 head."""


def load_model(
    config: EngineConfig, group: TensorParallelGroup, model: ModelConfig | None = None
) -> LoadedModel:
    """Builds a rank's model, checks the configuration, and loads the weights.

    Args:
        config: the engine's configuration.
        group: the rank's tensor-parallel group.
        model: the model's configuration; None reads it from the checkpoint.

    Raises:
        ValueError: the checkpoint cannot be served with this configuration.
    """
    device, pooling = group.device, config.pooling
    has_weights = config.load_format != "dummy"
    model = model or load_model_config(config.checkpoint, weights=has_weights, pooling=pooling)
    if config.num_mtp_drafts:
        model = model.with_mtp(config.num_mtp_drafts)
    if device.type == "cpu":
        tune_cpu_process(config.execution.cpu_threads, group.world_size)
    # Structure, without weights.
    max_model_len = model.resolve_max_model_len(config.max_model_len)
    num_positions = max_model_len + model.num_ahead
    dtype = resolve_dtype(config, model.dtype, group)
    cache_dtype = resolve_cache_dtype(config, model, device, dtype)
    built = build_model(model, _layer_options(config, group, dtype, cache_dtype), num_positions)
    eagle = _add_eagle(config, built, num_positions) if config.head_checkpoint else None
    lora, is_native = config.lora, config.execution.cpu_backend != "torch"
    adapters = None if lora is None else RankAdapters(built, lora, is_native=is_native)
    # Limits, and checks that all options are supported.
    layout = layout_of(built.caching_layers)
    if eagle is not None:
        layout = layout.with_beside(eagle.layer_index, eagle.layer.kv_cache_spec)
    config = config.with_page_size(model.block_size)
    most_replayed, given = num_replayed(config, layout), config.scheduling.max_num_batched_tokens
    config = resolve_limits(config, group, state_bytes=layout.slot_bytes(most_replayed))
    if model.is_bidirectional:
        config = with_whole_prompts(config, max_model_len, given)
    attention = _create_attention(config, model, num_positions, device, dtype, cache_dtype)
    head_attention = attention
    if eagle is not None:
        head_attention = _create_eagle_attention(config, eagle, device, dtype, cache_dtype)
    check_options(
        *(config, model, [cached.window for cached in layout.groups]),
        layers_per_page=layout.groups[0].layers_per_page,
        max_model_len=max_model_len,
    )
    _load_weights(config, group, built, eagle)
    return LoadedModel(
        config=config,
        model_config=model,
        model=built,
        dtype=dtype,
        cache_dtype=cache_dtype,
        layout=layout,
        attention=attention,
        adapters=adapters,
        num_positions=num_positions,
        num_replayed=most_replayed,
        eagle=eagle,
        head_attention=head_attention,
    )


def _load_weights(
    config: EngineConfig, group: TensorParallelGroup, model: DecoderModel, eagle: EagleHead | None
) -> None:
    """Loads the weights of the model and of its EAGLE-3 head, or fills them with dummy ones."""
    device, is_first = group.device, group.rank == 0
    is_dummy = config.load_format == "dummy"
    native = native_options(config, device, group.world_size)
    if is_dummy:
        fill_dummy_weights(model, native)
    else:
        load_weights(model, model.config, show_progress=is_first, native=native)
    if eagle is not None:
        load_head(*(eagle, eagle.config, device), show_progress=is_first, is_dummy=is_dummy)


def _add_eagle(config: EngineConfig, model: DecoderModel, num_positions: int) -> EagleHead:
    """The model's EAGLE-3 head, without weights. The model passes it the hidden states of some
    layers (taps)."""
    has_weights = config.load_format != "dummy"
    head = read_eagle(config.head_checkpoint, model.config, weights=has_weights)
    eagle = EagleHead(head, model, num_positions)
    model.tap_reader = eagle
    return eagle


def _layer_options(
    config: EngineConfig,
    group: TensorParallelGroup,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
) -> LayerOptions:
    return LayerOptions(
        group=group,
        dtype=dtype,
        device=group.device,
        batch_invariant=config.batch_invariant,
        expert_parallel=config.enable_expert_parallel,
        quantizes_fp8=config.quantization == "fp8",
        cache_dtype=cache_dtype,
    )


def _create_attention(
    config: EngineConfig,
    model: ModelConfig,
    num_positions: int,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
) -> AttentionBackend:
    """The attention backend selected by the configuration.

    Raises:
        ValueError: the backend does not support the model.
    """
    windows = model.windows_within(num_positions)
    return create_attention_backend(
        config.execution.attention_backend,
        AttentionSettings(
            device=device,
            dtype=dtype,
            page_size=config.cache.page_size,
            batch_invariant=config.batch_invariant,
            block_size=model.block_size,
            window=min(filter(None, windows), default=0),
            cap=model.attention_cap,
            has_sinks=model.has_sinks,
            has_latents=model.mla is not None,
            most_decodes=config.scheduling.max_num_seqs,
            num_heads=model.num_heads,
            head_dims=model.head_dims,
            has_narrow_values=model.value_dim is not None,
            has_fp8_cache=cache_dtype is not None,
            has_bidirectional_rows=model.canvas is not None,
        ),
    )


def _create_eagle_attention(
    config: EngineConfig,
    eagle: EagleHead,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
) -> AttentionBackend:
    """The attention backend of an EAGLE-3 head, whose attention may differ from the model's."""
    head = eagle.config
    return create_attention_backend(
        "auto",
        AttentionSettings(
            device=device,
            dtype=dtype,
            page_size=config.cache.page_size,
            batch_invariant=config.batch_invariant,
            has_latents=head.mla is not None,
            most_decodes=config.scheduling.max_num_seqs,
            num_heads=head.num_heads,
            head_dims=head.head_dims,
            has_fp8_cache=cache_dtype is not None,
        ),
    )
