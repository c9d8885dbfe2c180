"""The chart's examples serve: their pods run as processes, on real Ray, behind HAProxy; and stored
responses and counters of API keys are shared by both gateways of one of them.

Only settings that require a GPU, the internet or Redis are changed (`Example`), and numbers of
replicas.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import stat
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.environment import has_haproxy
from cluster.ports import free_ports
from router.api.responses.store import gateway_of
from tests.support.fleet.running_fleet import parent_of
from tests.support.helm.chart import CHART, Helm, Object, only
from tests.support.helm.kuberay import ray_pods
from tests.support.helm.pod_processes import (
    START_TIMEOUT_S,
    STDOUT,
    PodCluster,
    PodProcess,
    in_folders,
    listening_addresses,
    run_pods,
)
from tests.support.paths import MODELS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed"),
]
DEMO = str(MODELS / "demo")
DIFFUSION = str(MODELS / "demo-diffusion")
API_KEY = "key-of-the-tests"
KEYS = f"""
[tests]
key = "{API_KEY}"
[three]
key = "three"
max_concurrent_requests = 3
[ten]
key = "ten"
requests_per_minute = 10
"""
APPLICATIONS = "/api/serve/applications/"


@dataclass(frozen=True)
class Example:
    """An example of the chart, with overrides for two cores without GPUs."""

    values: str
    sets: tuple[str, ...] = ()
    """Overridden values."""
    models: dict[str, str] = field(default_factory=dict)
    """Local folder by name of a checkpoint on the Hub."""
    has_two_gateways: bool = False
    """Whether two gateways, with KEYS, run in the pod of one, which has room for its successor."""


TWO_GATEWAYS = "cpu-demo"
EXAMPLES = {
    TWO_GATEWAYS: Example("values-cpu-demo.yaml", ("models[0].workers=1",), has_two_gateways=True),
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

    def gateways(self) -> list[int]:
        """Process ids of the gateways."""
        found = []
        for pid in self.cluster.processes():
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
                if title.startswith(b"ray::ServeReplica:") and b":gateway" in title:
                    found.append(pid)
        return found

    def send(
        self, method: str, path: str, key: str = API_KEY, body: object = None
    ) -> httpx.Response:
        """Sends a request on a new connection, which HAProxy forwards to any gateway."""
        headers = {"authorization": f"Bearer {key}", "connection": "close"}
        url = f"{self.gateway.base_url}{path}"
        return client().request(method, url, headers=headers, json=body)


@cache
def client() -> httpx.Client:
    """One shared client: each client loads the certificate authorities, in 30 ms of CPU time."""
    return httpx.Client(timeout=START_TIMEOUT_S)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == TWO_GATEWAYS else pytest.mark.long)
        for name in EXAMPLES
    ],
)
def release(request: pytest.FixtureRequest, helm4: Helm) -> Iterator[Release]:
    """Applied as the operator does once the head responds."""
    example = EXAMPLES[request.param]
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
    (application,) = config["applications"]
    arguments = application["args"]
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
    if example.has_two_gateways:
        keys = cluster.directory / "keys.toml"
        keys.write_text(KEYS)
        arguments |= {"num_gateways": 2, "api_key_file": str(keys)}
        gateway = next(one for one in application["deployments"] if one["name"] == "gateway")
        gateway["num_replicas"] = 2
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


both_gateways = pytest.mark.parametrize("release", [TWO_GATEWAYS], indirect=True)
BODY = {"model": "demo", "input": "hello"}
SHORT = BODY | {"max_output_tokens": 4}
END_TOKENS = json.loads((MODELS / "demo" / "generation_config.json").read_text())["eos_token_id"]
LONG = BODY | {"max_output_tokens": 1500, "logit_bias": {str(token): -100 for token in END_TOKENS}}
"""Takes longer than all requests of a test: the demo model would stop after a sentence."""


def gateways_of(release: Release) -> dict[str, str]:
    """A response of each gateway behind HAProxy, by gateway id."""
    made = {}
    for _ in range(8):
        response = release.send("POST", "/v1/responses", body=SHORT)
        if response.status_code == 200:
            made[str(gateway_of(response.json()["id"]))] = response.json()["id"]
    return made


@both_gateways
def test_every_gateway_answers_for_responses_of_both(release: Release) -> None:
    release.cluster.wait("two gateways", lambda: len(gateways_of(release)) == 2)
    for response_id in gateways_of(release).values():
        path = f"/v1/responses/{response_id}"
        assert {release.send("GET", path).status_code for _ in range(8)} == {200}
        further = SHORT | {"previous_response_id": response_id}
        going_on = [release.send("POST", "/v1/responses", body=further) for _ in range(4)]
        assert {response.status_code for response in going_on} == {200}
        assert {release.send("GET", path, "ten").status_code for _ in range(4)} == {404}


@both_gateways
def test_a_background_stream_is_read_at_every_gateway(release: Release) -> None:
    body = BODY | {"background": True, "stream": True}
    made = release.send("POST", "/v1/responses", body=body)
    response_id = made.text.split('"id":"')[1].split('"')[0]
    path = f"/v1/responses/{response_id}?stream=true"
    assert {release.send("GET", path).text for _ in range(6)} == {made.text}


@both_gateways
def test_limits_of_keys_are_exact_over_gateways(release: Release) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: short(release, "ten"), range(40)))
    refilled = (time.monotonic() - began) / 6.0
    assert set(statuses) == {200, 429}
    assert 10 <= statuses.count(200) <= 10 + refilled
    with ThreadPoolExecutor(10) as pool:  # concurrently: none has finished
        made = list(pool.map(lambda _: begin_long(release), range(10)))
    open_now = [response for response in made if response.status_code == 200]
    assert {response.status_code for response in made} == {200, 429}
    ended = 0
    for response in open_now:
        path = f"/v1/responses/{response.json()['id']}"
        status = release.send("GET", path, "three").json()["status"]
        ended += status not in ("queued", "in_progress")
        release.send("POST", f"{path}/cancel", "three")
    assert len(open_now) - ended <= 3
    assert len(open_now) >= 3
    assert short(release, "three") == 200, "what was cancelled no longer counts"


@both_gateways
def test_after_a_gateway_has_died_its_responses_are_404_and_its_requests_do_not_count(
    release: Release,
) -> None:
    made = [begin_long(release).json() for _ in range(3)]
    before = gateways_of(release)
    victim, other = release.gateways()
    os.kill(victim, signal.SIGKILL)
    release.cluster.wait("another gateway", lambda: set(release.gateways()) - {victim, other})
    release.cluster.wait("its answers", lambda: len(gateways_of(release).keys() - before) == 1)
    after = gateways_of(release)
    for gateway_id, response_id in before.items():
        expected = 200 if gateway_id in after else 404
        path = f"/v1/responses/{response_id}"
        assert {release.send("GET", path).status_code for _ in range(6)} == {expected}
    for response in made:
        release.send("POST", f"/v1/responses/{response.get('id')}/cancel", "three")
    assert [short(release, "three") for _ in range(4)] == [200] * 4


def begin_long(release: Release) -> httpx.Response:
    """Starts a long response in the background, with the key for three of them."""
    return release.send("POST", "/v1/responses", "three", LONG | {"background": True})


def short(release: Release, key: str) -> int:
    """Status of a short completion."""
    body = {"model": "demo", "prompt": "hello", "max_tokens": 2}
    return release.send("POST", "/v1/completions", key, body).status_code
