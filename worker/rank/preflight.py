"""Preflight: checks of an engine's configuration against config.json, before weights are read.

`rayfleet serve` runs them before it starts Ray, each rank runs them again. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.config import EngineConfig
from worker.models.config.model_config import ModelConfig, load_model_config
from worker.models.layers.sharing import check_sharing


def check_engine(config: EngineConfig) -> ModelConfig:
    """Checks that a model can be served with this configuration, as far as config.json says it.

    The files beside the weights of a Hub repository are downloaded.

    Returns:
        The model's configuration.

    Raises:
        Unavailable: a file is missing, perhaps only for now.
        ValueError: the model cannot be served so; the message says what to change.
    """
    model = load_model_config(config.checkpoint, weights=False)
    max_model_len = model.resolve_max_model_len(config.max_model_len)
    check_sharing(model, config.tensor_parallel_size, expert_parallel=config.enable_expert_parallel)
    check_blocks(config, model)
    check_windows(config, model.windows_within(max_model_len))
    check_states(config, model)
    check_draft_model(config, model, max_model_len=max_model_len)
    return model


def check_blocks(config: EngineConfig, model: ModelConfig) -> None:
    """Checks that an engine's configuration suits its block-diffusion model, if it has one.

    Raises:
        ValueError: it does not; the message says what to change.
    """
    size = model.block_size
    if size == 1:
        return
    if config.page_size % size:
        raise ValueError(
            f"--page-size {config.page_size} must be a multiple of this model's block size, {size}"
        )
    if 0 < config.max_num_batched_tokens < 2 * size:
        raise ValueError(
            f"--max-num-batched-tokens must be at least two blocks of this model, {2 * size}"
        )
    if config.speculative_method != "none":
        raise ValueError(
            f"--speculative-method {config.speculative_method} drafts single tokens, this "
            "model decides blocks: use none"
        )


def check_windows(
    config: EngineConfig, layer_windows: Sequence[int], *, num_groups: int = 1
) -> None:
    """Checks that an engine's configuration suits a model with sliding windows, or with several
    groups of layers in its KV cache.

    Args:
        config: the engine's configuration.
        layer_windows: sliding window per layer or group, in tokens; 0 for full attention.
        num_groups: number of groups in the KV cache layout, if it is known.

    Raises:
        ValueError: it does not; the message says what to change.
    """
    windows = [window for window in layer_windows if window]
    if not windows and num_groups == 1:
        return
    what, remedy = "layers of this model keep unlike things of a token", "leave it out"
    if windows:
        what = f"layers of this model see {min(windows)} at a time"
        remedy = f"{remedy}, or set --max-model-len {min(windows)}"
    refused = {
        "--host-cache-gib": ("keeps prefixes whole", config.host_cache_gib > 0.0),
        "--speculative-method draft": (
            "takes pages of all positions",
            config.speculative_method == "draft",
        ),
        "--cpu-backend native": ("attends to all positions", config.cpu_backend == "native"),
    }
    for option, (reason, is_set) in refused.items():
        if is_set:
            raise ValueError(f"{option} {reason}, {what}: {remedy}")


def check_states(config: EngineConfig, model: ModelConfig) -> None:
    """Checks that an engine's configuration suits a model's linear-attention layers, if it has
    any.

    Raises:
        ValueError: it does not; the message says what to leave out.
    """
    refused = {
        "--host-cache-gib": ("keeps pages alone", config.host_cache_gib > 0.0),
        f"--speculative-method {config.speculative_method}": (
            "takes back positions that were computed",
            config.speculative_method != "none",
        ),
        "--cpu-backend native": ("knows attention alone", config.cpu_backend == "native"),
    }
    for option, (reason, is_set) in refused.items():
        if model.linear_layers and is_set:
            raise ValueError(
                f"{option} {reason}, and layers of this model keep a state of each request: "
                "leave it out"
            )


def check_draft_model(config: EngineConfig, model: ModelConfig, *, max_model_len: int) -> None:
    """Checks that the configured draft model can draft for `model`.

    Raises:
        ValueError: it cannot; the message says why.
    """
    if config.speculative_method != "draft":
        return
    draft = load_model_config(config.draft_checkpoint, weights=False)
    if draft.block_size > 1:
        raise ValueError(
            "--speculative-model decides blocks of tokens: use one that produces one after another"
        )
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"--speculative-model has a vocabulary of {draft.vocab_size} tokens, the model "
            f"one of {model.vocab_size}: they must share a tokenizer"
        )
    if draft.linear_layers:
        raise ValueError(
            "--speculative-model has layers of linear attention, which are not supported: use "
            "another one"
        )
    windows = list(filter(None, draft.windows_within(max_model_len)))
    if windows:
        raise ValueError(
            f"--speculative-model has layers that see {min(windows)} positions at a time, which is "
            f"not supported: use another one, or set --max-model-len {min(windows)}"
        )
