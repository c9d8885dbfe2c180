"""Arguments of attention libraries, checked by fakes with their documented signatures, and errors
if they are not installed."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, cast, get_args

import pytest
import torch

from kernels import attention, registry
from kernels.attention import (
    WHY,
    AttentionBackend,
    AttentionSettings,
    CapturableBackend,
    create_attention_backend,
    flash_backend,
)
from kernels.attention.flash_backend import FlashAttention
from kernels.attention.torch_backend import TorchAttention
from tests.support.kernels.paged_cases import Paged, make_paged, naive_decode, naive_extend
from worker.config import AttentionBackendName

SEQ_LENS, QUERY_LENS = [5, 90, 33, 16], [5, 37, 1, 16]


class Flash4:
    """`flash_attn.cute` of flash-attn-4 4.0.0b36."""

    calls: ClassVar[list[int]] = []
    """Rows of each call."""

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
        gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
        block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False,
        scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
        gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
    ):  # fmt: skip
        assert causal
        assert cu_seqlens_k is None, "not supported with pages"
        queries, tokens = cu_seqlens_q.diff().tolist(), seqused_k.tolist()
        assert max_seqlen_q == max(queries)
        assert max_seqlen_k == max(tokens)
        assert {t.dtype for t in (cu_seqlens_q, seqused_k, page_table)} == {torch.int32}
        assert len(page_table) == len(tokens)
        Flash4.calls.append(len(tokens))
        left, right = window_size
        window = 0 if left is None else left + 1
        assert right == (None if left is None else 0)
        case = Paged(tokens, k, v, page_table, softmax_scale, softcap, learnable_sink)
        return naive_extend(case, q, queries, window=window).to(q.dtype), None


class Others(TorchAttention, CapturableBackend):
    """Torch in the place of Triton."""

    captures_ragged = True


LIBRARIES: dict[str, AttentionBackend] = {
    "flash": FlashAttention(Flash4.flash_attn_varlen_func, Others()),
    "torch": TorchAttention(),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_receive_the_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_backend, "MIN_QUERIES", 16)
    library = LIBRARIES[name]
    case = make_paged(SEQ_LENS, num_kv_heads=2, head_dim=32, page_size=16)
    fused = torch.randn(sum(QUERY_LENS), 6 * 32 + 7)
    q = fused[:, : 6 * 32].unflatten(1, (6, 32))
    decode = library.plan(case.decodes())
    extend = library.plan(case.extends(QUERY_LENS))
    caches = (case.k_cache, case.v_cache)
    for _ in range(2):  # layers
        found = decode.forward(q[:4], *caches, scale=case.scale)
        expected = naive_decode(case, q[:4])
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)
        found = extend.forward(q, *caches, scale=case.scale)
        expected = naive_extend(case, q, QUERY_LENS)
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("lens", "query_lens", "calls"),
    [([40, 90], [16, 40], [2]), ([40, 90, 33], [15, 40, 16], [2]), ([40, 9], [15, 9], [])],
    ids=["all", "some", "none"],
)
def test_long_rows_are_those_of_flash(
    lens: list[int], query_lens: list[int], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows, soft caps and sinks; not with chunks, which the library does not support."""
    monkeypatch.setattr(flash_backend, "MIN_QUERIES", 16)
    monkeypatch.setattr(Flash4, "calls", [])
    library = FlashAttention(Flash4.flash_attn_varlen_func, Others(cap=5.0), cap=5.0)
    case = make_paged(lens, num_kv_heads=2, head_dim=32, cap=5.0)
    case.sinks = torch.randn(4)
    q = torch.randn(sum(query_lens), 4, 32)
    for is_chunked in (False, True):
        how: dict[str, Any] = {"window": 21, "is_chunked": is_chunked}
        found = case.attend(q, library, case.extends(query_lens, **how))
        expected = naive_extend(case, q, query_lens, **how)
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)
    assert Flash4.calls == calls


