"""Creates EngineInfo, which the coordinator sends to its frontend after all ranks have loaded. Does
not import torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from worker.config import EngineConfig
from worker.core.adapter_folder import static_adapters
from worker.models.config.checkpoint import block_hash_salt
from worker.models.config.model_config import ModelConfig, load_model_config
from worker.plan.messages import Hello, Ready, Start
from worker.protocol.diffusion import CANVAS_ALGORITHM
from worker.protocol.messages import EngineInfo
from worker.protocol.page_groups import PageGroups
from worker.protocol.text.end_tokens import tokenizer_eos_token_id


def begin_salt(config: EngineConfig) -> Callable[[], str]:
    """Starts hashing the checkpoint's files for the salt of block hashes, while ranks load them.

    Returns:
        Function that waits for the salt; it raises the errors of `load_model_config`.
    """
    salt: Future[str] = Future()

    def read() -> None:
        try:
            weights = config.load_format != "dummy"
            folder = load_model_config(
                config.checkpoint, weights=weights, pooling=config.pooling
            ).folder
            salt.set_result(block_hash_salt(folder, weights=weights))
        except Exception as error:
            salt.set_exception(error)

    # A daemon thread: a process that exits because a rank failed must not wait for it.
    threading.Thread(target=read, name="salt", daemon=True).start()
    return salt.result


def build_engine_info(config: EngineConfig, hellos: Sequence[Hello], salt: str) -> EngineInfo:
    """Computes the engine's limits from its configuration and the memory of its ranks.

    Args:
        config: the group's engine configuration.
        hellos: hello messages, one per rank.
        salt: identifies the checkpoint in block hashes.

    Raises:
        ValueError: a rank's memory has no room for a KV cache page, or a LoRA adapter is missing
            or unsupported.
    """
    model = load_model_config(
        config.checkpoint, weights=config.load_format != "dummy", pooling=config.pooling
    )
    num_pages = min(hello.num_pages for hello in hellos) - 1  # page 0 is for padding writes
    max_model_len, groups = min(hello.max_model_len for hello in hellos), hellos[0].page_groups
    if num_pages < 1:
        raise ValueError(
            "no memory left for the KV cache: increase --gpu-memory-utilization or "
            "--tensor-parallel-size, or set --kv-cache-tokens"
        )
    config = config.with_limits(hellos[0].max_num_seqs, hellos[0].max_num_batched_tokens)
    config = config.with_page_size(model.block_size)
    limits = config.scheduling
    max_total_tokens = _max_total_tokens(config, num_pages, groups, num_ahead=model.num_ahead)
    if groups.num_window:
        max_total_tokens = min(max_total_tokens, max_model_len)
    return EngineInfo(
        model=config.checkpoint,
        tokenizer=config.tokenizer,
        max_model_len=max_model_len,
        max_total_tokens=max_total_tokens,
        vocab_size=hellos[0].vocab_size,
        page_size=config.cache.page_size,
        max_num_seqs=limits.max_num_seqs,
        eos_token_ids=_eos_token_ids(config, model, hellos[0].vocab_size),
        block_hash_salt=_salt(config, hellos[0], salt),
        block_size=model.diffusion_size,
        dllm_algorithm=_dllm_algorithm(config, model),
        has_edit_tokens=model.edit_token_ids is not None,
        structured_outputs_backend=config.structured_outputs_backend,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_queued_requests=limits.max_queued_requests,
        max_queued_tokens=limits.max_queued_tokens,
        num_host_pages=min(hello.num_host_pages for hello in hellos),
        device=hellos[0].device,
        dtype=hellos[0].dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        startup=slowest(hellos),
        num_pages=num_pages,
        page_groups=groups,
        pooling=None if model.pooling is None else model.pooling.info,
        processes={"rank 0": os.getpid()} | _processes(hellos),
        **_lora(config),
    )


def _max_total_tokens(
    config: EngineConfig, num_pages: int, groups: PageGroups, *, num_ahead: int
) -> int:
    """Maximum number of tokens of one request that, together with `num_ahead` positions after them,
    fit in a cache of `num_pages` pages. Raises ValueError if not even one token fits."""
    page_size, most = config.cache.page_size, config.scheduling.max_num_batched_tokens
    max_total_tokens = groups.max_tokens(num_pages, page_size, most) - num_ahead
    if max_total_tokens < 1:
        raise ValueError(
            f"the KV cache is too small for a canvas of {num_ahead} tokens and a prompt: increase "
            "--gpu-memory-utilization or --tensor-parallel-size, or set --kv-cache-tokens"
        )
    return max_total_tokens


def _lora(config: EngineConfig) -> dict[str, Any]:
    """Fields of EngineInfo about LoRA adapters; empty if they are disabled."""
    lora = config.lora
    if lora is None:
        return {}
    return {
        "max_loras": lora.max_loras,
        "max_lora_rank": lora.max_lora_rank,
        "adapters": static_adapters(lora.folders, lora.max_lora_rank),
    }


def _dllm_algorithm(config: EngineConfig, model: ModelConfig) -> str:
    """Default algorithm of a block-diffusion model; empty for an autoregressive one."""
    if model.canvas is not None:
        return CANVAS_ALGORITHM
    return config.dllm.algorithm if model.block_size > 1 else ""


def _salt(config: EngineConfig, hello: Hello, salt: str) -> str:
    """Salt of block hashes: the checkpoint's digest and all options that affect keys and values."""
    quantization = "" if config.quantization == "auto" else config.quantization
    return "-".join(filter(None, (salt, hello.dtype, hello.kv_cache_dtype, quantization)))


def _eos_token_ids(config: EngineConfig, model: ModelConfig, vocab_size: int) -> list[int]:
    """EOS tokens from the checkpoint's configuration and its tokenizer."""
    try:
        tokenizer_eos = tokenizer_eos_token_id(config.tokenizer_checkpoint)
    except ValueError:  # prompts are token ids, or gateways report the error
        tokenizer_eos = None
    found = dict.fromkeys(
        [*model.eos_token_ids, *(() if tokenizer_eos is None else (tokenizer_eos,))]
    )
    return [token_id for token_id in found if 0 <= token_id < vocab_size]


def start_of(info: EngineInfo) -> Start:
    """Creates the Start message. All ranks allocate the same number of pages, including the dummy
    page."""
    return Start(num_pages=info.num_pages + 1, num_host_pages=info.num_host_pages)


def _processes(hellos: Sequence[Hello]) -> dict[str, int]:
    """Process ids by name, for ranks outside the coordinator's process."""
    return {
        f"rank {hello.rank}" if hello.rank else "the step of rank 0": hello.process
        for hello in sorted(hellos, key=lambda hello: hello.rank)
        if hello.process
    }


def slowest(ranks: Sequence[Hello | Ready]) -> dict[str, float]:
    """Duration of each phase, in seconds, on its slowest rank, for which the other ranks wait."""
    times: dict[str, float] = {}
    for rank in ranks:
        for phase, seconds in rank.startup.items():
            times[phase] = max(seconds, times.get(phase, 0.0))
    return times
