"""Model families, as the reader of config.json knows them, and how keys tell of windows.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.models.checkpoint import positive_integer
from worker.models.moe_config import MoeConfig

RawConfig = dict[str, Any]
"""The content of config.json, with the family's defaults for what is missing."""


def words(names: str) -> frozenset[str]:
    """The keys that a text lists."""
    return frozenset(names.split())


_READ = words(
    """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps
    tie_word_embeddings eos_token_id rope_theta rope_scaling rope_parameters
    original_max_position_embeddings quantization_config compression_config
    """
)
"""Keys that the reader looks at, whatever the family."""

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
pretraining_tp splits the same sums into pieces; max_window_layers is read by those that need it."""

ROUTER_KEYS = words("output_router_logits router_aux_loss_coef")
"""Keys of training that families with experts have."""

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

_UNKNOWN = (
    "it may change the model's mathematics; use another checkpoint, or remove the key if you know "
    "that it does not"
)


def no_windows(raw: RawConfig) -> tuple[int | None, ...]:
    """No windows: transformers ignores `sliding_window` for such a family."""
    return (None,) * int(raw["num_hidden_layers"])


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSizes:
    """Heads of some layers, where they are not those of the others."""

    head_dim: int
    num_kv_heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """A model family: what one value of `architectures` in config.json stands for."""

    model_types: tuple[str, ...]
    """Values of `model_type` that go with it; a checkpoint may also have none."""
    implementation: str
    """Module in `worker.models` and class, "llama:LlamaForCausalLM": a name, since readers of the
    configuration have no torch."""
    defaults: Mapping[str, object]
    """Values of missing keys, as in transformers' configuration class. These keys are known, and
    one whose default is a bool or a float has to be of that kind in config.json."""
    needed: tuple[str, ...] = ()
    """Keys that config.json has to give, since what a missing one means is not supported."""
    own: tuple[str, ...] = ()
    """Keys of `defaults` that its class alone reads, from `ModelConfig.own`."""
    keys: frozenset[str] = frozenset()
    """Further keys that are read, or have no effect in this family alone."""
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Further keys, and the values for which they change nothing."""
    qkv_bias: bool = False
    """Whether the q, k and v projections have biases whatever config.json says."""
    qkv_bias_key: str = "attention_bias"
    """Key that says whether they have."""
    mlp_bias_key: str = "mlp_bias"
    """Key that says whether the projections of the MLP have biases."""
    qk_norm: bool = False
    """Whether each head of q and k is normalised before it rotates."""
    qk_norm_key: str = "use_qk_norm"
    """Key that may say whether they are; none where it is empty."""
    output_bias: str = "attention_bias"
    """Key that says whether attention's output projection has a bias; none where it is empty."""
    query_beta: bool = False
    """Whether rope parameters may say how queries grow with positions."""
    has_sinks: bool = False
    """Whether heads have attention sinks."""
    has_latents: bool = False
    """Whether the keys and values of all heads are computed from one vector per token."""
    mxfp4_experts: bool = False
    """Whether experts may be MXFP4."""
    skips_next_layers: bool = False
    """Whether a checkpoint may hold layers behind the last, which predict further tokens."""
    window_theta: str = ""
    """Key with the base of the rotary embedding in layers with a window, where `rope_parameters`
    does not tell it; empty where all layers rotate alike."""
    skipped: tuple[str, ...] = ()
    """Beginnings of names of tensors that a checkpoint may hold and nothing here needs."""
    windows: Callable[[RawConfig], tuple[int | None, ...]] = no_windows
    """Windows per layer: how many tokens one sees, itself included; None for all before it. A
    family that says nothing has none: where its `keys` lack `sliding_window`, no checkpoint may
    give one."""
    rotating: Callable[[RawConfig], tuple[bool, ...]] | None = None
    """Whether queries and keys rotate, per layer; None where they do in all, or where the class
    tells by the windows."""
    has_chunks: bool = False
    """Whether windows begin at multiples of their length: a token sees its chunk up to itself."""
    full_heads: Callable[[RawConfig], HeadSizes] | None = None
    """Heads of the layers that see all positions; None where all layers' are alike."""
    linear_layers: Callable[[RawConfig], frozenset[int]] | None = None
    """Layers that keep a state of each request in place of keys and values; None where none do."""
    parse_moe: Callable[[RawConfig], MoeConfig | None] | None = None
    """Reads the experts, of which a dense model has none; None for a dense family."""
    translate: Callable[[RawConfig], RawConfig] | None = None
    """Puts config.json, with its defaults, into the words that the reader knows; None where it is
    in them already."""

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
    """The same in all layers."""
    window = raw.get("sliding_window")
    return (None if window is None else int(window),) * int(raw["num_hidden_layers"])