def test_flash_has_the_signature_of_the_stand_in() -> None:
    """Of the pinned version, if it is installed."""
    library = pytest.importorskip("flash_attn.cute", exc_type=ImportError)
    real, own = (
        [(one.name, one.default) for one in inspect.signature(function).parameters.values()]
        for function in (library.flash_attn_varlen_func, Flash4.flash_attn_varlen_func)
    )
    assert real == own


def create(name: str, **options: Any) -> AttentionBackend:
    settings = AttentionSettings(
        device=torch.device("cpu"), dtype=torch.bfloat16, page_size=256, batch_invariant=False
    )
    return create_attention_backend(name, replace(settings, **options))


def test_auto_is_what_the_ops_run_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="kernels.attention"):
        assert isinstance(create("auto"), TorchAttention)
    assert caplog.messages == [f"using attention backend torch: {WHY['torch']}"]
    assert isinstance(create("torch", batch_invariant=True), TorchAttention)
    with registry.using("triton"):
        assert isinstance(create("torch"), TorchAttention)
    with pytest.raises(ValueError, match="not batch-invariant"):
        create("torch", batch_invariant=True, device=torch.device("cuda"))
    with pytest.raises(ValueError, match="--batch-invariant is not supported on CPU"):
        create("torch", batch_invariant=True, cap=50.0)


@pytest.mark.parametrize("name", ["triton", "flash"])
def test_a_backend_without_cuda_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="needs a CUDA device: use auto or torch"):
        create(name)


@pytest.fixture
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of a compute capability, by default Hopper."""
    found = getattr(request, "param", (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: found)


@pytest.mark.parametrize(
    ("capability", "options", "message"),
    [
        ((9, 0), {"batch_invariant": True}, "not batch-invariant"),
        ((9, 0), {"block_size": 4}, "supports causal attention only"),
        ((9, 0), {"has_bidirectional_rows": True}, "does not support models with canvases"),
        ((9, 0), {"has_latents": True}, "does not support MLA"),
        ((9, 0), {"has_fp8_cache": True}, "does not support --kv-cache-dtype fp8"),
        ((9, 0), {"head_dims": (256, 512)}, "up to 256 .* this model has 256 and 512"),
        ((10, 0), {"head_dims": (192,)}, "192 with values of 128, or 256 on this GPU"),
        ((10, 0), {"head_dims": (60,)}, "this model has 60"),
        ((8, 9), {}, "9.x or 10.x .* this GPU has 8.9"),
        ((9, 0), {"dtype": torch.float32}, "supports float16 and bfloat16, not torch.float32"),
        ((9, 0), {}, r"not installed .*`pip install 'rayfleet\[gpu\]'"),
        ((10, 0), {"head_dims": (192,), "has_narrow_values": True}, "not installed"),
        ((10, 0), {"head_dims": (64, 256)}, "not installed"),
    ],
    indirect=["capability"],
)
@pytest.mark.usefixtures("capability")
def test_what_flash_does_not_serve_is_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ValueError, match=message):
        create("flash", device=torch.device("cuda"), **options)


@pytest.mark.usefixtures("capability")
def test_flash_is_created_with_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cast("ModuleType", Flash4))
    settings = {"window": 9, "cap": 50.0, "has_sinks": True, "head_dims": (64, 256)}
    library = create("flash", device=torch.device("cuda"), **settings)
    assert isinstance(library, FlashAttention)
    assert library.captures_ragged
    assert not library.needs_exact_lengths


def test_heads_that_no_program_holds_are_refused() -> None:
    with registry.using("triton"):
        create("triton", head_dims=(256, 512))
        create("triton", head_dims=(576,), has_latents=True)
        with pytest.raises(ValueError, match="--batch-invariant is not supported on CUDA"):
            create("triton", head_dims=(576,), has_latents=True, batch_invariant=True)
        with pytest.raises(ValueError, match="up to 512, but this model's is 640"):
            create("triton", head_dims=(128, 640))


def test_the_options_of_the_command_line_are_the_backends() -> None:
    folder = Path(attention.__file__).parent
    files = {path.name.removesuffix("_backend.py") for path in folder.glob("*_backend.py")}
    assert files == {*get_args(AttentionBackendName)} - {"auto"}
