"""Schemas of Gemma (huggingface.co/google). Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import (
    FULL,
    SLIDING,
    AlternatingFamilyConfig,
    FamilyConfig,
    HeadSizes,
    Layers,
    table,
)
from worker.models.config.moe_config import MoeConfig
from worker.models.config.multimodal import VISION_AND_PROJECTOR, MultimodalConfig, TensorNames
from worker.models.config.schema import (
    Count,
    Index,
    No,
    Number,
    RawConfig,
    Yes,
    short,
    words,
)


def shared_caches(kinds: tuple[str, ...], num_shared: int) -> dict[int, int] | None:
    """The last `num_shared` layers, each with the layer whose KV cache it reads: the last layer of
    the same type that has its own cache. None if `num_shared` is 0.

    Raises:
        ValueError: no layer of some type has its own cache.
    """
    own = kinds[: max(0, len(kinds) - num_shared)]
    if set(own) != set(kinds):
        raise ValueError(
            f"num_kv_shared_layers {num_shared} in config.json is too large: the other layers (of "
            f"{len(kinds)}) must include each type, {' and '.join(sorted(set(kinds)))}; fix it"
        )
    last = {kind: index for index, kind in enumerate(own)}
    return {index: last[kinds[index]] for index in range(len(own), len(kinds))} or None


def unused_keys_and_values(sources: dict[int, int] | None) -> tuple[str, ...]:
    """Tensor-name prefixes of keys and values in layers that read other layers' caches; released
    checkpoints have them for all layers."""
    return tuple(
        f"model.layers.{index}.self_attn.{part}."
        for index in sources or ()
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    )


class GemmaConfig(FamilyConfig):
    """Schema of Gemma 1."""

    architecture = "GemmaForCausalLM"
    model_types = ("gemma",)
    implementation = "gemma:GemmaForCausalLM"

    max_position_embeddings: Count = 8192
    head_dim: Count | None = 256
    num_key_value_heads: Count | None = 16
    tie_word_embeddings: bool = True
    eos_token_id: Any = 1
    attention_bias: bool = False
    hidden_act: Literal["gelu", "gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    """Activation of the MLP; both names refer to the tanh approximation of GELU."""
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"


class Gemma2Config(AlternatingFamilyConfig):
    """Gemma 2: sliding windows in every other layer, and soft caps."""

    architecture = "Gemma2ForCausalLM"
    model_types = ("gemma2",)
    implementation = "gemma:Gemma2ForCausalLM"
    harmless = frozenset({"sliding_window_size"})
    extra_keys = ("query_pre_attn_scalar", "final_logit_softcapping")

    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = True
    eos_token_id: Any = 1
    attention_bias: bool = False
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Number = 256
    attn_logit_softcapping: Number | None = 50.0
    final_logit_softcapping: Number | None = 30.0
    sliding_window: Index | None = 4096
    sliding_window_pattern: Index | str = 2

    def attention_cap(self) -> float:
        """Soft cap of attention scores (by tanh)."""
        return self.attn_logit_softcapping or 0.0


class Gemma3Config(AlternatingFamilyConfig):
    """The language model of Gemma 3: sliding windows in five out of six layers, with a separate
    rotary embedding, and QK norm."""

    architecture = "Gemma3ForCausalLM"
    model_types = ("gemma3_text",)
    implementation = "gemma:Gemma2ForCausalLM"
    window_theta = "rope_local_base_freq"
    extra_keys = ("query_pre_attn_scalar", "final_logit_softcapping")

    vocab_size: Count = 262208
    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    max_position_embeddings: Count = 131072
    tie_word_embeddings: bool = True
    eos_token_id: Any = 1
    attention_bias: bool = False
    use_qk_norm: Yes = True
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    rope_theta: Number = 1000000.0
    rope_local_base_freq: Number = 10000.0
    query_pre_attn_scalar: Number = 256
    attn_logit_softcapping: Number | None = None
    final_logit_softcapping: Number | None = None
    sliding_window: Index | None = 4096
    sliding_window_pattern: Index | str = 6

    def attention_cap(self) -> float:
        """Soft cap of attention scores (by tanh)."""
        return self.attn_logit_softcapping or 0.0


class Gemma4Config(FamilyConfig, kw_only=True):
    """The language model of Gemma 4, dense or with experts: every sixth layer and the last one have
    different heads and a different rotary embedding; E2B and E4B have per-layer embeddings, and
    layers that share keys and values."""

    architecture = "Gemma4ForCausalLM"
    model_types = ("gemma4_text",)
    implementation = "gemma4:Gemma4ForCausalLM"
    layer_kinds = (FULL, SLIDING)
    window_theta = "rope_theta"
    extra_keys = (
        *("attention_k_eq_v", "final_logit_softcapping", "use_double_wide_mlp"),
        *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    )
    top_k_key = "top_k_experts"

    vocab_size: Count = 262144
    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    global_head_dim: Count = 512
    num_global_key_value_heads: Count | None = None
    per_layer_config: dict[str, Any] | None = None
    """Per-layer heads, as written by transformers 5.23."""
    attention_k_eq_v: bool = False
    max_position_embeddings: Count = 131072
    tie_word_embeddings: bool = True
    eos_token_id: Any = 1
    attention_bias: bool = False
    use_qk_norm: Yes = True
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    rope_parameters: dict[str, Any] = table(
        full_attention={
            "rope_type": "proportional",
            "rope_theta": 1000000.0,
            "partial_rotary_factor": 0.25,
        },
        sliding_attention={"rope_type": "default", "rope_theta": 10000.0},
    )
    final_logit_softcapping: Number | None = None
    sliding_window: Count | None = 512
    enable_moe_block: bool = False
    num_experts: Count | None = None
    top_k_experts: Count | None = None
    moe_intermediate_size: Count | None = None
    hidden_size_per_layer_input: Index = 256
    vocab_size_per_layer_input: Count = 262144
    num_kv_shared_layers: Index = 0
    use_double_wide_mlp: bool = False
    use_bidirectional_attention: Literal["vision"] = "vision"

    def layer_kind(self, index: int) -> str:
        """Full attention in every sixth layer."""
        return SLIDING if (index + 1) % 6 else FULL

    def kinds_of_layers(self) -> tuple[str, ...]:
        """Type of each layer; the last one always has full attention."""
        return (*FamilyConfig.kinds_of_layers(self)[:-1], FULL)

    def window(self) -> int:
        """Sliding window in tokens."""
        if self.sliding_window is None:
            raise ValueError(
                "sliding_window = null in config.json is not supported: set it to a positive "
                "integer"
            )
        return self.sliding_window

    def full_heads(self) -> HeadSizes:
        """Heads of full-attention layers: from `per_layer_config` if set, otherwise from
        `global_head_dim` and, if keys are reused as values, `num_global_key_value_heads`."""
        if self.per_layer_config is not None:
            return self._heads_by_layer(self.per_layer_config)
        kv_heads = self.num_key_value_heads
        if self.attention_k_eq_v and self.num_global_key_value_heads is not None:
            kv_heads = self.num_global_key_value_heads
        return HeadSizes(
            head_dim=self.global_head_dim, num_kv_heads=kv_heads or self.num_attention_heads
        )

    def _heads_by_layer(self, tables: dict[str, Any]) -> HeadSizes:
        """Heads of full-attention layers in `per_layer_config`, which must be equal in all of these
        layers."""
        full = [layer for layer, kind in enumerate(self.kinds_of_layers()) if kind == FULL]
        first = next(iter(tables.values()), None)
        sizes = {"head_dim": self.head_dim, "num_key_value_heads": self.num_key_value_heads}
        if (
            sorted(int(layer) for layer in tables if layer.isdecimal()) != full
            or len(tables) != len(full)
            or not isinstance(first, dict)
            or not first.keys() <= sizes.keys()
            or any(type(size) is not int or size < 1 for size in first.values())
            or any(other != first for other in tables.values())
        ):
            raise ValueError(
                f"per_layer_config = {short(tables)} in config.json is not supported: it must set "
                "the same head_dim and num_key_value_heads for every full-attention layer and for "
                "no other layer; use another checkpoint"
            )
        sizes.update(first)
        return HeadSizes(
            head_dim=sizes["head_dim"] or self.head_size(),
            num_kv_heads=sizes["num_key_value_heads"] or self.num_attention_heads,
        )

    def derive(self) -> None:
        """Raises ValueError if the table of per-layer embeddings lacks tokens."""
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            raise ValueError(
                f"vocab_size_per_layer_input {self.vocab_size_per_layer_input} in config.json must "
                f"be at least vocab_size {self.vocab_size}: fix it"
            )

    def cache_sources(self) -> dict[int, int] | None:
        """The last layers, and the earlier layers whose KV caches they read."""
        return shared_caches(self.kinds_of_layers(), self.num_kv_shared_layers)

    def skipped_tensors(self) -> tuple[str, ...]:
        """Tensor-name prefixes of keys and values in layers that read other layers' caches."""
        unused = unused_keys_and_values(self.cache_sources())
        return (*FamilyConfig.skipped_tensors(self), *unused)

    def moe(self) -> MoeConfig | None:
        """Experts, in parallel with the MLP, in all layers or in none."""
        if not self.enable_moe_block:
            return None
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            if getattr(self, key) is None:
                raise ValueError(
                    f"{key} is missing from config.json: set it to a positive integer, as "
                    "enable_moe_block requires"
                )
        return MoeConfig(
            num_experts=self.num_experts or 0,
            top_k=self.top_k_experts or 0,
            intermediate_size=self.moe_intermediate_size or 0,
        )


