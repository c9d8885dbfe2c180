"""The chart's examples serve: their pods run as processes, on real Ray, behind HAProxy.

Only settings that require a GPU, the internet or Redis are changed (`Example`).
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import stat
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.environment import has_haproxy
from cluster.ports import free_ports
from tests.support.fleet.running_fleet import parent_of
from tests.support.helm.chart import CHART, Helm, Object, only
from tests.support.helm.kuberay import ray_pods
from tests.support.helm.pod_processes import (
    STDOUT,
    PodCluster,
    PodProcess,
    in_folders,
    listening_addresses,
    run_pods,
)
from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed"),
]
DEMO = str(ROOT / "deploy" / "models" / "demo")
DIFFUSION = str(ROOT / "deploy" / "models" / "demo-diffusion")
API_KEY = "key-of-the-tests"
APPLICATIONS = "/api/serve/applications/"


@dataclass(frozen=True)
class Example:
    """An example of the chart, with overrides for two cores without GPUs."""

    values: str
    sets: tuple[str, ...] = ()
    """Overridden values."""
    models: dict[str, str] = field(default_factory=dict)
    """Local folder by name of a checkpoint on the Hub."""


EXAMPLES = {
    "cpu-demo": Example("values-cpu-demo.yaml"),
    "mixed-diffusion": Example(
        "values-mixed-diffusion.yaml",
        (
            "workerGroups[0].gpus=0",
            "workerGroups[0].cpusPerRank=0.25",
            "gateway.replicas=1",
            "models[1].workers=1",
        ),
        {"Qwen/Qwen3-8B": DEMO, "JetLM/SDAR-8B-Chat": DIFFUSION},
    ),
    "air-gapped": Example(
        "values-air-gapped.yaml",
        (
            "workerGroups[0].gpus=0",
            "workerGroups[0].cpusPerRank=0.25",
            "gateway.replicas=1",
            "models[0].workers=1",
            "gcsFaultTolerance.enabled=false",  # Redis
        ),
        {"/models/Qwen3-32B": DEMO},
    ),
}


@dataclass(frozen=True)
class Release:
    """A running example."""

    cluster: PodCluster
    config: Object
    """Serve configuration as applied."""

    @property
    def gateway(self) -> PodProcess:
        (pod,) = (p for p in self.cluster.pods if p.pod.group == "gateway")
        return pod

    @property
    def arguments(self) -> dict[str, Any]:
        found = self.config["applications"][0]["args"]
        assert isinstance(found, dict)
        return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(one, id=name, marks=() if name == "cpu-demo" else pytest.mark.long)
        for name, one in EXAMPLES.items()
    ],
)
def release(request: pytest.FixtureRequest, helm4: Helm) -> Iterator[Release]:
    """Applied as the operator does once the head responds."""
    example: Example = request.param
    sets = [word for value in example.sets for word in ("--set-json", value)]
    service = only(helm4.template("-f", str(CHART / example.values), *sets), "RayService")
    token = secrets.token_hex(32)
    known = {
        "ray": {"auth_token": token},
        "hugging-face": {"token": "hf_of_the_tests"},
    }
    with run_pods(ray_pods(service, known), token) as cluster:
        config = serve_config(service, example, cluster)
        release = Release(cluster, config)
        # The operator also repeats it until the dashboard accepts it.
        cluster.wait("Serve's config", lambda: cluster.operator("PUT", APPLICATIONS, config) == "")
        cluster.wait("Serve", lambda: status(cluster) == "RUNNING", lambda: failure(cluster))
        yield release


def serve_config(service: Object, example: Example, cluster: PodCluster) -> Object:
    """The configuration that the operator would send, with this machine's folders and ports."""
    config: Object = yaml.safe_load(service["spec"]["serveConfigV2"])
    serve_port, metrics_port = free_ports(2)
    config["http_options"] |= {"host": "127.0.0.1", "port": serve_port}
    arguments = config["applications"][0]["args"]
    arguments |= {"metrics_host": "127.0.0.1", "metrics_port": metrics_port}
    for model in arguments["models"]:
        name = model["model"]
        model["model"] = example.models.get(name) or in_folders(name, cluster.directory)
    if "api_key_file" in arguments:
        # As the kubelet mounts the Secret: a file per entry.
        folder = Path(in_folders(arguments["api_key_file"], cluster.directory))
        folder.mkdir()
        (folder / "key-0").write_text(API_KEY)
        arguments["api_key_file"] = str(folder)
    return config


def status(cluster: PodCluster) -> str:
    return str(cluster.operator("GET", APPLICATIONS)["applications"]["rayfleet"]["status"])


def failure(cluster: PodCluster) -> str:
    application = cluster.operator("GET", APPLICATIONS)["applications"]["rayfleet"]
    return str(application["message"]) if application["status"] == "DEPLOY_FAILED" else ""


def chat(base_url: str, model: str) -> Any:
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions",
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
        data=json.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": "What is 12 + 30?"}],
                "temperature": 0,
            }
        ).encode(),
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def test_the_dashboard_requires_the_token(release: Release) -> None:
    with pytest.raises(OSError, match=r"401|403"):
        release.cluster.operator("GET", APPLICATIONS, token=None)


def test_every_pod_gets_ready_and_answers_through_haproxy(release: Release) -> None:
    cluster = release.cluster
    for pod in cluster.pods:
        for kind in pod.pod.probes:
            cluster.wait(f"{kind} of {pod.pod.group}", partial(pod.probe, kind))
    for model in release.arguments["models"]:
        for pod in cluster.workers:
            before = requests_of(pod)
            answer = chat(pod.base_url, model["served_model_name"])
            assert answer["choices"][0]["message"]["content"]
            assert requests_of(pod) > before


def requests_of(pod: PodProcess) -> int:
    """Requests to the API port, as HAProxy counts them."""
    return int(pod.haproxy_statistics()["http_frontend"]["req_tot"])


def test_pods_log_a_json_object_a_line(release: Release) -> None:
    lines = (release.cluster.directory / STDOUT).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert {record["level"] for record in records} <= {"DEBUG", "INFO", "WARNING", "ERROR"}
    processes = {record["process"].split()[0] for record in records}
    assert processes >= {"gateway", "worker", "rank"}


def test_haproxy_opens_nothing_else(release: Release) -> None:
    cluster = release.cluster
    haproxies = cluster.haproxies()
    assert len(haproxies) == len(cluster.pods)
    for pid in haproxies:
        assert {address for address, _ in listening_addresses(pid)} == {"127.0.0.1"}
    admin = list(cluster.directory.glob("haproxy/*/admin.sock"))
    assert len(admin) == len(cluster.pods)
    assert {stat.S_IMODE(path.stat().st_mode) for path in admin} == {0o600}


def test_killed_haproxy_is_back(release: Release) -> None:
    """Restarted by its supervisor, not by Serve, which would replace its manager as well."""
    cluster = release.cluster
    killed = {pid: parent_of(pid) for pid in cluster.haproxies()}
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    cluster.wait(
        "HAProxy of every pod",
        lambda: len(found := cluster.haproxies()) == len(killed) and not killed.keys() & set(found),
    )
    assert {parent_of(pid) for pid in cluster.haproxies()} == set(killed.values())
    model = release.arguments["models"][0]["served_model_name"]
    for pod in cluster.workers:
        cluster.wait("an answer", partial(chat, pod.base_url, model))
