"""Keys of the endpoint reach its gateways, and nothing that others can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.main import build_parser, main
from cluster.cli.serve import banner, configure, open_listener
from cluster.config import ServeConfig, serve_config_from_mapping
from router.keys import KeyFile, KeyRing

KEYS = ("sesame-1", "sesame-2")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServeConfig]:
    def configured(environment: Mapping[str, str], *argv: str) -> ServeConfig:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return configure(build_parser().parse_args(["serve", "m", *argv]))

    return configured


def test_keys_of_the_environment_are_added_to_those_of_flags(served: Any) -> None:
    assert served({"RAYFLEET_API_KEY": "sesame-1"}).gateway().access.api_keys == KEYS[:1]
    assert served({"RAYFLEET_API_KEY": " sesame-1,sesame-2,"}).gateway().access.api_keys == KEYS
    both = served({"RAYFLEET_API_KEY": "sesame-2"}, "--api-key", "sesame-1")
    assert both.gateway().access.api_keys == KEYS
    assert served({}).gateway().access.api_keys == ()


def test_keys_of_the_environment_apply_to_serve_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve deploy` and the chart have no flags: ignoring the variable would disable keys."""
    monkeypatch.setenv("RAYFLEET_API_KEY", "sesame-2")
    config = serve_config_from_mapping({"models": [{"model": "m"}], "api_keys": ["sesame-1"]})
    assert config.gateway().access.api_keys == KEYS


@pytest.mark.parametrize("empty", ["", " ", ","])
def test_an_empty_variable_is_rejected(served: Any, empty: str) -> None:
    with pytest.raises(ValueError, match="RAYFLEET_API_KEY is set but contains no keys"):
        served({"RAYFLEET_API_KEY": empty})


def test_the_banner_has_the_variable_and_no_key(served: Any) -> None:
    for config in (
        served({"RAYFLEET_API_KEY": "sesame-1,sesame-2"}),
        served({}, "--api-key", "sesame-1"),
        served({}, "--api-key-file", "/keys"),
    ):
        text = banner(config, "http://127.0.0.1:8000", "/logs")
        assert "sesame" not in text
        assert '-H "Authorization: Bearer $RAYFLEET_API_KEY"' in text
    open_to_all = banner(served({}), "http://127.0.0.1:8000", "/logs")
    assert "Authorization" not in open_to_all
    assert "Web page with chat and fleet status: http://127.0.0.1:8000/\n" in open_to_all


def test_representations_of_a_configuration_have_no_key() -> None:
    settings = {"models": [{"model": "m"}], "api_keys": list(KEYS), "admin_api_key": "sesame"}
    config = serve_config_from_mapping(settings)
    assert config.endpoint.access.api_keys == config.gateway().access.api_keys == KEYS
    assert "sesame" not in f"{config} {config!r} {config.gateway()}"


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        ((), False),
        (("--host", "localhost"), False),
        (("--host", "127.1.2.3"), False),
        (("--host", "::1"), False),
        (("--host", "0.0.0.0"), True),
        (("--host", "::"), True),
        (("--host", "gpu-7"), True),
        (("--host", "0.0.0.0", "--api-key-file", "/keys"), False),
    ],
)
def test_serving_without_keys_is_warned_about(
    served: Any, flags: tuple[str, ...], warns: bool
) -> None:
    warning = open_listener(served({}, *flags).endpoint)
    assert (warning is not None) == warns
    if warning is not None:
        assert "RAYFLEET_API_KEY" in warning
        assert "port 8000" in warning


def test_a_new_key_is_accepted_with_its_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    keys = {}
    for name in ("team", "team.two"):
        with pytest.raises(SystemExit) as ended:
            main(["keys", "new", name])
        assert ended.value.code == 0
        output = capsys.readouterr()
        keys[name] = output.err.split()[-1]
        assert keys[name] not in output.out
        path.write_text((path.read_text() if path.exists() else "") + output.out)
    ring = KeyRing((), str(path))
    for name, key in keys.items():
        entry = ring.find({"headers": [(b"authorization", f"Bearer {key}".encode())]})
        assert entry is not None
        assert entry.name == name
    assert len(set(keys.values())) == 2
    with pytest.raises(SystemExit):
        main(["keys", "check", str(path)])
    assert "team: priority up to 9" in capsys.readouterr().out


def test_a_new_key_can_have_monitoring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    for flags, is_for_monitoring in (([], False), (["--monitoring"], True)):
        with pytest.raises(SystemExit):
            main(["keys", "new", "team", *flags])
        path.write_text(capsys.readouterr().out)
        [entry] = KeyFile(str(path)).entries()
        assert entry.monitoring == is_for_monitoring
        with pytest.raises(SystemExit):
            main(["keys", "check", str(path)])
        assert ("monitoring" in capsys.readouterr().out) == is_for_monitoring


def test_invalid_names_and_files_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("[team]\nkey = 5\n")
    for arguments in (["new", "a b"], ["check", str(tmp_path / "keys")]):
        with pytest.raises(SystemExit) as ended:
            main(["keys", *arguments])
        assert ended.value.code == 2
        assert "Traceback" not in capsys.readouterr().err
