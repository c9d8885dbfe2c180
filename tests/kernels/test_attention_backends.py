"""Arguments of attention libraries, checked by fakes with their documented signatures, and errors
if they are not installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch

from kernels import attention, registry
from kernels.attention import (
    WHY,
    AttentionBackend,
    AttentionSettings,
    CapturableBackend,
    create_attention_backend,
)
from kernels.attention.flash_backend import FlashAttention
from kernels.attention.flashinfer_backend import FlashInferAttention
from kernels.attention.torch_backend import TorchAttention
from tests.support.kernels.flashinfer import FlashInfer, attend_paged
from tests.support.kernels.paged_cases import make_paged, naive_decode, naive_extend
from worker.config import AttentionBackendName

SEQ_LENS, QUERY_LENS = [5, 90, 33, 16], [5, 37, 1, 16]


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


LIBRARIES: dict[str, AttentionBackend] = {
    "flashinfer": FlashInferAttention(FlashInfer, torch.device("cpu")),
    "flash2": FlashAttention(Flash2, version=2),
    "flash3": FlashAttention(Flash3, version=3),
    "torch": TorchAttention(),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_receive_the_rows(name: str) -> None:
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


def test_flashinfer_plans_once_per_step() -> None:
    library = FlashInferAttention(FlashInfer, torch.device("cpu"))
    case = make_paged([5, 20], num_kv_heads=2, head_dim=32, page_size=16)
    for step in (1, 2):
        decode = library.plan(case.decodes())
        for _ in range(3):
            q = torch.randn(2, 4, 32)
            decode.forward(q, case.k_cache, case.v_cache, scale=case.scale)
        assert library._decode.num_plans == step


def test_flashinfer_plans_captured_steps_into_buffers_that_stay() -> None:
    """Without graph buffers a wrapper plans into its own tensors, which the next plan replaces."""
    library = FlashInferAttention(FlashInfer, torch.device("cpu"))
    case = make_paged([5, 20], num_kv_heads=2, head_dim=32, page_size=16)
    step = library.prepare_for_capture(case.decodes())
    assert library.prepare_for_capture(case.decodes()) is step
    rows, width = case.page_table.shape
    sizes = [len(buffer) for buffer in step._wrapper.buffers]
    assert sizes == [rows + 1, rows * width, rows]


class LateEvent:
    """An event of a device that does nothing until the host waits."""

    launched: ClassVar[list[Callable[[], None]]] = []
    """Pending copies."""

    def record(self) -> None:
        self.number = len(self.launched)

    def synchronize(self) -> None:
        for number in range(self.number):
            self.launched[number]()


class LateWrapper(FlashInfer.BatchDecodeWithPagedKVCacheWrapper):
    """Copies plans to the device late, as FlashInfer may."""

    def plan(self, *rows: Any, **options: Any) -> None:
        super().plan(*rows, **options)
        place, plan = self._pin_memory_int_workspace_buffer, self.num_plans

        def copy() -> None:
            assert (place == plan).all(), "another plan has taken its place"

        LateEvent.launched.append(functools.cache(copy))


def test_no_flashinfer_plan_takes_the_place_of_one_that_waits_for_its_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(LateEvent, "launched", [])
    monkeypatch.setattr(FlashInfer, "BatchDecodeWithPagedKVCacheWrapper", LateWrapper)
    library = FlashInferAttention(FlashInfer, torch.device("cpu"))
    library._planner._device = torch.device("cuda")
    case = make_paged([5, 20], num_kv_heads=2, head_dim=32, page_size=16)
    q = torch.randn(2, 4, 32)
    for _ in range(11):
        library.plan(case.decodes()).forward(q, case.k_cache, case.v_cache, scale=case.scale)
    for copy in LateEvent.launched:
        copy()
    assert len(LateEvent.launched) == 11


@pytest.mark.parametrize("version", [2, 3])
def test_captured_flash_steps_read_the_device_alone(version: int) -> None:
    """Pages and lengths are in static tensors, which are written before a replay."""
    library = LIBRARIES[f"flash{version}"]
    assert isinstance(library, CapturableBackend)
    case = make_paged([33, 48], num_kv_heads=2, head_dim=32, page_size=16)
    metadata = case.decodes()
    step = library.prepare_for_capture(metadata)
    metadata.seq_lens.copy_(torch.tensor([5, 20]))
    metadata.page_table.copy_(metadata.page_table.flip(0))
    q = torch.randn(2, 4, 32)
    expected = library.plan(replace(metadata, seq_lens_host=[5, 20]))
    caches = (case.k_cache, case.v_cache)
    torch.testing.assert_close(
        step.forward(q, *caches, scale=case.scale), expected.forward(q, *caches, scale=case.scale)
    )


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


@pytest.mark.parametrize("name", ["triton", "flashinfer", "flash"])
def test_a_backend_without_cuda_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="needs a CUDA device: use auto or torch"):
        create(name)


@pytest.mark.parametrize("name", ["flashinfer", "flash"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_invariant": True}, "not batch-invariant"),
        ({"block_size": 4}, "supports causal attention only"),
        ({"window": 9}, "use auto, or set --max-model-len 9"),
        ({"cap": 50.0}, "does not support logit soft-capping"),
        ({"has_sinks": True}, "does not support attention sinks"),
        ({"has_fp8_cache": True}, "does not support --kv-cache-dtype fp8"),
        ({"head_dims": (256, 512)}, "same head size in all layers, not 256 and 512"),
        ({"dtype": torch.float32}, "supports float16 and bfloat16, not torch.float32"),
    ],
    ids=["batch-invariant", "blocks", "window", "cap", "sinks", "fp8", "heads", "fp32"],
)
def test_what_a_library_does_not_serve_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        create(name, device=torch.device("cuda"), **options)


def test_heads_that_no_program_holds_are_refused() -> None:
    with registry.using("triton"):
        create("triton", head_dims=(256, 512))
        create("triton", head_dims=(576,), has_latents=True)
        with pytest.raises(ValueError, match="--batch-invariant is not supported on CUDA"):
            create("triton", head_dims=(576,), has_latents=True, batch_invariant=True)
        with pytest.raises(ValueError, match="up to 512, this model's is 640"):
            create("triton", head_dims=(128, 640))


@pytest.mark.parametrize("name", ["flashinfer", "flash"])
def test_a_library_that_is_not_installed_is_named(name: str) -> None:
    if any(map(importlib.util.find_spec, ("flashinfer", "flash_attn", "flash_attn_interface"))):
        pytest.skip("one of the libraries is installed")
    with pytest.raises(ValueError, match="pip install flash"):
        create(name, device=torch.device("cuda"))


def test_the_options_of_the_command_line_are_the_backends() -> None:
    folder = Path(attention.__file__).parent
    files = {path.name.removesuffix("_backend.py") for path in folder.glob("*_backend.py")}
    assert files == {*get_args(AttentionBackendName)} - {"auto"}