class Gemma4UnifiedConfig(Gemma4Config, kw_only=True):
    """The language model of Gemma 4 12B: dense Gemma 4, without an encoder for images and audio."""

    architecture = "Gemma4UnifiedForCausalLM"
    model_types = ("gemma4_unified_text",)

    max_position_embeddings: Count = 262144
    sliding_window: Count | None = 1024
    enable_moe_block: No = False
    hidden_size_per_layer_input: Literal[0] = 0


class DiffusionGemmaConfig(Gemma4Config, kw_only=True):
    """The language model of DiffusionGemma: Gemma 4 with experts, which computes known tokens
    causally, and canvases in both directions."""

    architecture = "DiffusionGemmaForBlockDiffusion"
    model_types = ("diffusion_gemma",)
    implementation = "diffusion_gemma:DiffusionGemmaForBlockDiffusion"
    skipped = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")

    final_logit_softcapping: Number | None = 30.0
    attention_k_eq_v: Yes = True
    enable_moe_block: Yes = True
    num_experts: Count
    top_k_experts: Count
    moe_intermediate_size: Count
    hidden_size_per_layer_input: Literal[0] = 0
    num_kv_shared_layers: Literal[0] = 0
    use_double_wide_mlp: No = False
    canvas_length: Count = 256

    @classmethod
    def prepare(cls, raw: RawConfig) -> RawConfig:
        """The keys of the language model, together with the top-level keys that apply to it."""
        return super().prepare(_DIFFUSION_GEMMA.text_config(raw))

    def canvas(self) -> int | None:
        """Number of tokens per canvas."""
        return self.canvas_length


