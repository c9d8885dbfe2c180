"""What the scheduler must know of the engine."""

from __future__ import annotations

from dataclasses import dataclass


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

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError("max_num_seqs must be at least 1")
        if self.max_num_batched_tokens < 1:
            raise ValueError("max_num_batched_tokens must be at least 1")
        if self.page_size < 1:
            raise ValueError("page_size must be at least 1")
        if self.num_pages < 2:
            raise ValueError("num_pages must be at least 2: one dummy page and one to use")
        if self.max_model_len < 2:
            raise ValueError("max_model_len must be at least 2")

    @property
    def max_total_tokens(self) -> int:
        """Length at which any request ends: the model's maximum, or what the cache holds."""
        return min(self.max_model_len, (self.num_pages - 1) * self.page_size)
