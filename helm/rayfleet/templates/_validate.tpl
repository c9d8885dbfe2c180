{{/* What a schema cannot say: values that contradict each other. Each message names the remedy. */}}
{{- define "rayfleet.validate" -}}
{{- $values := .Values -}}
{{- if gt (len (include "rayfleet.fullname" .)) 40 -}}
{{- /* KubeRay's limit is 47, for the RayJob NAME-bench as well. */ -}}
{{- fail (printf "the name %q is longer than 40 characters, to which KubeRay adds its own: set fullnameOverride" (include "rayfleet.fullname" .)) -}}
{{- end -}}

{{- $groups := dict -}}
{{- range $values.workerGroups -}}
{{- if or (eq .name "gateway") (eq .name "head") -}}
{{- fail (printf "workerGroups: the name %q is taken by the chart, choose another" .name) -}}
{{- end -}}
{{- if hasKey $groups .name -}}{{- fail (printf "workerGroups: there are two named %q" .name) -}}{{- end -}}
{{- $_ := set $groups .name (dict "ranks" 0) -}}
{{- if and (hasKey . "maxReplicas") (lt (int .maxReplicas) (int .replicas)) -}}
{{- fail (printf "workerGroups: %q has maxReplicas %d below replicas %d" .name (int .maxReplicas) (int .replicas)) -}}
{{- end -}}
{{- end -}}

{{- $names := dict -}}
{{- range $values.models -}}
{{- $model := . -}}
{{- if hasKey $names .name -}}{{- fail (printf "models: two are served as %q" .name) -}}{{- end -}}
{{- $_ := set $names .name true -}}
{{- range list "model" "served_model_name" "num_workers" "min_workers" "max_workers" "tensor_parallel_size" "device" -}}
{{- if hasKey (default dict $model.options) . -}}
{{- fail (printf "models: options of %q must not hold %q, for which the chart has a value of its own" $model.name .) -}}
{{- end -}}
{{- end -}}
{{- include "rayfleet.validateNames" (dict "where" (printf "models: options of %q" .name) "options" .options) -}}
{{- include "rayfleet.validateFit" (dict "root" $ "model" . "groups" $groups) -}}
{{- end -}}
{{- if hasKey $values.gateway "fairBy" -}}
{{- fail "gateway.fairBy is now gateway.fairnessKey" -}}
{{- end -}}
{{- with int $values.gateway.maxReplicas -}}
{{- if lt . (int $values.gateway.replicas) -}}
{{- fail (printf "gateway.maxReplicas %d is below gateway.replicas %d: raise it, or set it to 0 for a fixed number" . (int $values.gateway.replicas)) -}}
{{- end -}}
{{- if and (gt . (int $values.gateway.replicas)) (not $values.autoscaler.enabled) -}}
{{- fail "gateway.maxReplicas needs autoscaler.enabled=true: Ray's autoscaler adds and removes the pods of gateways" -}}
{{- end -}}
{{- end -}}
{{- include "rayfleet.validateNames" (dict "where" "gateway.options" "options" $values.gateway.options) -}}
{{- range list "models" "num_gateways" "max_gateways" "fairness_key" "api_key_file" "api_keys" "admin_api_key_file" "admin_api_key" "metrics_host" "metrics_port" "metrics_vllm_names" -}}
{{- if hasKey (default dict $values.gateway.options) . -}}
{{- fail (printf "gateway.options must not hold %q, for which the chart has a value of its own" .) -}}
{{- end -}}
{{- end -}}

