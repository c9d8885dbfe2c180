"""Images, compose files and Serve configs are valid and name existing files."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.app import build_app
from cluster.config import serve_config_from_mapping
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "images").glob("*.Dockerfile"))
SERVE_CONFIGS = sorted((DEPLOY / "serve").glob("*.yaml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def instructions(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", path.read_text()))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.stem)
def test_images_have_stages_and_an_unprivileged_user(path: Path) -> None:
    lines = instructions(path)
    assert sum(word == "FROM" for word, _ in lines) == 2
    last_stage = lines[len(lines) - [word for word, _ in lines][::-1].index("FROM") :]
    (user,) = (rest for word, rest in last_stage if word == "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert "pip install" not in " ".join(rest for _, rest in last_stage)
    (python,) = (rest for word, rest in lines if rest.startswith("PYTHON="))
    assert re.search(r"=3\.\d+-\w+", python)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.stem)
def test_images_keep_what_is_fetched_or_compiled_where_a_volume_is_mounted(path: Path) -> None:
    (pairs,) = (
        rest.split() for word, rest in instructions(path) if word == "ENV" and "HOME" in rest
    )
    environment = dict(pair.split("=", 1) for pair in pairs)
    for variable in ("HF_HOME", *(["TRITON_CACHE_DIR"] if path.stem == "cuda" else [])):
        assert environment[variable].startswith("/models/")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.stem)
def test_images_install_by_hash_and_begin_with_a_digest_that_is_given(path: Path) -> None:
    lines = instructions(path)
    base = dict(line.split("=") for line in (DEPLOY / "supply" / "base.env").read_text().split())
    arguments = [rest for word, rest in lines if word == "ARG"]
    assert f"PYTHON={base['PYTHON']}" in arguments
    assert 'PYTHON_DIGEST=""' in arguments
    images = [rest.split()[0] for word, rest in lines if word == "FROM"]
    assert set(images) == {"python:${PYTHON}${PYTHON_DIGEST:+@${PYTHON_DIGEST}}"}
    installs = [rest for word, rest in lines if "pip install" in rest]
    first, *later = installs
    assert "--require-hashes --only-binary :all:" in first
    locks = [rest.split() for word, rest in lines if word == "COPY" and "/opt/locks" in rest]
    assert [source for source, _ in locks] == ["deploy/supply/common.txt", "${TORCH_LOCK}"]
    assert all(f"-r {target}" in first for _, target in locks)
    # An isolated build would download the latest build requirements.
    assert "pip install --no-deps --no-build-isolation -e . && pip check" in later[-1]
    assert all("${EXTRA_PACKAGES}" in rest for rest in later[:-1])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.stem)
def test_images_take_torch_from_the_index_that_is_named(path: Path, tmp_path: Path) -> None:
    """Lock of another CUDA version, for drivers that are too old for the public index's."""
    lines = instructions(path)
    (default,) = (rest for word, rest in lines if word == "ARG" and rest.startswith("TORCH_INDEX="))
    (install,) = (rest for word, rest in lines if word == "RUN" and "--require-hashes" in rest)
    for index in ("https://example.org/cu1", default.partition("=")[2].strip('"')):
        script = install.replace("pip install", "printf '%s\n' install")
        result = subprocess.run(
            ["sh", "-c", script],
            cwd=tmp_path,
            env={"TORCH_INDEX": index, "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=True,
        )
        named = ["--extra-index-url", index] if index else []
        options = ["--require-hashes", "--only-binary", ":all:", *named]
        files = ["-r", "/opt/locks/common.txt", "-r", "/opt/locks/torch.txt"]
        assert result.stdout.split() == ["install", *options, *files]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.stem)
def test_images_copy_what_there_is(path: Path) -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    (lock,) = re.findall(r"(?m)^ARG TORCH_LOCK=(\S+)$", path.read_text())
    lines = [(word, rest.replace("${TORCH_LOCK}", lock)) for word, rest in instructions(path)]
    copied = [rest.split()[:-1] for word, rest in lines if word == "COPY"]
    names = [name for rest in copied if not rest[0].startswith("--from") for name in rest]
    assert {"cluster", "router", "worker", "kernels", "deploy"} <= set(names)
    for name in names:
        assert (ROOT / name).exists(), name
        assert f"!{name.split('/')[0]}" in allowed, name
        assert not [rule for rule in allowed if name.startswith(rule)], name


def test_the_chart_runs_the_user_of_the_images() -> None:
    context = read(ROOT / "helm" / "rayfleet" / "values.yaml")["pod"]["securityContext"]
    expected = f"{context['runAsUser']}:{context['runAsGroup']}"
    for path in DOCKERFILES:
        assert ("USER", expected) in instructions(path)


def test_compose_mounts_what_there_is() -> None:
    folder = DEPLOY / "compose"
    compose = read(folder / "compose.yaml")
    overlay = read(folder / "compose.gpu.yaml")
    assert set(overlay["services"]) <= set(compose["services"])
    named = set(compose["volumes"])
    for service in compose["services"].values():
        assert re.search(r":[\w.]+$", service["image"])
        assert not service["image"].endswith(":latest")
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in named or (folder / source).exists(), source
    for service in (compose["services"]["rayfleet"], overlay["services"]["rayfleet"]):
        build = service["build"]
        context = (folder / build["context"]).resolve()
        assert context == ROOT
        assert (context / build["dockerfile"]).is_file()
    serve_config_from_mapping(read(folder / "fleet.yaml"))


def test_prometheus_in_compose_finds_what_its_configuration_names() -> None:
    """It is the one of deploy/monitoring, whose relative paths lie elsewhere there."""
    folder = DEPLOY / "compose"
    mounts = dict(
        reversed(volume.split(":")[:2])
        for volume in read(folder / "compose.yaml")["services"]["prometheus"]["volumes"]
    )
    configuration = read(DEPLOY / "monitoring" / "prometheus.yml")
    (rules,) = configuration["rule_files"]
    assert list((folder / mounts["/etc/prometheus/rules"]).glob(Path(rules).name))
    (targets,) = configuration["scrape_configs"][0]["file_sd_configs"][0]["files"]
    (group,) = read(folder / mounts[f"/etc/prometheus/{targets}"])
    assert group["targets"] == ["rayfleet:8000"]


@pytest.mark.parametrize("path", SERVE_CONFIGS, ids=lambda p: p.stem)
def test_serve_takes_the_configs(path: Path) -> None:
    from ray._common.utils import import_attr
    from ray.serve.schema import ServeDeploySchema

    (application,) = ServeDeploySchema.model_validate(read(path)).applications
    assert import_attr(application.import_path) is build_app
    assert build_app(application.args)._bound_deployment.name == "gateway"
    models = serve_config_from_mapping(application.args).models
    known = {"gateway", *(model.deployment for model in models)}
    assert {deployment.name for deployment in application.deployments} <= known
