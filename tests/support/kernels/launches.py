"""Launches of every kernel as in serving, on small tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from kernels import (
    GELU,
    SQUARED_RELU,
    Activation,
    BlockScales,
    EditRows,
    ExpertChoice,
    Experts,
    ExpertWeights,
    ExtraTerms,
    HeadNorms,
    LatentRows,
    NgramLookup,
    Norm,
    PenaltyRows,
    Routing,
    SamplingParameters,
    StepRows,
    TokenCells,
    TokenEdits,
    apply_penalties_,
    apply_token_bitmask,
    apply_token_edits_,
    attend_to_blocks,
    attend_to_cells,
    choose_experts,
    clamped_silu_and_mul,
    clamped_swiglu,
    count_tokens_,
    draft_ngrams,
    fused_add_norm,
    fused_moe,
    gather_step_inputs,
    gelu_and_mul,
    gumbel_noise,
    linear,
    pack_quantized_experts,
    pack_quantized_linear_weight,
    prepare_latents,
    qk_norm_rope_store,
    rms_norm,
    rms_norm_pair,
    sample_tokens,
    select_blocks,
    select_tokens,
    silu_and_mul,
    soft_cap_,
    squared_relu,
    store_index_keys,
    token_scores,
    write_table_rows_,
    xielu,
)
from kernels.gated_delta_rule import gated_delta_net
from kernels.linear import WeightCode
from kernels.linear.triton_kernel import matmul_fixed_tiles
from kernels.lora import add_lora_
from tests.support.kernels.delta_cases import Row, make_cache, make_layer, make_rows
from tests.support.kernels.experts import make_codes, make_experts, make_quantized_experts
from tests.support.kernels.kimi_cases import make_kimi_step
from tests.support.kernels.lora_cases import PARTS, make_lora, make_tiles
from tests.support.kernels.mla_cases import make_prompts
from tests.support.kernels.paged_cases import make_paged
from tests.support.kernels.scan_cases import make_scan_step
from tests.support.kernels.sparse_cases import make_queries

MIXED_TOKENS = (2, 99, 257)
"""Numbers of tokens for which `fused_moe` uses different tile sizes."""


def attention(
    head_dim: int,
    dtype: torch.dtype,
    window: int = 0,
    cap: float = 0.0,
    *,
    is_chunked: bool = False,
    is_fp8: bool = False,
) -> None:
    """Launches decode and extend attention over a paged cache."""
    case = make_paged([1, 37, 270], num_kv_heads=2, head_dim=head_dim, dtype=dtype, cap=cap)
    case = case.in_fp8() if is_fp8 else case
    q = torch.randn(43, 8, head_dim).to(dtype)
    case.decode(q[:3], window=window, is_chunked=is_chunked)
    case.extend(q, [1, 37, 5], window=window, is_chunked=is_chunked)


def token_ops(dtype: torch.dtype, *, is_brief: bool = False) -> None:
    """Launches ops on single tokens, and matmuls without quantization codes. With `is_brief`,
    launches every kernel, but not every variant of expert matmuls and norms."""
    x, weight = torch.randn(5, 96).to(dtype), torch.randn(96).to(dtype)
    heads = torch.randn(5, 3, 40).to(dtype)
    caches = torch.zeros(2, 2, 8, 3, 40, dtype=dtype)
    rms_norm(x, weight, 1e-6)
    rms_norm_pair(x, x[:, :64], (weight, weight[:64]), 1e-6)
    add_norms(x, weight, is_brief=is_brief)
    silu_and_mul(x)
    gelu_and_mul(x)
    clamped_swiglu(x, 1.702, 7.0)
    clamped_silu_and_mul(x, 7.0)
    soft_cap_(x.float(), 30.0)
    squared_relu(x)
    xielu(x, torch.ones(4))
    for norms in (None, HeadNorms(weight[:40], weight[:40], 1e-6)):
        qk_norm_rope_store(
            *(heads, heads, heads, (caches[0], caches[1]), torch.arange(5)),
            positions=torch.arange(5),
            cos_sin_cache=torch.randn(9, 24),
            norms=norms,
        )
    latents = torch.randn(5, 576).to(dtype)
    rows = LatentRows(latents[:, :512], latents[:, 512:], torch.ones(512), 1e-6)
    for scale in (None, torch.ones(9)):
        prepare_latents(
            *(torch.randn(5, 16, 192).to(dtype), torch.empty(5, 16, 576).to(dtype), rows),
            *(torch.zeros(2, 8, 1, 576, dtype=dtype), torch.arange(5)),
            positions=torch.arange(5),
            cos_sin_cache=torch.randn(9, 64),
            query_scale=scale,
        )
    gumbel_noise(torch.arange(3), torch.arange(3), 1500)
    matmul_fixed_tiles(torch.randn(16, 128).to(dtype), torch.randn(64, 128).to(dtype))
    choose_experts(torch.randn(2, 4), None, Routing(top_k=2))
    grouped = Routing(top_k=8, scoring="sigmoid", num_groups=8, top_k_groups=4)
    choose_experts(torch.randn(2, 256), torch.randn(256), grouped)
    in_blocks = Routing(top_k=8, scoring="sigmoid", block_size=2, block_capacity=48)
    choose_experts(torch.randn(2, 256), torch.randn(256), in_blocks)
    always = Routing(top_k=2, num_always=2)
    choose_experts(torch.randn(2, 60), None, always, torch.randn(2, 1), torch.randn(60))
    experts = make_experts(4, hidden=128, inner=64, dtype=dtype)
    if is_brief:
        tokens = torch.randn(2, 128).to(dtype)
        extra = ExtraTerms(tokens, torch.ones(2, 1), first_zero_expert=3)
        choice = ExpertChoice(torch.zeros(2, 2).long(), torch.ones(2, 2))
        fused_moe(tokens, experts, choice, extra=extra, weighs_inputs=True, activation=GELU)
    else:
        mix(experts, MIXED_TOKENS, dtype)


def add_norms(x: torch.Tensor, weight: torch.Tensor, *, is_brief: bool = False) -> None:
    """Launches the norms between blocks of Llama, with a router, of Gemma 4, of OLMo and of
    StableLM; with `is_brief`, only those of Gemma 4 and StableLM."""
    plain, wide = Norm(weight), Norm(weight, is_fp32=True)
    fused_add_norm(x, x, (plain, wide, plain), 1e-6, x_weight=weight, total_scale=weight[:1])
    if is_brief:
        fused_add_norm(x, x, (Norm(weight.float(), weight.float(), subtracts_mean=True),), 1e-6)
        return
    fused_add_norm(x, x, (plain,), 1e-6)
    fused_add_norm(x, x, (plain, wide), 1e-6, x_scale=0.5)
    fused_add_norm(x, x, (plain,), 1e-6, x_weight=weight, residual_weight=weight)
    fused_add_norm(x, x, (), 1e-6, x_weight=weight)
    for residual in (x, None):
        layer_norm = Norm(weight.float(), weight.float(), subtracts_mean=True)
        fused_add_norm(x, residual, (layer_norm,), 1e-6)


def quantized_products(
    dtype: torch.dtype,
    numbers: tuple[int, ...],
    *,
    codes: tuple[WeightCode, ...] = ("e4m3", "uint4", "e2m1"),
    blocks: tuple[int, ...] = (0,),
    with_extras: bool = True,
) -> None:
    """Matmuls with codes, by number of features that share a scale; 0 for blocks that do not align
    with tiles. Experts have that number of tokens; extras are those of `mix`."""
    for code, block in itertools.product(codes, blocks):
        words, scaling = make_codes(64, 256, code=code)
        weight = pack_quantized_linear_weight(words, _aligned(scaling, block), dtype=dtype)
        linear(torch.randn(16, 256).to(dtype), weight)
        experts, _ = make_quantized_experts(4, code=code, hidden=256, inner=64, dtype=dtype)
        parts = (ExpertWeights(one.values, _aligned(one.scaling, block)) for one in experts)
        packed = (pack_quantized_experts(part, dtype) for part in parts)
        mix(Experts(*packed), numbers, dtype, with_extras=with_extras)


def _aligned(scaling: BlockScales | None, block: int) -> BlockScales:
    """The scaling with blocks of this number of features, the first of which is aligned."""
    assert scaling is not None
    return scaling._replace(block=block, offset=0) if block else scaling


def linear_attention(
    dtype: torch.dtype, lengths: tuple[int, ...] = (1, 70), *, key: int = 128, value: int = 128
) -> None:
    """A gated delta net of one key head and two value heads."""
    layer = make_layer(key=key, value=value, dtype=dtype)
    rows = make_rows([Row(number, 0, length) for number, length in enumerate(lengths)])
    x = torch.randn(sum(lengths), sum(layer.widths)).to(dtype)
    gated_delta_net(x, layer, make_cache(layer, len(lengths), dtype), rows, by_position=False)


def kimi_delta(dtype: torch.dtype, lengths: tuple[int, ...] = (1, 70)) -> None:
    """Kimi Delta Attention with heads of Kimi Linear's size."""
    rows = make_rows([Row(number, 0, length) for number, length in enumerate(lengths)])
    step = make_kimi_step(sum(lengths), "cpu", dtype, key=128, value=128, num_states=2)
    step.run(rows)


