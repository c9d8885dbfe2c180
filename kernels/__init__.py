"""GPU and CPU kernels: one op per folder, with a torch reference and a Triton kernel."""

import importlib
import pkgutil

from kernels.activate_fp8 import activate_fp8
from kernels.activation import squared_relu, xielu
from kernels.block_sparse_attention import BlockSelection, attend_to_blocks, select_blocks
from kernels.choose_experts import ExpertChoice, Routing, choose_experts
from kernels.draft_ngrams import NgramLookup, draft_ngrams, follow_ngram
from kernels.fused_add_norm import Norm, fused_add_norm, fused_add_norm_fp8
from kernels.fused_moe import (
    GELU,
    SILU,
    SQUARED_RELU,
    Activation,
    ExpertBiases,
    Experts,
    ExpertWeights,
    ExtraTerms,
    fused_moe,
    pack_quantized_experts,
)
from kernels.gate_and_mul import (
    clamped_silu_and_mul,
    clamped_swiglu,
    gelu_and_mul,
    silu_and_mul,
)
from kernels.gated_delta_rule import gated_delta_net
from kernels.gumbel_noise import gumbel_noise
from kernels.kimi_delta_attention import KimiDeltaLayer, KimiGates, kimi_delta_attention
from kernels.linear import (
    BlockScales,
    PackedLinear,
    WeightCode,
    dequantize,
    linear,
    pack_linear_weight,
    pack_quantized_linear_weight,
    quantize_weight,
)
from kernels.mla_prefill import ExpandedRows, Expansion, mla_prefill
from kernels.penalties import PenaltyRows, apply_penalties_, count_tokens_
from kernels.prepare_latents import LatentRows, prepare_latents
from kernels.qk_norm_rope_store import HeadNorms, qk_norm_rope_store
from kernels.quantize_fp8 import Fp8Inputs, Fp8Rows
from kernels.registry import Backend, OpRegistry, registry
from kernels.rms_norm import rms_norm, rms_norm_pair
from kernels.sample_tokens import SamplingParameters, TokenCells, sample_tokens
from kernels.selective_scan import ScanLayer, selective_scan
from kernels.short_convolution import short_convolution
from kernels.soft_cap import soft_cap_
from kernels.sparse_attention import (
    SparseQueries,
    attend_to_cells,
    select_tokens,
    store_index_keys,
)
from kernels.step_inputs import StepRows, StepTensors, gather_step_inputs, write_table_rows_
from kernels.token_bitmask import apply_token_bitmask
from kernels.token_edits import EditRows, TokenEdits, apply_token_edits_
from kernels.token_scores import TokenScores, token_scores

# Also declares the ops that are not exported above.
for _module in pkgutil.iter_modules(__path__):
    if _module.ispkg:
        importlib.import_module(f"kernels.{_module.name}")

__all__ = [
    "GELU",
    "SILU",
    "SQUARED_RELU",
    "Activation",
    "Backend",
    "BlockScales",
    "BlockSelection",
    "EditRows",
    "ExpandedRows",
    "Expansion",
    "ExpertBiases",
    "ExpertChoice",
    "ExpertWeights",
    "Experts",
    "ExtraTerms",
    "Fp8Inputs",
    "Fp8Rows",
    "HeadNorms",
    "KimiDeltaLayer",
    "KimiGates",
    "LatentRows",
    "NgramLookup",
    "Norm",
    "OpRegistry",
    "PackedLinear",
    "PenaltyRows",
    "Routing",
    "SamplingParameters",
    "ScanLayer",
    "SparseQueries",
    "StepRows",
    "StepTensors",
    "TokenCells",
    "TokenEdits",
    "TokenScores",
    "WeightCode",
    "activate_fp8",
    "apply_penalties_",
    "apply_token_bitmask",
    "apply_token_edits_",
    "attend_to_blocks",
    "attend_to_cells",
    "choose_experts",
    "clamped_silu_and_mul",
    "clamped_swiglu",
    "count_tokens_",
    "dequantize",
    "draft_ngrams",
    "follow_ngram",
    "fused_add_norm",
    "fused_add_norm_fp8",
    "fused_moe",
    "gated_delta_net",
    "gather_step_inputs",
    "gelu_and_mul",
    "gumbel_noise",
    "kimi_delta_attention",
    "linear",
    "mla_prefill",
    "pack_linear_weight",
    "pack_quantized_experts",
    "pack_quantized_linear_weight",
    "prepare_latents",
    "qk_norm_rope_store",
    "quantize_weight",
    "registry",
    "rms_norm",
    "rms_norm_pair",
    "sample_tokens",
    "select_blocks",
    "select_tokens",
    "selective_scan",
    "short_convolution",
    "silu_and_mul",
    "soft_cap_",
    "squared_relu",
    "store_index_keys",
    "token_scores",
    "write_table_rows_",
    "xielu",
]
