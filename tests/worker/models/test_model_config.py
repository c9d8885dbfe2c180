"""config.json: both layouts of rope parameters, defaults, limits, and errors that name the key."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from worker.models.config.checkpoint import block_hash_salt, resolve_checkpoint, weight_files
from worker.models.config.model_config import ModelConfig, load_model_config
from worker.models.config.multimodal import SIZES
from worker.protocol.retry import may_heal

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "vocab_size": 100,
}


GRANITE = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    return tmp_path


def load(folder: Path, **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in {**BASE, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(raw))
    return load_model_config(str(folder))


def test_defaults(folder: Path) -> None:
    config = load(folder)
    assert config.head_dim == 8
    assert config.num_kv_heads == 2
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)
    assert (config.rms_norm_eps, config.max_model_len) == (1e-6, 256)
    assert not config.tie_word_embeddings
    assert not config.qkv_bias


def test_kv_heads_default_to_heads(folder: Path) -> None:
    assert load(folder, num_key_value_heads="absent").num_kv_heads == 8
    assert load(folder, num_key_value_heads=None).num_kv_heads == 8


def test_qwen3_head_dim_defaults_to_128(folder: Path) -> None:
    assert load(folder, architectures=["Qwen3ForCausalLM"]).head_dim == 128


def test_both_rope_layouts_say_the_same(folder: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    before = load(folder, rope_theta=5e5, rope_scaling=scaling)
    since = load(folder, rope_parameters={**scaling, "rope_theta": 5e5})
    assert before.rope == since.rope
    assert since.rope.kind == "llama3"
    assert since.max_model_len == 256


def test_stretched_lengths(folder: Path) -> None:
    linear = {"type": "linear", "factor": 2.0}
    assert load(folder, rope_scaling=linear).max_model_len == 512
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert load(folder, rope_scaling=dynamic).max_model_len == 256
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}
    assert load(folder, rope_scaling=yarn).max_model_len == 800


def test_longrope_is_served_within_its_original_length(folder: Path) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    phi: dict[str, Any] = {
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
    }
    config = load(folder, rope_scaling=scaling, **phi)
    assert config.max_model_len == 64
    assert config.rope.short_factors == (1.0, 2.0)
    assert config.rope.attention_factor == pytest.approx((1 + 2 / 6) ** 0.5)
    with pytest.raises(
        ValueError, match=r"rope_scaling\.short_factor .* must have 4 numbers, .* got 2"
    ):
        load(folder, rope_scaling=scaling, **phi | {"partial_rotary_factor": 1.0})
    with pytest.raises(ValueError, match=r"original_max_position_embeddings .* at least 2, got 1"):
        load(folder, rope_scaling=scaling, **phi | {"original_max_position_embeddings": 1})
    with pytest.raises(
        ValueError, match=r"rope_scaling\.short_factor .* must be a list of positive"
    ):
        load(folder, rope_scaling={**scaling, "short_factor": "all"}, **phi)


def test_a_window_counts_in_sequences_that_exceed_it(folder: Path) -> None:
    config = load(folder, architectures=["MistralForCausalLM"], sliding_window=100)
    assert config.max_model_len == config.resolve_max_model_len(None) == 256
    assert config.windows_within(256) == config.windows_within(101) == (100, 100)
    assert config.windows_within(100) == (0, 0)


def test_a_window_caps_the_length_of_block_diffusion(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load(
        folder,
        architectures=["SDARForCausalLM"],
        head_dim=16,
        sliding_window=100,
        use_sliding_window=True,
        max_window_layers=1,
        block_size=4,
        mask_token_id=5,
    )
    assert config.max_model_len == 100
    assert "from 256 to 100" in caplog.text
    assert config.resolve_max_model_len(60) == 60
    with pytest.raises(ValueError, match=r"--max-model-len 101 .*sliding_window 100"):
        config.resolve_max_model_len(101)


def test_sliding_window_null_or_unused(folder: Path) -> None:
    mistral = load(folder, architectures=["MistralForCausalLM"], sliding_window=None)
    qwen2 = load(folder, architectures=["Qwen2ForCausalLM"], sliding_window=100)
    used = load(
        folder,
        architectures=["Qwen2ForCausalLM"],
        sliding_window=100,
        use_sliding_window=True,
        max_window_layers=1,
    )
    beyond = load(
        folder,
        architectures=["Qwen2ForCausalLM"],
        sliding_window=100,
        use_sliding_window=True,
        max_window_layers=2,
    )
    windows = [config.windows_within(256) for config in (mistral, qwen2, used, beyond)]
    assert windows == [(0, 0), (0, 0), (0, 100), (0, 0)]


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "awq"}},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
        {"final_logit_softcapping": 30.0},
        {"logits_scaling": 8.0},
        {"layer_types": ["linear_attention", "full_attention"]},
        {"num_experts": 8},
        {"num_hidden_layers": 10_001},
        {"architectures": ["GPT2LMHeadModel"]},
        {"hidden_size": "absent"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_refusals_name_the_key(folder: Path, changes: dict[str, Any]) -> None:
    name = next(iter(changes))
    if name == "rope_parameters":
        name = "partial_rotary_factor"
    with pytest.raises(ValueError, match=name):
        load(folder, **changes)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("residual_multiplier", True, "a non-negative number"),
        ("embedding_multiplier", "12", "a non-negative number"),
        ("logits_scaling", -8.0, "a non-negative number"),
        ("attention_bias", "false", "true or false"),
        ("attention_bias", 0, "true or false"),
        ("hidden_size", 64.0, "a positive integer"),
        ("num_hidden_layers", 20_000, "an integer from 1 to 10000"),
        ("hidden_act", "gelu", '"silu" or "swish"'),
        ("is_causal", False, "true"),
        ("partial_rotary_factor", 0.5, "1"),
        ("num_experts", 8, "0 or 1"),
        ("rope_scaling", [], "an object"),
    ],
)
def test_an_unsupported_value_is_named_with_the_supported_ones(
    folder: Path, key: str, value: Any, allowed: str
) -> None:
    given = f"{key} = {json.dumps(value)} in config.json"
    message = re.escape(f"{given} is not supported: it must be {allowed}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        load(folder, **GRANITE, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_head_dim", 16),
        ("norm_type", "layer"),
        ("use_rotary_pos_emb", False),
        ("use_cla", True),
        ("add_classification_head", True),
    ],
)
def test_hunyuan_keys_with_other_values_are_rejected(folder: Path, key: str, value: object) -> None:
    """`attention_head_dim` repeats the size of a head; the other keys are in each config.json, and
    refer to what no released model uses."""
    hunyuan = {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "model_type": "hunyuan_v1_dense",
        "attention_head_dim": 8,
        "norm_type": "rms",
        "use_rotary_pos_emb": True,
        "use_cla": False,
        "add_classification_head": False,
    }
    assert load(folder, **hunyuan).head_dim == 8
    with pytest.raises(ValueError, match=f"^{key} "):
        load(folder, **hunyuan | {key: value})


def test_a_required_key(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"vocab_size is missing .* add it; it must be a positive"):
        load(folder, vocab_size="absent")


def test_layers_that_read_the_caches_of_earlier_ones(folder: Path) -> None:
    """The last ones of the same type before all of them."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"] * 2
    gemma = {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 6, "layer_types": kinds}
    config = load(folder, **gemma, num_kv_shared_layers=2)
    assert config.cache_sources == {4: 1, 5: 1}, "the last layer has full attention"
    assert load(folder, **gemma).cache_sources is None
    for too_many in (5, 6, 9):
        with pytest.raises(ValueError, match=f"num_kv_shared_layers {too_many} .* is too large"):
            load(folder, **gemma, num_kv_shared_layers=too_many)
    with pytest.raises(ValueError, match=r"^vocab_size_per_layer_input 99 .* at least .* 100"):
        load(folder, **gemma, vocab_size_per_layer_input=99)
    load(folder, **gemma, vocab_size_per_layer_input=99, hidden_size_per_layer_input=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("intermediate_size", [128, 256]),
        ("intermediate_size", [128]),
        ("activation_sparsity_pattern", [0.5]),
        ("activation_sparsity_pattern", [0.5, 1.0]),
        ("altup_num_inputs", 3),
    ],
)
def test_gemma3n_refuses_layers_of_several_sizes(folder: Path, key: str, value: object) -> None:
    gemma = {"architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 0}
    config = load(folder, **gemma, intermediate_size=[128, 128])
    assert config.intermediate_size == 128
    assert config.extra is not None
    assert config.extra["activation_sparsity_pattern"] == [0.0, 0.0]
    with pytest.raises(ValueError, match=f"^{key} = "):
        load(folder, **{**gemma, key: value})


@pytest.mark.parametrize("key", ["_anything", "num_beam_groups", "early_stopping", "typical_p"])
def test_harmless_keys(folder: Path, key: str) -> None:
    """Bookkeeping and generation keys that older versions of transformers wrote, also nested."""
    load(folder, **{key: 3}, rope_scaling={"rope_type": "linear", "factor": 2.0, "_a": 3})


def test_layer_types_are_read_of_every_family(folder: Path) -> None:
    """transformers 5 writes them for models without windows, too."""
    load(folder, layer_types=["full_attention"] * 2, mlp_layer_types=["dense"] * 2)
    with pytest.raises(ValueError, match=r"^layer_types"):
        load(folder, layer_types=["full_attention"])
    with pytest.raises(ValueError, match="mlp_layer_types"):
        load(folder, mlp_layer_types=["dense", "sparse"])


@pytest.mark.parametrize(
    "name",
    ["hf_quant_config.json", "quantize_config.json", "quant_config.json", "adapter_config.json"],
)
def test_a_file_that_says_otherwise_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("{}")
    with pytest.raises(ValueError, match=re.escape(name)):
        load(folder)


def test_weights_are_downloaded_when_the_configuration_is_supported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_weights: list[bool] = []

    def download(name: str, files: list[str], ignored: list[str]) -> Path:
        with_weights.append("*.safetensors" in files)
        return folder

    monkeypatch.setattr("worker.models.config.checkpoint.download", download)
    (folder / "config.json").write_text(json.dumps({**BASE, "architectures": ["Foo"]}))
    with pytest.raises(ValueError, match="Foo"):
        load_model_config("some/model")
    assert with_weights == [False]
    (folder / "config.json").write_text(json.dumps(BASE))
    assert load_model_config("some/model").folder == folder
    assert with_weights == [False, False, True]


def test_an_adapter_alone_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="serve its base model with --enable-lora"):
        load_model_config(str(tmp_path))