class Gemma3nConfig(FamilyConfig, kw_only=True):
    """The language model of Gemma 3n: four streams of hidden states (AltUp), low-rank residuals
    (Laurel), sparse activations in the first MLPs, per-layer embeddings, and shared KV caches in
    the last layers."""

    architecture = "Gemma3nForCausalLM"
    model_types = ("gemma3n_text",)
    implementation = "gemma3n:Gemma3nForCausalLM"
    harmless = words("altup_coef_clip altup_lr_multiplier query_pre_attn_scalar")
    """Keys without effect: the first two only concern training, and the third sets a scale of
    scores that the model does not use."""
    layer_kinds = (FULL, SLIDING)
    window_theta = "rope_local_base_freq"
    extra_keys = (
        *("final_logit_softcapping", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
        *("altup_num_inputs", "altup_active_idx", "altup_correct_scale", "laurel_rank"),
        "activation_sparsity_pattern",
    )

    vocab_size: Count = 262400
    hidden_size: Count = 2048
    intermediate_size: Count = 16384
    num_hidden_layers: Layers = 35
    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 2
    head_dim: Count | None = 256
    max_position_embeddings: Count = 32768
    tie_word_embeddings: bool = True
    eos_token_id: Any = 1
    attention_bias: bool = False
    use_qk_norm: Yes = True
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    rope_theta: Number = 1000000.0
    rope_local_base_freq: Number = 10000.0
    final_logit_softcapping: Number | None = 30.0
    sliding_window: Count = 512
    hidden_size_per_layer_input: Count = 256
    vocab_size_per_layer_input: Count = 262144
    num_kv_shared_layers: Index = 15
    altup_num_inputs: Literal[4] = 4
    altup_active_idx: Literal[0, 1, 2, 3] = 0
    altup_correct_scale: bool = True
    laurel_rank: Count = 64
    activation_sparsity_pattern: list[float] | None = None
    """Fraction of an MLP's activations that are set to 0, per layer; exact if the gate values are
    normally distributed."""

    @classmethod
    def prepare(cls, raw: RawConfig) -> RawConfig:
        """config.json with the key names of the schema, with one size for the MLPs of all
        layers."""
        keys = super().prepare(raw)
        sizes = keys.get("intermediate_size")
        if not isinstance(sizes, list) or not sizes:
            return keys
        layers = keys.get("num_hidden_layers", 35)
        if len(sizes) != layers or any(size != sizes[0] for size in sizes):
            raise ValueError(
                f"intermediate_size = {short(sizes)} in config.json is not supported: it must be "
                f"the same positive integer for each of the {layers} layers"
            )
        return {**keys, "intermediate_size": sizes[0]}

    def derive(self) -> None:
        """Sets the sparsity of the layers' MLPs if it is missing; raises ValueError if it is
        malformed."""
        count, pattern = self.num_hidden_layers, self.activation_sparsity_pattern
        if pattern is None:
            num_sparse = 10 if count > 10 else 0
            pattern = [0.95] * num_sparse + [0.0] * (count - num_sparse)
        if len(pattern) != count or not all(0 <= share < 1 for share in pattern):
            raise ValueError(
                f"activation_sparsity_pattern = {short(pattern)} in config.json must have a "
                f"sparsity in [0, 1) for each of the {count} layers: fix it"
            )
        self.activation_sparsity_pattern = pattern

    def layer_kind(self, index: int) -> str:
        """Full attention in every fifth layer."""
        return SLIDING if (index + 1) % 5 else FULL

    def window(self) -> int:
        """Sliding window in tokens."""
        return self.sliding_window

    def cache_sources(self) -> dict[int, int] | None:
        """The last layers, and the earlier layers whose KV caches they read."""
        return shared_caches(self.kinds_of_layers(), self.num_kv_shared_layers)

    def skipped_tensors(self) -> tuple[str, ...]:
        """Tensor-name prefixes of keys and values in layers that read other layers' caches."""
        unused = unused_keys_and_values(self.cache_sources())
        return (*FamilyConfig.skipped_tensors(self), *unused)


FAMILIES = (
    *(GemmaConfig, Gemma2Config, Gemma3Config, Gemma3nConfig),
    *(Gemma4Config, Gemma4UnifiedConfig, DiffusionGemmaConfig),
)
_GEMMA3N_KEYS = words(
    """
    vision_config audio_config image_token_id audio_token_id boi_token_id eoi_token_id boa_token_id
    eoa_token_id vision_soft_tokens_per_image audio_soft_tokens_per_image
    """
)
_ENCODERS = tuple(
    f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
)
_GEMMA4_KEYS = words(
    """
    vision_config audio_config image_token_id video_token_id audio_token_id boi_token_id
    eoi_token_id boa_token_id eoa_token_id eoa_token_index vision_soft_tokens_per_image
    """
)
_DIFFUSION_GEMMA = MultimodalConfig(
    architectures=(DiffusionGemmaConfig.architecture,),
    model_type="diffusion_gemma",
    texts={"diffusion_gemma_text": DiffusionGemmaConfig.architecture},
    keys=_GEMMA4_KEYS,
    tensors=TensorNames(),
)
MULTIMODAL = (
    MultimodalConfig(
        architectures=("Gemma3ForConditionalGeneration",),
        model_type="gemma3",
        texts={"gemma3_text": "Gemma3ForCausalLM"},
        keys=words(
            """
            vision_config image_token_index image_token_id boi_token_index boi_token_id
            eoi_token_index eoi_token_id mm_tokens_per_image
            """
        ),
        tensors=VISION_AND_PROJECTOR,
    ),
    MultimodalConfig(
        architectures=("Gemma3nForConditionalGeneration",),
        model_type="gemma3n",
        texts={"gemma3n_text": "Gemma3nForCausalLM"},
        keys=_GEMMA3N_KEYS,
        tensors=TensorNames(
            renamed=(("model.language_model.", "model."),),
            skipped=_ENCODERS,
        ),
    ),
    MultimodalConfig(
        architectures=("Gemma4ForConditionalGeneration",),
        model_type="gemma4",
        texts={"gemma4_text": "Gemma4ForCausalLM"},
        keys=_GEMMA4_KEYS,
        tensors=TensorNames(
            renamed=(("model.language_model.", "model."),),
            skipped=_ENCODERS,
        ),
    ),
    MultimodalConfig(
        architectures=("Gemma4UnifiedForConditionalGeneration",),
        model_type="gemma4_unified",
        texts={"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
        keys=_GEMMA4_KEYS,
        tensors=TensorNames(
            renamed=(("model.language_model.", "model."),),
            skipped=("model.vision_embedder.", "model.embed_vision.", "model.embed_audio."),
        ),
    ),
)
