"""Mutations of features that config.json does not control."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import Activation, ExpertChoice, Norm, Routing, choose_experts, linear
from kernels.gated_delta_rule.reference import delta_inputs
from tests.support.checkpoints.specimen import Mutation, Patch
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.glm4 import SandwichLayer
from worker.models.architectures.gpt_oss import GptOssMoe
from worker.models.layers.attention import Attention, AttentionTraits
from worker.models.layers.moe import MoeMLP
from worker.models.layers.norms import LayerNorm, RMSNorm
from worker.models.layers.wide_norm import WideQueryKeyNorm


@contextmanager
def broken(folder: Path, mutation: Mutation, copy: Path) -> Iterator[Path]:
    """Folder of a checkpoint without a feature: the original folder with patched code, or a copy
    with a different config.json."""
    if isinstance(mutation, Patch):
        module, path = mutation.target.split(":")
        *owners, attribute = path.split(".")
        owner = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(owner, attribute, mutation.value)
            yield folder
        return
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    text = config.get("text_config", config)
    assert all(text.get(key) != value for key, value in mutation.items())
    text.update(mutation)
    (copy / "config.json").write_text(json.dumps(config))
    yield copy


@contextmanager
def swapped_for(block: Any, **parts: Any) -> Iterator[None]:
    """Replaces some parts of a block."""
    kept = {part: getattr(block, part) for part in parts}
    try:
        for part, other in parts.items():
            setattr(block, part, other)
        yield
    finally:
        for part, own in kept.items():
            setattr(block, part, own)


def _without(block: Any, parts: tuple[str, ...], forward: Any, args: tuple[Any, ...]) -> Any:
    """Output of a block without some of its parts."""
    with swapped_for(block, **dict.fromkeys(parts)):
        return forward(block, *args)


def _without_score_bias(self: GptOssMoe, *args: Any) -> Any:
    with swapped_for(self._router, bias=None):
        return _CLAMPED(self, *args)


def _swapped_norms(self: SandwichLayer, *args: Any) -> Any:
    """Swaps the norms after the two blocks."""
    first, second, third, fourth = norms = self.norms
    self.norms = [first, fourth, third, second]
    try:
        return _SANDWICH(self, *args)
    finally:
        self.norms = norms


def _keep_the_mean(
    x: torch.Tensor, residual: torch.Tensor | None, norms: tuple[Norm], eps: float, **_: Any
) -> tuple[tuple[torch.Tensor], torch.Tensor]:
    """Replaces LayerNorm with root-mean-square norms with biases."""
    total = x if residual is None else x + residual
    normed = torch.nn.functional.rms_norm(total, total.shape[-1:], norms[0].weight, eps)
    bias = norms[0].bias
    return (normed if bias is None else normed + bias,), total


def _choose_without_bias(
    scores: torch.Tensor, bias: torch.Tensor, routing: Routing, gate: torch.Tensor | None
) -> ExpertChoice:
    return choose_experts(scores, None, routing, gate)


def _norm_of_heads(self: WideQueryKeyNorm, *both: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Normalizes each head separately with its own weights."""
    return tuple(
        torch.nn.functional.rms_norm(x, x.shape[-1:], eps=self._eps) * weight.view(x.shape[1:])
        for x, weight in zip(both, self._weights, strict=True)
    )


def with_open_gate(self: MoeMLP, *inputs: torch.Tensor) -> torch.Tensor:
    """Adds the shared expert without a gate, as in other families."""
    names = self._names
    self._names = dataclasses.replace(names, shared_gate="")
    try:
        return _EXPERTS(self, *inputs)
    finally:
        self._names = names


def always_rotating(**traits: Any) -> AttentionTraits:
    return AttentionTraits(**{**traits, "rotates": True})


def _with_heads_by_turns(*args: Any) -> Any:
    """Interleaves the value heads that share a key head."""
    inputs, layer = _DELTA_INPUTS(*args), args[-1]
    num_heads = len(layer.log_rate)
    turns = torch.arange(num_heads).view(layer.num_key_heads, -1).T.flatten()
    return inputs._replace(q=inputs.q[:, turns], k=inputs.k[:, turns])


