"""The model families: which class implements each, and which keys of config.json it knows.

A key that a family does not know may change the mathematics, so a checkpoint that has one is
refused by the key's name. To add a family, add an entry to `FAMILIES` and, where its layers are
not those of another family, a module beside `llama.py`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.models.moe_config import (
    MoeConfig,
    parse_glm4_moe,
    parse_llada2_moe,
    parse_mixtral_moe,
    parse_qwen3_moe,
)

RawConfig = dict[str, Any]
"""The content of config.json, with the family's defaults for what is missing."""


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


_READ = _keys(
    """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps
    tie_word_embeddings eos_token_id rope_theta rope_scaling rope_parameters
    original_max_position_embeddings quantization_config
    """
)
"""Keys that the reader looks at, whatever the family."""

_HARMLESS = _keys(
    """
    _name_or_path _commit_hash _attn_implementation_autoset auto_map transformers_version
    dtype torch_dtype use_cache bos_token_id pad_token_id sep_token_id decoder_start_token_id
    unk_token_id id2label label2id problem_type finetuning_task task_specific_params
    tokenizer_class prefix return_dict output_attentions output_hidden_states torchscript
    chunk_size_feed_forward attention_dropout attention_probs_dropout_prob hidden_dropout
    hidden_dropout_prob embd_pdrop resid_pdrop initializer_range pretraining_tp use_flash_attn
    gradient_checkpointing unsloth_fixed unsloth_version model_name max_length min_length
    temperature top_k top_p do_sample num_beams repetition_penalty length_penalty
    bad_words_ids forced_bos_token_id forced_eos_token_id pruned_heads tf_legacy_loss
    use_bfloat16 max_window_layers max_sequence_length internal_version is_llama_config
    transformers.js_config cache_implementation _attn_implementation attn_implementation
    """
)
"""Keys without effect on logits: bookkeeping, training, and how transformers runs and samples.
pretraining_tp splits the same sums into pieces; max_window_layers is read by those that need it."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "activation": ("swiglu",),
    "is_causal": (True,),
    "partial_rotary_factor": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
}
"""Keys that change something with any other value. (A key that stands nowhere is taken to change
nothing where its value is null, false, zero or empty.)"""

_REMEDIES = {
    "compression_config": "use the checkpoint's unquantized version",
}
_UNKNOWN = (
    "it may change the model's mathematics; use another checkpoint, or remove the key if you know "
    "that it does not"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """What one value of `architectures` in config.json stands for."""

    model_types: tuple[str, ...]
    """Values of `model_type` that go with it; a checkpoint may also have none."""
    implementation: str
    """Module in `worker.models` and class, "llama:LlamaForCausalLM": a name, since readers of the
    configuration have no torch."""
    defaults: Mapping[str, object]
    """What a missing key means, as in transformers' configuration class. These keys are known."""
    own: tuple[str, ...] = ()
    """Keys of `defaults` that its class alone reads, from `ModelConfig.own`."""
    keys: frozenset[str] = frozenset()
    """Further keys that are read, or have no effect in this family alone."""
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Further keys, and the values for which they change nothing."""
    qkv_bias: bool = False
    """Whether the q, k and v projections have biases without `attention_bias`."""
    qk_norm: bool = False
    """Whether each head of q and k is normalised before it rotates."""
    output_bias: str = "attention_bias"
    """Key that says whether attention's output projection has a bias; none where it is empty."""
    query_beta: bool = False
    """Whether rope parameters may say how queries grow with positions."""
    skips_next_layers: bool = False
    """Whether a checkpoint may hold layers behind the last, which predict further tokens."""
    windows: Callable[[RawConfig], tuple[int | None, ...]]
    """Per layer, how many tokens one sees, itself included; None for all before it."""
    parse_moe: Callable[[RawConfig], MoeConfig] | None = None
    """Reads the experts; None for a dense family."""

    def refuse_unknown(self, raw: Mapping[str, Any]) -> None:
        """Checks every key that config.json gives.

        Raises:
            ValueError: one may change the mathematics in a way that is not implemented.
        """
        if (raw.get("model_type") or self.model_types[0]) not in self.model_types:
            raise ValueError(
                f"model_type {raw['model_type']!r} in config.json does not go with architectures "
                f"{raw['architectures']}, of model_type {' or '.join(self.model_types)}: repair it"
            )
        neutral = {**_NEUTRAL, **self.neutral, "use_qk_norm": (self.qk_norm,)}
        known = _READ | _HARMLESS | self.keys | frozenset(self.defaults)
        for key, value in raw.items():
            if value is None or key in known:
                continue
            if key in neutral:
                if value in neutral[key]:
                    continue
                remedy = f"it must be {' or '.join(map(repr, neutral[key]))}"
            elif value in (False, "", [], {}):
                continue
            else:
                remedy = _REMEDIES.get(key, _UNKNOWN)
            raise ValueError(f"{key} = {_short(value)} in config.json is not supported: {remedy}")


