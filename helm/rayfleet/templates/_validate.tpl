{{/* Checks that a schema cannot express: values that contradict each other. */}}
{{- define "rayfleet.validate" -}}
{{- $values := .Values -}}
{{- if gt (len (include "rayfleet.fullname" .)) 40 -}}
{{- /* KubeRay's limit is 47, for the RayJob NAME-bench as well. */ -}}
{{- fail (printf "the name %q is longer than 40 characters, and KubeRay appends to it: set fullnameOverride to a shorter one" (include "rayfleet.fullname" .)) -}}
{{- end -}}

{{- $groups := dict -}}
{{- range $values.workerGroups -}}
{{- if or (eq .name "gateway") (eq .name "head") -}}
{{- fail (printf "workerGroups: the name %q is reserved by the chart: choose another one" .name) -}}
{{- end -}}
{{- if hasKey $groups .name -}}{{- fail (printf "workerGroups: two groups are named %q: rename one" .name) -}}{{- end -}}
{{- $_ := set $groups .name (dict "ranks" 0) -}}
{{- if and (hasKey . "maxReplicas") (lt (int .maxReplicas) (int .replicas)) -}}
{{- fail (printf "workerGroups: %q has maxReplicas %d below replicas %d: raise maxReplicas" .name (int .maxReplicas) (int .replicas)) -}}
{{- end -}}
{{- end -}}

{{- $names := dict -}}
{{- range $values.models -}}
{{- $model := . -}}
{{- if hasKey $names .name -}}{{- fail (printf "models: two models are named %q: rename one" .name) -}}{{- end -}}
{{- $_ := set $names .name true -}}
{{- range list "model" "served_model_name" "num_workers" "min_workers" "max_workers" "tensor_parallel_size" "device" -}}
{{- if hasKey (default dict $model.options) . -}}
{{- fail (printf "models: options of %q must not contain %q: set the chart value instead" $model.name .) -}}
{{- end -}}
{{- end -}}
{{- include "rayfleet.validateNames" (dict "where" (printf "models: options of %q" .name) "options" .options) -}}
{{- include "rayfleet.validateFit" (dict "root" $ "model" . "groups" $groups) -}}
{{- end -}}
{{- if hasKey $values.gateway "fairBy" -}}
{{- fail "gateway.fairBy is now gateway.fairnessKey: rename it" -}}
{{- end -}}
{{- with int $values.gateway.maxReplicas -}}
{{- if lt . (int $values.gateway.replicas) -}}
{{- fail (printf "gateway.maxReplicas %d is below gateway.replicas %d: raise it, or set it to 0 for a fixed number" . (int $values.gateway.replicas)) -}}
{{- end -}}
{{- if and (gt . (int $values.gateway.replicas)) (not $values.autoscaler.enabled) -}}
{{- fail "gateway.maxReplicas needs autoscaler.enabled=true, because Ray's autoscaler adds and removes gateway pods" -}}
{{- end -}}
{{- end -}}
{{- include "rayfleet.validateNames" (dict "where" "gateway.options" "options" $values.gateway.options) -}}
{{- range list "models" "num_gateways" "max_gateways" "fairness_key" "api_key_file" "api_keys" "admin_api_key_file" "admin_api_key" "metrics_host" "metrics_port" "metrics_vllm_names" -}}
{{- if hasKey (default dict $values.gateway.options) . -}}
{{- fail (printf "gateway.options must not contain %q: set the chart value instead" .) -}}
{{- end -}}
{{- end -}}