def test_mistral_s_format_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ValueError, match=r"params\.json .* use a checkpoint in the format of"):
        load_model_config(str(tmp_path))


def test_neutral_values_pass(folder: Path) -> None:
    load(folder, pretraining_tp=4, logits_scaling=1.0, partial_rotary_factor=1.0, num_experts=0)


def test_eos_token_ids(folder: Path) -> None:
    assert load(folder).eos_token_ids == (2,)
    assert load(folder, eos_token_id=None).eos_token_ids == ()
    assert load(folder, eos_token_id=[3, 4]).eos_token_ids == (3, 4)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load(folder, eos_token_id=3).eos_token_ids == (3, 5, 6)
    assert load(folder, eos_token_id=[6, 4]).eos_token_ids == (6, 4, 5)


def test_salt_names_the_checkpoint(folder: Path) -> None:
    def salt(**settings: Any) -> str:
        return block_hash_salt(load(folder, **settings).folder)

    salts = {salt(), salt()}
    assert len(salts) == 1
    salts.add(salt(vocab_size=101))
    salts.add(block_hash_salt(folder, weights=False))
    (folder / "quantize_config.json").write_text("{}")
    salts.add(block_hash_salt(folder))
    assert len(salts) == 4


@pytest.mark.parametrize("place", [0, 1, 77_777, 199_998, 199_999])
def test_salt_distinguishes_fine_tunes(folder: Path, place: int) -> None:
    """Even if a single weight differs, and regardless of digests computed from the file before."""
    load(folder)
    path, salts = folder / "model.safetensors", set()
    for value in (0, 1):
        content = bytearray(200_000)
        content[place] = value
        path.write_bytes(content)
        salts.add(block_hash_salt(folder))
    assert len(salts) == 2


