{{/* Names and labels. */}}

{{- define "rayfleet.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}{{- .Release.Name -}}{{- else -}}{{- printf "%s-%s" .Release.Name $name -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "rayfleet.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rayfleet.labels" -}}
{{ include "rayfleet.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "rayfleet.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- with .Values.image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{- define "rayfleet.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "rayfleet.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Name of the Service that KubeRay creates for the API port of the serving cluster. */}}
{{- define "rayfleet.serveService" -}}
{{- printf "%s-serve-svc" (include "rayfleet.fullname" .) -}}
{{- end -}}

{{/* Names of Secrets: the existing one, or the chart's own; empty if there is neither. */}}

{{- define "rayfleet.apiKeySecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- .Values.apiKeys.existingSecret -}}
{{- else if .Values.apiKeys.keys -}}
{{- printf "%s-api-keys" (include "rayfleet.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "rayfleet.adminApiKeySecret" -}}
{{- if .Values.adminApiKeys.existingSecret -}}
{{- .Values.adminApiKeys.existingSecret -}}
{{- else if .Values.adminApiKeys.keys -}}
{{- printf "%s-admin-api-keys" (include "rayfleet.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* Entry of the API keys' Secret with the key for the chart's own pods and for Prometheus. */}}
{{- define "rayfleet.apiKeyEntry" -}}
{{- if .Values.apiKeys.existingSecret -}}{{- .Values.apiKeys.entry -}}{{- else -}}key-0{{- end -}}
{{- end -}}

{{- define "rayfleet.huggingFaceSecret" -}}
{{- if .Values.huggingFace.existingSecret -}}
{{- .Values.huggingFace.existingSecret -}}
{{- else if .Values.huggingFace.token -}}
{{- printf "%s-hugging-face" (include "rayfleet.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "rayfleet.modelCacheClaim" -}}
{{- default (printf "%s-model-cache" (include "rayfleet.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end -}}

{{/* Folder for files that outlive a container; /tmp on the head, which loads no model and mounts no cache. */}}
{{- define "rayfleet.cacheFolder" -}}
{{- $cached := and .Values.modelCache.enabled (ne (default "" .component) "head") -}}
{{- ternary .Values.modelCache.mountPath "/tmp" $cached -}}
{{- end -}}

{{/* Folder for checkpoints from the Hub. */}}
{{- define "rayfleet.hubFolder" -}}
{{- printf "%s/huggingface" (include "rayfleet.cacheFolder" .) -}}
{{- end -}}

{{/* Numbers of pods, or of sets of numOfHosts pods, of a worker group, as YAML. Arguments: root, group. */}}
{{- define "rayfleet.groupScale" -}}
{{- $least := .group.replicas -}}
{{- $most := .group.replicas -}}
{{- if .root.Values.autoscaler.enabled -}}
{{- $least = default 0 .group.minReplicas -}}
{{- $most = default .group.replicas .group.maxReplicas -}}
{{- end -}}
replicas: {{ int .group.replicas }}
minReplicas: {{ int $least }}
maxReplicas: {{ int $most }}
{{- end -}}

{{/* The worker group with a name, as YAML; fails if there is none. Arguments: root, name, model. */}}
{{- define "rayfleet.group" -}}
{{- $found := dict -}}
{{- $names := list -}}
{{- range .root.Values.workerGroups -}}
{{- $names = append $names .name -}}
{{- if eq .name $.name -}}{{- $found = . -}}{{- end -}}
{{- end -}}
{{- if not $found -}}
{{- fail (printf "models: %q names group %q, but workerGroups has only: %s" .model .name (join ", " $names)) -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}
