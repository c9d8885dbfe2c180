"""Invalid values are rejected with a message that names them."""

from __future__ import annotations

import re

import pytest

from tests.support.helm.chart import CHART, Helm, HelmError

H100 = ["-f", str(CHART / "values-h100-tp8.yaml")]
LONG = "a-name-that-goes-on-and-on-and-on-and-on-and-on"
DEMO = '{"name": "demo", "model": "m", "group": "cpu"'

WRONG = {
    # what the schema says
    "misspelled": (["--set", "gateways.replicas=2"], "gateways"),
    "no gateway": (["--set", "gateway.replicas=0"], "replicas"),
    "kind of service": (["--set", "service.type=Loadbalancer"], "type"),
    "strategy": (["--set", "upgradeStrategy.type=Recreate"], "type"),
    "name of a model": (["--set-json", 'models=[{"name": "a b", "model": "m", "group": "cpu"}]'], "name"),
    "no model": (["--set-json", "models=[]"], "models"),
    "placement": (["--set-json", f'models=[{DEMO}, "placement": "TIGHT"}}]'], "placement"),
    "resources": (["--set-json", 'head.resources={"limit": {}}'], "limit"),
    "key with a space": (["--set-json", 'apiKeys.keys=["a b"]'], "keys"),
    "digest": (["--set", "image.digest=sha256:1"], "digest"),
    "trusted proxy by name": (["--set-json", 'haproxy.trustedProxies=["ingress"]'], "trustedProxies"),
    "ray's version": (["--set", "rayVersion=latest"], "rayVersion"),
    # what contradicts something else
    "no such group": (["--set-json", 'models=[{"name": "a", "model": "m", "group": "gpu"}]'], 'group "gpu", but workerGroups has only: cpu'),
    "group twice": (["--set-json", 'workerGroups=[{"name": "a", "replicas": 1, "resources": {}}, {"name": "a", "replicas": 1, "resources": {}}]'], 'two groups are named "a"'),
    "group of the chart": (["--set-json", 'workerGroups=[{"name": "gateway", "replicas": 1, "resources": {}}]'], 'the name "gateway" is reserved'),
    "model twice": (["--set-json", f"models=[{DEMO}}}, {DEMO}}}]"], 'two models are named "demo"'),
    "option of the chart": (["--set-json", f'models=[{DEMO}, "options": {{"device": "cuda"}}}}]'], 'must not contain "device"'),
    "gateway option of the chart": (["--set-json", 'gateway.options={"api_keys": ["k"]}'], 'must not contain "api_keys"'),
    "fewer gateways at most": (["--set", "gateway.maxReplicas=1"], "gateway.maxReplicas 1 is below gateway.replicas 2"),
    "gateways follow, pods do not": (["--set", "gateway.maxReplicas=4"], "gateway.maxReplicas needs autoscaler.enabled"),
    "value under its old name": (["--set", "gateway.fairBy=key"], "gateway.fairBy is now gateway.fairnessKey"),
    "gateway option under its old name": (["--set-json", 'gateway.options={"salt_by": "key"}'], "salt_by is now cache_isolation"),
    "option under its old name": (["--set-json", f'models=[{DEMO}, "options": {{"worker_wait_s": 9}}}}]'], "worker_wait_s is now no_worker_timeout_s"),
    "workers and autoscaling": (["--set-json", f'models=[{DEMO}, "workers": 1, "autoscaling": {{"maxWorkers": 2}}}}]'], "both workers and autoscaling"),
    "fewest above most": (["--set-json", f'models=[{DEMO}, "autoscaling": {{"minWorkers": 3, "maxWorkers": 2}}}}]'], "minWorkers 3 above maxWorkers 2"),
    "no most": (["--set-json", f'models=[{DEMO}, "autoscaling": {{"minWorkers": 3}}}}]'], "maxWorkers"),
    "more ranks than GPUs in a pod": ([*H100, "--set-json", 'models=[{"name": "a", "model": "m", "group": "h100", "tensorParallelSize": 16}]'], "needs 16 GPUs in one pod"),
    "more workers than GPUs": ([*H100, "--set-json", 'models=[{"name": "a", "model": "m", "group": "h100", "workers": 9}]'], "has 8 GPUs in total, but its models need 9"),
    "open to the world": (["--set", "ingress.enabled=true,ingress.host=a.b"], "set apiKeys, or allowOpenEndpoint=true"),
    "open load balancer": (["--set", "service.type=LoadBalancer"], "set apiKeys"),
    "admin key of the chart": (["--set-json", 'gateway.options={"admin_api_key": "k"}'], 'must not contain "admin_api_key"'),
    "two sources of admin keys": (["--set-json", 'adminApiKeys={"existingSecret": "s", "keys": ["k"]}'], "adminApiKeys: set either"),
    "two sources of keys": (["--set-json", 'apiKeys={"existingSecret": "s", "keys": ["k"]}'], "either existingSecret or keys"),
    "two tokens": (["--set", "huggingFace.token=a,huggingFace.existingSecret=b"], "either existingSecret or token"),
    "Ray open to all": (["--set", "rayAuth.enabled=false,networkPolicy.enabled=false"], "could run code"),
    "no Redis": (["--set", "gcsFaultTolerance.enabled=true"], "needs redisAddress"),
    "no Gateway": (["--set", "httpRoute.enabled=true,allowOpenEndpoint=true"], "needs httpRoute.parentRefs"),
    "no host": (["--set", "ingress.enabled=true,allowOpenEndpoint=true"], "needs ingress.host"),
    "services without a lasting name": (["--set", "upgradeStrategy.type=NewClusterWithIncrementalUpgrade"], "names the Service after each cluster"),
    "RocksDB and Redis": (["--set", "gcsFaultTolerance.enabled=true,gcsFaultTolerance.backend=rocksdb,gcsFaultTolerance.redisAddress=r:1"], "uses neither redisAddress"),
    "one volume for two clusters": (["--set", "gcsFaultTolerance.enabled=true,gcsFaultTolerance.backend=rocksdb,gcsFaultTolerance.storage.claimName=c"], "open the files of the one that still serves"),
    "one Redis namespace for two clusters": (["--set", "gcsFaultTolerance.enabled=true,gcsFaultTolerance.redisAddress=r:1,gcsFaultTolerance.externalStorageNamespace=n"], "the state of the one that still serves"),
    "load balancer that the policy closes": (["--set", "service.type=LoadBalancer,allowOpenEndpoint=true"], "Set networkPolicy.clientCidrs"),
    "node port that the policy closes": (["--set", "service.type=NodePort,allowOpenEndpoint=true"], "service.type NodePort: its traffic has the source address of a node"),
    "autoscaler without its API server": (["--set", "networkPolicy.egress.restricted=true,autoscaler.enabled=true"], "Set networkPolicy.egress.apiServerCidrs"),
    "claim that no class fills": (["--set", "modelCache.persistent=true"], "modelCache.persistent needs storageClassName"),
    "secret that an old KubeRay drops": (["--set", "rayAuth.existingSecret=s", "--api-versions", "ray.io/v1/RayService"], "needs KubeRay 1.6"),
    "eviction never": (["--set", "podDisruptionBudget.maxUnavailable=0"], "maxUnavailable"),
    "eviction by percent": (["--set", "podDisruptionBudget.maxUnavailable=20%"], "maxUnavailable"),
    "address that is no network": (["--set-json", 'networkPolicy.clientCidrs=["10.0.0.1"]'], "clientCidrs"),
    "thresholds that KubeRay no longer reads": (["--set", "serviceUnhealthySecondThreshold=900"], "serviceUnhealthySecondThreshold"),
    "long name": (["--set", f"nameOverride={LONG}"], "set fullnameOverride"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_values_fail_with_a_message(helm4: Helm, arguments: list[str], message: str) -> None:
    with pytest.raises(HelmError, match=re.escape(message)):
        helm4.template(*arguments)


@pytest.mark.parametrize("case", ["misspelled", "kind of service", "no such group", "no Redis"])
def test_helm_3_refuses_alike(helm: Helm, case: str) -> None:
    arguments, message = WRONG[case]
    if helm.major == 3:
        with pytest.raises(HelmError, match=re.escape(message)):
            helm.template(*arguments)


def test_what_is_nearly_wrong_is_rendered(helm4: Helm) -> None:
    balancer = "service.type=LoadBalancer,allowOpenEndpoint=true"
    helm4.template("--set", f"{balancer},networkPolicy.clientCidrs={{10.0.0.0/16}}")
    helm4.template("--set", f"{balancer},networkPolicy.enabled=false")
    anywhere = '[{"ipBlock": {"cidr": "0.0.0.0/0"}}]'
    helm4.template("--set", balancer, "--set-json", f"networkPolicy.clients={anywhere}")
    helm4.template("--set", "rayAuth.enabled=false")
    known = ["--api-versions", "ray.io/v1/RayService", "--api-versions", "ray.io/v1/RayCronJob"]
    for versions in ([], known):
        helm4.template("--set", "rayAuth.existingSecret=s", *versions)
    helm4.template("--set", "modelCache.persistent=true,modelCache.accessModes={ReadWriteOnce}")
    eight = '[{"name": "a", "model": "m", "group": "h100", "workers": 8}]'
    helm4.template(*H100, "--set-json", f"models={eight}")
