"""QK norm over all heads together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels import rms_norm_pair
from worker.models.config.model_config import ModelConfig
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.sharing import local_heads


class WideQueryKeyNorm:
    """QK norm over all heads together, of queries and of keys.

    Each rank holds the weights of its heads. A single all-reduce adds the sums of squares of
    queries and keys.

    Args:
        config: the model's configuration.
        options: options of the model's layers.
        names: checkpoint names of the norms of queries and of keys.
    """

    def __init__(self, config: ModelConfig, options: LayerOptions, names: tuple[str, str]) -> None:
        group = options.group
        heads, kv_heads = local_heads(config, group.world_size)
        first_kv_head = group.rank * config.num_kv_heads // group.world_size
        self._names = names
        self._full = [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
        self._starts = [group.rank * heads * config.head_dim, first_kv_head * config.head_dim]
        self._weights = tuple(
            torch.empty(count * config.head_dim, dtype=options.dtype, device=options.device)
            for count in (heads, kv_heads)
        )
        copies = max(1, group.world_size // config.num_kv_heads)
        self._factors = torch.tensor(
            [1 / self._full[0], 1 / (copies * self._full[1])], device=options.device
        )
        """Factors that convert the ranks' sums of squares to means; the sums count each key head
        once for each rank that has a copy."""
        self._eps = config.rms_norm_eps
        self._options = options

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots for this rank's heads in the weights of the two norms; `prefix` ends with a
        dot."""
        for name, weight, full, start in zip(
            self._names, self._weights, self._full, self._starts, strict=True
        ):
            yield WeightSlot(
                name=f"{prefix}{name}.weight", destination=weight, full_shape=(full,), start=start
            )

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalizes queries and keys, [T, heads, head_dim] each."""
        if self._options.group.world_size == 1:
            weights = self._weights[0], self._weights[1]
            first, second = rms_norm_pair(q.flatten(1), k.flatten(1), weights, self._eps)
            return first.view(q.shape), second.view(k.shape)
        squares = torch.stack([x.flatten(1).float().square().sum(-1) for x in (q, k)], dim=1)
        total = self._options.group.all_reduce(squares, fixed_order=self._options.batch_invariant)
        scales = (total * self._factors + self._eps).rsqrt()[:, :, None, None].unbind(1)
        first, second = (
            (x.float() * scale).to(x.dtype) * weight.view(x.shape[1:])
            for x, scale, weight in zip((q, k), scales, self._weights, strict=True)
        )
        return first, second
