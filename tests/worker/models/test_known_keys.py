"""No key of config.json changes logits unnoticed: for any value of a key, the reader rejects it or
reads another configuration, or transformers computes the same as before."""

from __future__ import annotations

import copy
import functools
import operator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.initialization import no_init_weights

from tests.support.checkpoints.families import SPECIMENS
from tests.support.checkpoints.specimen import config_class, settings_of, text_config
from tests.support.effort import IS_LONG
from tests.support.worker.real_configs import load_corpus, verdict
from worker.models.config.families import FAMILIES
from worker.models.config.model_config import ModelConfig

pytestmark = pytest.mark.randomized  # with more values
SPECIMEN_OF = {
    specimen.served_architecture: specimen
    for specimen in reversed(SPECIMENS.values())
    if not (specimen.maths or specimen.multimodal or specimen.architecture)
}
"""First specimen of each family that transformers supports."""
ARCHITECTURES = [
    pytest.param(name, marks=pytest.mark.long if specimen.is_variant else ())
    for name, specimen in SPECIMEN_OF.items()
]
RELEASED = {real.config["architectures"][0] for real in load_corpus()}
"""Families that are released themselves; others are text models of multimodal checkpoints."""
TOKENS = torch.arange(3, 51)[None]
THETA = {"rope_theta": 100.0}
YARN = {**THETA, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
ODD = {"FalconForCausalLM": "output_attentions", "NemotronHForCausalLM": "time_step_min"}
"""Keys that change how transformers runs the model, and thereby its logits; they do not describe
the checkpoint. transformers limits step sizes of prompts, but not those of single tokens, to
time_step_min."""

ALSO: list[dict[str, Any]] = [
    {"is_causal": False},
    {"sliding_window": 3},
    {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 2},
    {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1},
    {
        "sliding_window": 3,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    {"rope_parameters": YARN},
    {"rope_parameters": {**YARN, "attention_factor": 1.5}},
    {"rope_parameters": {**YARN, "beta_fast": 4.0}},
    {"rope_parameters": {**YARN, "mscale": 0.5, "mscale_all_dim": 0.8}},
    {"rope_parameters": {**YARN, "truncate": False}},
    {"rope_parameters": {**THETA, "rope_type": "default", "partial_rotary_factor": 0.5}},
    {"rope_parameters": {**THETA, "rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {**THETA, "rope_type": "dynamic", "factor": 2.0}},
    {"hidden_act": "gelu"},
    {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 3,
    },
    {"mlp_only_layers": [0]},
    {"decoder_sparse_step": 2},
]


def raw_config(architecture: str) -> dict[str, Any]:
    """config.json of the family's specimen."""
    raw = text_config(SPECIMEN_OF[architecture]).to_dict()
    return {**raw, "architectures": [architecture]}


def logits(architecture: str, raw: dict[str, Any], state: dict[str, torch.Tensor] | None) -> Any:
    """Logits of transformers, and its weights; None if it cannot load these weights."""
    generator = torch.Generator().manual_seed(5)
    try:
        model_class = getattr(transformers, architecture)
        # Weights loaded later are not initialized, which takes half of the time.
        with nullcontext() if state is None else no_init_weights():
            model = model_class(config_class(SPECIMEN_OF[architecture])(**raw)).float().eval()
        if state is None:
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, 0.2, 0.4, generator=generator)
            state = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(state)
        with torch.no_grad():
            return model(TOKENS, use_cache=False).logits, state
    except Exception:
        return None, state


def other_values(value: Any) -> list[Any]:
    """Two other values of each type; one in `make test`."""
    found: list[Any] = []
    if isinstance(value, bool):
        found = [not value]
    elif isinstance(value, int | float):
        found = [value + 1, 3 * value + 2]
    elif value is None:
        found = [True, 3]
    return found if IS_LONG else found[:1]


def groups(changes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Changes of different keys that can be combined in one model; in `make check-long` each is
    alone, as is always the one with which transformers returns no `logits`."""

    def fit(first: dict[str, Any], second: dict[str, Any]) -> bool:
        alone = IS_LONG or "return_dict" in first or "return_dict" in second
        return not alone and not first.keys() & second.keys()

    found: list[list[dict[str, Any]]] = []
    for change in changes:
        fitting = (group for group in found if all(fit(change, other) for other in group))
        if (group := next(fitting, None)) is None:
            found.append(group := [])
        group.append(change)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_key_is_refused_or_read_or_of_no_effect(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    (tmp_path / "config.json").write_text("{}")

    def read(raw: dict[str, Any]) -> ModelConfig:
        return ModelConfig.parse(raw, tmp_path)

    raw = raw_config(architecture)
    before, (expected, state) = read(raw), logits(architecture, raw, None)
    assert expected is not None
    keys = raw.keys() - {ODD.get(architecture)}
    changes = [{key: value} for key in raw if key in keys for value in other_values(raw[key])]
    unnoticed, refusals = list[dict[str, Any]](), list[tuple[Any, str]]()
    for change in changes + ALSO:
        changed = {**raw, **change}
        try:
            if read(changed) != before:
                continue
        except ValueError as error:
            refusals.append((change, str(error)))
            continue
        unnoticed.append(change)

    def check(group: list[dict[str, Any]]) -> None:
        changed = functools.reduce(operator.or_, group, raw)
        found, _ = logits(architecture, changed, state)
        is_same = found is not None and torch.allclose(found, expected, atol=1e-5)
        if len(group) == 1:
            assert is_same or found is None, group
        elif not is_same:  # one of them, or several together
            for change in group:
                check([change])

    for group in groups(unnoticed):
        check(group)
    assert len(unnoticed) > 5
    assert all(any(key in text for key in raw | change) for change, text in refusals)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_missing_key_means_what_the_class_says(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def read(raw: dict[str, Any]) -> ModelConfig:
        raw = {**raw, "architectures": [architecture]}
        return ModelConfig.parse(raw, tmp_path)

    raw, refusals = raw_config(architecture), dict[str, str]()
    for key in raw:
        shorter = {name: value for name, value in raw.items() if name != key}
        try:
            found = read(shorter)
            expected = read(config_class(SPECIMEN_OF[architecture])(**shorter).to_dict())
        except (
            ValueError,
            StrictDataclassError,
        ) as error:  # required, or the default does not fit the other settings
            refusals[key] = str(error)
        else:
            assert found == expected, key
    assert all(any(name in text for name in raw) for text in refusals.values())
    assert set(refusals) < set(settings_of(SPECIMEN_OF[architecture]))


@pytest.mark.parametrize("architecture", [name for name in SPECIMEN_OF if name in RELEASED])
def test_a_released_model_is_the_same_when_transformers_saves_it_anew(
    architecture: str, tmp_path: Path
) -> None:
    """Its config.json is then in the format of transformers 5, with all defaults written out."""
    (tmp_path / "config.json").write_text("{}")
    models = [real for real in load_corpus() if real.config["architectures"] == [architecture]]
    accepted = [real for real in models if "accepted" in verdict(real)]
    for real in accepted:
        own = copy.deepcopy(dict(real.config))  # transformers changes nested values
        saved = config_class(SPECIMEN_OF[architecture])(**own).to_dict()
        assert ModelConfig.parse(saved, tmp_path) == ModelConfig.parse(
            dict(real.config), tmp_path
        ), real.name
    assert accepted


@pytest.mark.parametrize(
    "change",
    [
        {"dual_chunk_attention_config": {"chunk_size": 24, "local_size": 8}},
        {"mask_token_id": 7, "block_size": 4},
        {"model_type": "mixtral"},
        {"rope_scaling": {**YARN, "attn_factor": 0.8, "attention_factor": 1.0}},
        {"rope_scaling": {**YARN, "apply_yarn_scaling": False}},
        {"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}},
        {"attention_bias": True},
        {"embedding_multiplier": 12.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_transformers_ignores_is_refused_too(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    raw = {**raw_config("MistralForCausalLM"), **change}
    name = list(raw.get("rope_scaling", {"": 0}))[-1] or next(iter(change))
    with pytest.raises(ValueError, match=name):
        ModelConfig.parse(raw, tmp_path)


def test_blocks_are_of_families_trained_for_them_alone(tmp_path: Path) -> None:
    """A mask token and blocks make no sense for an autoregressive model."""
    (tmp_path / "config.json").write_text("{}")
    others = [
        real
        for real in load_corpus()
        if (accepted := verdict(real).get("accepted"))
        and "block_size" not in FAMILIES[accepted["architecture"]].__struct_fields__
    ]
    assert len(others) > 100
    for real in others:
        raw = copy.deepcopy(dict(real.config))
        (raw.get("text_config") or raw).update(mask_token_id=7, block_size=4)
        with pytest.raises(ValueError, match=r"block_size = 4|mask_token_id = 7"):
            ModelConfig.parse(raw, tmp_path)


def test_yarn_multiplies_attn_factor(tmp_path: Path) -> None:
    """As in DeepSeek-R1-0528-Qwen3-8B, whose factor cancels yarn's own."""
    (tmp_path / "config.json").write_text("{}")
    rope = {**YARN, "factor": 4.0, "attn_factor": 0.8782488562869419}
    raw = {**raw_config("Qwen3ForCausalLM"), "rope_parameters": rope}
    factor = ModelConfig.parse(raw, tmp_path).rope.attention_factor
    assert factor == pytest.approx(1.0)


def test_dual_chunks_cap_the_length(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    chunks = {"chunk_size": 24, "local_size": 8, "original_max_position_embeddings": 24}
    raw = {**raw_config("Qwen2ForCausalLM"), "dual_chunk_attention_config": chunks}
    assert ModelConfig.parse(raw, tmp_path).max_model_len == 16


def test_windows_by_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def windows(architecture: str, **change: Any) -> tuple[int | None, ...]:
        raw = {**raw_config(architecture), "sliding_window": 9, **change}
        return ModelConfig.parse(raw, tmp_path).windows

    on = {"use_sliding_window": True, "layer_types": None}
    off = {"use_sliding_window": False, "layer_types": None}
    assert windows("LlamaForCausalLM") == (None, None, None)
    assert windows("MistralForCausalLM") == (9, 9, 9)
    assert windows("Qwen2ForCausalLM", **off) == (None, None, None)
    assert windows("Qwen3ForCausalLM", **on, max_window_layers=1) == (None, 9, 9)
    assert windows("Qwen3ForCausalLM", **on, max_window_layers=3) == (None, None, None)
    on_all = {"use_sliding_window": True, "max_window_layers": 9}
    assert windows("Qwen3MoeForCausalLM", **on_all) == (9, 9, 9)
    sdar = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "mask_token_id": 7}
    assert windows("Qwen3ForCausalLM", **sdar, **on, max_window_layers=0) == (9, 9, 9)
