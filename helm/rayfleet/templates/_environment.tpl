{{/*
The environment of every Ray pod, head and workers alike: Ray Serve's controller runs on the head.
Arguments: Values, Chart and Release of the root; component.

The first part is the output of `python -m cluster.environment`; a test keeps the two equal. Draining
periods are longer here, since every load balancer must first remove an endpoint that has gone.
KubeRay sets the token (spec.rayClusterConfig.authOptions). RAY_AUTH_MODE is set here as well, so that
Ray does not start without a token if KubeRay is too old to support authOptions.
*/}}
{{- define "rayfleet.environment" -}}
{{- $longest := int64 .Values.longestStreamSeconds -}}
{{- $settings := dict
  "RAY_USAGE_STATS_ENABLED" "0"
  "RAY_ENABLE_AUTO_CONNECT" "0"
  "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO" "0"
  "RAY_AUTH_MODE" (include "rayfleet.rayAuthMode" .)
  "RAY_SERVE_USE_GRPC_BY_DEFAULT" "1"
  "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH" "268435456"
  "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD" "0"
  "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP" "0"
  "RAY_SERVE_RUN_SYNC_IN_THREADPOOL" "0"
  "RAY_SERVE_FREEZE_GC_ON_STARTUP" "1"
  "RAY_SERVE_LOG_TO_STDERR" "0"
  "RAY_SERVE_COLLECT_AUTOSCALING_METRICS_ON_HANDLE" "0"
  "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS" "5000"
  "RAY_SERVE_ROUTER_QUEUE_LEN_GAUGE_THROTTLE_S" "10"
  "RAY_SERVE_EVENT_LOOP_MONITORING_INTERVAL_S" "60"
  "RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S" "3600"
  "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH" "cluster.connections.serve_middlewares"
  "FORWARDED_ALLOW_IPS" "none"
  "RAYFLEET_HAPROXY_TRUSTED_PROXIES" (join "," .Values.haproxy.trustedProxies)
  "RAY_SERVE_HTTP_KEEP_ALIVE_TIMEOUT_S" "120"
  "RAY_SERVE_CONTROL_LOOP_INTERVAL_S" "0.25"
  "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S" "3"
  "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS" "1"
  "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S" "15"
  "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S" "30"
  "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S" "30"
  "RAY_SERVE_SHUTDOWN_TIER_TIMEOUT_S" "5"
  "RAY_SERVE_PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S" "2"
  "RAYFLEET_LOG_FORMAT" .Values.logging.format
  "RAYFLEET_LOG_LEVEL" .Values.logging.level
  "RAYFLEET_LOG_FILE" "/proc/1/fd/1"
  "HOME" "/tmp/rayfleet"
  "XDG_CACHE_HOME" "/tmp/rayfleet/cache"
  "HF_HOME" (include "rayfleet.hubFolder" .)
  "TRITON_CACHE_DIR" (printf "%s/triton" (include "rayfleet.cacheFolder" .))
-}}
{{- if .Values.haproxy.enabled -}}
{{- $settings = merge $settings (dict
  "RAY_SERVE_ENABLE_HA_PROXY" "1"
  "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S" "3"
  "RAY_SERVE_HAPROXY_BINARY_PATH" .Values.haproxy.executable
  "RAY_SERVE_HAPROXY_NBTHREAD" (toString (int .Values.haproxy.threads))
  "RAY_SERVE_HAPROXY_METRICS_ENABLED" "0"
  "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S" (toString $longest)
  "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S" "60"
  "RAYFLEET_HAPROXY_MAX_CONNECTIONS_PER_SOURCE" (toString (int .Values.haproxy.maxConnectionsPerSource))
  "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S" (toString $longest)
  "RAY_SERVE_HAPROXY_RETRY_ON" "conn-failure empty-response"
  "RAY_SERVE_HAPROXY_RETRIES" "12"
  "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT" "1"
  "RAY_SERVE_HAPROXY_TUNE_BUFSIZE" "65536"
  "RAY_SERVE_PORT_QUARANTINE_S" (toString (add $longest 30))
  "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER" "1s"
  "RAY_SERVE_HAPROXY_HEALTH_CHECK_RISE" "1"
) -}}
{{- end -}}
{{- if .Values.huggingFace.offline -}}
{{- $_ := set $settings "HF_HUB_OFFLINE" "1" -}}
{{- end -}}
{{- range $name, $value := $settings }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- if eq .component "worker" }}
- name: RAYFLEET_MEMORY_REQUEST
  valueFrom:
    resourceFieldRef:
      resource: requests.memory
{{- end }}
{{- with include "rayfleet.huggingFaceSecret" . }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.huggingFace.secretKey }}
{{- end }}
{{- end -}}

{{- define "rayfleet.rayAuthMode" -}}
{{- ternary "token" "disabled" .Values.rayAuth.enabled -}}
{{- end -}}