{{- if and $values.apiKeys.existingSecret $values.apiKeys.keys -}}
{{- fail "apiKeys: set either existingSecret or keys, not both" -}}
{{- end -}}
{{- if and $values.adminApiKeys.existingSecret $values.adminApiKeys.keys -}}
{{- fail "adminApiKeys: set either existingSecret or keys, not both" -}}
{{- end -}}
{{- if and $values.huggingFace.existingSecret $values.huggingFace.token -}}
{{- fail "huggingFace: set either existingSecret or token, not both" -}}
{{- end -}}
{{- $outside := or $values.ingress.enabled $values.httpRoute.enabled (ne $values.service.type "ClusterIP") -}}
{{- if and $outside (not (include "rayfleet.apiKeySecret" .)) (not $values.allowOpenEndpoint) -}}
{{- fail "the endpoint is exposed outside the cluster without API keys: set apiKeys, or allowOpenEndpoint=true if a proxy in front authenticates clients" -}}
{{- end -}}
{{- if and (not $values.rayAuth.enabled) (not $values.networkPolicy.enabled) -}}
{{- fail "with rayAuth.enabled=false and networkPolicy.enabled=false, anyone who can reach the pods could run code in them: enable one of them" -}}
{{- end -}}
{{- with $values.gcsFaultTolerance -}}
{{- if and .enabled (eq .backend "redis") (not .redisAddress) -}}
{{- fail "gcsFaultTolerance needs redisAddress: set it, for example to redis:6379, or set backend=rocksdb" -}}
{{- end -}}
{{- if and .enabled (eq .backend "rocksdb") (or .redisAddress .externalStorageNamespace) -}}
{{- fail "gcsFaultTolerance.backend=rocksdb uses neither redisAddress nor externalStorageNamespace: remove them" -}}
{{- end -}}
{{- if and .enabled (eq .backend "rocksdb") .storage.claimName (ne $values.upgradeStrategy.type "None") -}}
{{- fail "gcsFaultTolerance.storage.claimName with upgradeStrategy.type NewCluster: the new cluster would open the files of the one that still serves. Remove it (KubeRay creates a claim per cluster), or set upgradeStrategy.type=None" -}}
{{- end -}}
{{- if and .enabled .externalStorageNamespace (ne $values.upgradeStrategy.type "None") -}}
{{- fail "gcsFaultTolerance.externalStorageNamespace with upgradeStrategy.type NewCluster: the new cluster would overwrite the state of the one that still serves. Remove it (KubeRay creates a namespace per cluster), or set upgradeStrategy.type=None" -}}
{{- end -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.host) -}}
{{- fail "ingress.enabled needs ingress.host: set it to the host name of the endpoint" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: set it to the Gateway that the route belongs to" -}}
{{- end -}}
{{- if eq $values.upgradeStrategy.type "NewClusterWithIncrementalUpgrade" -}}
{{- fail "upgradeStrategy.type NewClusterWithIncrementalUpgrade is not supported: KubeRay then names the Service after each cluster, so that Ingress, HTTPRoute and clients cannot refer to it, and exposes /admin, /metrics and /sessions on its own Gateway. Set NewCluster or None" -}}
{{- end -}}
{{- include "rayfleet.validateNetwork" . -}}
{{- include "rayfleet.validateKubeRay" . -}}
{{- with $values.modelCache -}}
{{- if and .enabled .persistent (not .existingClaim) (not .storageClassName) (has "ReadWriteMany" .accessModes) -}}
{{- fail "modelCache.persistent needs storageClassName: set it to a class that supports ReadWriteMany (NFS, EFS, Filestore, Azure Files). With the default class of most clouds, the claim and all pods stay Pending. If all pods run on one node, set accessModes=[ReadWriteOnce] instead" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Options under their old names, which the pods would reject. */}}
{{- define "rayfleet.validateNames" -}}
{{- $where := .where -}}
{{- $options := default dict .options -}}
{{- range $old, $new := dict "fair_by" "fairness_key" "salt_by" "cache_isolation" "worker_wait_s" "no_worker_timeout_s" -}}
{{- if hasKey $options $old -}}{{- fail (printf "%s: %s is now %s: rename it" $where $old $new) -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Checks that the NetworkPolicy admits the clients, and the connections that the pods need. */}}
{{- define "rayfleet.validateNetwork" -}}
{{- $policy := .Values.networkPolicy -}}
{{- $addresses := $policy.clientCidrs -}}
{{- range $policy.clients -}}
{{- with .ipBlock -}}{{- $addresses = append $addresses .cidr -}}{{- end -}}
{{- end -}}
{{- if and $policy.enabled (ne .Values.service.type "ClusterIP") (not $addresses) -}}
{{- fail (printf "service.type %s: its traffic has the source address of a node or of the client, but networkPolicy only admits pods. Set networkPolicy.clientCidrs, for example to the network of the nodes ([10.0.0.0/16])" .Values.service.type) -}}
{{- end -}}
{{- if and $policy.enabled $policy.egress.restricted .Values.autoscaler.enabled (not $policy.egress.apiServerCidrs) -}}
{{- fail "networkPolicy.egress.restricted with autoscaler.enabled: Ray's autoscaler must reach the API server. Set networkPolicy.egress.apiServerCidrs to its addresses, each with /32 (`kubectl get endpointslices -n default -l kubernetes.io/service-name=kubernetes` lists them)" -}}
{{- end -}}
{{- end -}}

{{/* Checks that the cluster's KubeRay supports the values; skipped if no cluster is connected. */}}
{{- define "rayfleet.validateKubeRay" -}}
{{- $versions := .Capabilities.APIVersions -}}
{{- /* RayCronJob came with KubeRay 1.6, as did authOptions.secretName. */ -}}
{{- $old := and ($versions.Has "ray.io/v1/RayService") (not ($versions.Has "ray.io/v1/RayCronJob")) -}}
{{- if and $old .Values.rayAuth.enabled .Values.rayAuth.existingSecret -}}
{{- fail "rayAuth.existingSecret needs KubeRay 1.6 or newer, but the CRDs of this cluster are older and would drop it, so that Ray would use a token created by KubeRay. Upgrade the CRDs and the operator, or leave existingSecret empty" -}}
{{- end -}}
{{- end -}}

{{/* Checks that the ranks of a model, and of all models of its group, fit into the group's pods. */}}
{{- define "rayfleet.validateFit" -}}
{{- $group := include "rayfleet.group" (dict "root" .root "name" .model.group "model" .model.name) | fromYaml -}}
{{- $tp := int (default 1 .model.tensorParallelSize) -}}
{{- if and .model.autoscaling (hasKey .model "workers") -}}
{{- fail (printf "models: %q has both workers and autoscaling: remove one" .model.name) -}}
{{- end -}}
{{- $least := int (default 1 .model.workers) -}}
{{- with .model.autoscaling -}}
{{- $least = int (ternary .minWorkers 1 (hasKey . "minWorkers")) -}}
{{- if gt $least (int .maxWorkers) -}}
{{- fail (printf "models: autoscaling of %q has minWorkers %d above maxWorkers %d: raise maxWorkers" $.model.name $least (int .maxWorkers)) -}}
{{- end -}}
{{- end -}}
{{- $gpus := int $group.gpus -}}
{{- if gt $gpus 0 -}}
{{- $hosts := int (default 1 $group.numOfHosts) -}}
{{- if and (eq (default "STRICT_PACK" .model.placement) "STRICT_PACK") (gt $tp $gpus) -}}
{{- fail (printf "models: %q needs %d GPUs in one pod (tensorParallelSize with placement STRICT_PACK), but pods of group %q have %d: lower tensorParallelSize, or set placement to PACK" .model.name $tp .model.group $gpus) -}}
{{- end -}}
{{- $sum := get .groups .model.group -}}
{{- $_ := set $sum "ranks" (add (get $sum "ranks") (mul $tp $least)) -}}
{{- $there := mul $gpus $hosts (int (default $group.replicas (ternary $group.maxReplicas nil .root.Values.autoscaler.enabled))) -}}
{{- if gt (int (get $sum "ranks")) (int $there) -}}
{{- fail (printf "models: group %q has %d GPUs in total, but its models need %d: add pods to the group, or lower the number of workers" .model.group (int $there) (int (get $sum "ranks"))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
