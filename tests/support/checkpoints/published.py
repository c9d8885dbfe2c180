"""Checkpoints of families without a transformers class, in their released format, and mutations
that break each of their features.

Sources are the modeling code published with the weights: huggingface.co/internlm (InternLM 1, 2,
3), /baichuan-inc (Baichuan 2), /Qwen (Qwen 1), /XiaomiMiMo, /openbmb (MiniCPM), /OrionStarAI,
/IQuestLab, /deepseek-ai (DeepSeekMoE), /inclusionAI (Ling 2), /LGAI-EXAONE (EXAONE 3.5) and
/microsoft (Phi-3-vision).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tests.support.checkpoints.moe import BAILING, MoeMathematics
from tests.support.checkpoints.mutations import (
    NO_HEAD_NORMS,
    NO_NAMES,
    NO_NORM_BIAS,
    NO_QKV_BIAS,
    NO_ROUTER_BIAS,
    NO_SHARED_EXPERT,
    RMS_FOR_LAYER_NORM,
)
from tests.support.checkpoints.reference import Experts, Mathematics, Names
from tests.support.checkpoints.specimen import VOCAB_SIZE, Mutation, Patch, Specimen
from worker.models.architectures.decoder import DecoderModel
from worker.models.layers.attention import AttentionNames, GatedMLP
from worker.models.layers.moe import MoeNames

_THETA: dict[str, Mutation] = {"theta": {"rope_theta": 300.0}}
_EPS: dict[str, Mutation] = {"eps": {"rms_norm_eps": 0.1}}
_SHORT = (1.0, 1.5, 2.0, 2.5, 1.0, 1.5, 2.0, 2.5)
_SU = {"type": "su", "short_factor": _SHORT, "long_factor": (2.0,) * 8}


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _stretched_as_llama3() -> tuple[float, ...]:
    """Wavelength factors of 8 pairs of dimensions with base 100: 1 if at least 4 rotations fit in
    32 positions, 8 if at most one does, and linear in frequency in between."""
    rotations = [32 / (2 * math.pi * 100 ** (pair / 8)) for pair in range(8)]
    shares = [min(max((count - 1) / 3, 0.0), 1.0) for count in rotations]
    return tuple(1 / (share + (1 - share) / 8) for share in shares)


def _config(architecture: str, model_type: str, *without: str, **keys: Any) -> dict[str, Any]:
    """A config.json: sizes and family-specific keys, without the keys that the family does not
    have."""
    common = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-3,
        "rope_theta": 100.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 7,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    return {**{key: common[key] for key in common if key not in without}, **keys}


PUBLISHED_SPECIMENS: dict[str, Specimen] = {
    "iquestcoder": Specimen(
        maths=Mathematics(config=_config("IQuestCoderForCausalLM", "iquestcoder", head_dim=16)),
        is_variant=True,
        mutations={**_THETA, **_EPS},
    ),
    "internlm": Specimen(
        maths=Mathematics(
            config=_config(
                *("InternLMForCausalLM", "internlm", "rope_theta", "num_key_value_heads"), bias=True
            ),
            qkv_bias=True,
            output_bias=True,
        ),
        mutations={"no bias": {"bias": False}, **_THETA, **_EPS},
    ),
    "internlm2": Specimen(
        maths=Mathematics(
            config=_config("InternLM2ForCausalLM", "internlm2", bias=True),
            names=Names(
                embedding="model.tok_embeddings",
                head="output",
                attention="attention",
                joined="wqkv",
                output="wo",
                mlp="feed_forward",
                gate="w1",
                up="w3",
                down="w2",
                norms=("attention_norm", "ffn_norm"),
            ),
            rows="by kv head",
            qkv_bias=True,
            output_bias=True,
        ),
        mutations={
            "no bias": {"bias": False},
            "order of rows": Patch(
                target="worker.models.architectures.internlm2:AttentionNames",
                value=lambda is_grouped, **names: AttentionNames(is_fused=True, **names),
            ),
            "order of norms": Patch(
                target="worker.models.architectures.internlm2:InternLM2Layer.norm_names",
                value=("ffn_norm", "attention_norm"),
            ),
            **_THETA,
            **_EPS,
        },
    ),
    "internlm3": Specimen(
        maths=Mathematics(
            config=_config(
                *("InternLM3ForCausalLM", "internlm3"),
                head_dim=16,
                qkv_bias=True,
                bias=True,
                rope_scaling={"rope_type": "dynamic", "factor": 6.0},
            ),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
        ),
        mutations={
            "no bias": {"qkv_bias": False},
            "no other bias": {"bias": False},
            **_THETA,
            **_EPS,
        },
    ),
    "baichuan": Specimen(
        maths=Mathematics(
            config=_config("BaichuanForCausalLM", "baichuan", "rope_theta", "num_key_value_heads"),
            names=Names(joined="W_pack"),
            has_unit_rows=True,
        ),
        mutations={
            "lengths of rows": Patch(
                target="worker.models.architectures.baichuan:BaichuanForCausalLM.process_after_loading",
                value=DecoderModel.process_after_loading,
            ),
            **_THETA,
            **_EPS,
        },
    ),
    "qwen": Specimen(
        maths=Mathematics(
            config=_config(
                *("QWenLMHeadModel", "qwen"),
                *("rms_norm_eps", "rope_theta", "num_key_value_heads", "hidden_act"),
                intermediate_size=96,
                kv_channels=16,
                layer_norm_epsilon=1e-3,
                no_bias=True,
                rotary_emb_base=100,
                seq_length=256,
            ),
            names=Names(
                embedding="transformer.wte",
                layers="transformer.h",
                norm="transformer.ln_f",
                attention="attn",
                joined="c_attn",
                output="c_proj",
                gate="w2",
                up="w1",
                down="c_proj",
                norms=("ln_1", "ln_2"),
            ),
            eps_key="layer_norm_epsilon",
            theta_key="rotary_emb_base",
            head_key="kv_channels",
            mlp_share=2,
            qkv_bias=True,
        ),
        mutations={
            "no bias": NO_QKV_BIAS,
            "gate and up": Patch(
                target="worker.models.architectures.qwen:GatedMLP",
                value=lambda *args, names: GatedMLP(*args, names=("w1", "w2", "c_proj")),
            ),
            "theta": {"rotary_emb_base": 300},
            "eps": {"layer_norm_epsilon": 0.1},
        },
    ),
    "exaone3": Specimen(
        maths=Mathematics(
            config=_config(
                *("ExaoneForCausalLM", "exaone"),
                *("num_hidden_layers", "rms_norm_eps", "hidden_act"),
                num_layers=3,
                activation_function="silu",
                embed_dropout=0.0,
                head_dim=16,
                layer_norm_epsilon=1e-3,
                rope_scaling=_LLAMA3,
            ),
            names=Names(
                embedding="transformer.wte",
                layers="transformer.h",
                norm="transformer.ln_f",
                attention="attn.attention",
                output="out_proj",
                gate="c_fc_0",
                up="c_fc_1",
                down="c_proj",
                norms=("ln_1", "ln_2"),
            ),
            eps_key="layer_norm_epsilon",
            layers_key="num_layers",
            stretch=_stretched_as_llama3(),
        ),
        mutations={
            "gate and up": Patch(
                target="worker.models.architectures.exaone:_MLP_NAMES",
                value=("c_fc_1", "c_fc_0", "c_proj"),
            ),
            "stretching": {"rope_scaling": {**_LLAMA3, "factor": 2.0}},
            "eps": {"layer_norm_epsilon": 0.1},
            **_THETA,
        },
        is_variant=True,
    ),
    "mimo": Specimen(
        is_variant=True,
        maths=Mathematics(
            config=_config(
                *("MiMoForCausalLM", "mimo"),
                head_dim=16,
                attention_bias=True,
                num_nextn_predict_layers=1,
                max_window_layers=3,
                sliding_window=256,
                use_sliding_window=False,
            ),
            qkv_bias=True,
            further=("model.mtp_layers.0.final_layernorm.weight",),
        ),
        mutations={"no bias": {"attention_bias": False}, **_THETA, **_EPS},
    ),
    "minicpm": Specimen(
        maths=Mathematics(
            config=_config(
                *("MiniCPMForCausalLM", "minicpm"),
                tie_word_embeddings=True,
                scale_emb=3.0,
                scale_depth=1.4,
                dim_model_base=256,
            ),
            embedding_scale=3.0,
            branch_scale=1.4 / math.sqrt(3),
            logits_scale=256 / 64,
        ),
        mutations={
            "embedding": {"scale_emb": 1.0},
            "residual": {"scale_depth": 1.0},
            "logits": {"dim_model_base": 128},
            **_THETA,
            **_EPS,
        },
    ),
    "minicpm-moe": Specimen(
        is_variant=True,
        maths=Mathematics(
            config=_config(
                *("MiniCPMForCausalLM", "minicpm"),
                tie_word_embeddings=True,
                scale_emb=3.0,
                scale_depth=1.4,
                dim_model_base=256,
                num_experts=8,
                num_experts_per_tok=3,
            ),
            embedding_scale=3.0,
            branch_scale=1.4 / math.sqrt(3),
            logits_scale=256 / 64,
            experts=Experts(count=8, chosen=3, size=48, sums_to_one=True, names=("w1", "w3", "w2")),
        ),
        mutations={
            "number of experts": {"num_experts_per_tok": 2},
            "up and gate": Patch(
                target="worker.models.architectures.granite:_MINICPM_NAMES",
                value=MoeNames(gate="w3", up="w1", down="w2"),
            ),
            "sum of weights": Patch(
                target="worker.models.config.model_config:checked",
                value=lambda moe, _: replace(moe, normalize=False),
            ),
            "residual": {"scale_depth": 1.0},
            **_EPS,
        },
    ),
    "orion": Specimen(
        maths=Mathematics(config=_config("OrionForCausalLM", "orion"), norm="layer"),
        is_variant=True,
        mutations={"bias of norms": NO_NORM_BIAS, "mean": RMS_FOR_LAYER_NORM, **_THETA, **_EPS},
    ),
    "deepseek-moe": Specimen(
        is_variant=True,
        maths=Mathematics(
            config=_config(
                *("DeepseekForCausalLM", "deepseek"),
                n_routed_experts=8,
                n_shared_experts=2,
                num_experts_per_tok=3,
                moe_intermediate_size=16,
                first_k_dense_replace=1,
                moe_layer_freq=1,
                norm_topk_prob=False,
                scoring_func="softmax",
            ),
            experts=Experts(
                count=8, chosen=3, size=16, sums_to_one=False, shared_size=32, first_layer=1
            ),
        ),
        mutations={
            "shared experts": NO_SHARED_EXPERT,
            "first layer": {"first_k_dense_replace": 0},
            "sum of weights": {"norm_topk_prob": True},
            "number of experts": {"num_experts_per_tok": 2},
            **_THETA,
            **_EPS,
        },
    ),
    "ling2": Specimen(
        maths=MoeMathematics(BAILING),
        mutations={
            "norms of heads": NO_HEAD_NORMS,
            "partial": {"partial_rotary_factor": 1.0, "rotary_dim": 16},
            "groups": {"topk_group": 2},
            "number of experts": {"num_experts_per_tok": 2},
            "sum of weights": {"norm_topk_prob": False},
            "scale of experts": {"routed_scaling_factor": 1.0},
            "first layer": {"first_k_dense_replace": 0},
            "bias of the router": NO_ROUTER_BIAS,
            "shared expert": NO_SHARED_EXPERT,
            **_THETA,
            **_EPS,
        },
        is_variant=True,
    ),
    "phi3-images": Specimen(
        is_variant=True,
        maths=Mathematics(
            config=_config(
                *("Phi3VForCausalLM", "phi3_v"),
                max_position_embeddings=640,
                original_max_position_embeddings=160,
                rope_scaling=_SU,
                sliding_window=None,
                embd_layer={"embedding_cls": "image"},
                img_processor={"name": "clip_vision_model"},
            ),
            names=Names(joined="qkv_proj", gate_up="gate_up_proj"),
            stretch=_SHORT,
            cosine_scale=math.sqrt(1 + math.log(640 / 160) / math.log(160)),
            further=("model.vision_embed_tokens.glb_GN",),
        ),
        mutations={
            "names": NO_NAMES,
            "short factors": {"rope_scaling": {**_SU, "short_factor": [1.0] * 8}},
            "temperature": {"rope_scaling": {**_SU, "attention_factor": 1.0}},
            **_THETA,
            **_EPS,
        },
    ),
}
"""Test checkpoints, keyed by the family's name in tests."""
