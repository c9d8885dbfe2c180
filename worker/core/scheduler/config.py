"""What the scheduler must know of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.core.scheduler.block_policy import BlockPolicy
from worker.wire.admission import AdmissionOptions
from worker.wire.host_cache import HostCachePolicy
from worker.wire.page_groups import ONE_GROUP, PageGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one worker group, as loaded."""

    max_num_seqs: int
    """Slots: most requests in the running set."""
    max_num_batched_tokens: int
    """Token budget of one step."""
    max_model_len: int
    """Most tokens of prompt plus completion."""
    page_size: int
    """Tokens per page."""
    num_pages: int
    """Pages on the device, the dummy page 0 included."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end tokens."""
    block_hash_salt: str = ""
    """Mixed into block hashes (model and its revision)."""
    enable_prefix_caching: bool = True
    """Whether computed pages are kept for later requests."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed in parts at will; else in one step, where it fits into
    one."""
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    """Rules of admission, to begin with."""
    preempt_priority_gap: int = 3
    """Levels by which a waiting request must outrank a running one to take its place; 0: never."""
    deadline_margin_s: float = 0.05
    """Time before the last moment for a deadline from which on a request is more urgent."""
    max_queued_requests: int = 0
    """Requests that may wait; 0 for any number."""
    max_queued_tokens: int = 0
    """Tokens that they may have together; 0 for any number."""
    num_host_pages: int = 0
    """Slots in host memory for pages that are evicted; 0 for no such tier."""
    host_cache_policy: HostCachePolicy = "auto"
    """Whether pages in host memory are copied back only where that is quicker, or always."""
    page_groups: PageGroups = ONE_GROUP
    """How the model's layers share pages."""
    blocks: BlockPolicy | None = None
    """Of a block-diffusion model; None for an autoregressive one."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError("max_num_seqs must be at least 1")
        if self.max_num_batched_tokens < 1:
            raise ValueError("max_num_batched_tokens must be at least 1")
        if self.page_size < 1:
            raise ValueError("page_size must be at least 1")
        if self.num_pages <= self.page_groups.num_groups:
            raise ValueError("num_pages must be at least 2: one dummy page and one to use")
        if self.page_groups.num_window and (self.num_host_pages or self.blocks is not None):
            raise ValueError("layers that see a window go with no host tier and no blocks")
        if self.num_host_pages and not self.enable_prefix_caching:
            raise ValueError("num_host_pages needs enable_prefix_caching")
        if self.max_model_len < 2:
            raise ValueError("max_model_len must be at least 2")
        if self.blocks is not None and self.page_size % self.blocks.size:
            raise ValueError("page_size must be a multiple of the block size")

    @property
    def max_total_tokens(self) -> int:
        """Length at which any request ends: the model's maximum, or what the cache holds."""
        most = self.page_groups.max_tokens(
            self.num_pages - 1, self.page_size, self.max_num_batched_tokens
        )
        return min(self.max_model_len, most)