def mamba(dtype: torch.dtype) -> None:
    """A short convolution and a selective scan, with heads and states of Nemotron 3's sizes."""
    rows = make_rows([Row(number, 0, length) for number, length in enumerate((1, 70))])
    step = make_scan_step(71, "cpu", dtype, head_dim=64, state_dim=128, num_states=2)
    step.run(rows)


def mix(
    experts: Experts, numbers: tuple[int, ...], dtype: torch.dtype, *, with_extras: bool = True
) -> None:
    """Each token uses two of four experts; as extras, weighted inputs, extra terms, and other
    activations."""
    for number in numbers:
        choice = ExpertChoice(torch.zeros(number, 2).long(), torch.ones(number, 2))
        packed = experts.down.packed
        hidden = experts.down.values.shape[1] if packed is None else packed.shape[0]
        x = torch.randn(number, hidden).to(dtype)
        fused_moe(x, experts, choice)
    if not with_extras:
        return
    gate = torch.ones(len(x), 1)
    fused_moe(
        x, experts, choice, extra=ExtraTerms(x, gate, first_zero_expert=3), weighs_inputs=True
    )
    for activation in (GELU, Activation("clamped", 1.702, 7.0), SQUARED_RELU):
        fused_moe(x, experts, choice, activation=activation)


