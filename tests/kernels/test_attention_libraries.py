"""What other attention libraries are told, by stand-ins with their documented signatures; where
they are missing, who asks for them is told what to do."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kernels import decode_attention, extend_attention, prepare_decode, prepare_extend, registry
from kernels.attention import AttentionBackend, AttentionLibrary, create_attention_library
from kernels.attention.flash_attn import FlashAttention
from kernels.attention.flashinfer import FlashInferAttention
from kernels.attention.library import import_library
from kernels.attention.torch_library import TorchAttention
from tests.support.kernels.paged_cases import Paged, make_paged, naive_decode, naive_extend

SEQ_LENS, QUERY_LENS = [5, 90, 33, 16], [5, 37, 1, 16]


def attend_paged(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    rows: list[tuple[torch.Tensor, int, int]],
) -> torch.Tensor:
    """Rows of (pages, tokens, queries) by the naive reference, causal from the end."""
    page_table = torch.nn.utils.rnn.pad_sequence([pages for pages, _, _ in rows], batch_first=True)
    case = Paged([tokens for _, tokens, _ in rows], *caches, page_table.int(), scale)
    return naive_extend(case, q, [queries for _, _, queries in rows]).to(q.dtype)


class FlashInferWrapper:
    """Plans and runs of flashinfer 0.6."""

    def __init__(
        self, workspace: torch.Tensor, kv_layout: str, use_tensor_cores: bool = False
    ) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.num_plans = 0

    def plan_rows(
        self,
        query_start: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        shape: tuple[int, ...],
        sm_scale: float,
    ) -> None:
        assert all(t.dtype == torch.int32 for t in (query_start, indptr, indices, last_page_len))
        assert len(indices) == int(indptr[-1])
        self.num_plans += 1
        self.shape, self.scale, self.rows = shape, sm_scale, []
        for row, last in enumerate(last_page_len.tolist()):
            pages = indices[indptr[row] : indptr[row + 1]]
            assert 1 <= last <= shape[3]
            num_queries = int(query_start[row + 1] - query_start[row])
            self.rows.append((pages, (len(pages) - 1) * shape[3] + last, num_queries))

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        heads = (q.shape[1], paged_kv_cache[0].shape[2], q.shape[2], paged_kv_cache[0].shape[1])
        assert heads == self.shape
        return attend_paged(q, paged_kv_cache, self.scale, self.rows)


class FlashInfer:
    class BatchDecodeWithPagedKVCacheWrapper(FlashInferWrapper):
        def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim,
                 page_size, *, sm_scale=None, q_data_type="float16",
                 kv_data_type=None):  # fmt: skip
            assert q_data_type == kv_data_type == torch.float32
            shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
            queries = torch.arange(len(indptr), dtype=torch.int32)
            self.plan_rows(queries, indptr, indices, last_page_len, shape, sm_scale)

    class BatchPrefillWithPagedKVCacheWrapper(FlashInferWrapper):
        def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
                 num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo=None,
                 custom_mask=None, packed_custom_mask=None, causal=False, sm_scale=None,
                 q_data_type="float16", kv_data_type=None):  # fmt: skip
            assert causal
            shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
            rows = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            self.plan_rows(qo_indptr, *rows, shape, sm_scale)


class Flash2:
    """flash_attn 2.8."""

    @staticmethod
    def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, *, cache_seqlens, block_table,
                                softmax_scale=None, causal=False):  # fmt: skip
        assert q.shape[1] == 1
        rows = [(t, n, 1) for t, n in zip(block_table, cache_seqlens.tolist(), strict=True)]
        return attend_paged(q[:, 0], (k_cache, v_cache), softmax_scale, rows).unsqueeze(1)

    @staticmethod
    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *,
                               softmax_scale, causal, block_table):  # fmt: skip
        assert causal
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        queries, tokens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert (max(queries), max(tokens)) == (max_seqlen_q, max_seqlen_k)
        rows = list(zip(block_table, tokens, queries, strict=True))
        return attend_paged(q, (k, v), softmax_scale, rows)


class Flash3:
    """flash_attn_interface of FlashAttention 3."""

    @staticmethod
    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table,
                                cu_seqlens_q=None, max_seqlen_q=None, softmax_scale=None,
                                causal=False):  # fmt: skip
        assert causal
        if cu_seqlens_q is None:
            return Flash2.flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=page_table,
                softmax_scale=softmax_scale, causal=True,
            )  # fmt: skip
        queries = cu_seqlens_q.diff().tolist()
        assert max(queries) == max_seqlen_q
        rows = list(zip(page_table, cache_seqlens.tolist(), queries, strict=True))
        return attend_paged(q, (k_cache, v_cache), softmax_scale, rows)


LIBRARIES: dict[str, AttentionLibrary] = {
    "flashinfer": FlashInferAttention(FlashInfer, torch.device("cpu")),
    "flash2": FlashAttention(Flash2, version=2),
    "flash3": FlashAttention(Flash3, version=3),
    "torch": TorchAttention(),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_are_told_the_rows(name: str) -> None:
    library = LIBRARIES[name]
    case = make_paged(SEQ_LENS, num_kv_heads=2, head_dim=32, page_size=16)
    fused = torch.randn(sum(QUERY_LENS), 6 * 32 + 7)
    q = fused[:, : 6 * 32].unflatten(1, (6, 32))
    lengths = torch.tensor(SEQ_LENS, dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor(QUERY_LENS).cumsum(0)], dtype=torch.int32)
    decode = prepare_decode(
        case.page_table, lengths, seq_lens_host=SEQ_LENS, page_size=16, library=library
    )
    extend = prepare_extend(
        case.page_table, lengths, starts, seq_lens_host=SEQ_LENS, query_lens_host=QUERY_LENS,
        page_size=16, library=library,
    )  # fmt: skip
    caches = (case.k_cache, case.v_cache)
    for _ in range(2):  # layers
        found = decode_attention(q[:4], *caches, decode, scale=case.scale)
        expected = naive_decode(case, q[:4])
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)
        found = extend_attention(q, *caches, extend, scale=case.scale)
        expected = naive_extend(case, q, QUERY_LENS)
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


def test_flashinfer_plans_once_per_step() -> None:
    library = FlashInferAttention(FlashInfer, torch.device("cpu"))
    case = make_paged([5, 20], num_kv_heads=2, head_dim=32, page_size=16)
    lengths = torch.tensor([5, 20], dtype=torch.int32)
    for step in (1, 2):
        decode = prepare_decode(
            case.page_table, lengths, seq_lens_host=[5, 20], page_size=16, library=library
        )
        for _ in range(3):
            q = torch.randn(2, 4, 32)
            decode_attention(q, case.k_cache, case.v_cache, decode, scale=case.scale)
        assert library._decode.num_plans == step


def create(backend: AttentionBackend, **options: object) -> AttentionLibrary | None:
    settings: dict[str, object] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "page_size": 16,
        "batch_invariant": False,
        **options,
    }
    return create_attention_library(backend, **settings)  # type: ignore[arg-type]  # test options


def test_own_ops_need_no_library() -> None:
    assert create("auto") is None
    assert create("torch") is None
    with registry.using("triton"):
        assert create("auto", batch_invariant=True) is None
        assert create("triton", batch_invariant=True) is None
        assert isinstance(create("torch"), TorchAttention)
        with pytest.raises(ValueError, match="not batch-invariant"):
            create("torch", batch_invariant=True)


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "flash"])
def test_a_backend_without_cuda_is_refused(backend: AttentionBackend) -> None:
    with pytest.raises(ValueError, match="needs a CUDA device; use auto or torch"):
        create(backend, dtype=torch.bfloat16)


@pytest.mark.parametrize("backend", ["flashinfer", "flash"])
def test_a_library_that_is_not_installed_is_named(backend: AttentionBackend) -> None:
    if any(map(importlib.util.find_spec, ("flashinfer", "flash_attn", "flash_attn_interface"))):
        pytest.skip("one of the libraries is installed")
    with pytest.raises(ValueError, match="pip install flash"):
        import_library(backend, torch.device("cpu"), 256)