{{- if and $values.apiKeys.existingSecret $values.apiKeys.keys -}}
{{- fail "apiKeys: give either existingSecret or keys, not both" -}}
{{- end -}}
{{- if and $values.adminApiKeys.existingSecret $values.adminApiKeys.keys -}}
{{- fail "adminApiKeys: give either existingSecret or keys, not both" -}}
{{- end -}}
{{- if and $values.huggingFace.existingSecret $values.huggingFace.token -}}
{{- fail "huggingFace: give either existingSecret or token, not both" -}}
{{- end -}}
{{- $outside := or $values.ingress.enabled $values.httpRoute.enabled (ne $values.service.type "ClusterIP") -}}
{{- if and $outside (not (include "rayfleet.apiKeySecret" .)) (not $values.allowOpenEndpoint) -}}
{{- fail "the endpoint is to be reached from outside the cluster and lets everyone in: set apiKeys, or allowOpenEndpoint=true if something in front asks for keys" -}}
{{- end -}}
{{- if and (not $values.rayAuth.enabled) (not $values.networkPolicy.enabled) -}}
{{- fail "with rayAuth.enabled=false and networkPolicy.enabled=false whoever reaches the pods could run code in them: enable one" -}}
{{- end -}}
{{- with $values.gcsFaultTolerance -}}
{{- if and .enabled (eq .backend "redis") (not .redisAddress) -}}
{{- fail "gcsFaultTolerance needs redisAddress, such as redis:6379, or backend=rocksdb" -}}
{{- end -}}
{{- if and .enabled (eq .backend "rocksdb") (or .redisAddress .externalStorageNamespace) -}}
{{- fail "gcsFaultTolerance.backend=rocksdb uses neither redisAddress nor externalStorageNamespace: remove them" -}}
{{- end -}}
{{- if and .enabled (eq .backend "rocksdb") .storage.claimName (ne $values.upgradeStrategy.type "None") -}}
{{- fail "gcsFaultTolerance.storage.claimName with upgradeStrategy.type NewCluster: the new cluster would open the files of the one that still serves. Leave the claim to KubeRay, which makes one per cluster, or set upgradeStrategy.type=None" -}}
{{- end -}}
{{- if and .enabled .externalStorageNamespace (ne $values.upgradeStrategy.type "None") -}}
{{- fail "gcsFaultTolerance.externalStorageNamespace with upgradeStrategy.type NewCluster: the new cluster would read and overwrite the state of the one that still serves. Leave the namespace to KubeRay, which makes one per cluster, or set upgradeStrategy.type=None" -}}
{{- end -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.host) -}}
{{- fail "ingress needs a host" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- fail "httpRoute needs parentRefs, the Gateway that it belongs to" -}}
{{- end -}}
{{- if eq $values.upgradeStrategy.type "NewClusterWithIncrementalUpgrade" -}}
{{- fail "upgradeStrategy.type NewClusterWithIncrementalUpgrade is not supported: KubeRay then names the Service after each cluster, so that no Ingress, HTTPRoute or client could name it, and shows /admin and /metrics on a Gateway of its own. Set NewCluster or None" -}}
{{- end -}}
{{- include "rayfleet.validateNetwork" . -}}
{{- include "rayfleet.validateKubeRay" . -}}
{{- with $values.modelCache -}}
{{- if and .enabled .persistent (not .existingClaim) (not .storageClassName) (has "ReadWriteMany" .accessModes) -}}
{{- fail "modelCache.persistent needs storageClassName, a class whose volumes several nodes may write (NFS, EFS, Filestore, Azure Files): with the default class of most clouds the claim stays Pending, and all pods with it. Where all pods run on one node, accessModes=[ReadWriteOnce] does" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Options under names that they had before; pods would refuse them, one by one. */}}
{{- define "rayfleet.validateNames" -}}
{{- $where := .where -}}
{{- $options := default dict .options -}}
{{- range $old, $new := dict "fair_by" "fairness_key" "salt_by" "cache_isolation" "worker_wait_s" "no_worker_timeout_s" -}}
{{- if hasKey $options $old -}}{{- fail (printf "%s: %s is now %s" $where $old $new) -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether those who are to come in, and those that the pods must reach, pass the NetworkPolicy. */}}
{{- define "rayfleet.validateNetwork" -}}
{{- $policy := .Values.networkPolicy -}}
{{- $addresses := $policy.clientCidrs -}}
{{- range $policy.clients -}}
{{- with .ipBlock -}}{{- $addresses = append $addresses .cidr -}}{{- end -}}
{{- end -}}
{{- if and $policy.enabled (ne .Values.service.type "ClusterIP") (not $addresses) -}}
{{- fail (printf "service.type %s: what comes in there has the address of a node or of the client, and networkPolicy lets in pods alone. Set networkPolicy.clientCidrs, such as [10.0.0.0/16] for the network of the nodes" .Values.service.type) -}}
{{- end -}}
{{- if and $policy.enabled $policy.egress.restricted .Values.autoscaler.enabled (not $policy.egress.apiServerCidrs) -}}
{{- fail "networkPolicy.egress.restricted with autoscaler.enabled: Ray's autoscaler asks the API server for pods. Set networkPolicy.egress.apiServerCidrs to its addresses, which `kubectl get endpointslices -n default -l kubernetes.io/service-name=kubernetes` lists, each with /32" -}}
{{- end -}}
{{- end -}}