def _last_input_alone(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    own = inputs[..., weight.shape[1] - 1 :, :]
    return torch.nn.functional.silu(own * weight[:, -1])


def _delta_inputs(**change: Any) -> Patch:
    """Changes decays or update rates."""

    def inputs(*args: Any) -> Any:
        own = _DELTA_INPUTS(*args)
        return own._replace(**{key: make(getattr(own, key)) for key, make in change.items()})

    return Patch(target="kernels.gated_delta_rule.reference:delta_inputs", value=inputs)


_DELTA_INPUTS = delta_inputs
_LAYER_NORM = LayerNorm.norm
_SANDWICH, _ATTENTION, _EXPERTS = SandwichLayer.forward, Attention.forward, MoeMLP.forward
_CLAMPED = GptOssMoe.forward
IN_HALVES = Patch(
    target="worker.models.layers.attention:ColumnParallelLinear.reorder", value=lambda *_: 0
)
"""Rotates halves of dimensions, like Llama."""
NO_QKV_BIAS = Patch(
    target="worker.models.layers.attention:ColumnParallelLinear.forward",
    value=lambda self, x: linear(x, self._packed),
)
NO_HEAD_NORMS = Patch(
    target="worker.models.layers.attention:Attention.forward",
    value=lambda self, *args: _without(self, ("q_norm", "k_norm"), _ATTENTION, args),
)
SWAPPED_POST_NORMS = Patch(
    target="worker.models.architectures.olmo:PostNormLayer.norm_names",
    value=("post_feedforward_layernorm", "post_attention_layernorm"),
)
WIDE_NORMS_OF_HEADS = Patch(
    target="worker.models.layers.wide_norm:WideQueryKeyNorm.forward", value=_norm_of_heads
)
NO_ROUTER_BIAS = Patch(target="worker.models.layers.moe:choose_experts", value=_choose_without_bias)
SWAPPED_SANDWICH = Patch(
    target="worker.models.architectures.glm4:SandwichLayer.forward", value=_swapped_norms
)
NO_NAMES = Patch(
    target="worker.models.config.multimodal:TensorNames.internal_name", value=lambda _, name: name
)
NO_NORM_OFFSET = Patch(
    target="worker.models.architectures.decoder:RMSNorm",
    value=lambda size, eps, options, offset: RMSNorm(size, eps, options),
)
NO_EMBEDDING_SCALE = Patch(
    target="worker.models.architectures.gemma:GemmaForCausalLM.embed", value=DecoderModel.embed
)
SILU = Patch(target="worker.models.architectures.gemma:GELU", value=Activation("silu"))
NO_SHARED_EXPERT = Patch(
    target="worker.models.layers.moe:MoeMLP.forward",
    value=lambda self, *args: _without(self, ("_shared",), _EXPERTS, args),
)
NO_SINKS = Patch(
    target="worker.models.layers.attention:Attention.forward",
    value=lambda self, *args: _without(self, ("_sinks",), _ATTENTION, args),
)
NO_EXPERT_BIASES = Patch(
    target="worker.models.architectures.gpt_oss:GptOssMoe.forward",
    value=lambda self, *args: _without(self, ("_biases",), _CLAMPED, args),
)
NO_SCORE_BIAS = Patch(
    target="worker.models.architectures.gpt_oss:GptOssMoe.forward",
    value=_without_score_bias,
)
OPEN_GATE = Patch(
    target="worker.models.layers.attention:Attention._gated", value=lambda self, x, gate: x
)
NO_UNIT_LENGTH = Patch(target="kernels.gated_delta_rule.reference:unit_length", value=lambda x: x)
NO_TAPS = Patch(
    target="kernels.gated_delta_rule.reference:causal_convolution", value=_last_input_alone
)
NO_DECAY = _delta_inputs(decay=torch.zeros_like)
WHOLE_SHARE = _delta_inputs(share=torch.ones_like)
UNSCALED_QUERIES = _delta_inputs(q=lambda q: q * q.shape[-1] ** 0.5)
HEADS_BY_TURNS = Patch(
    target="kernels.gated_delta_rule.reference:delta_inputs",
    value=_with_heads_by_turns,
)
NO_NORM_BIAS = Patch(
    target="worker.models.layers.norms:LayerNorm.norm",
    value=lambda self: _LAYER_NORM(self)._replace(bias=None),
)
RMS_FOR_LAYER_NORM = Patch(target="worker.models.layers.norms:fused_add_norm", value=_keep_the_mean)
