"""Model family: an entry in the table of families, and readers of keys that describe layers.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.models.config.checkpoint import positive_integer
from worker.models.config.moe_config import MoeConfig

RawConfig = dict[str, Any]
"""The content of config.json, with the family's defaults for what is missing."""


def words(names: str) -> frozenset[str]:
    """The set of keys in a text that lists them between blanks."""
    return frozenset(names.split())


_READ = words(
    """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps
    tie_word_embeddings eos_token_id rope_theta rope_scaling rope_parameters
    original_max_position_embeddings quantization_config compression_config
    """
)
"""Keys that are read for every family."""

_HARMLESS = words(
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
pretraining_tp only splits sums; max_window_layers has an effect in families that read it."""

ROUTER_KEYS = words("output_router_logits router_aux_loss_coef")
"""Keys of families with experts that concern training alone."""

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
"""Keys with the values for which they have no effect; other values are refused. (Keys that are
listed nowhere are taken to have none if they are null, false, zero or empty.)"""

_UNKNOWN = (
    "it may change the model's mathematics; use another checkpoint, or remove the key if you know "
    "that it does not"
)


def no_windows(raw: RawConfig) -> tuple[int | None, ...]:
    """Full attention in all layers; `sliding_window` is ignored, as transformers does for such a
    family."""
    return (None,) * int(raw["num_hidden_layers"])


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSizes:
    """Sizes of the attention heads of some layers, where they differ from those of others."""

    head_dim: int
    num_kv_heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """A model family: what one value of `architectures` in config.json stands for."""

    model_types: tuple[str, ...]
    """Values of `model_type` of this family; a checkpoint may also have none."""
    implementation: str
    """Module in `worker.models` and class, as in "llama:LlamaForCausalLM"; a name, so that reading
    the configuration does not import torch."""
    defaults: Mapping[str, object]
    """Values of missing keys, as in transformers' configuration class. These keys are known, and
    one whose default is a bool or a float has to be of that kind in config.json."""
    needed: tuple[str, ...] = ()
    """Keys that config.json must have, since the value that a missing one stands for is not
    supported."""
    own: tuple[str, ...] = ()
    """Keys of `defaults` that only the family's class reads, from `ModelConfig.own`."""
    keys: frozenset[str] = frozenset()
    """Further keys that are read, or that have no effect in this family."""
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Further keys, with the values for which they have no effect; other values are refused."""
    qkv_bias: bool = False
    """Whether the q, k and v projections have biases whatever config.json says."""
    qkv_bias_key: str = "attention_bias"
    """Key that says whether the q, k and v projections have biases."""
    mlp_bias_key: str = "mlp_bias"
    """Key that says whether the projections of the MLP have biases."""
    qk_norm: bool = False
    """Whether each head of q and k is normalised (QK norm) by default."""
    qk_norm_key: str = "use_qk_norm"
    """Key that overrides `qk_norm`; empty for none."""
    output_bias: str = "attention_bias"
    """Key that says whether attention's output projection has a bias; empty if it never has."""
    query_beta: bool = False
    """Whether rope parameters may have `llama_4_scaling_beta`, by which queries grow with the
    position."""
    has_sinks: bool = False
    """Whether heads have attention sinks."""
    has_latents: bool = False
    """Whether attention is multi-head latent attention (MLA)."""
    mxfp4_experts: bool = False
    """Whether experts may be MXFP4."""
    skips_next_layers: bool = False
    """Whether a checkpoint may hold layers for multi-token prediction, which are skipped."""
    window_theta: str = ""
    """Key with the base of the rotary embedding of sliding-window layers, unless `rope_parameters`
    has it; empty if all layers have the same rotary embedding."""
    skipped: tuple[str, ...] = ()
    """Prefixes of names of tensors that a checkpoint may hold and that are not loaded."""
    windows: Callable[[RawConfig], tuple[int | None, ...]] = no_windows
    """Reads the sliding window of each layer: number of tokens that one attends to, itself
    included; None for full attention. With the default, a checkpoint may have `sliding_window` only
    if `keys` name it."""
    rotating: Callable[[RawConfig], tuple[bool, ...]] | None = None
    """Reads which layers have rotary embedding; None if all have, or if the class decides by the
    windows."""
    has_chunks: bool = False
    """Whether attention is chunked: windows begin at multiples of their length, and a token attends
    to its chunk up to itself."""
    full_heads: Callable[[RawConfig], HeadSizes] | None = None
    """Reads the heads of full-attention layers; None if all layers have the same."""
    linear_layers: Callable[[RawConfig], frozenset[int]] | None = None
    """Reads which layers are linear attention, with a state per request instead of keys and values;
    None if none are."""
    parse_moe: Callable[[RawConfig], MoeConfig | None] | None = None
    """Reads the experts, and returns None for a dense model; None for a dense family."""
    translate: Callable[[RawConfig], RawConfig] | None = None
    """Translates config.json, with its defaults, to the keys that the reader knows; None if it has
    them already."""

    def refuse_unknown(self, raw: Mapping[str, Any]) -> None:
        """Checks every key of config.json.

        Raises:
            ValueError: one may change the mathematics in a way that is not implemented.
        """
        if (raw.get("model_type") or self.model_types[0]) not in self.model_types:
            raise ValueError(
                f"model_type {raw['model_type']!r} in config.json does not go with architectures "
                f"{raw['architectures']}, of model_type {' or '.join(self.model_types)}: repair it"
            )
        neutral = {**_NEUTRAL, "use_qk_norm": (self.qk_norm,), **self.neutral}
        for key in self.needed:
            if raw.get(key) is None:
                allowed = " or ".join(map(repr, neutral[key]))
                raise ValueError(
                    f"config.json lacks {key}, which is not supported but as {allowed}: add it if "
                    "you know that it is meant, or use another checkpoint"
                )
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
                remedy = _UNKNOWN
            raise ValueError(f"{key} = {_short(value)} in config.json is not supported: {remedy}")


def one_window(raw: RawConfig) -> tuple[int | None, ...]:
    """The same sliding window in all layers."""
    window = raw.get("sliding_window")
    return (None if window is None else int(window),) * int(raw["num_hidden_layers"])


def switched_window(raw: RawConfig) -> tuple[int | None, ...]:
    """The same sliding window in all layers if `use_sliding_window` is set, else none."""
    return one_window(raw) if raw.get("use_sliding_window") else no_windows(raw)


def window_of_types(raw: RawConfig) -> tuple[int | None, ...]:
    """Sliding windows in the layers that `layer_types` names; if it is missing, in all but every
    n-th, where n is `sliding_window_pattern`; without that in all."""
    types = raw.get("layer_types")
    if raw.get("sliding_window") is None:
        return no_windows(raw)
    if types is None and "sliding_window_pattern" not in raw:
        return one_window(raw)
    if types is None:
        period = _period(raw, "sliding_window_pattern")
        kinds = ("full_attention", "sliding_attention")
        types = [kinds[(i + 1) % period != 0] for i in range(int(raw["num_hidden_layers"]))]
    return windows_by_layer({**raw, "use_sliding_window": True, "layer_types": types})


def window_but_every_sixth(raw: RawConfig) -> tuple[int | None, ...]:
    """Sliding windows in the layers that `layer_types` names, or, if it is missing, in all but
    every sixth; never in the last.

    Raises:
        ValueError: `sliding_window` is missing.
    """
    num_layers, types = int(raw["num_hidden_layers"]), raw.get("layer_types")
    if not raw.get("sliding_window"):
        raise ValueError("sliding_window in config.json must be a positive number: repair it")
    if types is None:
        kinds = ("full_attention", "sliding_attention")
        types = [kinds[(index + 1) % 6 != 0] for index in range(num_layers)]
    last = ["full_attention"] if types else []
    return windows_by_layer(
        {**raw, "use_sliding_window": True, "layer_types": [*types[:-1], *last]}
    )


def rotating_layers(raw: RawConfig) -> tuple[bool, ...]:
    """Rotary embedding in the layers for which `no_rope_layers` has a 1; if it is missing, in all
    but every n-th, where n is `no_rope_layer_interval`."""
    num_layers, said = int(raw["num_hidden_layers"]), raw["no_rope_layers"]
    if not said:
        period = positive_integer(raw, "no_rope_layer_interval")
        return tuple(bool((index + 1) % period) for index in range(num_layers))
    if len(said) < num_layers or any(flag not in (0, 1) for flag in said):
        raise ValueError(
            f"no_rope_layers = {_short(said)} in config.json must say 0 or 1 of each of "
            f"{num_layers} layers: repair it"
        )
    return tuple(map(bool, said[:num_layers]))


def chunks_by_type(raw: RawConfig) -> tuple[int | None, ...]:
    """Chunked attention in the layers that `layer_types` names; if it is missing, in those with
    rotary embedding."""
    num_layers, types = int(raw["num_hidden_layers"]), raw.get("layer_types")
    if types is None:
        kinds = ("full_attention", "chunked_attention")
        types = [kinds[rotates] for rotates in rotating_layers(raw)]
    chunked = _layers_of(types, "chunked_attention", num_layers)
    size = raw["attention_chunk_size"]
    if chunked and (type(size) is not int or size < 1):
        raise ValueError(
            f"attention_chunk_size = {_short(size)} in config.json must be a positive number: "
            "repair it"
        )
    return tuple(size if index in chunked else None for index in range(num_layers))


def wider_full_heads(raw: RawConfig) -> HeadSizes:
    """Heads of full-attention layers, from `global_head_dim` and, if values are keys,
    `num_global_key_value_heads`; or from `per_layer_config`, as transformers 5.23 writes it."""
    if raw.get("per_layer_config") is not None:
        own, within = {**raw, **_heads_by_layer(raw)}, "per_layer_config."
        sizes = [positive_integer(own, key, within) for key in ("head_dim", "num_key_value_heads")]
        return HeadSizes(head_dim=sizes[0], num_kv_heads=sizes[1])
    key = "num_key_value_heads"
    if raw["attention_k_eq_v"] and raw["num_global_key_value_heads"] is not None:
        key = "num_global_key_value_heads"
    return HeadSizes(
        head_dim=positive_integer(raw, "global_head_dim"), num_kv_heads=positive_integer(raw, key)
    )


def _heads_by_layer(raw: RawConfig) -> RawConfig:
    """Heads of full-attention layers in `per_layer_config`, which must be the same for all."""
    own = raw["per_layer_config"]
    said = {int(layer): table for layer, table in own.items() if str(layer).isdecimal()}
    full = [i for i, window in enumerate(window_but_every_sixth(raw)) if window is None]
    tables = list(said.values())
    is_alike = (
        sorted(said) == full
        and len(own) == len(full)
        and all(table == tables[0] for table in tables)
    )
    keys = {"head_dim", "num_key_value_heads"}
    if not is_alike or not isinstance(tables[0], dict) or not tables[0].keys() <= keys:
        raise ValueError(
            f"per_layer_config = {_short(own)} in config.json must give all layers of "
            "full_attention, and no others, the same head_dim and num_key_value_heads: use "
            "another checkpoint"
        )
    return dict(tables[0])


def no_windowed_types(raw: RawConfig) -> tuple[int | None, ...]:
    """Full attention in all layers; `layer_types`, if present, must say the same."""
    windows, types = no_windows(raw), raw.get("layer_types")
    if types is not None and types != ["full_attention"] * len(windows):
        raise ValueError(
            f"layer_types = {_short(types)} in config.json must say full_attention for each of "
            f"{len(windows)} layers: use another checkpoint"
        )
    return windows


def no_other_attention(raw: RawConfig) -> tuple[int | None, ...]:
    """Full attention in all layers; `attn_type_list`, if present, must have 1 (softmax) for
    each."""
    windows, types = no_windows(raw), raw.get("attn_type_list")
    if types is not None and types != [1] * len(windows):
        raise ValueError(
            f"attn_type_list = {_short(types)} in config.json must say 1 for each of "
            f"{len(windows)} layers: use another checkpoint"
        )
    return windows


def linear_by_type(raw: RawConfig) -> frozenset[int]:
    """Linear-attention layers by `layer_types`; if it is missing, all but every n-th, where n is
    `full_attention_interval`."""
    num_layers, types = int(raw["num_hidden_layers"]), raw.get("layer_types")
    if types is None:
        period = _period(raw, "full_attention_interval")
        return frozenset(index for index in range(num_layers) if (index + 1) % period)
    return _layers_of(types, "linear_attention", num_layers)


def windows_by_layer(raw: RawConfig) -> tuple[int | None, ...]:
    """Sliding windows, if `use_sliding_window` is set, in the layers that `layer_types` names, or
    from layer `max_window_layers` on."""
    windows = switched_window(raw)
    types = raw.get("layer_types")
    if types is None:
        first = int(raw["max_window_layers"])
        return (None,) * min(first, len(windows)) + windows[first:]
    sliding = _layers_of(types, "sliding_attention", len(windows))
    return tuple(window if index in sliding else None for index, window in enumerate(windows))


def _layers_of(types: Sequence[str], kind: str, num_layers: int) -> frozenset[int]:
    """Layers whose entry in `layer_types` is `kind`; all others must be full_attention."""
    if len(types) != num_layers or not set(types) <= {"full_attention", kind}:
        raise ValueError(
            f"layer_types = {_short(types)} in config.json must say full_attention or "
            f"{kind} for each of {num_layers} layers: repair it"
        )
    return frozenset(index for index, said in enumerate(types) if said == kind)


def _period(raw: RawConfig, key: str) -> int:
    """Value of a key that names a period of layers; a positive integer."""
    period = raw[key]
    if type(period) is not int or period < 1:
        raise ValueError(
            f"{key} = {_short(period)} in config.json must be a positive integer where there are "
            "no layer_types: repair it"
        )
    return period


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def with_alpha(raw: RawConfig) -> RawConfig:
    """Translates `alpha` of Hunyuan's dynamic rope scaling to the larger base of the rotary
    embedding that it stands for at all sequence lengths."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    table = dict(raw.get(key) or {})
    alpha, kind = table.pop("alpha", None), table.pop("rope_type", table.pop("type", None))
    if alpha is None:
        return raw
    dim = int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])
    if type(alpha) not in (int, float) or alpha <= 0 or kind != "dynamic" or dim <= 2:
        raise ValueError(
            f"{key}.alpha {alpha!r:.40} of kind {kind!r:.40} in config.json is not supported: it "
            "must be positive, of kind dynamic; use another checkpoint"
        )
    for without_effect in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        table.pop(without_effect, None)
    theta = float(table.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    table.update(rope_type="default", rope_theta=theta * alpha ** (dim / (dim - 2)))
    return {**raw, key: table}
