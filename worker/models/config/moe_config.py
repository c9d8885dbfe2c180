"""Configuration of a mixture of experts (MoE), from config.json. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from worker.models.config.checkpoint import positive_integer


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Experts of a model: number, size, layers that have them, and routing."""

    num_experts: int
    num_chosen: int
    """Number of experts per token (top-k)."""
    intermediate_size: int
    """Intermediate size of an expert."""
    dense_layers: frozenset[int]
    """Layers with a single MLP; a set that is only tested for membership."""
    normalize: bool
    """Whether weights of a token's experts are normalised to sum to 1."""
    sigmoid: bool = False
    """Whether scores are sigmoids, and not a softmax over all experts."""
    has_bias: bool = False
    """Whether a bias per expert is added to scores for the choice, and not for the weights."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Number of groups that experts are chosen from: those with the largest sums of scores."""
    num_summed: int = 2
    """Number of a group's largest scores that are summed."""
    scale: float = 1.0
    """Factor of the weights."""
    shared_size: int = 0
    """Intermediate size of the shared expert, which all tokens use; 0 for none."""
    num_idle: int = 0
    """Number of zero-computation experts, which return their input; they come after the others."""

    @property
    def num_scored(self) -> int:
        """Number of experts that the router scores."""
        return self.num_experts + self.num_idle


def parse_qwen3_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of Qwen3-MoE and SDAR-MoE, and of Qwen2-MoE, which has a shared expert."""
    step = int(raw.get("decoder_sparse_step", 1))
    if step < 1:
        raise ValueError(f"decoder_sparse_step {step} in config.json must be positive: repair it")
    dense = frozenset(
        layer
        for layer in range(int(raw["num_hidden_layers"]))
        if layer in (raw.get("mlp_only_layers") or ()) or (layer + 1) % step
    )
    return _checked(
        MoeConfig(
            num_experts=int(raw["num_experts"]),
            num_chosen=int(raw["num_experts_per_tok"]),
            intermediate_size=int(raw["moe_intermediate_size"]),
            dense_layers=dense,
            normalize=bool(raw["norm_topk_prob"]),
            shared_size=int(raw.get("shared_expert_intermediate_size", 0)),
        )
    )


def parse_qwen3_5_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of Qwen3.5, whose weights are always normalised; in all layers."""
    return parse_qwen3_moe({**raw, "norm_topk_prob": True})


def parse_llada2_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of LLaDA 2, whose router is that of Ling 2."""
    meant = {
        "n_routed_experts": raw["num_experts"],
        "n_shared_experts": raw["num_shared_experts"] or 0,
    }
    has_bias = bool(raw["moe_router_enable_expert_bias"])
    return replace(parse_glm4_moe({**raw, **meant}), has_bias=has_bias)


def parse_deepseek_v2_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of DeepSeek V2, chosen from all, or from the groups with the best experts."""
    method, size = raw["topk_method"], positive_integer(raw, "moe_intermediate_size")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"topk_method {method!r:.40} in config.json is not supported (supported: greedy, "
            "group_limited_greedy): use another checkpoint"
        )
    num_groups, num_chosen_groups = 1, 1
    if method == "group_limited_greedy":
        num_groups, num_chosen_groups = (
            positive_integer(raw, key) for key in ("n_group", "topk_group")
        )
    return _checked(
        MoeConfig(
            num_experts=positive_integer(raw, "n_routed_experts"),
            num_chosen=positive_integer(raw, "num_experts_per_tok"),
            intermediate_size=size,
            dense_layers=frozenset(range(int(raw["first_k_dense_replace"]))),
            normalize=bool(raw.get("norm_topk_prob", False)),
            num_groups=num_groups,
            num_chosen_groups=num_chosen_groups,
            num_summed=1,
            scale=float(raw["routed_scaling_factor"]),
            shared_size=size * int(raw["n_shared_experts"]),
        )
    )