def find_family(raw: Mapping[str, Any]) -> tuple[str, ModelFamily]:
    """The architecture that config.json names, and its family.

    Raises:
        ValueError: none that it names is supported.
    """
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return str(name), FAMILIES[name]
    raise ValueError(
        f"architectures {names} in config.json: none is supported "
        f"(supported: {', '.join(FAMILIES)}): use another checkpoint"
    )


def _no_windows(raw: RawConfig) -> tuple[int | None, ...]:
    """transformers ignores `sliding_window` here."""
    return (None,) * int(raw["num_hidden_layers"])


def _one_window(raw: RawConfig) -> tuple[int | None, ...]:
    """The same in all layers."""
    window = raw.get("sliding_window")
    return (None if window is None else int(window),) * int(raw["num_hidden_layers"])


def _switched_window(raw: RawConfig) -> tuple[int | None, ...]:
    """The same in all layers, where `use_sliding_window` is set."""
    return _one_window(raw) if raw.get("use_sliding_window") else _no_windows(raw)


def _window_of_types(raw: RawConfig) -> tuple[int | None, ...]:
    """In the layers that `layer_types` names; where it is missing, in all but every n-th, where n
    is `sliding_window_pattern`."""
    if raw.get("sliding_window") is None:
        return _no_windows(raw)
    types = raw.get("layer_types")
    if types is None:
        period = raw.get("sliding_window_pattern")
        if type(period) is not int or period < 1:
            raise ValueError(
                f"sliding_window_pattern = {_short(period)} in config.json must be a positive "
                "integer where there are no layer_types: repair it"
            )
        kinds = ("full_attention", "sliding_attention")
        types = [kinds[(i + 1) % period != 0] for i in range(int(raw["num_hidden_layers"]))]
    return _windows_by_layer({**raw, "use_sliding_window": True, "layer_types": types})


def _no_windowed_types(raw: RawConfig) -> tuple[int | None, ...]:
    """`layer_types` may say what is so anyway."""
    windows, types = _no_windows(raw), raw.get("layer_types")
    if types is not None and types != ["full_attention"] * len(windows):
        raise ValueError(
            f"layer_types = {_short(types)} in config.json must say full_attention for each of "
            f"{len(windows)} layers: use another checkpoint"
        )
    return windows


def _windows_by_layer(raw: RawConfig) -> tuple[int | None, ...]:
    """Where `use_sliding_window` is set, in the layers of `layer_types`, or from one layer on."""
    windows = _switched_window(raw)
    types = raw.get("layer_types")
    if types is None:
        first = int(raw["max_window_layers"])
        return (None,) * min(first, len(windows)) + windows[first:]
    if len(types) != len(windows) or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types = {_short(types)} in config.json must say full_attention or "
            f"sliding_attention for each of {len(windows)} layers"
        )
    return tuple(
        window if kind == "sliding_attention" else None
        for window, kind in zip(windows, types, strict=True)
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_WINDOW_KEYS = frozenset({"use_sliding_window", "sliding_window"})
_QWEN_KEYS = _WINDOW_KEYS | {"layer_types"}
_QWEN3_MOE_KEYS = _WINDOW_KEYS | {
    "attention_bias",
    "num_local_experts",  # transformers 5 writes num_experts so
    "decoder_sparse_step",
    "mlp_only_layers",
    "output_router_logits",
    "router_aux_loss_coef",
}
_SDAR_KEYS = _keys(
    """
    attention_bias debug ep_size fuse_cross_entropy micro_forward skip_checkpoint
    use_regular_causal
    """
)
_BLOCKS_OF_4 = {"block_size": 4, "mask_token_id": 151669}
_QWEN_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3_MOE_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}
_COHERE_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "eos_token_id": 255001,
}

