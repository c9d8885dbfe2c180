"""Config files, `build_app` arguments and command lines describe the same fleets."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.cli.main import build_parser
from cluster.cli.options import add_options, field_docstrings, given_options
from cluster.cli.serve import PER_MODEL, configure
from cluster.config import (
    RENAMED,
    EndpointConfig,
    FleetConfig,
    ServeConfig,
    serve_config_from_mapping,
)
from router.config import AccessConfig, PrefixScoreConfig, RoutingConfig
from worker.config import EngineConfig
from worker.metrics.node import NodeMetricsConfig
from worker.protocol.options import option_values, options_of


def parse(*argv: str) -> ServeConfig:
    return configure(build_parser().parse_args(["serve", *argv]))


def test_origins_have_no_path() -> None:
    with pytest.raises(ValueError, match="--allowed-origins"):
        AccessConfig(allowed_origins=("https://page.example/path",))
    assert AccessConfig(allowed_origins=("*", "http://localhost:3000")).allowed_origins


def test_unknown_parsers_are_rejected() -> None:
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "none"}
    [route] = serve_config_from_mapping({"models": [{"model": "m", **parsers}]}).gateway().models
    assert (route.chat.tool_call_parser, route.chat.reasoning_parser) == ("hermes", "none")
    for name in parsers:
        with pytest.raises(ValueError, match="choose from"):
            serve_config_from_mapping({"models": [{"model": "m", name: "hermit"}]})


def test_flags_reach_the_configuration() -> None:
    config = parse(
        *("some/model", "--num-workers", "2", "--tensor-parallel-size", "2", "--port", "9000"),
        *("--api-key", "one", "--api-key", "two", "--no-enable-prefix-caching"),
        *("--kv-cache-tokens", "4096", "--served-model-name", "shown"),
    )
    (model,) = config.models
    assert model.fleet == FleetConfig(num_workers=2, served_model_name="shown")
    assert model.engine == EngineConfig.of(
        model="some/model",
        tensor_parallel_size=2,
        kv_cache_tokens=4096,
        enable_prefix_caching=False,
    )
    assert config.endpoint == EndpointConfig(
        port=9000, access=AccessConfig(api_keys=("one", "two"))
    )
    assert config.gateway().models[0].name == "shown"


def test_flags_of_vllm_users_reach_the_configuration() -> None:
    config = parse(
        *("some/model", "-tp", "2", "--tokenizer", "some/tokenizer", "--revision", "v1"),
        *("--chat-template", "{{ messages }}", "--generation-config", "vllm"),
        *("--allowed-origins", '["https://a.example", "http://b:1"]', "--root-path", "/llm"),
    )
    gateway = config.gateway()
    [route] = gateway.models
    assert config.models[0].engine.tensor_parallel_size == 2
    assert (route.tokenizer, route.revision) == ("some/tokenizer", "v1")
    assert route.tokenizer_checkpoint == config.models[0].engine.tokenizer_checkpoint
    assert (route.chat.chat_template, route.chat.generation_config) == ("{{ messages }}", "vllm")
    assert gateway.access.allowed_origins == ("https://a.example", "http://b:1")
    assert gateway.access.root_path == "/llm"
    assert parse(
        "m", "--allowed-origins", "https://a.example,*"
    ).gateway().access.allowed_origins == (*("https://a.example", "*"),)


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b"])
def test_root_path_is_validated(path: str) -> None:
    with pytest.raises(ValueError, match="--root-path"):
        AccessConfig(root_path=path)


def test_a_model_may_be_served_under_several_names() -> None:
    [route] = parse("x/m", "--served-model-name", "a", "b", "--port", "9").gateway().models
    assert (route.name, route.aliases) == ("a", ("b",))
    [route] = parse("x/m", "--served-model-name", "a", "--served-model-name", "b").gateway().models
    assert (route.name, route.aliases) == ("a", ("b",))
    with pytest.raises(ValueError, match="before this flag"):
        parse("--served-model-name", "a", "x/m")


def test_options_of_other_servers_are_rejected_in_files() -> None:
    with pytest.raises(ValueError, match="trust_remote_code: code of checkpoints is never"):
        serve_config_from_mapping({"models": [{"model": "m", "trust_remote_code": True}]})


def test_endpoint_flags_take_precedence_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "port: 9000\nhost: 0.0.0.0\nmodels:\n"
        "  - {model: a/one, num_workers: 2}\n  - {model: b/two, max_num_seqs: 8}\n"
    )
    config = parse("--config", str(file), "--port", "9001")
    assert (config.endpoint.host, config.endpoint.port) == ("0.0.0.0", 9001)
    assert [model.name for model in config.models] == ["one", "two"]
    assert config.models[0].fleet.num_workers == 2
    assert config.models[1].engine.scheduling.max_num_seqs == 8
    with pytest.raises(ValueError, match=r"cannot be combined with --config: set --max-num-seqs"):
        parse("--config", str(file), "--max-num-seqs", "4")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": [{"model": "m", "max_num_seq": 4}]}, "options of model m: max_num_seq"),
        ({"models": [{"model": "m"}], "prot": 1}, "unknown options in the configuration: prot"),
        ({"models": [{"model": "m", "num_workers": "two"}]}, r"Expected `int`, got `str`"),
        ({"models": [{"num_workers": 2}]}, "needs a key `model`"),
        ({"models": []}, "needs a list `models:`"),
        ({"models": [{"model": "m"}, {"model": "x/m"}]}, "duplicates: m"),
        ({"models": [{"model": "m", "page_size": 12}]}, "power of two"),
        (
            {"models": [{"model": "m", "batch_invariant": True, "attention_backend": "flash"}]},
            "not batch-invariant",
        ),
        (
            {"models": [{"model": "m", "enable_expert_parallel": True}]},
            "set --tensor-parallel-size",
        ),
        ({"models": [{"model": "m"}], "port": 0}, "--port"),
        ({"models": [{"model": "m"}], "port": 9000, "metrics_port": 9000}, "--metrics-port"),
        ({"models": [{"model": "m"}], "metrics_max_tenants": 0}, "metrics_max_tenants in"),
        ({"models": [{"model": "m"}], "responses_store_mib": -1}, "--responses-store-mib"),
        ({"models": [{"model": "m"}], "startup_retry_s": -1}, "--startup-retry-s"),
        ({"models": [{"model": "m"}], "startup_retry_s": float("nan")}, "--startup-retry-s"),
    ],
)
def test_mistakes_in_a_file_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve_config_from_mapping(settings)


@pytest.mark.parametrize("cls", [EngineConfig, FleetConfig, EndpointConfig, RoutingConfig])
def test_every_field_is_explained(cls: type) -> None:
    docs = [text for owner in owners(cls) for text in field_docstrings(owner).values()]
    assert all(doc.endswith(".") for doc in docs), docs


def owners(cls: type) -> set[type]:
    return {cls, *(option.owner for option in options_of(cls).values())}


def test_options_keep_their_names() -> None:
    """`options.json` has a value other than the default for each option of 0.1."""
    kept = json.loads(Path(__file__).with_name("options.json").read_text())
    config = serve_config_from_mapping({**kept["endpoint"], "models": [kept["model"]]})
    [model] = config.models
    groups = (model.engine, model.fleet, model.routing, model.autoscaling)
    found = {name: value for group in groups for name, value in option_values(group).items()}
    assert json.loads(msgspec.json.encode(found)).items() >= kept["model"].items()
    endpoint = option_values(config.endpoint)
    assert json.loads(msgspec.json.encode(endpoint)).items() >= kept["endpoint"].items()
    assert parse(*kept["flags"]) == config


def test_a_configuration_survives_a_change_of_one_option() -> None:
    config = EngineConfig.of(model="m", speculative_method="ngram", kv_cache_tokens=64)
    assert EngineConfig.of(**option_values(config)) == config
    plain = config.with_options(speculative_method="none")
    assert plain.speculative is None
    assert plain.with_options(speculative_method="ngram") == config
    with pytest.raises(ValueError, match="unknown options max_num_seq "):
        config.with_options(max_num_seq=3)


def test_adapters_are_given_as_pairs_or_json() -> None:
    pairs = ("--enable-lora", "--lora-modules", "a=/x", '{"name": "b", "path": "/y=z"}')
    lora = parse("m", *pairs, "--max-loras", "2").models[0].engine.lora
    assert lora is not None
    assert lora.folders == {"a": "/x", "b": "/y=z"}
    assert (lora.num_host_copies, parse("m").models[0].engine.lora) == (2, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": False, "lora_modules": ("a=/x",)}, "needs --enable-lora"),
        ({"enable_lora": False, "enable_lora_embeddings": True}, "needs --enable-lora"),
        ({"lora_modules": ("a",)}, "NAME=FOLDER"),
        ({"lora_modules": ("a=/x", "a=/y")}, "'a' is used more than once"),
        ({"lora_modules": ('{"path": "/x"}',)}, "missing required field `name`"),
        ({"max_loras": 0}, "at least 1"),
        ({"max_lora_rank": 513}, r"in \[1, 512\]"),
        ({"max_loras": 4, "max_cpu_loras": 3}, r"--max-cpu-loras \(3\)"),
        (
            {"enable_lora_embeddings": True, "cpu_backend": "native"},
            "--cpu-backend native does not support --enable-lora-embeddings",
        ),
    ],
)
def test_wrong_adapter_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.of(**{"model": "m", "enable_lora": True} | options)


@pytest.mark.parametrize(
    ("method", "expected"), [("mtp", "mtp"), ("mimo_v2_mtp", "mtp"), ("ngram", "ngram")]
)
def test_speculation_is_configured_as_in_vllm(method: str, expected: str) -> None:
    keys = json.dumps({"method": method, "num_speculative_tokens": 3})
    [model] = parse("m", "--speculative-config", keys).models
    speculative = model.engine.speculative
    assert speculative is not None
    assert (speculative.method, speculative.num_speculative_tokens) == (expected, 3)
    [model] = parse("m", "--speculative-config", '{"method": "draft_model", "model": "d"}').models
    assert model.engine.draft_checkpoint == "d"


def test_the_help_has_a_section_per_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help=cache"])
    text = capsys.readouterr().out
    assert "--page-size" in text
    assert "--max-num-seqs" not in text


def test_each_node_has_a_metrics_port_if_set() -> None:
    assert parse("m").node_metrics().port == 0
    names = ("--metrics-config", '{"metrics_host": "::"}')
    config = parse("m", "--metrics-port", "9464", *names, "--fairness-key", "key")
    assert config.node_metrics() == NodeMetricsConfig(host="::", port=9464)
    vllm = parse("m", "--metrics-config", '{"metrics_vllm_names": true}')
    assert vllm.node_metrics() == NodeMetricsConfig(vllm_names=True)
    assert config.gateway().tenants.metrics_max_tenants == 32


def test_old_names_are_rejected_with_the_new_name() -> None:
    with pytest.raises(ValueError, match="fair_by is now fairness_key, salt_by is now cache_isol"):
        serve_config_from_mapping({"models": [{"model": "m"}], "fair_by": "key", "salt_by": "key"})
    with pytest.raises(ValueError, match="worker_wait_s is now no_worker_timeout_s"):
        serve_config_from_mapping({"models": [{"model": "m", "worker_wait_s": 9}]})
    with pytest.raises(ValueError, match="adaptive_window_s: removed"):
        serve_config_from_mapping({"models": [{"model": "m", "adaptive_window_s": 9}]})


def test_new_names_are_options() -> None:
    names = {name for cls in (*PER_MODEL, EndpointConfig) for name in options_of(cls)}
    assert names.issuperset(RENAMED.values())
    assert names.isdisjoint(RENAMED)


def test_startup_retry_is_validated() -> None:
    assert parse("m").gateway().startup_retry_s == 0.0
    assert parse("m", "--startup-retry-s", "inf").gateway().startup_retry_s == float("inf")


def test_routing_is_chosen_per_model() -> None:
    settings = {"model": "m", "routing_policy": "least-load", "prefix_score_hit_weight": 3.0}
    route = serve_config_from_mapping({"models": [settings]}).gateway().models[0]
    expected = RoutingConfig(
        routing_policy="least-load", prefix_score=PrefixScoreConfig(hit_weight=3.0)
    )
    assert route.routing == expected
    flags = ("--routing-policy", "least-load", "--routing-config", '{"prefix_score_hit_weight": 3}')
    assert parse("m", *flags).gateway().models[0].routing == expected
    with pytest.raises(ValueError, match="routing_policy"):
        serve_config_from_mapping({"models": [{"model": "m", "routing_policy": "nope"}]})


def test_unset_flags_are_not_in_the_namespace() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, FleetConfig)
    assert given_options(parser.parse_args([]), FleetConfig) == {}
    assert given_options(parser.parse_args(["--num-workers", "3"]), FleetConfig) == {
        "num_workers": 3
    }


def test_deployment_names_are_valid_for_serve() -> None:
    config = serve_config_from_mapping({"models": [{"model": "m", "served_model_name": "a/b#c"}]})
    assert config.models[0].deployment == "worker-a-b-c"


def test_a_model_may_have_further_names() -> None:
    named = {"model": "x/m", "served_model_aliases": ["m-latest", "gpt"]}
    [route] = serve_config_from_mapping({"models": [named]}).gateway().models
    assert (route.name, route.aliases) == ("m", ("m-latest", "gpt"))
    with pytest.raises(ValueError, match="duplicates: gpt"):
        serve_config_from_mapping({"models": [named, {"model": "gpt"}]})


def test_the_admin_key_is_read_from_the_environment_and_is_no_api_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = {"models": [{"model": "org/name"}]}
    assert serve_config_from_mapping(models).gateway().access.admin_api_key == ""
    monkeypatch.setenv("RAYFLEET_ADMIN_API_KEY", "omega")
    assert serve_config_from_mapping(models).gateway().access.admin_api_key == "omega"
    given = serve_config_from_mapping({**models, "admin_api_key": "given"})
    assert given.gateway().access.admin_api_key == "given"
    with pytest.raises(ValueError, match="--admin-api-key must differ"):
        serve_config_from_mapping({**models, "api_keys": ["omega"]})
    files = {"api_key_file": "/keys", "admin_api_key_file": "/keys"}
    with pytest.raises(ValueError, match="--admin-api-key-file must differ"):
        serve_config_from_mapping({**models, **files})
    monkeypatch.setenv("RAYFLEET_ADMIN_API_KEY", "")
    assert serve_config_from_mapping(models).gateway().access.admin_api_key == ""