{{/* Whether the cluster's KubeRay knows what it is told; offline nothing is known of it. */}}
{{- define "rayfleet.validateKubeRay" -}}
{{- $versions := .Capabilities.APIVersions -}}
{{- /* RayCronJob came with KubeRay 1.6, as did authOptions.secretName. */ -}}
{{- $old := and ($versions.Has "ray.io/v1/RayService") (not ($versions.Has "ray.io/v1/RayCronJob")) -}}
{{- if and $old .Values.rayAuth.enabled .Values.rayAuth.existingSecret -}}
{{- fail "rayAuth.existingSecret needs KubeRay 1.6 or newer, and the resource definitions of this cluster are older: they would drop it, and Ray would ask for a token of KubeRay's own. Upgrade them with the operator, or leave existingSecret empty" -}}
{{- end -}}
{{- end -}}

{{/* Whether the ranks of a model, and with it all of its group, find a place. */}}
{{- define "rayfleet.validateFit" -}}
{{- $group := include "rayfleet.group" (dict "root" .root "name" .model.group "model" .model.name) | fromYaml -}}
{{- $tp := int (default 1 .model.tensorParallelSize) -}}
{{- if and .model.autoscaling (hasKey .model "workers") -}}
{{- fail (printf "models: %q has both workers and autoscaling, which decides their number" .model.name) -}}
{{- end -}}
{{- $least := int (default 1 .model.workers) -}}
{{- with .model.autoscaling -}}
{{- $least = int (ternary .minWorkers 1 (hasKey . "minWorkers")) -}}
{{- if gt $least (int .maxWorkers) -}}
{{- fail (printf "models: autoscaling of %q has minWorkers %d above maxWorkers %d" $.model.name $least (int .maxWorkers)) -}}
{{- end -}}
{{- end -}}
{{- $gpus := int $group.gpus -}}
{{- if gt $gpus 0 -}}
{{- $hosts := int (default 1 $group.numOfHosts) -}}
{{- if and (eq (default "STRICT_PACK" .model.placement) "STRICT_PACK") (gt $tp $gpus) -}}
{{- fail (printf "models: %q needs %d GPUs in one pod (tensorParallelSize with placement STRICT_PACK), but pods of group %q have %d" .model.name $tp .model.group $gpus) -}}
{{- end -}}
{{- $sum := get .groups .model.group -}}
{{- $_ := set $sum "ranks" (add (get $sum "ranks") (mul $tp $least)) -}}
{{- $there := mul $gpus $hosts (int (default $group.replicas (ternary $group.maxReplicas nil .root.Values.autoscaler.enabled))) -}}
{{- if gt (int (get $sum "ranks")) (int $there) -}}
{{- fail (printf "models: group %q has %d GPUs in all, but its models need %d" .model.group (int $there) (int (get $sum "ranks"))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
