"""Configurations of released models: each is read as recorded in verdicts.json, or rejected with a
message that names a key and a remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.effort import IS_LONG
from tests.support.worker.real_configs import (
    README,
    VERDICTS,
    RealConfig,
    load_corpus,
    summary,
    verdict,
)
from worker.models.config.families import FAMILIES, MULTIMODAL
from worker.models.config.model_config import ModelConfig

CORPUS = load_corpus()
EXPECTED: dict[str, dict[str, Any]] = json.loads(VERDICTS.read_text(encoding="utf-8"))
ACCEPTED = [real for real in CORPUS if "accepted" in EXPECTED[real.name]]
REFUSED = [real for real in CORPUS if "refused" in EXPECTED[real.name]]
REMEDY = re.compile(r": .*\b(use|fix|it must (?:be|equal)|merge|remove)\b")


def test_real_configurations_are_read_as_the_table_says() -> None:
    """`make families` updates verdicts.json."""
    found = {real.name: verdict(real) for real in CORPUS}
    changed = {name: said for name, said in found.items() if said != EXPECTED[name]}
    assert changed == {name: EXPECTED[name] for name in changed}


def test_the_table_is_of_these_configurations() -> None:
    assert list(EXPECTED) == [real.name for real in CORPUS]
    assert len(CORPUS) >= 300
    assert summary(EXPECTED) in README.read_text(encoding="utf-8")


def test_errors_name_what_is_there_and_a_remedy() -> None:
    for real in REFUSED:
        reason = EXPECTED[real.name]["refused"]
        keys = [*real.config, *real.config.get("text_config", ())]
        key = next((key for key in keys if re.match(rf"{re.escape(key)}\b", reason)), None)
        file = next((name for name in real.files if name in reason), None)
        assert key or file, (real.name, reason)
        assert REMEDY.search(reason), (real.name, reason)


WITHOUT_RELEASE = {
    "Glm46VForConditionalGeneration",  # GLM-4.6V itself has the classes of GLM-4.1V and 4.5V
    "LlavaOnevisionForConditionalGeneration",
}
"""Multimodal classes of which no released config.json was found, as README.md says."""


def test_each_family_has_a_real_model() -> None:
    read = {EXPECTED[real.name]["accepted"]["architecture"] for real in ACCEPTED}
    wrappers = {name for real in ACCEPTED for name in real.config["architectures"]}
    without = {name for name, one in MULTIMODAL.items() if wrappers.isdisjoint(one.architectures)}
    assert (set(FAMILIES) - read, without) == (set(), WITHOUT_RELEASE), (
        "write config.json down: tests/worker/models/configs/README.md"
    )


def test_families_without_a_public_configuration_are_listed() -> None:
    sources: dict[str, set[str]] = {}
    for real in ACCEPTED:
        family = EXPECTED[real.name]["accepted"]["architecture"]
        sources.setdefault(family, set()).add(real.source)
    assert {name for name, found in sources.items() if found <= {"unverified", "made"}} == {
        "ExaoneMoeForCausalLM",
        "FalconForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "HyperCLOVAXForCausalLM",
        "NemotronForCausalLM",
    }, "change the list of models in README.md as well"


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("stepfun-ai/Step-3.7-Flash (nested)", "stepfun-ai/Step-3.7-Flash"),
        ("openbmb/MiniCPM-o-2_6, the text model", None),
        ("Qwen/Qwen3-8B in transformers 5's spelling", None),
        ("the text of Gemma-4-26B-A4B", None),
    ],
)
def test_changed_configurations_are_no_releases(name: str, release: str | None) -> None:
    assert RealConfig(name=name, source="made", config={}, files={}).release == release


def places(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Paths of the keys of config.json, of its text_config and of its quantization_config, down to
    the description of the weights; and their values. Keys that text_config repeats are only read
    there."""
    for key, value in config.items():
        if key not in config.get("text_config", ()):
            yield (key,), value
        if isinstance(value, dict) and key in ("text_config", *FORMATS):
            if key == "text_config" and FORMATS[0] in config:
                value = {name: value[name] for name in value if name != FORMATS[0]}
            for path, inner in places(value):
                yield (key, *path), inner


FORMATS = ("quantization_config", "config_groups", "group_0", "weights")