def switched_window(raw: RawConfig) -> tuple[int | None, ...]:
    """The same in all layers, where `use_sliding_window` is set."""
    return one_window(raw) if raw.get("use_sliding_window") else no_windows(raw)


def window_of_types(raw: RawConfig) -> tuple[int | None, ...]:
    """Windows in the layers that `layer_types` names; where it is missing, in all but every n-th,
    where n is `sliding_window_pattern`, and without that in all."""
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
    """Windows in the layers that `layer_types` names, in all but every sixth where it is missing;
    never in the last. There always is a window."""
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
    """Rotation in the layers of which `no_rope_layers` says 1; where it is missing, in all but
    every n-th, where n is `no_rope_layer_interval`."""
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
    """Chunks in the layers that `layer_types` names; where it is missing, in those that rotate."""
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
    """Heads of `global_head_dim` and, where values are keys, `num_global_key_value_heads`; or of
    `per_layer_config`, as transformers 5.23 writes it."""
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
    """Heads that `per_layer_config` gives each layer that sees all positions."""
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
    """`layer_types` may say what is so anyway."""
    windows, types = no_windows(raw), raw.get("layer_types")
    if types is not None and types != ["full_attention"] * len(windows):
        raise ValueError(
            f"layer_types = {_short(types)} in config.json must say full_attention for each of "
            f"{len(windows)} layers: use another checkpoint"
        )
    return windows


def no_other_attention(raw: RawConfig) -> tuple[int | None, ...]:
    """`attn_type_list` may say 1 of every layer: all positions by softmax."""
    windows, types = no_windows(raw), raw.get("attn_type_list")
    if types is not None and types != [1] * len(windows):
        raise ValueError(
            f"attn_type_list = {_short(types)} in config.json must say 1 for each of "
            f"{len(windows)} layers: use another checkpoint"
        )
    return windows


def linear_by_type(raw: RawConfig) -> frozenset[int]:
    """The layers that `layer_types` says are linear; where it is missing, all but every n-th, where
    n is `full_attention_interval`."""
    num_layers, types = int(raw["num_hidden_layers"]), raw.get("layer_types")
    if types is None:
        period = _period(raw, "full_attention_interval")
        return frozenset(index for index in range(num_layers) if (index + 1) % period)
    return _layers_of(types, "linear_attention", num_layers)


def windows_by_layer(raw: RawConfig) -> tuple[int | None, ...]:
    """Windows where `use_sliding_window` is set, in the layers of `layer_types`, or from one layer
    on."""
    windows = switched_window(raw)
    types = raw.get("layer_types")
    if types is None:
        first = int(raw["max_window_layers"])
        return (None,) * min(first, len(windows)) + windows[first:]
    sliding = _layers_of(types, "sliding_attention", len(windows))
    return tuple(window if index in sliding else None for index, window in enumerate(windows))


def _layers_of(types: Sequence[str], kind: str, num_layers: int) -> frozenset[int]:
    """The layers of which `layer_types` says this kind; it must say full_attention of the rest."""
    if len(types) != num_layers or not set(types) <= {"full_attention", kind}:
        raise ValueError(
            f"layer_types = {_short(types)} in config.json must say full_attention or "
            f"{kind} for each of {num_layers} layers: repair it"
        )
    return frozenset(index for index, said in enumerate(types) if said == kind)


def _period(raw: RawConfig, key: str) -> int:
    """Every how many layers one is of another kind."""
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
    """The base of the rotation as `alpha` stretches it, whatever the length of a sequence."""
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