def parse_deepseek_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of the first DeepSeek MoE, chosen from all by softmax."""
    meant = {"topk_method": "greedy", "routed_scaling_factor": 1.0}
    meant["n_shared_experts"] = raw["n_shared_experts"] or 0
    return parse_deepseek_v2_moe({**raw, **meant})


def parse_glm4_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of GLM-4.5 and DeepSeek V3, which have the same router."""
    size = int(raw["moe_intermediate_size"])
    return _checked(
        MoeConfig(
            num_experts=int(raw["n_routed_experts"]),
            num_chosen=int(raw["num_experts_per_tok"]),
            intermediate_size=size,
            dense_layers=frozenset(range(int(raw["first_k_dense_replace"]))),
            normalize=bool(raw["norm_topk_prob"]),
            sigmoid=True,
            has_bias=True,
            num_groups=int(raw["n_group"]),
            num_chosen_groups=int(raw["topk_group"]),
            scale=float(raw["routed_scaling_factor"]),
            shared_size=size * int(raw["n_shared_experts"]),
        )
    )


def parse_mistral4_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of Mistral 4: as of GLM-4.5, but scored by softmax and without bias."""
    return replace(parse_glm4_moe(raw), sigmoid=False, has_bias=False)


def parse_hunyuan_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of Hunyuan, with a shared expert, in all layers."""
    size = int(raw["intermediate_size"])
    if raw.get("moe_intermediate_size") not in (None, size):
        raise ValueError(
            f"moe_intermediate_size {raw['moe_intermediate_size']!r:.40} in config.json is not "
            f"supported: it must be intermediate_size ({size})"
        )
    return _checked(
        MoeConfig(
            num_experts=positive_integer(raw, "num_experts"),
            num_chosen=positive_integer(raw, "moe_topk"),
            intermediate_size=size,
            dense_layers=frozenset(),
            normalize=True,
            shared_size=size,
        ),
        chosen="moe_topk",
    )


def parse_glm4_moe_lite(raw: dict[str, Any]) -> MoeConfig:
    """Experts of GLM-4.7-Flash, whose layers transformers lists in `mlp_layer_types`."""
    num_layers, first = int(raw["num_hidden_layers"]), raw.get("first_k_dense_replace")
    dense = frozenset(range(min(num_layers, 1 if first is None else int(first))))
    kinds = raw.get("mlp_layer_types")
    if kinds is not None:
        if len(kinds) != num_layers or any(kind not in ("dense", "sparse") for kind in kinds):
            raise ValueError(
                f"mlp_layer_types = {kinds!r:.80} in config.json must say dense or sparse for each "
                f"of {num_layers} layers: repair it"
            )
        listed = frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
        if first is not None and listed != dense:
            raise ValueError(
                f"mlp_layer_types and first_k_dense_replace {first} in config.json say two things: "
                "repair it"
            )
        dense = listed
    return replace(parse_glm4_moe({**raw, "first_k_dense_replace": 0}), dense_layers=dense)


def parse_solar_open_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of Solar Open: as of GLM-4.5, in all layers."""
    return parse_glm4_moe({**raw, "first_k_dense_replace": 0})


def parse_olmo_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of FlexOlmo, in all layers."""
    mixtral = parse_mixtral_moe({**raw, "num_local_experts": raw["num_experts"]})
    return replace(mixtral, normalize=bool(raw["norm_topk_prob"]))


def parse_longcat_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of LongCat-Flash, in parallel with each pair of layers."""
    return _checked(
        MoeConfig(
            num_experts=positive_integer(raw, "n_routed_experts"),
            num_chosen=positive_integer(raw, "moe_topk"),
            intermediate_size=positive_integer(raw, "expert_ffn_hidden_size"),
            dense_layers=frozenset(),
            normalize=False,
            has_bias=True,
            scale=float(raw["routed_scaling_factor"]),
            num_idle=int(raw["zero_expert_num"]),
        ),
        chosen="moe_topk",
    )


def parse_mixtral_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of Mixtral, in all layers."""
    return _checked(
        MoeConfig(
            num_experts=int(raw["num_local_experts"]),
            num_chosen=int(raw["num_experts_per_tok"]),
            intermediate_size=int(raw["intermediate_size"]),
            dense_layers=frozenset(),
            normalize=True,
        )
    )