def changed(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A configuration with another value at a path."""
    key, *rest = path
    return {**config, key: changed(config[key], tuple(rest), value) if rest else value}


def other_values(value: Any) -> list[Any]:
    """Other values of a key."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, 2 * value + 2]
    if isinstance(value, str):
        return [value + "_else"]
    if isinstance(value, list):
        return [[*value, 0], value[1:]]
    return [{}, {"else": 1}] if isinstance(value, dict) else [True, 3]


IGNORED = {
    "bookkeeping": "_name_or_path _num_mtp_layers transformers_version internal_version "
    "auto_map is_llama_config transformers.js_config _attn_implementation_autoset "
    "_attn_implementation attn_implementation _from_model_config _sliding_window_pattern "
    "custom_pipelines id2label label2id tokenizer_class onnx_safe max_tokenizer_truncation "
    "architectures finetuning_task model_name prefix problem_type task_specific_params "
    "unsloth_version",
    "generation, as transformers 4 wrote it": "bad_words_ids begin_suppress_tokens "
    "decoder_start_token_id diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id "
    "forced_eos_token_id length_penalty min_length no_repeat_ngram_size num_beam_groups num_beams "
    "num_return_sequences output_scores remove_invalid_values repetition_penalty "
    "return_dict_in_generate suppress_tokens temperature top_k top_p typical_p",
    "how weights were quantized": "producer quantization_status observer observer_kwargs "
    "batch_size cache_block_outputs damp_percent dataset max_input_length model_seqlen "
    "module_name_preceding_first_block block_name_to_quantize sym tokenizer true_sequential "
    "global_compression_ratio version scale_dtype zp_dtype",
    "how quantized weights are run": "exllama_config use_exllama use_cuda_fp16 input_activations "
    "kv_cache_scheme",
    "formats that quant_algo or format name": "format config_groups group_0 weights type num_bits "
    "dynamic targets",
    "a block's shape while scales are per block or group": "block_structure group_size",
    "training": "initializer_range attention_dropout embedding_dropout output_dropout ep_size "
    "debug fuse_cross_entropy micro_forward skip_checkpoint router_aux_loss_coef residual_dropout "
    "embd_pdrop resid_pdrop hidden_dropout attn_dropout_prob emb_dropout_prob aux_loss_alpha "
    "seq_aux router_jitter_noise",
    "of images": "image_token_index multimodal_projector_bias projector_hidden_act "
    "spatial_merge_size vision_feature_layer vision_config mm_tokens_per_image boi_token_index "
    "eoi_token_index image_token_id video_token_id vision_token_id vision_start_token_id "
    "vision_end_token_id ignore_index media_placeholder_token_id use_unified_vision_chunk "
    "vision_feature_select_strategy embd_layer img_processor vision_soft_tokens_per_image "
    "downsample_factor",
    "of images too": "image_start_token_id image_end_token_id image_grid_pinpoints boi_token_id "
    "eoi_token_id language_model_only use_image_newline_parameter video_start_token_id "
    "video_end_token_id video_placeholder projector_bias understand_projector_stride "
    "downsample_ratio image_seq_length img_token_compression_config perceiver_config "
    "pixel_shuffle_factor process_image_mode projector_hidden_size scale_factor video_token_index "
    "do_image_splitting encoder_patch_size max_image_tokens max_pixels_tolerance max_tiles "
    "min_image_tokens min_tiles projector_use_layernorm tile_size use_image_special_tokens "
    "use_thumbnail",
    "of sound": "audio_token_id audio_config boa_token_id eoa_token_id eoa_token_index "
    "audio_soft_tokens_per_image",
    "where the text says it itself": "dtype torch_dtype",
    "while layers are listed": "full_attention_interval index_skip_topk_offset index_topk_freq",
    "while a model has no experts": "intermediate_size num_experts_per_tok",
    "of Mamba without a norm, or whose size is given": "mamba_norm_before_gate mamba_expand",
    "beside rope_parameters": "partial_rotary_factor",
    "beside rms_norm_eps": "layer_norm_eps",
    "layers that predict further tokens": "num_nextn_predict_layers use_mtp num_mtp_modules "
    "mtp_transformer_layers mtp_loss_scaling_factor mtp_share_layers mtp_num_hidden_layers "
    "mtp_use_dedicated_embeddings",
    "how transformers runs": "chunk_size_feed_forward fp16 fp32 output_attentions "
    "output_hidden_states pruned_heads return_dict tf_legacy_loss torchscript "
    "use_bfloat16 use_cache pretraining_tp output_router_logits cache_implementation "
    "use_parallel_embedding use_flash_attn _flash_attn_2_enabled bf16 max_length "
    "attention_softmax_in_fp32 "
    "scale_attention_softmax_in_fp32",
    "tokens that are not end tokens": "bos_token_id pad_token_id sep_token_id",
    "while windows are off": "sliding_window use_sliding_window max_window_layers",
    "where rotation is not stretched": "original_max_position_embeddings",
    "less than a window or a chunk is served": "max_position_embeddings seq_length",
    "beyond the length that is served": "use_dynamic_ntk use_logn_attn",
    "where experts are chosen from all": "n_group topk_group",
    "said elsewhere": "global_attn_every_n_layers max_sequence_length model_max_length "
    "sliding_window_pattern sliding_window_size moe_shared_expert_intermediate_size "
    "experts_per_token initial_context_length moe_layer_end_index no_rope_layer_interval "
    "activation_function layer_norm_epsilon apply_residual_connection_post_layernorm rms_norm_eps "
    "share_expert_dim",
}


def test_what_is_ignored_of_accepted_models(tmp_path: Path) -> None:
    """For all other keys, at any level, another value is rejected with an error that names it, or
    changes the configuration."""
    (tmp_path / "config.json").write_text("{}")

    def read(raw: dict[str, Any], path: tuple[str, ...]) -> ModelConfig | None:
        try:
            return ModelConfig.parse(raw, tmp_path)
        except ValueError as error:
            refusals.append((path, raw, str(error)))
            return None

    refusals = list[tuple[tuple[str, ...], dict[str, Any], str]]()
    ignored, tried = set[str](), set[tuple[str, tuple[str, ...], str]]()
    for real in ACCEPTED:
        if real.config.get("quantization_config", {}).get("quant_algo") == "MIXED_PRECISION":
            continue  # it lists its modules in another file
        before = ModelConfig.parse(dict(real.config), tmp_path)
        for path, value in places(real.config):
            case = (before.architecture, path, repr(value))
            if case in tried:
                continue
            tried.add(case)
            values = [{"else": 1}] if path[-1] == "rope_scaling" else other_values(value)
            others = [read(changed(real.config, path, other), path) for other in values]
            ignored |= {path[-1]} if all(other == before for other in others) else set()
    declared = set[str]().union(*(family.harmless for family in FAMILIES.values()))
    assert sorted(ignored - declared) == sorted(set(" ".join(IGNORED.values()).split()) - declared)
    assert len(refusals) > 700
    for path, raw, text in refusals:
        assert any(key in text for key in (*path, *raw, *raw.get("text_config", ()))), (path, text)


STRANGE: list[Any] = [{}, {"a": 1}, "x", "false", [], [[]], -1, 0, True, 1.5, float("nan")]


@pytest.mark.randomized  # with all configurations
def test_a_strange_value_is_rejected_or_harmless(tmp_path: Path) -> None:
    """Raises only ValueError, and converts no value from another type."""
    (tmp_path / "config.json").write_text("{}")
    refusals, tried = list[tuple[str, Any, str]](), set[tuple[str, str]]()
    for real in ACCEPTED if IS_LONG else ACCEPTED[::2]:
        for key in real.config.keys() - {"architectures"}:
            if (real.config["architectures"][0], key) in tried:
                continue
            tried.add((real.config["architectures"][0], key))
            for value in STRANGE:
                try:
                    ModelConfig.parse({**real.config, key: value}, tmp_path)
                except ValueError as error:
                    refusals.append((key, value, str(error)))
    assert len(refusals) > 500
    others = {"block_size": "mask", "n_group": "experts", "moe_num_experts": "moe_k"}
    others["seq_length"] = "max_position_embeddings"
    others["global_attn_every_n_layers"] = "sliding_window_pattern"
    others |= dict.fromkeys(("topk_group", "n_routed_experts"), "num_experts_per_tok")
    others["num_local_experts"] = "num_experts"  # also as an alias of num_experts
    others["num_nextn_predict_layers"] = "layers"  # of which lists are too long without it
    for key, value, reason in refusals:
        assert key in reason or others.get(key, key) in reason, (key, value, reason)


@pytest.mark.parametrize(
    ("key", "value"),
    [("norm_topk_prob", "false"), ("tie_word_embeddings", "false"), ("rms_norm_eps", True)],
)
def test_no_value_counts_as_one_of_another_kind(key: str, value: Any, tmp_path: Path) -> None:
    real = next(real for real in ACCEPTED if "norm_topk_prob" in real.config)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{key} = .* in config.json is not supported: it must be"):
        ModelConfig.parse({**real.config, key: value}, tmp_path)
