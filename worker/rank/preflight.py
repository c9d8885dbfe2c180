"""Preflight: checks of an engine's configuration against config.json, before weights are read.

`rayfleet serve` runs them before it starts Ray; each rank runs them again. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from worker.config import EngineConfig
from worker.models.config.eagle_config import read_eagle
from worker.models.config.model_config import ModelConfig, load_model_config
from worker.models.config.quantization import ScaledConfig
from worker.models.layers.sharing import check_sharing
from worker.protocol.options import option_name

_STATEFUL = "linear-attention or convolution layers"
_MOST_DRAFTS: Final = 15
"""Maximum number of drafts per row for models with linear attention. Only in rows of up to 16
tokens (`MOST_STEPS`) can kernels advance states position by position, or leave them unchanged.
"""


def check_engine(config: EngineConfig) -> ModelConfig:
    """Checks that a model can be served with this configuration, based on config.json.

    Downloads all files of a Hub repository except its weights.

    Returns:
        The model's configuration.

    Raises:
        Unavailable: a file is missing, possibly temporarily.
        ValueError: the model cannot be served; the message names the option to change.
    """
    model = load_model_config(config.checkpoint, weights=False, pooling=config.pooling)
    config = config.with_page_size(model.block_size)
    max_model_len = model.resolve_max_model_len(config.max_model_len)
    check_sharing(model, config.tensor_parallel_size, expert_parallel=config.enable_expert_parallel)
    check_quantization(config, model)
    check_blocks(config, model)
    check_pooling(config, model)
    check_windows(config, model.windows_within(max_model_len))
    check_states(config, model)
    check_draft_model(config, model, max_model_len=max_model_len)
    if config.head_checkpoint:
        _check_eagle(config, model)
    return model.with_mtp(config.num_mtp_drafts) if config.num_mtp_drafts else model


def _check_eagle(config: EngineConfig, model: ModelConfig) -> None:
    """Checks that the configured EAGLE-3 head can draft for `model`; raises ValueError if it
    cannot."""
    eagle = read_eagle(config.head_checkpoint, model, weights=False)
    try:
        check_sharing(eagle.head, config.tensor_parallel_size)
    except ValueError as error:
        raise ValueError(f"--speculative-model {config.head_checkpoint}: {error}") from error


def check_options(
    config: EngineConfig,
    model: ModelConfig,
    windows: Sequence[int],
    *,
    layers_per_page: int,
    max_model_len: int,
) -> None:
    """Checks an engine's configuration for a model, before its weights are loaded.

    Args:
        config: the engine's configuration.
        model: the model's configuration.
        windows: sliding window of each group of layers; 0 for full attention.
        layers_per_page: number of layers of the first group that share a page.
        max_model_len: maximum number of tokens of a request.

    Raises:
        ValueError: an option is not supported; the message names it.
    """
    check_quantization(config, model)
    check_blocks(config, model)
    check_pooling(config, model)
    check_windows(config, windows, num_groups=len(windows), layers_per_page=layers_per_page)
    check_states(config, model)
    check_draft_model(config, model, max_model_len=max_model_len)


def check_quantization(config: EngineConfig, model: ModelConfig) -> None:
    """Checks an engine's quantization; FP8 requires an unquantized or an FP8 checkpoint.

    Raises:
        ValueError: the checkpoint is quantized in another format.
    """
    if config.quantization == "auto" or model.quantization is None:
        return
    formats = {model.quantization.weights, *model.quantization.by_module.values()} - {None}
    if any(not isinstance(one, ScaledConfig) or one.code != "e4m3" for one in formats):
        raise ValueError(
            f"--quantization {config.quantization} needs an unquantized or an FP8 checkpoint, but "
            "this one has another format: use auto, or the model's unquantized checkpoint"
        )


def check_blocks(config: EngineConfig, model: ModelConfig) -> None:
    """Checks an engine's configuration for a block-diffusion model; accepts all other models.

    Raises:
        ValueError: an option is not supported; the message names it.
    """
    if model.canvas is not None:
        _check_canvases(config, model.canvas.length)
    size = model.block_size
    if size == 1:
        return
    if config.cache.page_size % size:
        raise ValueError(
            f"--page-size {config.cache.page_size} must be a multiple of this model's block size, "
            f"{size}: remove it, or set --page-size {size}"
        )
    if 0 < config.scheduling.max_num_batched_tokens < 2 * size:
        raise ValueError(
            f"--max-num-batched-tokens must be at least {2 * size}, two blocks of this model, got "
            f"{config.scheduling.max_num_batched_tokens}"
        )
    if config.dllm.algorithm == "JointThresholdInDel" and model.edit_token_ids is None:
        raise ValueError(
            "--dllm-algorithm JointThresholdInDel requires delete_token_id and split_token_id in "
            "config.json, which this model does not have: use JointThreshold"
        )
    _check_not_speculative(config)


def _check_canvases(config: EngineConfig, length: int) -> None:
    """Checks an engine's configuration for a model with canvases of `length` tokens; raises
    ValueError if an option is not supported."""
    budget = config.scheduling.max_num_batched_tokens
    if 0 < budget < length:
        raise ValueError(
            f"--max-num-batched-tokens must be at least {length}, the canvas length of this model, "
            f"got {budget}"
        )
    _check_not_speculative(config)


def _check_not_speculative(config: EngineConfig) -> None:
    if config.speculative is not None:
        raise ValueError(
            f"--speculative-method {config.speculative.method} is not supported for "
            "block-diffusion models: use none"
        )


def check_pooling(config: EngineConfig, model: ModelConfig) -> None:
    """Checks an engine's configuration for a pooling model; accepts all other models.

    Raises:
        ValueError: an option is not supported; the message names it.
    """
    if model.pooling is None:
        return
    unsupported = {
        "--speculative-method": config.speculative is not None,
        "--enable-weight-caching": config.execution.enable_weight_caching,
    }
    for option, is_set in unsupported.items():
        if is_set:
            raise ValueError(f"{option} is not supported for pooling models: remove it")
    if model.block_size > 1:
        raise ValueError(
            "pooling tasks (--task embed, classify or score) are not supported for block-diffusion "
            "models: use another model"
        )


def check_windows(
    config: EngineConfig,
    layer_windows: Sequence[int],
    *,
    num_groups: int = 1,
    layers_per_page: int = 1,
) -> None:
    """Checks an engine's configuration for a model with sliding windows, or with several KV cache
    groups.

    Args:
        config: the engine's configuration.
        layer_windows: sliding window per layer or group, in tokens; 0 for full attention.
        num_groups: number of groups in the KV cache layout, if it is known.
        layers_per_page: number of layers of the first group that share a page.

    Raises:
        ValueError: an option is not supported; the message names it.
    """
    windows = [window for window in layer_windows if window]
    if not windows and num_groups == 1:
        return
    models, remedy = "models whose layers differ in KV cache per token", "remove it"
    if windows:
        models = f"models with sliding windows (this model's: {min(windows)} tokens)"
        remedy = f"{remedy}, or set --max-model-len {min(windows)}"
    if config.execution.cpu_backend == "native":
        raise ValueError(f"--cpu-backend native is not supported for {models}: {remedy}")
    if not config.draft_checkpoint and not config.head_checkpoint:
        return
    # The cache of a draft model or an EAGLE-3 head is in pages with the ids of the first group: it
    # has all positions.
    assert config.speculative is not None, "the configuration has a checkpoint that drafts"
    option = f"--speculative-method {config.speculative.method}"
    if all(layer_windows):
        models = f"models with sliding windows in all layers (this model's: {min(windows)} tokens)"
        raise ValueError(f"{option} is not supported for {models}: {remedy}")
    if layers_per_page > 1:
        models = "models whose full-attention layers have smaller pages than others"
        raise ValueError(f"{option} is not supported for {models}: remove it")


def check_states(config: EngineConfig, model: ModelConfig) -> None:
    """Checks an engine's configuration for a model with layers that keep a state per request;
    accepts all other models.

    Raises:
        ValueError: an option is not supported; the message names it.
    """
    if not model.linear_layers:
        return
    if config.execution.cpu_backend == "native":
        raise ValueError(
            f"--cpu-backend native is not supported for models with {_STATEFUL}: remove it"
        )
    speculative = config.speculative
    if speculative is not None and speculative.num_speculative_tokens > _MOST_DRAFTS:
        raise ValueError(
            f"{option_name(speculative, 'num_speculative_tokens')} must be at most {_MOST_DRAFTS} "
            f"for models with {_STATEFUL}, got {speculative.num_speculative_tokens}"
        )


def check_draft_model(config: EngineConfig, model: ModelConfig, *, max_model_len: int) -> None:
    """Checks that the configured draft model can draft for `model`.

    Raises:
        ValueError: it cannot; the message gives the reason.
    """
    if not config.draft_checkpoint:
        return
    draft = load_model_config(config.draft_checkpoint, weights=False)
    if draft.diffusion_size > 1:
        raise ValueError(
            "--speculative-model: block-diffusion models are not supported; use an "
            "autoregressive model"
        )
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"--speculative-model has a vocabulary of {draft.vocab_size} tokens, but the model's "
            f"has {model.vocab_size}: use a draft model with the same tokenizer"
        )
    if draft.linear_layers:
        raise ValueError(f"--speculative-model: {_STATEFUL} are not supported; use another model")
    if draft.selects_tokens_within(draft.max_model_len):
        raise ValueError(
            "--speculative-model: sparse attention is not supported; use another model"
        )
    windows = list(filter(None, draft.windows_within(max_model_len)))
    if windows:
        raise ValueError(
            f"--speculative-model: sliding windows ({min(windows)} tokens) are not supported; use "
            f"another model, or set --max-model-len {min(windows)}"
        )
