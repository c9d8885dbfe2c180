"""The compiled CPU library: its build, its products, and its attention in a small model."""

from __future__ import annotations

import ctypes
import os
import platform
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.native import (
    LinearTensors,
    ModelTensors,
    NativeDecoder,
    NativeUnavailable,
    build,
    build_library,
)
from kernels.native.library import library
from kernels.native.packing import multiply, pack_weight
from tests.support.kernels.native_model import (
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    PAGE,
    Bench,
    make_model,
)

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(100, 48), (32, 16), (513, 256), (7, 704)])
def test_products(dtype: torch.dtype, n: int, k: int) -> None:
    torch.manual_seed(n)
    weight, x = torch.randn(n, k).to(dtype), torch.randn(300, k).to(dtype).float()
    packed = pack_weight(weight)
    whole = multiply(x, packed, n)
    torch.testing.assert_close(whole, x @ weight.float().T, atol=2e-4, rtol=1e-4)
    for rows in (1, 2, 3, 5, 12, 13, 31, 32, 33, 97, 257):
        assert torch.equal(multiply(x[-rows:], packed, n), whole[-rows:]), f"{rows} rows differ"


TILES = ["-mamx-tile", "-mamx-bf16"]
EMULATED_TILES = ["-DRAYFLEET_EMULATE_AMX"]


@pytest.fixture
def library_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Compiles and loads the library as for another processor, for one test."""

    def load(processor: str, effort: str) -> None:
        if processor == "AMX":
            flags = [*build._flags(), *EMULATED_TILES, effort]
        else:
            monkeypatch.setenv(build.MAX_CPU_ISA, processor)
            flags = [*build._flags(), effort]
        monkeypatch.setattr(build, "_flags", lambda: flags)
        library.cache_clear()

    yield load
    library.cache_clear()


def _has_tiles() -> bool:
    """Whether the processor has tiles, and the kernel grants them to this process."""
    if platform.machine() != "x86_64" or "amx_bf16" not in build.processor():
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


@pytest.mark.parametrize(
    ("processor", "dtype", "effort"),
    [
        ("AVX2", torch.float32, "-O0"),
        pytest.param(
            *("AMX", torch.bfloat16, "-O0"),
            marks=pytest.mark.skipif(_has_tiles(), reason="all tests run on this one's tiles"),
        ),
        pytest.param("AVX512_CORE", torch.bfloat16, "-O3", marks=pytest.mark.long),
        pytest.param("AVX2", torch.float32, "-O3", marks=pytest.mark.long),
        pytest.param("AVX2", torch.bfloat16, "-O3", marks=pytest.mark.long),
        pytest.param("SSE41", torch.float32, "-O3", marks=pytest.mark.long),
        pytest.param("AMX", torch.bfloat16, "-O3", marks=pytest.mark.long),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are of x86-64")
def test_it_runs_on_other_processors(
    library_of: Callable[[str, str], None], processor: str, dtype: torch.dtype, effort: str
) -> None:
    """Tiles are emulated; the compiler does not use instructions that the processor lacks.

    Optimising takes ten seconds and more, so it is only enabled in long runs.
    """
    library_of(processor, effort)
    assert library().rayfleet_has_tiles() == (processor == "AMX")
    for n, k in ((100, 48), (513, 256), (7, 704)):
        test_products(dtype, n, k)
    test_prefill_then_decode_equals_torch(dtype, True)
    test_rows_chunks_and_threads_change_no_bit(dtype)


@pytest.mark.skipif(
    not _has_tiles(), reason="this processor has no tiles, or the kernel does not grant them"
)
def test_tiles_are_used_where_the_processor_has_them() -> None:
    """With the flags of releases: an optimising compiler dropped writes that tiles read."""
    assert library().rayfleet_has_tiles()


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have no tiles")
def test_products_in_tiles_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs no processor with tiles; their numbers must be literals for the assembler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = [*build._flags(), *TILES, "-O0"]
    monkeypatch.setattr(build, "_flags", lambda: flags)
    build_library()


def test_an_unknown_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.MAX_CPU_ISA, "AVX1024")
    with pytest.raises(NativeUnavailable, match="choose from AVX512_CORE_BF16, AVX512"):
        build_library()


def reference(model: ModelTensors, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states of one whole sequence, in plain fp32 torch."""
    count = len(tokens)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight.float(), model.eps)

    def linear(x: torch.Tensor, one: LinearTensors) -> torch.Tensor:
        assert one.bias is not None
        return x @ one.weight.float().T + one.bias.float()

    def rotate(x: torch.Tensor) -> torch.Tensor:
        cos, sin = model.cos_sin[:count].unsqueeze(1).chunk(2, dim=-1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    x = model.embedding.float()[tokens]
    for layer in model.layers:
        qkv = linear(norm(x, layer.input_norm), layer.qkv).view(count, -1, DIM)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        blocks = torch.arange(count) // model.block_size
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(part.transpose(0, 1) for part in (rotate(q), rotate(k), v)),
            attn_mask=blocks[:, None] >= blocks[None, :],
            enable_gqa=True,
        )
        x = x + linear(attended.transpose(0, 1).reshape(count, -1), layer.output)
        gate, up = linear(norm(x, layer.post_attention_norm), layer.gate_up).chunk(2, dim=-1)
        x = x + linear(torch.nn.functional.silu(gate) * up, layer.down)
    return norm(x, model.final_norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_prefill_then_decode_equals_torch(dtype: torch.dtype, qk_norm: bool) -> None:
    torch.manual_seed(0)
    model = make_model(dtype, qk_norm=qk_norm)
    bench = Bench(model, poison=float("nan"))
    expected = reference(model, bench.tokens[1, :131].long())
    actual = torch.cat((bench.run((1, 0, 130)), bench.run((1, 130, 1))))
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
    scores = bench.decoder.logits(actual[-3:])
    rounded = actual[-3:].to(dtype).float()
    torch.testing.assert_close(scores, rounded @ model.lm_head.float().T, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_chunks_and_threads_change_no_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = make_model(dtype)
    alone = Bench(model)
    whole = alone.run((0, 0, 200))
    for num_threads in (1, 2, 3):
        bench = Bench(model, num_threads=num_threads, poison=float("nan"))
        bench.tokens[0] = alone.tokens[0]
        bench.run((1, 0, 77))
        first = bench.run((2, 0, 5), (0, 0, 150))[5:]
        rest = torch.cat([bench.run((1, 77 + i, 1), (0, 150 + i, 1))[1:] for i in range(50)])
        assert torch.equal(torch.cat((first, rest)), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4])
def test_of_tokens_that_nobody_reads_only_keys_and_values_are_computed(
    dtype: torch.dtype, block_size: int
) -> None:
    torch.manual_seed(0)
    model = make_model(dtype, block_size=block_size)
    whole, bench = Bench(model), Bench(model, num_threads=2, poison=float("nan"))
    bench.tokens = whole.tokens
    rows = (2, 0, 12), (0, 0, 100), (1, 0, 40)
    expected = whole.run(*rows)
    for indices in ([], [0], [11, 12, 60, 61, 111, 151], list(range(40)), list(range(152))):
        assert torch.equal(bench.run(*rows, logits_indices=indices), expected[indices]), indices
    # Later steps find all keys and values in the cache.
    following = (2, 12, 4), (0, 100, 8), (1, 40, 4)
    bench.run(*rows, logits_indices=[])
    assert torch.equal(bench.run(*following, logits_indices=[3, 9]), whole.run(*following)[[3, 9]])


def test_a_pass_takes_as_many_threads_as_its_work_is_worth() -> None:
    torch.manual_seed(0)
    model = make_model(torch.float32)
    alone = Bench(model)
    # With this estimate a token uses one thread, ten use two and a hundred all four.
    bench = Bench(model, num_threads=4)
    bench.decoder = NativeDecoder(model, page_size=PAGE, num_threads=4, ms_per_thread=2e-3)
    bench.decoder.bind(bench.caches)
    bench.tokens = alone.tokens
    rows = [(0, 0, 1), (1, 0, 100), (0, 1, 10), (1, 100, 1), (2, 0, 100), (0, 11, 1)]
    for row in rows:
        assert torch.equal(bench.run(row), alone.run(row))
    # Long steps try more and fewer threads.
    whole = alone.run((0, 0, 200))
    for _ in range(40):
        assert torch.equal(bench.run((0, 0, 200)), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16])
