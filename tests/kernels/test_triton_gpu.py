from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import (
    Norm,
    fused_add_norm,
    qk_norm_rope_store,
    registry,
    rms_norm,
    sample_tokens,
    squared_relu,
    token_scores,
)
from kernels.linear.tiled import TritonTiledWeight
from tests.support.kernels.paged_cases import Paged, make_paged, naive_decode, naive_extend
from tests.support.kernels.sampling_cases import FILTERS, make_logits, parameters
from tests.support.kernels.triton_cases import CASES, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
SHAPES = [
    (8, 8, 64, 16),
    (14, 2, 80, 1),
    (12, 3, 96, 128),
    (32, 4, 128, 16),
    (40, 1, 128, 64),
    (4, 2, 256, 32),
]
"""Query heads, KV heads, head size, page size."""


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_kernel_on_gpu(case: Case, dtype: torch.dtype) -> None:
    case("cuda", dtype)


@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "batch-invariant"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_attention_on_gpu(
    dtype: torch.dtype, shape: tuple[int, int, int, int], invariant: bool
) -> None:
    num_q_heads, num_kv_heads, head_dim, page_size = shape
    lens, query_lens = [1, 128, 257, 700, 1500], [1, 128, 200, 3, 65]
    case = make_paged(
        lens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        device="cuda",
        dtype=dtype,
    )
    q = torch.randn(sum(query_lens), num_q_heads, head_dim).to("cuda", dtype)
    decoded = case.decode(q[: len(lens)], batch_invariant=invariant)
    assert_close(decoded, naive_decode(case, q[: len(lens)]))
    extended = case.extend(q, query_lens, batch_invariant=invariant)
    assert_close(extended, naive_extend(case, q, query_lens))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_product_is_batch_invariant_on_gpu(dtype: torch.dtype) -> None:
    weight = torch.randn(1536, 1024).to("cuda", dtype) / 32
    x = torch.randn(300, 1024).to("cuda", dtype)
    packed = TritonTiledWeight(weight)
    whole = packed.multiply(x, None)
    assert_close(whole, x.double() @ weight.double().t())
    for start, stop in ((0, 1), (1, 33), (64, 128), (299, 300), (17, 250)):
        assert torch.equal(packed.multiply(x[start:stop], None), whole[start:stop])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 4.0])
def test_draws_of_a_large_vocabulary(scale: float) -> None:
    """A scale of 1e-3 puts all tokens into few buckets, so that the search reads whole rows."""
    rows, vocab = 8 * len(FILTERS), 151_936
    own = parameters(FILTERS * 8, "cuda")
    logits = make_logits(rows, vocab, scale, "cuda", ties=False)
    drawn = {}
    for backend in ("torch", "triton"):
        with registry.using(backend):  # type: ignore[arg-type]
            drawn[backend] = sample_tokens(logits, own)
    # The logarithms of noise, and so near ties, may differ in their last bits.
    assert int((drawn["torch"] != drawn["triton"]).sum()) <= 1
    tokens = drawn["triton"]
    with registry.using("torch"):
        expected = token_scores(logits, tokens)
    actual = token_scores(logits, tokens)
    assert torch.equal(actual.rank, expected.rank)
    ratio = actual.weight.double() / expected.weight.double()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-6, atol=0)


def test_a_captured_draw_takes_any_mixture_of_rows() -> None:
    logits = make_logits(len(FILTERS), 32_000, 3.0, "cuda", ties=False)
    fixed = parameters([(1.0, 0, 1.0, 0.0)] * len(FILTERS), "cuda")
    out = torch.empty(len(FILTERS), dtype=torch.int64, device="cuda")
    sample_tokens(logits, fixed, out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_tokens(logits, fixed, out)
    for seed in range(3):
        own = parameters(FILTERS[seed:] + FILTERS[:seed], "cuda", seed)
        for name in ("temperature", "seeds", "positions", "top_k", "top_p", "log_min_p"):
            getattr(fixed, name).copy_(getattr(own, name))
        graph.replay()
        assert torch.equal(out, sample_tokens(logits, own))


def test_kernels_of_a_graph_wait_for_each_other() -> None:
    """Kernels that start before the previous one has completed read what it stores, and do not
    overwrite what it still reads: results are those of kernels that run one at a time."""
    x = torch.randn(257, 8192).to("cuda", torch.bfloat16)
    norm = Norm(torch.ones_like(x[0]))

    def run(finish: Callable[[], None]) -> torch.Tensor:
        residual, y = x, x
        for _ in range(100):
            (y,), residual = fused_add_norm(y, residual, (norm,), 1e-6)
            finish()
            y = rms_norm(squared_relu(y), norm.weight, 1e-6)
            finish()
        return residual + y

    expected = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(lambda: None)
    for _ in range(50):
        graph.replay()
        assert torch.equal(out, expected)


def test_a_cache_of_more_elements_than_32_bits_count() -> None:
    shape = (2**31 // (16 * 8 * 128) + 8, 16, 8, 128)
    caches = 2 * 2 * 2**31  # bytes of keys and values
    if torch.cuda.mem_get_info()[0] < caches + (2 << 30):
        pytest.skip(f"needs {caches >> 30} GiB of device memory and some more")
    k_cache, v_cache = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    pages = torch.tensor([[shape[0] - 1, 3, shape[0] - 2]], dtype=torch.int32, device="cuda")
    positions = torch.arange(40, device="cuda")
    slots = pages[0, positions // 16].long() * 16 + positions % 16
    k, v, q = (torch.randn(40, 8, 128).to("cuda", torch.bfloat16) for _ in range(3))
    with registry.using("triton"):
        qk_norm_rope_store(
            *(q.clone(), k.clone(), v, (k_cache, v_cache), slots),
            positions=positions,
            cos_sin_cache=None,
        )
    case = Paged([40], k_cache, v_cache, pages, 128**-0.5)
    assert torch.equal(case.row(k_cache, 0), k)
    assert torch.equal(case.row(v_cache, 0), v)
    assert_close(case.extend(q, [40]), naive_extend(case, q, [40]))
    assert_close(case.decode(q[:1]), naive_decode(case, q[:1]))