def test_salt_is_the_same_wherever_the_files_are(folder: Path, tmp_path: Path) -> None:
    load(folder)
    (copy := tmp_path / "copy").mkdir()
    for path in folder.iterdir():
        if path.is_file():
            shutil.copyfile(path, copy / path.name)
    assert block_hash_salt(copy) == block_hash_salt(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"a": 3}',
        b'{"a": {"data_offsets": [-9, 4], "dtype": "U8", "shape": [4]}}',
        b'{"a": {"data_offsets": [0, 4000], "dtype": "U8", "shape": [4000]}}',
        b'{"a": {"data_offsets": [0], "dtype": "U8", "shape": [1]}}',
    ],
)
def test_a_forged_header_has_a_salt_too(folder: Path, header: bytes) -> None:
    """Loading rejects it."""
    load(folder)
    path = folder / "model.safetensors"
    start = len(header).to_bytes(8, "little") + header
    salts = set()
    for data in (b"12345678", b"12345679"):
        path.write_bytes(start + data)
        salts.add(block_hash_salt(folder))
    assert len(salts) == 2


def test_unusable_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_checkpoint(str(tmp_path))
    with pytest.raises(ValueError, match="does not exist"):
        resolve_checkpoint(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        weight_files(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"is missing the weight files model-1\.safetensors"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "sub/model.safetensors",
        "/tmp/model.safetensors",
        "..\\model.safetensors",
        "model.bin",
        ".safetensors",
        "model.safetensors\n",
        "a\0.safetensors",
        "",
        7,
        None,
    ],
)
def test_an_index_names_weights_beside_it_alone(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for path in (folder, folder / "sub", tmp_path):
        (path / "model.safetensors").write_bytes(b"12345678")
    (folder / "model.bin").write_bytes(b"12345678")
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model.safetensors", "b": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (weight_files, block_hash_salt, lambda path: resolve_checkpoint(str(path))):
        with pytest.raises(ValueError, match=r"safetensors files next to it") as refused:
            read(folder)
        assert not may_heal(refused.value)


@pytest.mark.parametrize("index", [{}, {"weight_map": ["model.safetensors"]}])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="has no weight_map"):
        weight_files(tmp_path)


