"""Keys of the endpoint reach its gateways, and nothing that others can read."""

from __future__ import annotations

import pytest

from cluster.cli.main import build_parser
from cluster.cli.serve import banner, configure, with_keys_of
from cluster.config import ServeConfig, serve_config_from_mapping

KEYS = ("sesame-1", "sesame-2")


def served(environment: dict[str, str], *argv: str) -> ServeConfig:
    return with_keys_of(environment, configure(build_parser().parse_args(["serve", "m", *argv])))


def test_the_environment_holds_keys_beside_those_of_flags() -> None:
    assert served({"RAYFLEET_API_KEY": "sesame-1"}).gateway().api_keys == KEYS[:1]
    assert served({"RAYFLEET_API_KEY": " sesame-1,sesame-2,"}).gateway().api_keys == KEYS
    both = served({"RAYFLEET_API_KEY": "sesame-2"}, "--api-key", "sesame-1")
    assert both.gateway().api_keys == KEYS
    assert served({}).gateway().api_keys == ()


def test_what_is_started_later_does_not_inherit_them() -> None:
    environment = {"RAYFLEET_API_KEY": "sesame-1", "HOME": "/home"}
    served(environment)
    assert environment == {"HOME": "/home"}


@pytest.mark.parametrize("empty", ["", " ", ","])
def test_an_empty_variable_opens_no_endpoint(empty: str) -> None:
    with pytest.raises(ValueError, match="RAYFLEET_API_KEY is set but holds no key"):
        served({"RAYFLEET_API_KEY": empty})


def test_the_banner_names_the_variable_and_no_key() -> None:
    for config in (
        served({"RAYFLEET_API_KEY": "sesame-1,sesame-2"}),
        served({}, "--api-key", "sesame-1"),
        served({}, "--api-key-file", "/keys"),
    ):
        text = banner(config, "http://127.0.0.1:8000", "/logs")
        assert "sesame" not in text
        assert '-H "Authorization: Bearer $RAYFLEET_API_KEY"' in text
    assert "Authorization" not in banner(served({}), "http://127.0.0.1:8000", "/logs")


def test_no_text_about_a_configuration_holds_a_key() -> None:
    config = serve_config_from_mapping({"models": [{"model": "m"}], "api_keys": list(KEYS)})
    assert config.endpoint.api_keys == config.gateway().api_keys == KEYS
    assert "sesame" not in f"{config} {config!r} {config.gateway()}"