FAMILIES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(
        model_types=("llama",),
        implementation="llama:LlamaForCausalLM",
        defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
        keys=frozenset({"attention_bias", "mlp_bias", "sliding_window"}),
        windows=_no_windows,
    ),
    "GraniteForCausalLM": ModelFamily(
        model_types=("granite",),
        implementation="granite:GraniteForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "eos_token_id": 2,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        own=(
            *("embedding_multiplier", "attention_multiplier", "residual_multiplier"),
            "logits_scaling",
        ),
        keys=frozenset({"attention_bias", "mlp_bias"}),
        windows=_no_windows,
    ),
    "Ministral3ForCausalLM": ModelFamily(
        model_types=("ministral3",),
        implementation="ministral3:Ministral3ForCausalLM",
        defaults={
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        keys=frozenset({"sliding_window"}),
        query_beta=True,
        windows=_one_window,
    ),
    "Glm4ForCausalLM": ModelFamily(
        model_types=("glm4",),
        implementation="glm4:Glm4ForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 0.00000015625,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "eos_token_id": [151329, 151336, 151338],
        },
        output_bias="",
        windows=_no_windows,
    ),
    "Glm4MoeForCausalLM": ModelFamily(
        model_types=("glm4_moe",),
        implementation="glm4_moe:Glm4MoeForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "attention_bias": False,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        keys=_keys(
            """
            num_nextn_predict_layers num_mtp_layers output_router_logits router_aux_loss_coef
            """
        ),
        output_bias="",
        skips_next_layers=True,
        windows=_no_windows,
        parse_moe=parse_glm4_moe,
    ),
    "SmolLM3ForCausalLM": ModelFamily(
        model_types=("smollm3",),
        implementation="smollm3:SmolLM3ForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "eos_token_id": 128001,
            "tie_word_embeddings": True,
            "rope_theta": 2000000.0,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        own=("no_rope_layers", "no_rope_layer_interval"),
        keys=frozenset({"attention_bias", "mlp_bias", "layer_types", "sliding_window"}),
        windows=_no_windowed_types,
    ),
    "SeedOssForCausalLM": ModelFamily(
        model_types=("seed_oss",),
        implementation="llama:LlamaForCausalLM",
        defaults={
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "eos_token_id": 2,
        },
        keys=frozenset({"attention_out_bias", "mlp_bias", "residual_dropout"}),
        output_bias="attention_out_bias",
        windows=_no_windows,
    ),
    "Olmo2ForCausalLM": ModelFamily(
        model_types=("olmo2",),
        implementation="post_norm:Olmo2ForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
        },
        keys=frozenset({"attention_bias"}),
        windows=_no_windows,
    ),
    "Ernie4_5ForCausalLM": ModelFamily(
        model_types=("ernie4_5",),
        implementation="ernie4_5:Ernie45ForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "eos_token_id": 2,
        },
        windows=_no_windows,
    ),
    "Exaone4ForCausalLM": ModelFamily(
        model_types=("exaone4",),
        implementation="post_norm:Exaone4ForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "eos_token_id": 2,
        },
        own=("sliding_window",),
        keys=frozenset({"layer_types"}),
        qk_norm=True,
        windows=_window_of_types,
    ),
    "CohereForCausalLM": ModelFamily(
        model_types=("cohere",),
        implementation="cohere:CohereForCausalLM",
        defaults=_COHERE_DEFAULTS,
        own=("logit_scale",),
        keys=frozenset({"attention_bias", "model_max_length"}),
        windows=_no_windows,
    ),
    "Cohere2ForCausalLM": ModelFamily(
        model_types=("cohere2",),
        implementation="cohere:Cohere2ForCausalLM",
        defaults={
            **{**_COHERE_DEFAULTS, "rope_theta": 10000.0},
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        own=("logit_scale",),
        keys=frozenset({"attention_bias", "layer_types"}),
        neutral={
            "layer_switch": (4,),
            "order_of_interleaved_layers": ("local_attn_first",),
            "position_embedding_type": ("rope_gptj",),
            "rotary_pct": (1.0,),
            "use_embedding_sharing": (True,),
            "use_gated_activation": (True,),
            "use_parallel_block": (True,),
            "use_parallel_embedding": (True, False),
        },
        windows=_window_of_types,
    ),
    "MixtralForCausalLM": ModelFamily(
        model_types=("mixtral",),
        implementation="mixtral:MixtralForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "eos_token_id": 2,
        },
        keys=_keys(
            """
            sliding_window output_router_logits router_aux_loss_coef router_jitter_noise
            """
        ),
        windows=_one_window,
        parse_moe=parse_mixtral_moe,
    ),
    "MistralForCausalLM": ModelFamily(
        model_types=("mistral",),
        implementation="llama:LlamaForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
        windows=_one_window,
    ),
    "Qwen2ForCausalLM": ModelFamily(
        model_types=("qwen2",),
        implementation="llama:LlamaForCausalLM",
        defaults=_QWEN_DEFAULTS,
        keys=_QWEN_KEYS | {"dual_chunk_attention_config"},
        qkv_bias=True,
        windows=_windows_by_layer,
    ),
    "Qwen3ForCausalLM": ModelFamily(
        model_types=("qwen3",),
        implementation="llama:LlamaForCausalLM",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        keys=_QWEN_KEYS | {"attention_bias"},
        qk_norm=True,
        windows=_windows_by_layer,
    ),
    "Qwen3MoeForCausalLM": ModelFamily(
        model_types=("qwen3_moe",),
        implementation="qwen3_moe:Qwen3MoeForCausalLM",
        defaults=_QWEN3_MOE_DEFAULTS,
        keys=_QWEN3_MOE_KEYS,
        qk_norm=True,
        windows=_switched_window,
        parse_moe=parse_qwen3_moe,
    ),
    "SDARForCausalLM": ModelFamily(
        model_types=("sdar",),
        implementation="llama:LlamaForCausalLM",
        defaults={**_QWEN_DEFAULTS, **_BLOCKS_OF_4, "num_key_value_heads": 8, "head_dim": 128},
        keys=_QWEN_KEYS | _SDAR_KEYS,
        qk_norm=True,
        windows=_windows_by_layer,
    ),
    "SDARMoeForCausalLM": ModelFamily(
        model_types=("sdar_moe",),
        implementation="qwen3_moe:Qwen3MoeForCausalLM",
        defaults={
            **_QWEN3_MOE_DEFAULTS,
            **_BLOCKS_OF_4,
            "head_dim": 128,
            "norm_topk_prob": True,
        },
        keys=_QWEN3_MOE_KEYS | _SDAR_KEYS,
        qk_norm=True,
        windows=_switched_window,
        parse_moe=parse_qwen3_moe,
    ),
    "LLaDA2MoeModelLM": ModelFamily(
        model_types=("llada2_moe",),
        implementation="llada2:LLaDA2MoeModelLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "block_size": 32,
            "mask_token_id": 156895,
            "partial_rotary_factor": 0.5,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "moe_router_enable_expert_bias": True,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "num_shared_experts": 1,
        },
        keys=frozenset({"sliding_window"})  # of no effect while use_sliding_window is false
        | {"num_local_experts", "rotary_dim", "moe_shared_expert_intermediate_size"}
        | {"embedding_dropout", "output_dropout", "output_router_logits"}
        | {"router_aux_loss_coef", "mtp_loss_scaling_factor"},
        neutral={
            "score_function": ("sigmoid",),
            "router_dtype": ("fp32",),
            "use_rmsnorm": (True,),
            "moe_router_enable_shared_expert": (True,),
        },
        qk_norm=True,
        windows=_no_windows,
        parse_moe=parse_llada2_moe,
    ),
}
"""By value of `architectures` in config.json."""
