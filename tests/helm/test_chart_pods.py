"""Pods: permissions, environment, start and stop."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import yaml

from cluster.environment import cluster_settings, haproxy_settings, has_haproxy
from cluster.forwarded import TRUSTED_PROXIES_VARIABLE, trusted_proxies
from tests.support.helm.chart import CHART, EXAMPLES, Helm, Object, only, pod_specs
from tests.support.helm.small_endpoint import serve_models
from tests.support.paths import ROOT

LONGER_BEHIND_LOAD_BALANCERS = {
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S",
}
HEALTH = "http://127.0.0.1:52365/api/healthz"


@pytest.fixture(scope="module")
def objects(helm4: Helm, everything: Path) -> list[Object]:
    return helm4.template("-f", str(everything))


def ray_pods(objects: list[Object]) -> dict[str, Object]:
    return {name: pod["spec"] for name, pod in pod_specs(objects) if "RayService" in name}


def environment_of(pod: Object) -> dict[str, str]:
    container, *_ = pod["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


@pytest.mark.parametrize("example", EXAMPLES)
def test_nothing_runs_as_root_or_writes_to_its_image(helm4: Helm, example: str) -> None:
    rendered = helm4.template("-f", str(CHART / example))
    pods = dict(pod_specs(rendered))
    assert len(pods) >= 4  # head, gateway, worker, smoke test
    for pod in pods.values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec["automountServiceAccountToken"] or "autoscaler" in str(rendered)
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def test_all_pods_have_the_image_of_the_digest(helm4: Helm) -> None:
    """A digest pins the image even if its tag is moved."""
    digest = f"sha256:{'a' * 64}"
    values = "image.repository=r.example/rayfleet,image.tag=v1"
    for setting, name in (
        (values, "r.example/rayfleet:v1"),
        (f"{values},image.digest={digest}", f"r.example/rayfleet:v1@{digest}"),
    ):
        pods = [pod["spec"] for _, pod in pod_specs(helm4.template("--set", setting))]
        images = [container["image"] for pod in pods for container in pod["containers"]]
        assert len(images) >= 4
        assert set(images) == {name}


def test_the_environment_is_that_of_the_code(objects: list[Object]) -> None:
    pods = ray_pods(objects)
    expected = cluster_settings()
    assert set(pods) == {"RayService head", "RayService gateway", "RayService cpu"}
    for pod in pods.values():
        environment = environment_of(pod)
        assert expected.keys() <= environment.keys()
        different = {name for name in expected if environment[name] != expected[name]}
        assert different == LONGER_BEHIND_LOAD_BALANCERS


@pytest.mark.skipif(not has_haproxy(), reason="no wheel of HAProxy for this platform")
def test_haproxy_is_set_as_in_the_code(objects: list[Object], tmp_path: Path) -> None:
    ours = haproxy_settings(tmp_path / "haproxy", "0.0.0.0", 8000, 10_000)
    environment = environment_of(ray_pods(objects)["RayService gateway"])
    executable = "RAY_SERVE_HAPROXY_BINARY_PATH"
    shared = {k for k in ours if k in environment} - {"RAY_SERVE_HAPROXY_NBTHREAD", executable}
    assert {"RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"} <= shared
    assert {k: environment[k] for k in shared} == {k: ours[k] for k in shared}
    folder, name = environment[executable].rsplit("/", 1)
    assert name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for image in (ROOT / "deploy" / "images").glob("*.Dockerfile"):
        assert f"ENV PATH={folder}:$PATH" in image.read_text()


def test_all_pods_know_the_proxies_in_front(helm4: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy keeps their X-Forwarded-For, and gateways skip their addresses in it."""
    networks = ["10.1.0.0/16", "fd00::7/128"]
    for given, expected in (([], []), (networks, networks)):
        rendered = helm4.template("--set-json", f"haproxy.trustedProxies={json.dumps(given)}")
        for pod in ray_pods(rendered).values():
            environment = environment_of(pod)
            monkeypatch.setenv(TRUSTED_PROXIES_VARIABLE, environment[TRUSTED_PROXIES_VARIABLE])
            assert [str(network) for network in trusted_proxies()] == expected


