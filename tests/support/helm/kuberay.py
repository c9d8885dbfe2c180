"""Pods that KubeRay creates from the chart's RayService: environment and command.

Written after `ray-operator/controllers/ray/common/pod.go` of KubeRay 1.7 (setMissingRayStartParams,
generateRayStartCommand, setContainerEnvVars, SetContainerTokenAuthEnvVars and
initLivenessAndReadinessProbe), limited to the branches that this chart uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tests.support.helm.chart import Object

GCS_PORT = "6379"
AGENT_PORT = "52365"
METRICS_PORT = "8080"
SERVE_PORT = "8000"
OPERATOR_TOKEN_HEADER = "x-ray-authorization"
CLUSTER = "fleet-rayfleet-abcde"
HEAD_SERVICE = f"{CLUSTER}-head-svc.demo.svc.cluster.local"
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
EXPLICIT_BOOLEANS = {"log-color", "include-dashboard", "include-log-monitor"}
"""Flags of `ray start` with a value of true or false; other boolean flags have no value."""

Secrets = Mapping[str, Mapping[str, str]]
"""Entries of each Secret, keyed by the Secret's name."""


@dataclass(frozen=True)
class RayPod:
    """A pod's Ray container, as KubeRay creates it."""

    group: str
    """`headgroup`, or the worker group's name."""
    environment: dict[str, str]
    start_parameters: dict[str, str]
    """Parameters of `ray start`, without dashes."""
    probes: dict[str, list[str]]
    """Commands: the chart's startupProbe and livenessProbe, and KubeRay's readinessProbe."""

    @property
    def is_head(self) -> bool:
        return self.group == "headgroup"

    @property
    def command(self) -> list[str]:
        """Command that replaces the image's."""
        return ["/bin/bash", "-c", "--", f"ulimit -n 65536; {self._ray_start()}"]

    def with_start_parameters(self, **changed: str) -> RayPod:
        """A copy with other values; underscores in names become dashes."""
        changes = {name.replace("_", "-"): value for name, value in changed.items()}
        return replace(self, start_parameters={**self.start_parameters, **changes})

    def _ray_start(self) -> str:
        words = ["ray start --head" if self.is_head else "ray start"]
        for name, value in sorted(self.start_parameters.items()):
            if value.lower() not in ("true", "false") or name in EXPLICIT_BOOLEANS:
                words.append(f"--{name}={value}")
            elif value.lower() == "true":
                words.append(f"--{name}")
        return " ".join(words)


def ray_pods(service: Object, secrets: Secrets) -> list[RayPod]:
    """The head, then one pod per replica and host of each worker group."""
    spec = service["spec"]["rayClusterConfig"]
    secrets = {CLUSTER: {"auth_token": secrets["ray"]["auth_token"]}, **secrets}
    head = _pod(spec, "headgroup", spec["headGroupSpec"], secrets)
    pods = [head]
    for group in spec["workerGroupSpecs"]:
        worker = _pod(spec, group["groupName"], group, secrets)
        pods += [worker] * (group["replicas"] * group.get("numOfHosts", 1))
    return pods


def _pod(spec: Object, name: str, group: Object, secrets: Secrets) -> RayPod:
    is_head = name == "headgroup"
    container = group["template"]["spec"]["containers"][0]
    assert "command" not in container  # it would go before `ray start`
    parameters = {
        "metrics-export-port": METRICS_PORT,
        "dashboard-agent-listen-port": AGENT_PORT,
        "memory": str(_bytes(container["resources"]["limits"]["memory"])),
        **group["rayStartParams"],
        "block": "true",
    }
    assert {"num-cpus", "num-gpus"} <= parameters.keys()  # else KubeRay counts them itself
    if is_head:
        parameters.setdefault("dashboard-host", "0.0.0.0")
        if spec.get("enableInTreeAutoscaling"):
            parameters["no-monitor"] = "true"
    else:
        parameters.setdefault("address", f"{HEAD_SERVICE}:{GCS_PORT}")
    probes = {
        kind: container[kind]["exec"]["command"]
        for kind in ("startupProbe", "livenessProbe")
        if "exec" in container.get(kind, {})
    }
    assert "readinessProbe" not in container  # it would replace KubeRay's
    probes["readinessProbe"] = _readiness_probe(is_head)
    pod = RayPod(name, _rendered_environment(container, secrets), parameters, probes)
    environment = {**pod.environment}
    for variable, value in _injected_environment(spec, pod, secrets).items():
        environment.setdefault(variable, value)
    return replace(pod, environment=environment)


def _rendered_environment(container: Object, secrets: Secrets) -> dict[str, str]:
    environment = {}
    for entry in container["env"]:
        if "value" in entry:
            environment[entry["name"]] = entry["value"]
        elif field := entry["valueFrom"].get("resourceFieldRef"):
            kind, name = field["resource"].split(".")
            environment[entry["name"]] = str(_bytes(container["resources"][kind][name]))
        else:
            reference = entry["valueFrom"]["secretKeyRef"]
            environment[entry["name"]] = secrets[reference["name"]][reference["key"]]
    assert "envFrom" not in container
    return environment


def _injected_environment(spec: Object, pod: RayPod, secrets: Secrets) -> dict[str, str]:
    address = "127.0.0.1" if pod.is_head else HEAD_SERVICE
    injected = {
        "RAY_CLUSTER_NAME": CLUSTER,
        "RAY_CLUSTER_NAMESPACE": "demo",
        "RAY_CLOUD_INSTANCE_ID": f"{CLUSTER}-{pod.group}-fghij",
        "RAY_NODE_TYPE_NAME": pod.group,
        "KUBERAY_GEN_RAY_START_CMD": pod._ray_start(),
        "RAY_PORT": GCS_PORT,
        "RAY_ADDRESS": f"{address}:{GCS_PORT}",
        "RAY_timeout_ms_task_wait_for_death_info": "0",
        "RAY_gcs_server_request_timeout_seconds": "5",
        "RAY_SERVE_KV_TIMEOUT_S": "5",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
    }
    if pod.is_head:
        injected["RAY_USAGE_STATS_EXTRA_TAGS"] = "kuberay_version=v1.7.0;kuberay_crd=RayService"
        if spec.get("enableInTreeAutoscaling"):
            assert spec["autoscalerOptions"]["version"] == "v2"
            injected["RAY_enable_autoscaler_v2"] = "true"
    else:
        injected |= {"FQ_RAY_IP": HEAD_SERVICE, "RAY_IP": HEAD_SERVICE.partition(".")[0]}
    if spec.get("authOptions", {}).get("mode") == "token":
        secret = spec["authOptions"].get("secretName", CLUSTER)
        token = secrets[secret]["auth_token"]
        injected |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    assert "gcsFaultToleranceOptions" not in spec  # its variables are not written down here
    return injected


def _readiness_probe(is_head: bool) -> list[str]:
    def probe(timeout_s: int, port: str, path: str) -> str:
        url = f"http://localhost:{port}/{path}"
        return f"wget --tries 1 -T {timeout_s} -q -O- {url} | grep success"

    if is_head:  # a GET of the kubelet's
        return ["wget", "-q", "-O", "/dev/null", f"http://localhost:{AGENT_PORT}/api/healthz"]
    raylet = probe(2, AGENT_PORT, "api/local_raylet_healthz")
    return ["bash", "-c", f"{raylet} && {probe(10, SERVE_PORT, '-/healthz')}"]


def _bytes(quantity: object) -> int:
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(quantity))
    assert match is not None
    return int(float(match[1]) * UNITS[match[2]])
