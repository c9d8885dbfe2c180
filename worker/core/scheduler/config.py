"""SchedulerConfig: options of the scheduler, and properties of the loaded engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from worker.config import EngineConfig, SchedulingConfig
from worker.core.scheduler.block_policy import BlockPolicy
from worker.protocol.diffusion import CANVAS_ALGORITHM
from worker.protocol.host_cache import HostCachePolicy
from worker.protocol.messages import EngineInfo
from worker.protocol.page_groups import ONE_GROUP, PageGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig(SchedulingConfig):
    """Configuration of a worker group's scheduler: options, and properties of the loaded engine."""

    max_num_seqs: int = 64
    """Maximum number of requests in the running set; the device's default is already applied."""
    max_num_batched_tokens: int = 1024
    """Token budget of one step; the device's default is already applied."""
    max_model_len: int
    """Maximum number of tokens of a request, prompt plus completion."""
    page_size: int
    """Tokens per page."""
    num_pages: int
    """Number of pages on the device, including dummy page 0."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's EOS tokens."""
    enable_prefix_caching: bool = True
    """Whether computed pages are reused for prompts with the same prefix."""
    host_cache_policy: HostCachePolicy = "auto"
    """Policy that decides when evicted pages are copied back from host memory."""
    block_hash_salt: str = ""
    """Salt of block hashes: identifies the checkpoint and all options that affect keys and values.
    """
    num_host_pages: int = 0
    """Number of slots in host memory for evicted pages; 0 disables the tier."""
    page_groups: PageGroups = ONE_GROUP
    """Layer groups with separate pages."""
    num_ranks: int = 1
    """Number of ranks of the worker group. If there are several, Plans carry digests of sampled
    tokens, which each rank compares with its own."""
    max_loras: int = 0
    """Number of slots on the device for LoRA adapters; 0 disables adapters."""
    max_cpu_loras: int = 0
    """Maximum number of LoRA adapters in host memory, at least `max_loras`."""
    blocks: BlockPolicy | None = None
    """Policy of a block-diffusion model; None for an autoregressive one."""

    def __post_init__(self) -> None:
        SchedulingConfig.__post_init__(self)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {self.page_size}")
        if self.num_pages <= self.page_groups.num_groups:
            raise ValueError(
                f"num_pages must be more than {self.page_groups.num_groups}, got {self.num_pages}"
            )
        blocks = None if self.blocks is None or self.blocks.has_canvases else self.blocks
        if self.page_groups.num_window and blocks is not None:
            raise ValueError("sliding-window layers are incompatible with block diffusion")
        if self.page_groups.snapshot_pages and self.blocks is not None:
            raise ValueError("linear-attention layers are incompatible with block diffusion")
        if self.num_host_pages and not self.enable_prefix_caching:
            raise ValueError("num_host_pages requires enable_prefix_caching")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if blocks is not None and self.page_size % blocks.size:
            raise ValueError(
                f"page_size must be a multiple of the block size {blocks.size}, "
                f"got {self.page_size}"
            )

    @classmethod
    def of(cls, config: EngineConfig, info: EngineInfo) -> Self:
        """Scheduler configuration of an engine.

        Args:
            config: the engine's options, including the limits.
            info: properties of the loaded engine.
        """
        limits, pooling, lora = config.scheduling, info.pooling, config.lora
        is_whole = pooling is not None and pooling.is_bidirectional
        can_reuse = pooling is None or pooling.reuses_prefixes
        blocks = None
        if info.block_size > 1:
            has_canvases = info.dllm_algorithm == CANVAS_ALGORITHM
            blocks = BlockPolicy.of(config.dllm, info.block_size, has_canvases=has_canvases)
        return cls(
            **{
                **{item.name: getattr(limits, item.name) for item in fields(SchedulingConfig)},
                "enable_chunked_prefill": limits.enable_chunked_prefill and not is_whole,
            },
            enable_prefix_caching=config.cache.enable_prefix_caching and can_reuse,
            host_cache_policy=config.cache.host_cache_policy,
            max_model_len=info.max_model_len,
            page_size=info.page_size,
            num_pages=(info.num_pages or info.max_total_tokens // info.page_size) + 1,
            page_groups=info.page_groups,
            eos_token_ids=tuple(info.eos_token_ids),
            block_hash_salt=info.block_hash_salt,
            num_host_pages=info.num_host_pages,
            num_ranks=info.tensor_parallel_size,
            max_loras=0 if lora is None else lora.max_loras,
            max_cpu_loras=0 if lora is None else lora.num_host_copies,
            blocks=blocks,
        )

    @property
    def max_total_tokens(self) -> int:
        """Length at which any request ends: the model's maximum or the capacity of the cache minus
        a canvas, whichever is smaller."""
        capacity = self.page_groups.max_tokens(
            self.num_pages - 1, self.page_size, self.max_num_batched_tokens
        )
        if self.blocks is not None and self.blocks.has_canvases:
            capacity -= self.blocks.size
        return min(self.max_model_len, capacity)