def parse_minicpm_moe(raw: dict[str, Any]) -> MoeConfig | None:
    """Experts of MiniCPM-MoE: as of Mixtral, with other keys; None for a MiniCPM without."""
    if not raw.get("num_experts"):
        return None
    if raw.get("num_experts_per_tok") is None:
        raise ValueError("num_experts_per_tok is missing in config.json: restore it")
    return parse_mixtral_moe({**raw, "num_local_experts": raw["num_experts"]})


def parse_ernie_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of ERNIE 4.5, in every n-th layer of a range."""
    num_layers, size = int(raw["num_hidden_layers"]), int(raw["moe_intermediate_size"])
    first, last = int(raw["moe_layer_start_index"]), raw["moe_layer_end_index"]
    step = int(raw["moe_layer_interval"])
    if type(last) is not int or step < 1:
        raise ValueError(
            f"moe_layer_end_index {last!r:.20} and moe_layer_interval {step} in config.json must "
            "be a layer's number and a positive one: repair it"
        )
    last = num_layers - 1 if last == -1 else last
    sparse = {layer for layer in range(first, last + 1) if not (layer + 1) % step}
    return _checked(
        MoeConfig(
            num_experts=int(raw["moe_num_experts"]),
            num_chosen=int(raw["moe_k"]),
            intermediate_size=size,
            dense_layers=frozenset(range(num_layers)) - sparse,
            normalize=True,
            has_bias=True,
            shared_size=size * int(raw["moe_num_shared_experts"]),
        ),
        chosen="moe_k",
    )


def parse_gemma4_moe(raw: dict[str, Any]) -> MoeConfig | None:
    """Experts of Gemma 4, in parallel with the MLP, in all layers or in none."""
    if not raw["enable_moe_block"]:
        return None
    return _checked(
        MoeConfig(
            num_experts=positive_integer(raw, "num_experts"),
            num_chosen=positive_integer(raw, "top_k_experts"),
            intermediate_size=positive_integer(raw, "moe_intermediate_size"),
            dense_layers=frozenset(),
            normalize=True,
        ),
        chosen="top_k_experts",
    )


def parse_llama4_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of Llama 4, in the layers that `moe_layers` lists, or in every n-th, where n is
    `interleave_moe_layer_step`."""
    num_layers, size = int(raw["num_hidden_layers"]), positive_integer(raw, "intermediate_size")
    sparse = raw["moe_layers"]
    if sparse is None:
        step = positive_integer(raw, "interleave_moe_layer_step")
        sparse = range(step - 1, num_layers, step)
    elif any(type(layer) is not int or not 0 <= layer < num_layers for layer in sparse):
        raise ValueError(
            f"moe_layers = {sparse!r:.80} in config.json must be numbers of layers, from 0 to "
            f"{num_layers - 1}: repair it"
        )
    return _checked(
        MoeConfig(
            num_experts=positive_integer(raw, "num_local_experts"),
            num_chosen=positive_integer(raw, "num_experts_per_tok"),
            intermediate_size=size,
            dense_layers=frozenset(range(num_layers)) - frozenset(sparse),
            normalize=False,
            sigmoid=True,
            shared_size=size,
        )
    )


def parse_minimax_m2_moe(raw: dict[str, Any]) -> MoeConfig:
    """Experts of MiniMax-M2, in all layers."""
    return replace(parse_mixtral_moe(raw), sigmoid=True, has_bias=True)


def _checked(config: MoeConfig, chosen: str = "num_experts_per_tok") -> MoeConfig:
    """Returns the configuration after checks of its numbers; `chosen` is the key of `num_chosen`.

    Raises:
        ValueError: groups do not divide the experts, or more are chosen than there are.
    """
    if config.num_groups < 1 or config.num_experts % config.num_groups:
        raise ValueError(
            f"n_group {config.num_groups} in config.json does not divide num_experts "
            f"({config.num_experts}): repair it"
        )
    allowed = config.num_experts // config.num_groups * config.num_chosen_groups
    if not 1 <= config.num_chosen <= allowed:
        raise ValueError(f"{chosen} {config.num_chosen} in config.json must be in [1, {allowed}]")
    return config