def test_pods_and_replicas_wait_for_the_longest_stream(helm4: Helm) -> None:
    rendered = helm4.template("--set", "longestStreamSeconds=7200")
    service = only(rendered, "RayService")
    for name, pod in ray_pods(rendered).items():
        if name == "RayService head":
            continue
        assert pod["terminationGracePeriodSeconds"] > 7200
        assert environment_of(pod)["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == "7200"
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["python", "-m", "cluster.drain", "--deadline", "7200"]
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    deployments = config["applications"][0]["deployments"]
    assert [d["graceful_shutdown_timeout_s"] for d in deployments] == [7200, 7200]


def test_large_numbers_stay_numbers(helm4: Helm) -> None:
    options = {"kv_cache_tokens": 12_000_000, "speculative_max_utilization": 0.5}
    models = [{"name": "demo", "model": "m", "group": "cpu", "options": options}]
    rendered = helm4.template("--set-json", f"models={json.dumps(models)}")
    config = yaml.safe_load(only(rendered, "RayService")["spec"]["serveConfigV2"])
    (model,) = config["applications"][0]["args"]["models"]
    assert {name: model[name] for name in options} == options


def test_gpus_become_ray_resources(helm4: Helm) -> None:
    rendered = helm4.template("-f", str(CHART / "values-h100-tp8.yaml"))
    service = only(rendered, "RayService")
    worker = ray_pods(rendered)["RayService h100"]
    resources = worker["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == 8
    assert worker["runtimeClassName"] == "nvidia"
    assert "nvidia.com/gpu" not in str(ray_pods(rendered)["RayService gateway"])
    (group,) = (
        g
        for g in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        if g["groupName"] == "h100"
    )
    offered = json.loads(json.loads(group["rayStartParams"]["resources"]))
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    bundles = config["applications"][0]["deployments"][1]["placement_group_bundles"]
    assert bundles == [{"GPU": 1, "rayfleet_workers_h100": 0.001}] * 8
    assert offered["rayfleet_workers_h100"] >= sum(b["rayfleet_workers_h100"] for b in bundles)


@pytest.mark.parametrize("group", ["a100", "b200", "ada", "cpu"])
def test_no_resource_has_a_name_that_ray_keeps_for_placement_groups(
    helm4: Helm, group: str
) -> None:
    """Ray parses NAME_group_HEX as a placement group's part of NAME, and never schedules it."""
    models = [{"name": "demo", "model": "m", "group": group}]
    resources = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    groups = [{"name": group, "replicas": 1, "gpus": 1, "resources": resources}]
    rendered = helm4.template(
        "--set-json",
        f"models={json.dumps(models)}",
        "--set-json",
        f"workerGroups={json.dumps(groups)}",
    )
    service = only(rendered, "RayService")["spec"]
    config = yaml.safe_load(service["serveConfigV2"])
    gateway, worker = config["applications"][0]["deployments"]
    requested = {*gateway["ray_actor_options"]["resources"], *worker["placement_group_bundles"][0]}
    offered = {"GPU"}
    for pods in service["rayClusterConfig"]["workerGroupSpecs"]:
        offered |= json.loads(json.loads(pods["rayStartParams"]["resources"])).keys()
    assert requested == offered
    assert [name for name in requested if re.fullmatch(r".+_group_[0-9a-f_]+", name)] == []


def test_keys_come_from_secrets_alone(objects: list[Object], helm4: Helm) -> None:
    secret = only(objects[:], "RayService")
    text = yaml.safe_dump([o for o in objects if o["kind"] != "Secret"])
    for word in ("key-one", "key-two", "key-of-the-admin", "hf_token"):
        assert word not in text
    config = yaml.safe_load(secret["spec"]["serveConfigV2"])
    arguments = config["applications"][0]["args"]
    gateway = ray_pods(objects)["RayService gateway"]
    mounts = {m["name"]: m for m in gateway["containers"][0]["volumeMounts"]}
    volumes = {v["name"]: v["secret"]["secretName"] for v in gateway["volumes"] if "secret" in v}
    secrets = {o["metadata"]["name"]: o["stringData"] for o in objects if o["kind"] == "Secret"}
    for name, option, key in (
        ("api-keys", "api_key_file", "key-one"),
        ("admin-api-keys", "admin_api_key_file", "key-of-the-admin"),
    ):
        assert mounts[name]["mountPath"] == arguments[option]
        assert mounts[name]["readOnly"]
        assert secrets[volumes[name]]["key-0"] == key
    assert "api-keys" not in str(ray_pods(objects)["RayService cpu"])
    for pod in ray_pods(objects).values():
        assert any(e["name"] == "HF_TOKEN" for e in pod["containers"][0]["env"])


def test_probes_leave_loading_pods_alone(objects: list[Object]) -> None:
    for pod in ray_pods(objects).values():
        container, *_ = pod["containers"]
        assert "readinessProbe" not in container  # KubeRay's own
        for name in ("startupProbe", "livenessProbe"):
            probe = container[name]
            assert probe["exec"]["command"][-1] == HEALTH
            assert probe["failureThreshold"] * probe["periodSeconds"] >= 600


@pytest.mark.parametrize(("is_head", "status"), [(True, 503), (False, 200)])
async def test_a_dead_gcs_restarts_the_head_alone(is_head: bool, status: int) -> None:
    """Ray's response without a token: the pod's raylet is alive, the GCS is not."""
    from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS
    from ray.dashboard.modules.reporter.healthz_agent import HealthzAgent

    assert HEALTH.endswith("/api/healthz")
    assert "/api/healthz" in PUBLIC_EXACT_PATHS
    agent = HealthzAgent.__new__(HealthzAgent)
    agent._dashboard_agent = SimpleNamespace(is_head=is_head)
    agent._health_checker = SimpleNamespace(
        check_local_raylet_liveness=AsyncMock(return_value=True),
        check_gcs_liveness=AsyncMock(return_value=False),
    )
    # Without the wrapper that binds it to the running agent.
    answer = await HealthzAgent.unified_health.__wrapped__(agent, None)
    assert answer.status == status


def test_budgets_and_spread_select_the_pods_that_there_are(objects: list[Object]) -> None:
    pods = {name: pod for name, pod in pod_specs(objects) if "RayService" in name}
    budgets = [o["spec"]["selector"]["matchLabels"] for o in objects if "Disruption" in o["kind"]]
    assert len(budgets) == 2
    for name in ("RayService gateway", "RayService cpu"):
        labels = pods[name]["metadata"]["labels"]
        assert sum(budget.items() <= labels.items() for budget in budgets) == 1
        for constraint in pods[name]["spec"]["topologySpreadConstraints"]:
            assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()


def test_nothing_of_a_token_is_seen_outside_its_secret(helm4: Helm) -> None:
    """Also no digest of it, which could confirm a guess."""
    seen = []
    for token in ("one", "two"):
        rendered = helm4.template("--set", f"huggingFace.token={token},benchmark.enabled=true")
        seen.append([o for o in rendered if o["kind"] != "Secret"])
    assert seen[0] == seen[1]


def test_no_volume_of_checkpoints_holds_up_the_head(objects: list[Object]) -> None:
    pods = ray_pods(objects)
    for name, pod in pods.items():
        mounted = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
        is_head = name == "RayService head"
        assert ("models" in mounted) == (not is_head)
        assert any(volume["name"] == "models" for volume in pod["volumes"]) == (not is_head)
        # The root is read-only.
        for variable in ("HF_HOME", "TRITON_CACHE_DIR"):
            folder = environment_of(pod)[variable]
            assert folder.startswith("/tmp/" if is_head else mounted["models"] + "/")


def test_the_smoke_test_queries_every_model(helm4: Helm, tmp_path: Path) -> None:
    """Runs the script of `helm test` against an endpoint."""
    rendered = helm4.template("-f", str(CHART / "values-multi-node.yaml"))
    (container,) = only(rendered, "Pod")["spec"]["containers"]
    environment = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    with serve_models(["llama-405b", "qwen-8b"]) as (url, requested):
        environment |= {"BASE_URL": url, "API_KEY": "secret\nother", "TIMEOUT_S": "20"}
        script = [sys.executable, "-c", *container["args"]]
        subprocess.run(script, env=environment, check=True, timeout=120)
        assert requested == ["llama-405b", "qwen-8b"]
        missing = environment | {"MODELS": "llama-405b,other"}
        done = subprocess.run(script, env=missing, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "model other is not served" in done.stderr


def test_the_benchmark_is_a_command_that_there_is(objects: list[Object]) -> None:
    from cluster.bench.jobs.options import JobOptions
    from cluster.cli.main import build_parser
    from cluster.cli.options import given_options

    job = only(objects, "RayJob")["spec"]
    program, *arguments = shlex.split(job["entrypoint"])
    parsed = build_parser().parse_args(arguments)
    assert program == "rayfleet"
    assert parsed.base_url == "http://fleet-rayfleet-serve-svc:8000"
    assert parsed.wait_ready_s == 3600.0
    assert (parsed.kind, parsed.model, parsed.json) == ("sweep", "demo", True)
    assert JobOptions(**given_options(parsed, JobOptions)).load_tasks == 2
    # With a claim, its files outlive the pod; the job's process runs on the head.
    pods = job["rayClusterSpec"]
    head = pods["headGroupSpec"]["template"]["spec"]
    (mount,) = (m for m in head["containers"][0]["volumeMounts"] if m["name"] == "results")
    assert parsed.out.startswith(mount["mountPath"] + "/")
    claim = {"name": "results", "persistentVolumeClaim": {"claimName": "results-of-the-tests"}}
    assert claim in head["volumes"]
    (load,) = pods["workerGroupSpecs"]
    assert claim not in load["template"]["spec"]["volumes"]
    service = only(objects, "RayService")["spec"]["serveService"]["metadata"]["name"]
    assert service == "fleet-rayfleet-serve-svc"
    for pod in (head, load["template"]["spec"]):
        token = {"name": "fleet-rayfleet-hugging-face", "key": "token"}
        assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}} in pod["containers"][0][
            "env"
        ]


def test_names_fit_those_that_kuberay_makes_of_them(helm4: Helm) -> None:
    """KubeRay rejects RayJobs and RayServices with names of more than 47 characters."""
    longest = ["--set", f"fullnameOverride={'n' * 40},benchmark.enabled=true"]
    rendered = helm4.template(*longest)
    for kind in ("RayService", "RayJob"):
        assert len(only(rendered, kind)["metadata"]["name"]) <= 47


def test_ray_counts_what_pods_request(helm4: Helm) -> None:
    counted = {}
    for cpu in ("250m", "1500m", "3", "2.5"):
        arguments = ["--set-string", f"gateway.resources.requests.cpu={cpu}"]
        cluster = only(helm4.template(*arguments), "RayService")["spec"]["rayClusterConfig"]
        counted[cpu] = cluster["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"]
    assert counted == {"250m": "1", "1500m": "2", "3": "3", "2.5": "3"}


def serve_deployment(objects: list[Object], name: str) -> Object:
    config = yaml.safe_load(only(objects, "RayService")["spec"]["serveConfigV2"])
    (found,) = (d for d in config["applications"][0]["deployments"] if d["name"] == name)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_several_gateways_take_a_pod_each(helm4: Helm, replicas: int) -> None:
    """One gateway leaves room for its successor in its pod."""
    objects = helm4.template("--set", f"gateway.replicas={replicas}")
    (group,) = (
        g
        for g in only(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        if g["groupName"] == "gateway"
    )
    in_pod = json.loads(json.loads(group["rayStartParams"]["resources"]))["rayfleet_gateway"]
    gateway = serve_deployment(objects, "gateway")
    per_pod = in_pod // gateway["ray_actor_options"]["resources"]["rayfleet_gateway"]
    assert per_pod == (2 if replicas == 1 else 1)
    assert gateway.get("max_surge_percent") == (None if replicas == 1 else 0)
    assert gateway["num_replicas"] == replicas


def test_gateways_are_autoscaled_between_their_bounds(helm4: Helm) -> None:
    arguments = ("--set", "gateway.replicas=2,gateway.maxReplicas=5,autoscaler.enabled=true")
    objects = helm4.template(*arguments)
    service = only(objects, "RayService")["spec"]
    group = service["rayClusterConfig"]["workerGroupSpecs"][0]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (2, 2, 5)
    assert "num_replicas" not in serve_deployment(objects, "gateway")
    args = yaml.safe_load(service["serveConfigV2"])["applications"][0]["args"]
    assert (args["num_gateways"], args["max_gateways"]) == (2, 5)


def test_init_containers_and_sidecars_come_beside_ray(objects: list[Object]) -> None:
    """KubeRay treats the first container as Ray's."""
    (gateway,) = (pod for name, pod in ray_pods(objects).items() if "gateway" in name)
    assert [container["name"] for container in gateway["containers"]] == ["ray-worker", "collector"]
    assert [container["name"] for container in gateway["initContainers"]] == ["copy"]


def test_every_pod_requests_ephemeral_storage_by_default(helm4: Helm) -> None:
    """Clusters with a quota on ephemeral storage admit no pod without requests for it."""
    pods = ray_pods(helm4.template())
    assert len(pods) == 3
    for pod in pods.values():
        assert pod["containers"][0]["resources"]["requests"]["ephemeral-storage"]
