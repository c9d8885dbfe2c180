{{/* The template of a Ray pod. Arguments: root, component (head, gateway, worker), settings, group. */}}
{{- define "rayfleet.podTemplate" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $isHead := eq .component "head" -}}
{{- $hasCache := and $values.modelCache.enabled (not $isHead) -}}
{{- $pod := mergeOverwrite (deepCopy $values.pod) (deepCopy (default dict .settings.pod)) -}}
{{- $selector := include "rayfleet.selectorLabels" $root | fromYaml -}}
{{- $_ := set $selector "app.kubernetes.io/component" .component -}}
{{- with .group -}}{{- $_ := set $selector "rayfleet.io/group" . -}}{{- end -}}
metadata:
  labels:
    {{- toYaml (merge (deepCopy $selector) $pod.labels) | nindent 4 }}
  {{- with $pod.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "rayfleet.serviceAccountName" $root }}
  automountServiceAccountToken: {{ and $isHead $values.autoscaler.enabled }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ ternary "60" (include "rayfleet.graceSeconds" $root) $isHead }}
  securityContext: {{- toYaml $pod.securityContext | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $pod.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pod.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $pod.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml $pod.topologySpreadConstraints | nindent 4 }}
  {{- else if and $pod.topologySpread (not $isHead) }}
  topologySpreadConstraints:
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- toYaml $selector | nindent 10 }}
    {{- end }}
  {{- end }}
  {{- with $pod.initContainers }}
  initContainers: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" $isHead }}
      image: {{ include "rayfleet.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      ports: {{- include "rayfleet.ports" . | nindent 8 }}
      env:
        {{- include "rayfleet.environment" (dict "Values" $values "Chart" $root.Chart "Release" $root.Release "component" .component) | trim | nindent 8 }}
        {{- with $pod.env }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- with $pod.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext: {{- toYaml $pod.containerSecurityContext | nindent 8 }}
      {{- include "rayfleet.probes" (dict "probes" $pod.probes) | nindent 6 }}
      {{- if not $isHead }}
      lifecycle: {{- include "rayfleet.drain" $root | nindent 8 }}
      {{- end }}
      resources: {{- include "rayfleet.resources" .settings | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if $hasCache }}
        - {name: models, mountPath: {{ $values.modelCache.mountPath }}}
        {{- end }}
        {{- if and (eq .component "gateway") (include "rayfleet.apiKeySecret" $root) }}
        - {name: api-keys, mountPath: /etc/rayfleet/api-keys, readOnly: true}
        {{- end }}
        {{- if and (eq .component "gateway") (include "rayfleet.adminApiKeySecret" $root) }}
        - {name: admin-api-keys, mountPath: /etc/rayfleet/admin-api-keys, readOnly: true}
        {{- end }}
        {{- with $pod.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
    {{- with $pod.sidecars }}{{ toYaml . | nindent 4 }}{{ end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ $pod.tmpSize }}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pod.shmSize }}}
    {{- if $hasCache }}
    - name: models
      {{- if or $values.modelCache.persistent $values.modelCache.existingClaim }}
      persistentVolumeClaim: {claimName: {{ include "rayfleet.modelCacheClaim" $root }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ $values.modelCache.size }}}
      {{- end }}
    {{- end }}
    {{- if and (eq .component "gateway") (include "rayfleet.apiKeySecret" $root) }}
    - name: api-keys
      secret: {secretName: {{ include "rayfleet.apiKeySecret" $root }}, defaultMode: 0440}
    {{- end }}
    {{- if and (eq .component "gateway") (include "rayfleet.adminApiKeySecret" $root) }}
    - name: admin-api-keys
      secret: {secretName: {{ include "rayfleet.adminApiKeySecret" $root }}, defaultMode: 0440}
    {{- end }}
    {{- with $pod.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{- define "rayfleet.ports" -}}
- {name: serve, containerPort: 8000}
- {name: metrics, containerPort: 8080}
{{- if ne .component "head" }}
- {name: fleet, containerPort: 9464}
{{- end }}
{{- if eq .component "head" }}
- {name: gcs-server, containerPort: 6379}
- {name: dashboard, containerPort: 8265}
- {name: client, containerPort: 10001}
{{- end }}
{{- end -}}

{{/* Probes check Ray's processes (the raylet; on the head also the GCS), not models: a pod that loads a
model for an hour is healthy. KubeRay adds the readiness probe, which also checks Serve's proxy on the pod. */}}
{{- define "rayfleet.probes" -}}
{{- $ask := dict "exec" (dict "command" (list "wget" "-q" "-T" "4" "-O" "/dev/null" "http://127.0.0.1:52365/api/healthz")) "periodSeconds" 10 "timeoutSeconds" 5 -}}
startupProbe:
  {{- toYaml (merge (dict "failureThreshold" (int (ceil (divf .probes.startupSeconds 10)))) $ask) | nindent 2 }}
livenessProbe:
  {{- toYaml (merge (dict "failureThreshold" (int (ceil (divf .probes.livenessSeconds 10)))) $ask) | nindent 2 }}
{{- end -}}

{{/* Before a pod stops, Serve moves its replicas to other pods, and they finish their streams. If Ray does
not respond (the whole cluster is being deleted), the pod stops without waiting. */}}
{{- define "rayfleet.drain" -}}
preStop:
  exec:
    command: [python, -m, cluster.drain, --deadline, {{ int64 .Values.longestStreamSeconds | quote }}]
{{- end -}}

{{/* Seconds that a pod, or a replaced cluster, is kept for its streams. The extra minute is for streams that
start before all nodes know that it stops. */}}
{{- define "rayfleet.graceSeconds" -}}
{{- add (int64 .Values.longestStreamSeconds) 60 -}}
{{- end -}}

{{/* A pod's resources as Ray counts them: requested CPUs, rounded up, and GPUs. */}}
{{- define "rayfleet.rayStartParams" -}}
{{- $cpu := toString (default "1" (get (default dict .resources.requests) "cpu")) -}}
{{- if hasSuffix "m" $cpu -}}
{{- $cpu = divf (trimSuffix "m" $cpu) 1000 -}}
{{- end -}}
num-cpus: {{ ceil $cpu | toString | quote }}
num-gpus: {{ int .gpus | toString | quote }}
object-store-memory: "268435456"
{{- end -}}

{{/* A component's resources, with the GPUs of a worker group. */}}
{{- define "rayfleet.resources" -}}
{{- $resources := deepCopy (default dict .resources) -}}
{{- if gt (int .gpus) 0 -}}
{{- $gpus := dict (default "nvidia.com/gpu" .gpuResource) (int .gpus) -}}
{{- range list "requests" "limits" -}}
{{- $_ := set $resources . (merge (deepCopy (default dict (get $resources .))) $gpus) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
