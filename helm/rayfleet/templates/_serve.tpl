{{/* Configuration of Ray Serve: the text of serveConfigV2, a ServeDeploySchema. */}}

{{- define "rayfleet.serveConfig" -}}
{{- $grace := int64 .Values.longestStreamSeconds -}}
{{- $models := list -}}
{{- $gateway := dict
  "name" "gateway"
  "graceful_shutdown_timeout_s" $grace
  "ray_actor_options" (dict "num_cpus" 0.1 "resources" (dict "rayfleet_gateway" 1))
-}}
{{- $maxGateways := int (include "rayfleet.maxGateways" .) -}}
{{- if gt $maxGateways 1 -}}
{{- /* Otherwise, the first pod to join would get two gateways and keep them. */ -}}
{{- $_ := set $gateway "ray_actor_options" (dict "num_cpus" 0.1 "resources" (dict "rayfleet_gateway" 2)) -}}
{{- $_ := set $gateway "max_surge_percent" 0 -}}
{{- end -}}
{{- /* With autoscaling, num_gateways alone sets the number of gateways. */ -}}
{{- if not (or (include "rayfleet.autoscales" .) (gt $maxGateways (int .Values.gateway.replicas))) -}}
{{- $_ := set $gateway "num_replicas" (int .Values.gateway.replicas) -}}
{{- end -}}
{{- $deployments := list $gateway -}}
{{- range .Values.models -}}
{{- $group := include "rayfleet.group" (dict "root" $ "name" .group "model" .name) | fromYaml -}}
{{- $entry := dict
  "served_model_name" .name
  "model" .model
  "tensor_parallel_size" (int (default 1 .tensorParallelSize))
  "device" (ternary "cuda" "cpu" (gt (int $group.gpus) 0))
-}}
{{- if .autoscaling -}}
{{- $entry = merge $entry (include "rayfleet.modelAutoscaling" .autoscaling | fromYaml) -}}
{{- else -}}
{{- $_ := set $entry "num_workers" (int (default 1 .workers)) -}}
{{- end -}}
{{- $models = append $models (merge $entry (default dict .options)) -}}
{{- $deployments = append $deployments (include "rayfleet.workerDeployment" (dict "model" . "group" $group "grace" $grace) | fromYaml) -}}
{{- end -}}
{{- $args := dict "num_gateways" (int .Values.gateway.replicas) "fairness_key" .Values.gateway.fairnessKey "models" $models "metrics_host" "0.0.0.0" "metrics_port" 9464 -}}
{{- if gt $maxGateways (int .Values.gateway.replicas) -}}
{{- $_ := set $args "max_gateways" $maxGateways -}}
{{- end -}}
{{- if .Values.monitoring.vllmNames -}}
{{- $_ := set $args "metrics_vllm_names" true -}}
{{- end -}}
{{- if include "rayfleet.apiKeySecret" . -}}
{{- $_ := set $args "api_key_file" "/etc/rayfleet/api-keys" -}}
{{- end -}}
{{- if include "rayfleet.adminApiKeySecret" . -}}
{{- $_ := set $args "admin_api_key_file" "/etc/rayfleet/admin-api-keys" -}}
{{- end -}}
{{- $args = merge $args (default dict .Values.gateway.options) -}}
{{- $application := dict
  "name" "rayfleet"
  "route_prefix" "/"
  "import_path" "cluster.app:build_app"
  "args" $args
  "deployments" $deployments
-}}
{{- toYaml (dict
  "proxy_location" "EveryNode"
  "http_options" (dict "host" "0.0.0.0" "port" 8000)
  "logging_config" (dict "enable_access_log" false "encoding" (upper .Values.logging.format) "log_level" (upper .Values.logging.level))
  "applications" (list $application)
) -}}
{{- end -}}

{{/* One model's deployment: its replicas and the placement of their ranks. No resource may be named
`..._group_` plus hexadecimal digits (a group `a100`): Ray uses such names for placement groups. */}}
{{- define "rayfleet.workerDeployment" -}}
{{- $bundle := dict (printf "rayfleet_workers_%s" .group.name) 0.001 -}}
{{- if gt (int .group.gpus) 0 -}}
{{- $_ := set $bundle "GPU" 1 -}}
{{- else -}}
{{- $_ := set $bundle "CPU" (default 1 .group.cpusPerRank) -}}
{{- end -}}
{{- $bundles := list -}}
{{- range until (int (default 1 .model.tensorParallelSize)) -}}
{{- $bundles = append $bundles $bundle -}}
{{- end -}}
{{- $deployment := dict
  "name" (printf "worker-%s" .model.name)
  "placement_group_bundles" $bundles
  "placement_group_strategy" (default "STRICT_PACK" .model.placement)
  "graceful_shutdown_timeout_s" .grace
  "max_surge_percent" (int (default 0 .model.maxSurgePercent))
-}}
{{- if not .model.autoscaling -}}
{{- $_ := set $deployment "num_replicas" (int (default 1 .model.workers)) -}}
{{- end -}}
{{- toYaml $deployment -}}
{{- end -}}

{{/* Maximum number of gateways, autoscaled or not. */}}
{{- define "rayfleet.maxGateways" -}}
{{- max (int .Values.gateway.replicas) (int .Values.gateway.maxReplicas) -}}
{{- end -}}

{{/* Whether any model has autoscaling. */}}
{{- define "rayfleet.autoscales" -}}
{{- range .Values.models -}}{{- if .autoscaling -}}yes{{- end -}}{{- end -}}
{{- end -}}

{{/* A model's autoscaling settings under the names of rayfleet's options. */}}
{{- define "rayfleet.modelAutoscaling" -}}
{{- $names := dict
  "minWorkers" "min_workers"
  "maxWorkers" "max_workers"
  "targetLoad" "target_load"
  "targetQueueDelayMs" "target_queue_delay_ms"
  "targetKvUsage" "target_kv_usage"
  "backlogHorizonSeconds" "backlog_horizon_s"
  "upscaleDelaySeconds" "upscale_delay_s"
  "downscaleDelaySeconds" "downscale_delay_s"
  "downscaleToZeroDelaySeconds" "downscale_to_zero_delay_s"
-}}
{{- $options := dict -}}
{{- range $name, $value := . -}}
{{- $_ := set $options (get $names $name) $value -}}
{{- end -}}
{{- toYaml $options -}}
{{- end -}}
