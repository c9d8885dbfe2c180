"""Cases of benchmark `kernels`: each op on the shapes of a served model, with the minimum number of
bytes and floating-point operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

import kernels
from deploy.benchmarks.kernels.case import Case, Shape, elementwise_case
from deploy.benchmarks.kernels.lora import lora_case
from deploy.benchmarks.kernels.mla import expanded_prompt
from deploy.benchmarks.kernels.sparse import SPARSE_CASES
from deploy.benchmarks.kernels.states import STATE_STEPS, gated_delta_step
from kernels import EditRows, PenaltyRows, SamplingParameters, TokenEdits, registry
from kernels.attention import AttentionMetadata, AttentionSettings, create_attention_backend
from kernels.linear.base import HALF_BYTES
from kernels.quantize_fp8 import quantize_fp8
from worker.protocol.sampling import MAX_LOGPROBS

PAGE_SIZE = 16
_CHUNK = 512
"""Tokens per prefill chunk."""

OTHER_OPS = (
    *("linear", "torch_linear", "quantized_linear"),
    *("decode_attention", "extend_attention"),
)
"""Ops that are measured but not in the registry, since their backends are selected elsewhere."""
_FORMATS: dict[str, tuple[kernels.WeightCode, int]] = {
    "INT4": ("uint4b8", 128),
    "FP8": ("e4m3", 128),
    "MXFP4": ("e2m1", 32),
}
"""Formats of quantized weights: codes, and number of input features per scale."""
_DRAFTS, _SHORTEST, _LONGEST = 8, 2, 4
"""Tokens per n-gram draft, and in the shortest and longest n-gram."""


def make_cases(
    shape: Shape,
    rows: int,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
    names: Sequence[str],
) -> list[Callable[[], Case]]:
    """Functions that create cases; each allocates its tensors when called.

    Args:
        shape: dimensions of the model.
        rows: requests per step.
        context: tokens in the KV cache per request.
        device: device of all tensors.
        dtype: data type of weights, activations and KV cache.
        names: names of ops.
    """
    maker = _Maker(shape, rows, context, device, dtype)
    makers: list[tuple[str, Callable[[], Case]]] = [
        *((name, partial(maker.token_op, name)) for name in _TOKEN_OPS),
        *(("linear", partial(maker.linear, *size)) for size in maker.linear_sizes),
        # The op that `linear` replaces for few rows at some sizes.
        *(("torch_linear", partial(maker.torch_linear, *size)) for size in maker.linear_sizes),
        *(
            ("quantized_linear", partial(maker.quantized_linear, name, *size))
            for name in _FORMATS
            for size in maker.linear_sizes[2:4]
        ),
        ("decode_attention", maker.decode),
        ("extend_attention", maker.extend),
        *(("gated_delta_net", partial(maker.states, length)) for length in (1, _CHUNK)),
        *((op, partial(maker.state_op, op, n)) for op in STATE_STEPS for n in (1, _CHUNK)),
        *(
            (op, partial(make, rows, context, shape.q_heads, device, dtype))
            for op, make in SPARSE_CASES.items()
        ),
        (
            "attend_to_expanded",
            partial(expanded_prompt, _CHUNK, context, shape.q_heads, device, dtype),
        ),
        ("gumbel_noise", maker.noise),
        *(("sample_tokens", partial(maker.sample, kind)) for kind in _SAMPLING),
        ("apply_token_bitmask", maker.bitmask),
        ("apply_penalties_", maker.penalties),
        ("count_tokens_", maker.count),
        ("apply_token_edits_", maker.edits),
        ("token_scores", maker.scores),
        ("write_table_rows_", maker.write),
        ("gather_step_inputs", maker.gather),
        ("choose_experts", maker.choose),
        *(("fused_moe", partial(maker.moe, name)) for name in (None, *_FORMATS)),
        ("draft_ngrams", partial(_ngram_case, rows, context, device)),
        ("add_lora_", partial(lora_case, shape, rows, device, dtype)),
    ]
    with_cases = {name for name, _ in makers}
    size = rows, shape.intermediate
    makers += [
        (op, partial(elementwise_case, op, size, device, dtype))
        for op in registry
        if op not in with_cases
    ]
    return [make for name, make in makers if name in names]


_TOKEN_OPS = (
    "rms_norm",
    "rms_norm_pair",
    "fused_add_norm",
    "qk_norm_rope_store",
    "silu_and_mul",
    "gelu_and_mul",
    "clamped_swiglu",
    "soft_cap_",
    "xielu",
    "prepare_latents",
    "quantize_fp8",
    "fused_add_norm_fp8",
    "activate_fp8",
)
_LATENTS = (512, 64)
"""Values per token in the MLA cache, without and with rotary embedding, as in DeepSeek V3."""
_GATES: dict[str, Callable[[torch.Tensor], object]] = {
    "silu_and_mul": kernels.silu_and_mul,
    "gelu_and_mul": kernels.gelu_and_mul,
    "clamped_swiglu": partial(kernels.clamped_swiglu, alpha=1.702, limit=7.0),
}
_SAMPLING = {  # temperature, top-k, top-p, min-p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 50, top-p 0.9, min-p 0.05": (1.0, 50, 0.9, 0.05),
}


class _Maker:
    def __init__(
        self, shape: Shape, rows: int, context: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._shape, self._rows, self._context = shape, rows, context
        self._device, self._dtype = device, dtype
        self._item = dtype.itemsize
        settings = AttentionSettings(device=device, dtype=dtype, page_size=PAGE_SIZE)
        self._attention = create_attention_backend("auto", settings)

    @property
    def linear_sizes(self) -> list[tuple[int, int]]:
        """Numbers of output and input features of a layer's linear projections and of the LM
        head."""
        s = self._shape
        attention = (s.q_heads + 2 * s.kv_heads) * s.head_dim
        return [
            (attention, s.hidden),
            (s.hidden, s.q_heads * s.head_dim),
            (2 * s.intermediate, s.hidden),
            (s.hidden, s.intermediate),
            (s.vocab, s.hidden),
        ]

    def token_op(self, name: str) -> Case:
        s, rows, item = self._shape, self._rows, self._item
        x, weight = self._randn(rows, s.hidden), self._randn(s.hidden)
        q, k = (self._randn(rows, n, s.head_dim) for n in (s.q_heads, s.kv_heads))
        run: Callable[[], object]
        if name == "rms_norm":
            run = partial(kernels.rms_norm, x, weight, 1e-6)
            size = 2 * x.numel()
        elif name == "rms_norm_pair":
            sizes = s.q_heads * s.head_dim, s.kv_heads * s.head_dim
            weights = self._randn(sizes[0]), self._randn(sizes[1])
            run = partial(kernels.rms_norm_pair, q.flatten(1), k.flatten(1), weights, 1e-6)
            size = 2 * (q.numel() + k.numel())
        elif name == "fused_add_norm":
            run = partial(kernels.fused_add_norm, x, x.clone(), (kernels.Norm(weight),), 1e-6)
            size = 4 * x.numel()
        elif name in _GATES:
            run = partial(_GATES[name], self._randn(rows, 2 * s.intermediate))
            size = 3 * rows * s.intermediate
        elif name == "soft_cap_":
            logits = torch.randn(rows, s.vocab, device=self._device)
            run = partial(kernels.soft_cap_, logits, 30.0)
            size = 2 * logits.numel() * logits.itemsize // item
        elif name == "xielu":
            ups = self._randn(rows, s.intermediate)
            run = partial(kernels.xielu, ups, torch.ones(4, device=self._device))
            size = 2 * ups.numel()
        elif name == "quantize_fp8":
            run = partial(quantize_fp8, x, by_block=True)
            size = x.numel() + x.numel() // item
        elif name == "fused_add_norm_fp8":
            norm = kernels.Norm(weight)
            run = partial(kernels.fused_add_norm_fp8, x, x.clone(), norm, 1e-6, by_block=True)
            size = 3 * x.numel() + x.numel() // item
        elif name == "activate_fp8":
            both = self._randn(rows, 2 * s.intermediate)
            run = partial(kernels.activate_fp8, both, kernels.SILU, by_block=True)
            size = both.numel() + both.numel() // 2 // item
        elif name == "prepare_latents":
            run = self._latents()
            size = 2 * rows * (sum(_LATENTS) + s.q_heads * _LATENTS[1])
        else:
            assert name == "qk_norm_rope_store", f"{name} has no case"
            run = self._queries_and_keys(q, k)
            size = 2 * q.numel() + 4 * k.numel()
        return Case(op=name, shape=f"{rows} tokens", run=run, num_bytes=size * item)

    def _queries_and_keys(self, q: torch.Tensor, k: torch.Tensor) -> Callable[[], object]:
        """Function that calls qk_norm_rope_store on the given queries and keys."""
        rows, width = self._rows, self._shape.head_dim
        caches = self._zeros(2, rows, PAGE_SIZE, *k.shape[1:])
        places = torch.arange(rows, device=self._device)
        return partial(
            kernels.qk_norm_rope_store,
            *(q, k, k.clone(), (caches[0], caches[1]), places * PAGE_SIZE),
            positions=torch.full_like(places, self._context),
            cos_sin_cache=torch.randn(self._context + 1, width, device=self._device),
            norms=kernels.HeadNorms(self._randn(width), self._randn(width), 1e-6),
        )

    def _latents(self) -> Callable[[], object]:
        """Function that calls prepare_latents with latents of `_LATENTS`."""
        (value_dim, rotary_dim), places = _LATENTS, torch.arange(self._rows, device=self._device)
        heads, kept = (self._rows, self._shape.q_heads), value_dim + rotary_dim
        latents, rotating = (self._randn(self._rows, size) for size in _LATENTS)
        rows = kernels.LatentRows(latents, rotating, self._randn(value_dim), 1e-6)
        return partial(
            kernels.prepare_latents,
            *(self._randn(*heads, 128 + rotary_dim), self._randn(*heads, kept), rows),
            *(self._zeros(self._rows, PAGE_SIZE, 1, kept), places * PAGE_SIZE),
            positions=torch.full_like(places, self._context),
            cos_sin_cache=torch.randn(self._context + 1, rotary_dim, device=self._device),
        )

    def linear(self, outputs: int, inputs: int) -> Case:
        weight = kernels.pack_linear_weight(self._randn(outputs, inputs))
        return self._linear("linear", weight, outputs, inputs)

    def torch_linear(self, outputs: int, inputs: int) -> Case:
        return self._linear("torch_linear", self._randn(outputs, inputs), outputs, inputs)

    def _linear(
        self, op: str, weight: kernels.PackedLinear | torch.Tensor, outputs: int, inputs: int
    ) -> Case:
        x = self._randn(self._rows, inputs)
        return Case(
            op=op,
            shape=f"{self._rows} x {inputs} -> {outputs}",
            run=lambda: kernels.linear(x, weight),
            num_bytes=(outputs * inputs + self._rows * (outputs + inputs)) * self._item,
            num_flops=2.0 * self._rows * outputs * inputs,
        )

    def quantized_linear(self, name: str, outputs: int, inputs: int) -> Case:
        codes, scaling = self._codes(name, outputs, inputs)
        weight = kernels.pack_quantized_linear_weight(codes, scaling, dtype=self._dtype)
        x = self._randn(self._rows, inputs)
        return Case(
            op="quantized_linear",
            shape=f"{self._rows} x {inputs} -> {outputs}, {name}",
            run=lambda: kernels.linear(x, weight),
            num_bytes=codes.numel() + self._rows * (outputs + inputs) * self._item,
            num_flops=2.0 * self._rows * outputs * inputs,
        )

    def _codes(self, name: str, *shape: int) -> tuple[torch.Tensor, kernels.BlockScales]:
        """Packed codes, uint8 [..., N, K] (K / 2 for 4-bit codes), all bytes equal; and scales,
        float32 [..., N, K / block]."""
        code, block = _FORMATS[name]
        *rows, inputs = shape
        per_byte = 2 if code in HALF_BYTES else 1
        size = (*rows, inputs // per_byte)
        codes = torch.full(size, 0x11, dtype=torch.uint8, device=self._device)
        scales = torch.ones(*rows, -(-inputs // block), device=self._device)
        return codes, kernels.BlockScales(scales, block, 0, code, rows=128)

    def decode(self) -> Case:
        s, rows, length = self._shape, self._rows, self._context
        caches, table = self._paged(rows, length)
        step = self._attention.plan(
            AttentionMetadata(
                page_table=table,
                seq_lens=torch.full((rows,), length, dtype=torch.int32, device=self._device),
                seq_lens_host=[length] * rows,
                page_size=PAGE_SIZE,
            )
        )
        q = self._randn(rows, s.q_heads, s.head_dim)
        return Case(
            op="decode_attention",
            shape=f"{rows} rows of {length}",
            run=lambda: step.forward(q, *caches, scale=0.1),
            num_bytes=(2 * rows * length * s.kv_heads * s.head_dim + 2 * q.numel()) * self._item,
            num_flops=4.0 * rows * length * s.q_heads * s.head_dim,
        )

    def extend(self) -> Case:
        s, length = self._shape, max(self._context, _CHUNK)
        caches, table = self._paged(1, length)
        step = self._attention.plan(
            AttentionMetadata(
                page_table=table,
                seq_lens=torch.tensor([length], dtype=torch.int32, device=self._device),
                seq_lens_host=[length],
                query_start=torch.tensor([0, _CHUNK], dtype=torch.int32, device=self._device),
                query_lens_host=[_CHUNK],
                page_size=PAGE_SIZE,
            )
        )
        q = self._randn(_CHUNK, s.q_heads, s.head_dim)
        seen = _CHUNK * (length - _CHUNK) + _CHUNK * (_CHUNK + 1) / 2
        return Case(
            op="extend_attention",
            shape=f"{_CHUNK} tokens after {length - _CHUNK}",
            run=lambda: step.forward(q, *caches, scale=0.1),
            num_bytes=(2 * length * s.kv_heads * s.head_dim + 2 * q.numel()) * self._item,
            num_flops=4.0 * seen * s.q_heads * s.head_dim,
        )

    def states(self, length: int) -> Case:
        """Case of linear attention on rows of `length` tokens: with one token (decodes), all rows
        of the step; with more (prompts), at most four rows."""
        s, rows = self._shape, self._rows if length == 1 else min(self._rows, 4)
        run, num_bytes = gated_delta_step(
            *(rows, length),
            num_heads=s.q_heads,
            head_dim=s.head_dim,
            device=self._device,
            dtype=self._dtype,
        )
        return Case(
            op="gated_delta_net",
            shape=f"{rows} x {length} tokens, {s.q_heads} heads",
            run=run,
            num_bytes=num_bytes,
            # Predictions, updates and outputs, each the size of a state.
            num_flops=0.0 if length == 1 else 6.0 * rows * length * s.q_heads * s.head_dim**2,
        )

    def state_op(self, op: str, length: int) -> Case:
        """Case of an op of `STATE_STEPS` on rows of `length` tokens, as in `states`."""
        s, rows = self._shape, self._rows if length == 1 else min(self._rows, 4)
        sizes = {"num_heads": s.q_heads, "head_dim": s.head_dim}
        run, num_bytes = STATE_STEPS[op](
            rows, length, **sizes, device=self._device, dtype=self._dtype
        )
        shape = f"{rows} x {length} tokens, {s.q_heads} heads"
        return Case(op=op, shape=shape, run=run, num_bytes=num_bytes)

    def noise(self) -> Case:
        seeds = torch.arange(self._rows, device=self._device)
        return Case(
            op="gumbel_noise",
            shape=self._drawn,
            run=lambda: kernels.gumbel_noise(seeds, seeds, self._shape.vocab),
            num_bytes=4.0 * self._rows * self._shape.vocab,
        )

    def sample(self, kind: str) -> Case:
        temperature, top_k, top_p, min_p = _SAMPLING[kind]

        def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((self._rows,), value, dtype=dtype, device=self._device)

        seeds = torch.arange(self._rows, device=self._device)
        parameters = SamplingParameters(
            temperature=column(temperature),
            seeds=seeds,
            positions=seeds,
            top_k=column(top_k, torch.int64) if top_k else None,
            top_p=column(top_p) if top_p < 1.0 else None,
            log_min_p=column(min_p).log() if min_p else None,
        )
        logits = self._logits()
        return Case(
            op="sample_tokens",
            shape=f"{self._drawn}, {kind}",
            run=lambda: kernels.sample_tokens(logits, parameters),
            num_bytes=4.0 * logits.numel(),
        )

    def moe(self, name: str | None) -> Case:
        experts, taken, inner = 8, 2, self._shape.intermediate // 8
        rows, hidden = self._rows, self._shape.hidden
        x = self._randn(rows, hidden)
        weights = kernels.Experts(
            self._experts(name, experts, 2 * inner, hidden),
            self._experts(name, experts, hidden, inner),
        )
        index = torch.arange(rows * taken, device=self._device)
        choice = kernels.ExpertChoice(
            (index % experts).view(rows, taken),
            torch.ones(rows, taken, device=self._device),
        )
        used = min(experts, rows * taken) * 3 * inner * hidden
        bits = 8 * self._item if name is None else 4 if _FORMATS[name][0] in HALF_BYTES else 8
        return Case(
            op="fused_moe",
            shape=f"{rows} tokens, {taken} of {experts} experts" + (f", {name}" if name else ""),
            run=lambda: kernels.fused_moe(x, weights, choice),
            num_bytes=used * bits / 8 + 2 * x.numel() * self._item,
            num_flops=2.0 * rows * taken * 3 * inner * hidden,
        )

    def _experts(self, name: str | None, *shape: int) -> kernels.ExpertWeights:
        """Expert weights [E, N, K] in a format; None for unquantized weights."""
        if name is None:
            return kernels.ExpertWeights(self._randn(*shape))
        return kernels.pack_quantized_experts(
            kernels.ExpertWeights(*self._codes(name, *shape)), self._dtype
        )

    def choose(self) -> Case:
        scores = torch.randn(self._rows, 128, device=self._device)
        routing = kernels.Routing(top_k=8, normalize=True)
        return Case(
            op="choose_experts",
            shape=f"{self._rows} tokens, 8 of 128 experts",
            run=lambda: kernels.choose_experts(scores, None, routing),
            num_bytes=4.0 * scores.numel() + 12.0 * 8 * self._rows,
        )

    def bitmask(self) -> Case:
        logits, words = self._logits(), -(-self._shape.vocab // 32)
        mask = torch.full((self._rows, words), 0x55555555, dtype=torch.int32, device=self._device)
        return Case(
            op="apply_token_bitmask",
            shape=f"{self._drawn}, half banned",
            run=lambda: kernels.apply_token_bitmask(logits, mask),
            num_bytes=4.0 * mask.numel() + 2.0 * logits.numel(),
        )

    def penalties(self) -> Case:
        logits = self._logits()
        rows, in_prompt, counts, pool = self._counted()
        return Case(
            op="apply_penalties_",
            shape=f"{self._drawn}, {self._context} tokens each",
            run=lambda: kernels.apply_penalties_(logits, rows, in_prompt, counts, pool),
            num_bytes=5.0 * logits.numel() + 8.0 * self._rows * self._context,
        )

    def count(self) -> Case:
        rows, _, counts, _ = self._counted()
        tokens = torch.zeros(self._rows, dtype=torch.int64, device=self._device)
        return Case(
            op="count_tokens_",
            shape=self._drawn,
            run=lambda: kernels.count_tokens_(counts, rows, tokens),
            num_bytes=32.0 * self._rows,
        )

    def edits(self) -> Case:
        num_biases, num_words, length = 64, 8, 4
        logits, (pool, _) = self._logits(), self._tables()
        index = torch.arange(self._rows, device=self._device)
        tokens = torch.arange(num_biases, dtype=torch.int32, device=self._device)
        ends = torch.arange(1, num_words + 1, dtype=torch.int32, device=self._device) * length
        edits = TokenEdits(
            bias_tokens=tokens.repeat(self._rows, 1),
            biases=torch.ones(self._rows, num_biases, device=self._device),
            words=tokens[: num_words * length].repeat(self._rows, 1),
            word_ends=ends.repeat(self._rows, 1),
        )
        rows = EditRows(
            rows=index,
            slots=index,
            cells=torch.full_like(index, length),
            num_output=torch.full_like(index, length),
            num_biases=torch.full_like(index, num_biases),
            num_words=torch.full_like(index, num_words),
            most_biases=num_biases,
            most_words=num_words,
        )
        return Case(
            op="apply_token_edits_",
            shape=f"{self._drawn}, {num_biases} biases, {num_words} words",
            run=lambda: kernels.apply_token_edits_(logits, edits, rows, pool),
            num_bytes=self._rows * (num_biases * 16.0 + num_words * (4 + 8.0 * length) + 48.0),
        )

    def scores(self) -> Case:
        logits = self._logits()
        tokens = torch.zeros(self._rows, dtype=torch.int64, device=self._device)
        return Case(
            op="token_scores",
            shape=f"{self._drawn} (top {MAX_LOGPROBS} apart)",
            run=lambda: kernels.token_scores(logits, tokens),
            num_bytes=4.0 * logits.numel(),
        )

    def write(self) -> Case:
        pool, table = self._tables()
        place = torch.arange(self._rows)
        segments = torch.stack(
            (place % 2, place * table.shape[1], place * 4, torch.full_like(place, 4)), dim=1
        ).to(self._device)
        values = torch.ones(4 * self._rows, dtype=torch.int32, device=self._device)
        return Case(
            op="write_table_rows_",
            shape=f"{self._rows} runs of 4",
            run=lambda: kernels.write_table_rows_(pool, table, segments, values, longest=4),
            num_bytes=(32.0 + 2 * 16.0) * self._rows,
        )

    def gather(self) -> Case:
        pool, table = self._tables()
        num_pages = -(-self._context // PAGE_SIZE)
        rows = kernels.StepRows(
            slots=torch.arange(self._rows, device=self._device),
            starts=torch.full((self._rows,), self._context - 1, device=self._device),
            query_start=torch.arange(self._rows + 1, device=self._device),
            num_tokens=self._rows,
            longest_query=1,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
        )
        return Case(
            op="gather_step_inputs",
            shape=f"{self._rows} decodes of {num_pages} pages",
            run=lambda: kernels.gather_step_inputs(pool, table, rows),
            num_bytes=self._rows * (8.0 * num_pages + 56.0),
        )

    @property
    def _drawn(self) -> str:
        return f"{self._rows} x {self._shape.vocab}"

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device, dtype=self._dtype)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, device=self._device, dtype=self._dtype)

    def _logits(self) -> torch.Tensor:
        """Random logits with the spread of a real model's, so that top-k, top-p and min-p keep a
        similar number of tokens."""
        return torch.randn(self._rows, self._shape.vocab, device=self._device) * 3

    def _paged(
        self, rows: int, length: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """KV caches, and a page table with pages in random order to defeat prefetching."""
        per_row = -(-length // PAGE_SIZE)
        shape = (rows * per_row, PAGE_SIZE, self._shape.kv_heads, self._shape.head_dim)
        order = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(0))
        table = order.int().view(rows, per_row).to(self._device)
        return (self._randn(*shape), self._randn(*shape)), table

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        pages = -(-self._context // PAGE_SIZE)
        return (
            torch.ones(self._rows, self._context + 1, dtype=torch.int32, device=self._device),
            torch.ones(self._rows, max(4, pages), dtype=torch.int32, device=self._device),
        )

    def _counted(self) -> tuple[PenaltyRows, torch.Tensor, torch.Tensor, torch.Tensor]:
        vocab, rows = self._shape.vocab, self._rows
        pool = torch.randint(0, vocab, (rows, self._context), dtype=torch.int32)
        counts = torch.zeros(rows, vocab, dtype=torch.int32)
        counts.scatter_add_(1, pool.long(), torch.ones_like(pool))
        index = torch.arange(rows, device=self._device)
        ones = torch.ones(rows, device=self._device)
        penalised = PenaltyRows(
            rows=index,
            slots=index,
            ends=torch.full_like(index, self._context),
            num_drafts=torch.zeros_like(index),
            most_drafts=0,
            frequency=ones * 1e-3,
            presence=ones * 1e-3,
            repetition=ones * 1.001,
        )
        counts = counts.to(self._device)
        return penalised, torch.zeros_like(counts, dtype=torch.bool), counts, pool.to(self._device)


def _ngram_case(rows: int, context: int, device: torch.device) -> Case:
    """Case of n-gram lookup in `rows` requests of `context` tokens each."""
    pool = torch.randint(100, (rows, context), dtype=torch.int32, device=device)
    lookup = kernels.NgramLookup(
        slots=torch.arange(rows, device=device),
        newest=torch.full((rows,), context - 1 - _DRAFTS, device=device),
        count=_DRAFTS,
        shortest=_SHORTEST,
        longest=_LONGEST,
        num_tokens=context,
    )
    return Case(
        op="draft_ngrams",
        shape=f"{rows} requests, {context} tokens each",
        run=lambda: kernels.draft_ngrams(pool, lookup),
        num_bytes=4.0 * (pool.numel() + rows * _DRAFTS),
    )