def test_blocks_see_all_of_themselves(dtype: torch.dtype, block_size: int) -> None:
    torch.manual_seed(0)
    model = make_model(dtype, block_size=block_size)
    bench = Bench(model, poison=float("nan"))
    expected = reference(model, bench.tokens[1, :128].long())
    whole = bench.run((1, 0, 128))
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(whole, expected, atol=tolerance, rtol=0)
    other = Bench(model, num_threads=2, poison=float("nan"))
    other.tokens[0] = bench.tokens[1]
    other.run((2, 0, 48))
    # In chunks, beside another row, one block over and over: no bit changes.
    chunks = [other.run((0, 0, 64))]
    other.run((0, 64, 16), (2, 48, 16))
    chunks.append(other.run((2, 48, 16), (0, 64, 16))[16:])
    chunks.append(other.run((0, 80, 48)))
    assert torch.equal(torch.cat(chunks), whole)


def test_a_failed_sum_over_ranks_ends_the_step() -> None:
    def fail(values: torch.Tensor) -> None:
        raise ConnectionError(f"lost a peer summing {values.shape[0]} floats")

    model = make_model(torch.float32)
    decoder = NativeDecoder(
        model, page_size=PAGE, num_threads=2, ms_per_thread=1e-9, all_reduce=fail
    )
    decoder.bind([(torch.zeros(4, PAGE, KV_HEADS, DIM),) * 2] * model.num_layers)
    rows, pages = np.array([[0, 0, 5, 1]]), torch.ones(1, 1, dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(ConnectionError, match=f"{5 * HIDDEN} floats"):
            decoder.forward(rows, torch.zeros(1, 9, dtype=torch.int32), pages)
    decoder.close()


def test_what_it_cannot_run() -> None:
    model = make_model(torch.float32)
    assert model.unsupported(16) is None
    assert model.unsupported(8) == "its page size (8) is not a multiple of 16"
    assert "not a multiple of its block size" in str(
        make_model(torch.float32, block_size=32).unsupported(16)
    )
    half = make_model(torch.float16)
    assert half.unsupported(16) == "torch.float16 is not supported: only fp32 and bf16 are"


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\nfor last; do :; done\n: > "$last"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    first = build_library()
    written = first.stat().st_mtime_ns
    assert build_library() == first
    assert first.stat().st_mtime_ns == written
    assert stat.S_IMODE(first.parent.stat().st_mode) & 0o022 == 0
    # Nothing is loaded from a folder that others may write to.
    first.parent.chmod(0o777)
    other = build_library()
    assert other.parent != first.parent
    assert os.stat(other.parent).st_mode & 0o077 == 0


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler .*nowhere.* install g\+\+"):
        build_library()
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NativeUnavailable, match="out of order"):
        build_library()