def test_offline_hub_name_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        resolve_checkpoint("nobody/nothing")


LLAVA: dict[str, Any] = {
    "architectures": ["LlavaNextForConditionalGeneration"],
    "model_type": "llava_next",
    "text_config": {"model_type": "mistral", "max_position_embeddings": 256},
}


def test_keys_of_the_text_model_take_precedence_over_those_beside_it(tmp_path: Path) -> None:
    text = {**LLAVA["text_config"], "vocab_size": 300, "rms_norm_eps": 1e-3}
    beside = {"vocab_size": 200, "rms_norm_eps": 1e-6, "num_hidden_layers": 3}
    config = ModelConfig.parse({**LLAVA, **beside, "text_config": text}, tmp_path)
    assert (config.vocab_size, config.rms_norm_eps, config.num_layers) == (300, 1e-3, 3)
    with pytest.raises(ValueError, match="attention_bias = true"):
        ModelConfig.parse({**LLAVA, "attention_bias": True}, tmp_path)


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_that_a_text_config_lacks_are_those_of_its_class(kind: str) -> None:
    config = transformers.CONFIG_MAPPING[kind]()
    assert {key: getattr(config, key) for key in SIZES[kind]} == SIZES[kind]


def test_an_error_has_the_spelling_of_config_json(folder: Path) -> None:
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    with pytest.raises(ValueError, match=r'^num_local_experts = "many"'):
        load(folder, **experts, num_local_experts="many")


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("XverseForCausalLM", "xverse"), ("AquilaForCausalLM", "aquila"), ("LLaMAForCausalLM", None)],
)
def test_llama_under_other_names(architecture: str, kind: str | None, folder: Path) -> None:
    config = load(folder, architectures=[architecture], model_type=kind)
    assert config.architecture == "LlamaForCausalLM"
