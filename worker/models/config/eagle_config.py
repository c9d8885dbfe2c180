"""Configuration of EAGLE-3 heads, from the config.json of their own checkpoint. Does not import
torch.

EAGLE-3: arXiv 2503.01840. Keys and defaults are those of vLLM, SpecForge, TorchSpec, ModelOpt
and speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from worker.models.config.checkpoint import find_shape, read_json, resolve_checkpoint
from worker.models.config.family import FamilyConfig, Layers
from worker.models.config.latent_family import LatentFamilyConfig
from worker.models.config.model_config import ModelConfig
from worker.models.config.multimodal import TensorNames
from worker.models.config.schema import (
    Count,
    No,
    One,
    RawConfig,
    Yes,
    architectures,
    only,
    read_fields,
    short,
    words,
)
from worker.models.config.vendors.deepseek import NEXT_LAYERS, TRAINING
from worker.models.config.vendors.meta import LlamaConfig

_LLAMA_HEADS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_LATENT_HEADS = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
_SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
"""Values of `architectures` written by speculators; these checkpoints have the layer's keys in a
separate object."""
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_TENSORS = TensorNames(
    renamed=(
        ("model.midlayer.", "layers.0."),
        ("midlayer.", "layers.0."),
        ("model.", ""),
    ),
    skipped=("t2d",),  # the inverse of d2t, as a mask
)


class EagleKeys(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Keys of config.json that any EAGLE-3 head may have, besides those of its decoder layer."""

    draft_vocab_size: Count | None = None
    target_hidden_size: Count | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    use_aux_hidden_state: Yes = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    use_input_layernorm_in_first_layer: Yes = True
    use_last_layernorm: Yes = True
    use_mtp_layernorm: No = False
    parallel_draft_step: One = 1
    """Number of tokens that the head predicts at once."""


_HARMLESS = words(
    """
    draft_model_type embed_requires_grad has_no_defaults_at_init modal_type next_layer_regular
    num_aux_hidden_states parallel_draft_heads_num_layers target_model_type
    """
)
"""Keys that have no effect in heads of one layer that predict one token."""


class LlamaLayer(LlamaConfig):
    """Keys of a decoder layer with Llama's attention."""

    harmless = LlamaConfig.harmless | _HARMLESS | words("use_sliding_window")

    num_hidden_layers: Annotated[Layers, only(1)] = 1


class LatentLayer(LatentFamilyConfig):
    """Keys of a decoder layer with latent attention (MLA). Keys of experts have no effect, since
    the layer has an MLP."""

    architecture = _LATENT_HEADS[0]
    model_types = ("deepseek_v3",)
    harmless = (
        TRAINING
        | NEXT_LAYERS
        | _HARMLESS
        | words(
            """
            first_k_dense_replace moe_intermediate_size moe_layer_freq n_group n_routed_experts
            n_shared_experts norm_topk_prob num_experts_per_tok routed_scaling_factor scoring_func
            topk_group topk_method
            """
        )
    )

    num_hidden_layers: Annotated[Layers, only(1)] = 1
    max_position_embeddings: Count = 4096


def _read(raw: RawConfig) -> tuple[EagleKeys, FamilyConfig]:
    """Reads the content of config.json: the head's own keys and those of its decoder layer, which
    may also be in the objects `eagle_config` and `transformer_layer_config`; raises ValueError like
    `FamilyConfig.read`, and for other kinds of heads."""
    supported = (*_LLAMA_HEADS, *_LATENT_HEADS, *_SPECULATORS)
    names = architectures(raw)
    if not set(names) & {*supported}:
        raise ValueError(
            f"architectures {names} in config.json are not supported as an EAGLE-3 head: use a "
            f"checkpoint of one of {', '.join(supported)}, or --speculative-method draft for a "
            "complete model"
        )
    merged = {key: raw[key] for key in raw if not key.startswith("speculators_")}
    layer = merged.pop("transformer_layer_config", None) or {}
    eagle = merged.pop("eagle_config", None) or {}
    if not isinstance(layer, dict) or not isinstance(eagle, dict):
        raise ValueError(
            "eagle_config and transformer_layer_config in config.json must be objects: fix them"
        )
    merged = {**layer, **merged, **eagle}
    fields = EagleKeys.__struct_fields__
    own = {key: merged.pop(key) for key in fields if key in merged}
    kind = LatentLayer if set(names) & {*_LATENT_HEADS} else LlamaLayer
    family = kind.read({**merged, "model_type": kind.model_types[0]})
    return read_fields(EagleKeys, own, frozenset()), family


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig:
    """An EAGLE-3 head: it predicts the token after the next one from hidden states between layers
    of the model (taps) and the embedding of the next token."""

    head: ModelConfig
    """Sizes of the head's decoder layer, the head's folder and its tensor names."""
    taps: tuple[int, ...]
    """Layers of the model before which hidden states are read; layers are numbered as in vLLM."""
    target_hidden_size: int
    """Hidden size of the model."""
    draft_vocab_size: int
    """Number of tokens that the head can predict."""
    has_embedding: bool
    """Whether the head has an embedding; otherwise it uses the model's."""
    has_lm_head: bool
    """Whether the head has an LM head; otherwise it uses the model's."""
    norm_before_residual: bool
    """Whether the residual of the head's layer starts from the normalized hidden states."""
    norm_before_fc: bool
    """Whether the concatenated taps are normalized before the projection."""
    fc_norm: bool
    """Whether each tap is normalized before the projection."""
    norm_output: bool
    """Whether the next prediction starts from the output of the final norm, rather than from its
    input."""

    @property
    def is_reduced(self) -> bool:
        """Whether the head predicts only some tokens of the vocabulary; `d2t` maps its token ids to
        the model's."""
        return self.draft_vocab_size < self.head.vocab_size


