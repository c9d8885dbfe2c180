"""Prompts of latent attention in expanded form against naive attention; run as `triton_cases`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels import Expansion, mla_prefill, registry
from kernels.mla_prefill import plan_expanded_rows
from tests.support.effort import is_thorough
from tests.support.kernels.paged_cases import Paged, make_paged, naive_attention


class Prompts(NamedTuple):
    """Rows of one layer."""

    case: Paged
    q: torch.Tensor
    up: torch.Tensor
    sizes: Expansion
    query_lens: list[int]

    def attend(self, most_keys: int) -> torch.Tensor:
        """Attention in expanded form, with chunks of `most_keys` keys."""
        rows = plan_expanded_rows(self.case.extends(self.query_lens), most_keys)
        return mla_prefill(
            *(self.q, self.case.k_cache, self.up, rows, self.sizes),
            scale=self.case.scale,
            value_scale=self.case.value_scale,
        )

    def naive(self) -> torch.Tensor:
        """Attention in absorbed form, in fp64."""
        sizes, case = self.sizes, self.case
        up = self.up.double().view(sizes.num_heads, -1, sizes.latent_dim)
        to_key, to_value = up.split([sizes.plain_dim, sizes.value_dim], dim=1)
        plain, rotated = self.q.double().split([sizes.plain_dim, sizes.rotary_dim], dim=2)
        absorbed = torch.cat((torch.einsum("thp,hpv->thv", plain, to_key), rotated), dim=2)
        parts = []
        for row, q in enumerate(absorbed.split(self.query_lens)):
            keys = case.row(case.k_cache, row).double()
            found = naive_attention(q, keys, keys[..., : sizes.latent_dim], case.scale)
            parts.append(torch.einsum("thv,hdv->thd", found, to_value))
        return torch.cat(parts) * case.value_scale


def make_prompts(
    lens: list[int],
    query_lens: list[int],
    *,
    heads: int = 2,
    latent: int = 40,
    rotary: int = 12,
    plain: int = 20,
    value: int = 24,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    fp8_scale: float | None = None,
) -> Prompts:
    case = make_paged(
        lens,
        num_kv_heads=1,
        head_dim=latent + rotary,
        value_dim=latent,
        device=device,
        dtype=dtype,
    )
    case.scale = (plain + rotary) ** -0.5
    if fp8_scale is not None:
        case = case.in_fp8(fp8_scale)
    sizes = Expansion(heads, latent, rotary, plain, value, itemsize=dtype.itemsize)
    # Slices of wider rows, as of a fused projection.
    row = torch.randn(sum(query_lens), heads * (plain + rotary) + 16).to(device, dtype)
    q = row[:, :-16].unflatten(1, (heads, -1))
    up = (latent**-0.5 * torch.randn(sizes.width, latent)).to(device, dtype)
    return Prompts(case, q, up, sizes, query_lens)


def compare_prompts(prompts: Prompts, most_keys: int, backend: str = "triton") -> None:
    """Compares the attention of a backend with the naive one."""
    with registry.using("triton" if backend == "triton" else "torch"):
        found = prompts.attend(most_keys)
    tolerance = 2e-5 if found.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), prompts.naive(), rtol=tolerance, atol=tolerance)


def whole_prompts_case(device: str, dtype: torch.dtype) -> None:
    """Checks rows that are expanded together, with and without a prefix, and alone."""
    prompts = make_prompts([40, 37, 25], [40, 9, 20], device=device, dtype=dtype)
    compare_prompts(prompts, 80)


def prompts_in_pieces_case(device: str, dtype: torch.dtype) -> None:
    """Checks a row of several chunks, some before its first query, within its queries, and after a
    tile's last query, next to rows of one chunk."""
    lens, query_lens = [90, 20, 30], [60, 20, 7]
    shapes: tuple[dict[str, int], ...] = ({}, {"heads": 4, "rotary": 16, "plain": 32, "value": 32})
    for shape in shapes if is_thorough(device) else shapes[:1]:
        compare_prompts(make_prompts(lens, query_lens, device=device, dtype=dtype, **shape), 40)


def fp8_prompts_case(device: str, dtype: torch.dtype) -> None:
    """Checks attention to an FP8 cache with a scale."""
    prompts = make_prompts([40], [20], device=device, dtype=dtype, fp8_scale=0.5)
    compare_prompts(prompts, 32)


MLA_CASES: list[Callable[[str, torch.dtype], None]] = [
    whole_prompts_case,
    prompts_in_pieces_case,
    fp8_prompts_case,
]
