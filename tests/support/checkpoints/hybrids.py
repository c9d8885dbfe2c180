"""Checkpoints of families that have layers with a state per request in addition to attention
(convolutions, Mamba-2, Kimi Delta Attention), and mutations that break each of their features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels import KimiGates, choose_experts
from kernels.gated_delta_rule import DeltaInputs
from kernels.kimi_delta_attention.reference import kimi_delta_inputs
from kernels.selective_scan import ScanLayer, selective_scan
from kernels.selective_scan.reference import ScanInputs, scan_inputs
from kernels.short_convolution.reference import convolve
from tests.support.checkpoints.latents import LATENTS
from tests.support.checkpoints.mutations import (
    NO_HEAD_NORMS,
    NO_ROUTER_BIAS,
    NO_SHARED_EXPERT,
    always_rotating,
)
from tests.support.checkpoints.specimen import Mutation, Patch, Specimen
from worker.models.config.mamba_config import MambaConfig

_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_THETA: dict[str, Mutation] = {"theta": {"rope_parameters": {**_ROPE, "rope_theta": 300.0}}}
_CONVOLVE = "kernels.short_convolution.reference:convolve"
_CONVOLUTION: dict[str, Mutation] = {
    "taps": Patch(
        target=_CONVOLVE,
        value=lambda inputs, weight, bias=None: convolve(
            inputs[..., len(weight) - 1 :, :], weight[-1:], bias
        ),
    ),
    "bias of the convolution": Patch(
        target=_CONVOLVE, value=lambda inputs, weight, bias=None: convolve(inputs, weight)
    ),
}


def _scan_inputs(change: Callable[[ScanInputs], ScanInputs]) -> Patch:
    """Changes the inputs of the scan."""
    return Patch(
        target="kernels.selective_scan.reference:scan_inputs",
        value=lambda *args: change(scan_inputs(*args)),
    )


def _kimi_inputs(change: Callable[[DeltaInputs], DeltaInputs]) -> Patch:
    """Changes the inputs of the delta rule."""
    return Patch(
        target="kernels.kimi_delta_attention.reference:kimi_delta_inputs",
        value=lambda *args: change(kimi_delta_inputs(*args)),
    )


def _dense_mlps(tensors: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """Renames dense MLPs, which transformers saves under the released name of experts."""
    renamed = {
        f"block_sparse_moe.{part}_proj.": f"mlp.{part}_proj." for part in ("gate", "up", "down")
    }
    for old, new in renamed.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def _turned(x: torch.Tensor, num_groups: int = 2) -> torch.Tensor:
    """Interleaves heads [T, H, ...] over the groups."""
    order = torch.arange(x.shape[1]).view(num_groups, -1).T.flatten()
    return x[:, order]


def _with_layer(**change: Any) -> Patch:
    """Changes the weights of the scan."""

    def scan(x: Any, steps: Any, layer: ScanLayer, *args: Any, **options: Any) -> Any:
        own = {key: make(getattr(layer, key)) for key, make in change.items()}
        return selective_scan(x, steps, layer._replace(**own), *args, **options)

    return Patch(target="worker.models.layers.mamba:selective_scan", value=scan)


_MAMBA: dict[str, Mutation] = {
    **_CONVOLUTION,
    "decay": _scan_inputs(lambda own: own._replace(decay=torch.zeros_like(own.decay))),
    "B and C": _scan_inputs(lambda own: own._replace(b=own.c, c=own.b)),
    "bias of steps": _with_layer(step_bias=torch.zeros_like),
    "skipped inputs": _with_layer(skip=torch.zeros_like),
    "gate": Patch(target="worker.models.layers.mamba:Mamba2.gate", value=lambda self, out, z: out),
}
_GROUPS = _scan_inputs(lambda own: own._replace(b=_turned(own.b), c=_turned(own.c)))
_NORM_FIRST = Patch(
    target="worker.models.config.vendors.ibm:MambaConfig",
    value=partial(MambaConfig, order="norm first"),
)
_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_GRANITE = {
    "layer_types": _LINEAR,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.25,
    "shared_intermediate_size": 40,
}

_SSM = [0.7, 1.3, 0.8, 1.2, 0.6]
_FALCON = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "num_hidden_layers": 2,
    "rope_parameters": _ROPE,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.7, 0.6],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.4,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": _SSM,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
}

_NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 12,
    "chunk_size": 8,
    "layer_norm_epsilon": 1e-3,
    "time_step_min": 1e-30,
}
"""transformers limits step sizes to `time_step_min` in prompts, but not for single tokens."""

_KIMI = {
    **{key: value for key, value in LATENTS.items() if key != "q_lora_rank"},
    "layer_types": _LINEAR,
    "linear_num_heads": 2,
    "linear_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "num_local_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
}

_LFM2 = {
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_bias": True,
    "norm_eps": 1e-3,
    "rope_parameters": _ROPE,
}
HYBRID_SPECIMENS: dict[str, Specimen] = {
    "lfm2": Specimen(
        name="Lfm2",
        covers=("positions", "shards"),
        settings={**_LFM2, "intermediate_size": 72, "block_multiple_of": 16},
        mutations={
            **_CONVOLUTION,
            "norms of heads": NO_HEAD_NORMS,
            "size of the MLP": {"block_auto_adjust_ff_dim": False},
            "eps": {"norm_eps": 0.1},
            **_THETA,
        },
    ),
    "lfm2-moe": Specimen(
        name="Lfm2Moe",
        settings={
            **_LFM2,
            "conv_L_cache": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.7,
        },
        mutations={
            **_CONVOLUTION,
            "bias of the router": NO_ROUTER_BIAS,
            "number of experts": {"num_experts_per_tok": 2},
            "sum of weights": {"norm_topk_prob": False},
            "scale of experts": {"routed_scaling_factor": 1.0},
        },
    ),
    "granite-4": Specimen(
        name="GraniteMoeHybrid",
        covers=("shards", "functions"),
        settings={
            **_GRANITE,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
        },
        mutations={
            **_MAMBA,
            "groups": _GROUPS,
            "order of gate and norm": _NORM_FIRST,
            "no rotary embedding": {"position_embedding_type": "rope"},
            "number of experts": {"num_experts_per_tok": 2},
            "embedding": {"embedding_multiplier": 1.0},
            "scale of attention": {"attention_multiplier": 0.25},
            "residual": {"residual_multiplier": 1.0},
            "logits": {"logits_scaling": 4.0},
        },
        lacks_head_dim=True,
    ),
    "granite-4-dense": Specimen(
        name="GraniteMoeHybrid",
        is_variant=True,
        settings={
            **_GRANITE,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "rope_parameters": _ROPE,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
        mutations={
            "taps": _CONVOLUTION["taps"],
            "bias of steps": _with_layer(step_bias=torch.zeros_like),
            "eps": {"rms_norm_eps": 0.1},
            **_THETA,
        },
        lacks_head_dim=True,
    ),
    "falcon-h1": Specimen(
        name="FalconH1",
        covers=("shards",),
        settings=_FALCON,
        mutations={
            **_MAMBA,
            **{key: {key: 1.0} for key in _FALCON if key.endswith("_multiplier")},
            "factor of gates": {"mlp_multipliers": [1.0, 0.6]},
            "factor of MLPs": {"mlp_multipliers": [0.7, 1.0]},
            **{
                f"factor of {part}": {"ssm_multipliers": [*_SSM[:place], 1.0, *_SSM[place + 1 :]]}
                for place, part in enumerate(("z", "x", "B", "C", "dt"))
            },
            **_THETA,
        },
    ),
    "falcon-h1-norm": Specimen(
        name="FalconH1",
        is_variant=True,
        settings={
            **_FALCON,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "projectors_bias": True,
        },
        mutations={
            "groups": _GROUPS,
            "order of gate and norm": {"mamba_norm_before_gate": False},
            "no norm": {"mamba_rms_norm": False},
        },
    ),
    "nemotron-3": Specimen(
        name="NemotronH",
        covers=("positions", "shards", "experts"),
        settings={
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "num_hidden_layers": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
        mutations={
            **_MAMBA,
            "groups of heads": _GROUPS,
            "activation": Patch(
                target="worker.models.architectures.nemotron_h:squared_relu", value=torch.relu
            ),
            "bias of the router": Patch(
                target="worker.models.architectures.nemotron_h:choose_experts",
                value=lambda scores, bias, *args: choose_experts(scores, None, *args),
            ),
            "number of experts": {"num_experts_per_tok": 2},
            "groups of experts": {"topk_group": 4},
            "sum of weights": {"norm_topk_prob": False},
            "scale of experts": {"routed_scaling_factor": 1.0},
            "rotary embedding": Patch(
                target="worker.models.architectures.nemotron_h:AttentionTraits",
                value=always_rotating,
            ),
            "eps": {"layer_norm_epsilon": 0.1},
        },
    ),
    "kimi-linear": Specimen(
        name="KimiLinear",
        covers=("positions", "shards"),
        settings=_KIMI,
        mutations={
            "taps": _CONVOLUTION["taps"],
            "lengths of keys": Patch(
                target="kernels.kimi_delta_attention.reference:unit_length", value=lambda x: x
            ),
            "scale of queries": _kimi_inputs(lambda own: own._replace(q=own.q * 12**0.5)),
            "no decay": _kimi_inputs(lambda own: own._replace(decay=torch.zeros_like(own.decay))),
            "decays of dimensions": _kimi_inputs(
                lambda own: own._replace(decay=own.decay.mean(-1, keepdim=True).expand(own.q.shape))
            ),
            "step sizes": _kimi_inputs(lambda own: own._replace(share=torch.ones_like(own.share))),
            "gates of outputs": Patch(
                target="worker.models.architectures.kimi_linear:KimiGates",
                value=lambda *gates: KimiGates(*gates)._replace(output=torch.zeros_like(gates[2])),
            ),
            "no rotary embedding": Patch(
                target="worker.models.config.vendors.moonshot:KimiLinearConfig.rotating",
                value=lambda _: None,
            ),
            "eps of norms within attention": Patch(
                target="worker.models.architectures.deepseek:_EPS", value=0.05
            ),
            "eps": {"rms_norm_eps": 0.1},
            "shared expert": NO_SHARED_EXPERT,
            "bias of the router": NO_ROUTER_BIAS,
            "number of experts": {"num_experts_per_token": 2},
            "groups of experts": {"topk_group": 4},
            "sum of weights": {"moe_renormalize": False},
            "scale of experts": {"routed_scaling_factor": 1.0},
        },
        rewrite=_dense_mlps,
        lacks_head_dim=True,
    ),
    "nemotron-h": Specimen(
        name="NemotronH",
        settings={
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "num_hidden_layers": 4,
            "n_groups": 1,
            "use_bias": True,
            "mlp_bias": True,
        },
        mutations={
            "no bias of the convolution": _CONVOLUTION["bias of the convolution"],
            "skipped inputs": _MAMBA["skipped inputs"],
        },
    ),
}