def read_eagle(checkpoint: str, model: ModelConfig, *, weights: bool = True) -> EagleConfig:
    """Reads the configuration of an EAGLE-3 head, and checks that it was trained for `model`.

    Args:
        checkpoint: folder or Hub repository of the head.
        model: the model that the head drafts for.
        weights: whether the head's weights are also needed.

    Raises:
        Unavailable: there is no such folder, or the Hub is unreachable.
        ValueError: the head is not supported, or belongs to another model.
    """
    folder = resolve_checkpoint(checkpoint, weights=False)
    raw = read_json(folder / "config.json")
    try:
        keys, layer = _read(raw)
        head = ModelConfig.of_family(layer, raw, folder, tensors=_TENSORS)
        if weights:
            head = replace(head, folder=resolve_checkpoint(checkpoint))
        config = _of(keys, head, model)
        _check(config, model)
    except ValueError as error:
        raise ValueError(f"--speculative-model {checkpoint}: {error}") from error
    return config


def _of(keys: EagleKeys, head: ModelConfig, model: ModelConfig) -> EagleConfig:
    taps, count = keys.eagle_aux_hidden_state_layer_ids, model.num_layers
    if taps is None:
        taps = [2, count // 2, count - 3]
    flags: Mapping[str, Any] = msgspec.structs.asdict(keys)
    return EagleConfig(
        head=head,
        taps=tuple(taps),
        target_hidden_size=keys.target_hidden_size or head.hidden_size,
        draft_vocab_size=keys.draft_vocab_size or head.vocab_size,
        has_embedding=find_shape(head.folder, "embed_tokens.weight") is not None,
        has_lm_head=find_shape(head.folder, "lm_head.weight") is not None,
        **{name: flags[name] for name in _FLAGS},
    )


def _check(eagle: EagleConfig, model: ModelConfig) -> None:
    """Raises ValueError if a head does not fit a model."""
    head = eagle.head
    pairs = {
        "target_hidden_size": (eagle.target_hidden_size, model.hidden_size),
        "vocab_size": (head.vocab_size, model.vocab_size),
    }
    for key, (own, other) in pairs.items():
        if own != other:
            raise ValueError(
                f"{key} = {own}, but the model's {key.removeprefix('target_')} is {other}: use a "
                "head that was trained for this model"
            )
    if not eagle.taps or any(not 0 <= tap < model.num_layers for tap in eagle.taps):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids = {short(list(eagle.taps))} must be a list of layer "
            f"indices in [0, {model.num_layers - 1}]: use a head that was trained for this model"
        )
    if eagle.draft_vocab_size > head.vocab_size:
        raise ValueError(
            f"draft_vocab_size = {eagle.draft_vocab_size} exceeds vocab_size = {head.vocab_size} "
            "in config.json: fix it"
        )
    if head.quantization is not None:
        raise ValueError("quantized heads are not supported: use the unquantized head")
    for name, has, is_needed in (
        ("embed_tokens", eagle.has_embedding, head.hidden_size != model.hidden_size),
        ("lm_head", eagle.has_lm_head, head.hidden_size != model.hidden_size or eagle.is_reduced),
    ):
        if is_needed and not has and find_shape(head.folder, ".weight") is not None:
            raise ValueError(
                f"{name}.weight is missing from the head, and the model's {name} has a different "
                "size: download the head again"
            )