def draw(rows: int, place: Callable[[torch.Tensor], torch.Tensor], vocab: int = 5003) -> None:
    """All launches of sampling with random, filtered, penalized and scored rows."""
    logits = torch.randn(rows, vocab)
    integers, numbers = place(torch.arange(rows)), place(torch.ones(rows))
    own = SamplingParameters(
        temperature=numbers,
        seeds=integers,
        positions=integers,
        top_k=integers,
        top_p=numbers,
        log_min_p=numbers,
    )
    penalties = PenaltyRows(
        rows=integers,
        slots=integers,
        ends=integers,
        num_drafts=integers,
        most_drafts=1,
        frequency=numbers,
        presence=numbers,
        repetition=numbers,
    )
    counts = torch.zeros(rows, vocab, dtype=torch.int32)
    mask = torch.zeros(rows, -(-vocab // 32), dtype=torch.int32)
    apply_token_bitmask(logits, mask, rows=integers, mask_rows=integers)
    table = torch.zeros(rows, 64 * rows, dtype=torch.int32)
    edits = TokenEdits(bias_tokens=table, biases=table.float(), words=table, word_ends=table)
    edited = EditRows(
        rows=integers,
        slots=integers,
        cells=integers,
        num_output=integers,
        num_biases=integers,
        num_words=place(torch.zeros(rows, dtype=torch.long)),
        most_biases=rows,
        most_words=rows,
    )
    apply_token_edits_(logits, edits, edited, torch.zeros(1, 1))
    apply_penalties_(logits, penalties, counts.bool(), counts, torch.zeros(1, 1))
    pool = torch.zeros(rows, dtype=torch.int32)
    tokens = sample_tokens(logits, own, cells=TokenCells(pool, integers))
    count_tokens_(counts, penalties, tokens)
    token_scores(logits, integers)


def prepare(rows: int, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """All launches before a forward pass."""
    pool, table = (torch.zeros(20, width, dtype=torch.int32) for width in (401, 50))
    segments, values = torch.zeros(rows, 4, dtype=torch.long), torch.zeros(9, dtype=torch.int32)
    write_table_rows_(pool, table, segments, place(values), longest=9)
    step = StepRows(
        slots=place(torch.arange(rows)),
        starts=place(torch.arange(rows)),
        query_start=place(torch.arange(rows + 1)),
        num_tokens=rows,
        longest_query=rows,
        num_pages=rows,
        page_size=8,
    )
    gather_step_inputs(pool, table, step)
    newest = place(torch.arange(rows))
    lookup = NgramLookup(
        slots=newest, newest=newest, count=4, shortest=2, longest=12, num_tokens=99 + rows
    )
    draft_ngrams(pool, lookup)


def adapters(dtype: torch.dtype, ranks: tuple[int, ...] = (16, 64)) -> None:
    """LoRA matmuls in a layer of Llama's size, by rank of the buffers."""
    x, out = torch.randn(40, 2048).to(dtype), torch.randn(40, PARTS[-1].stop).to(dtype)
    for rank in ranks:
        weights = make_lora("cpu", dtype, in_features=2048, rank=rank)
        add_lora_(out, x, weights, make_tiles([1, 0, 2] * 13 + [3], "cpu"))


def expanded_prompts(dtype: torch.dtype) -> None:
    """Launches prompts of DeepSeek's size in expanded form, with several chunks and with one."""
    prompts = make_prompts(
        *([300, 9], [150, 9]),
        heads=16,
        latent=512,
        rotary=64,
        plain=128,
        value=128,
        dtype=dtype,
    )
    for most_keys in (200, 400):
        prompts.attend(most_keys)


def block_sparse_attention(dtype: torch.dtype) -> None:
    """Selections and attention of MiniMax-M3 on a quarter of its heads: decodes, and a prompt."""
    for places in ([700, 3, 300], list(range(600, 637))):
        queries = make_queries("cpu", [places], 512)
        count = len(places)
        cache = torch.zeros(140, 16, 1, 128, dtype=dtype)
        q = torch.randn(count, 1, 128).to(dtype)
        selection = select_blocks(q, cache, queries, 128, cos_sin_cache=torch.randn(701, 64))
        heads = torch.randn(count, 16, 128).to(dtype)
        attend_to_blocks(heads, (cache, cache), selection, scale=0.1)


def sparse_attention(dtype: torch.dtype) -> None:
    """Index keys, selections and attention of DeepSeek V3.2: decodes, and a prompt."""
    table = torch.randn(128, 64)
    for places in ([90, 3, 100], list(range(60, 97))):
        queries = make_queries("cpu", [places], 32)
        count = len(places)
        cache = torch.zeros(40, 16, 1, 128, dtype=dtype)
        store_index_keys(
            *(torch.randn(count, 128).to(dtype), cache, torch.arange(count)),
            positions=queries.positions,
            cos_sin_cache=table,
        )
        q, weights = torch.randn(count, 64, 128).to(dtype), torch.randn(count, 64)
        select_tokens(q, weights, cache, queries, cos_sin_cache=table)
        cells = torch.zeros(count, 2048, dtype=torch.int32)
        latents = torch.zeros(40, 16, 1, 576, dtype=dtype)
        attend_to_cells(torch.randn(count, 16, 576).to(dtype), latents, cells, 512, scale=0.1)
