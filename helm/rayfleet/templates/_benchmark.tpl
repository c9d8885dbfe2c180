{{/* A pod that generates load. Arguments: root, container. */}}
{{- define "rayfleet.benchmarkPod" -}}
{{- $values := .root.Values -}}
{{- $results := ternary $values.benchmark.resultsClaim "" (eq .container "ray-head") -}}
metadata:
  labels:
    {{- include "rayfleet.selectorLabels" .root | nindent 4 }}
    app.kubernetes.io/component: benchmark
spec:
  serviceAccountName: {{ include "rayfleet.serviceAccountName" .root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext: {{- toYaml $values.pod.securityContext | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.benchmark.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .container }}
      image: {{ include "rayfleet.image" .root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      env:
        - {name: HOME, value: /tmp/rayfleet}
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
        - {name: RAY_AUTH_MODE, value: {{ include "rayfleet.rayAuthMode" .root }}}
        {{- with include "rayfleet.apiKeySecret" .root }}
        - name: OPENAI_API_KEY
          valueFrom:
            secretKeyRef: {name: {{ . }}, key: {{ include "rayfleet.apiKeyEntry" $.root }}}
        {{- end }}
        {{- with include "rayfleet.huggingFaceSecret" .root }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ . }}, key: {{ $values.huggingFace.secretKey }}}
        {{- end }}
        {{- if $values.huggingFace.offline }}
        - {name: HF_HUB_OFFLINE, value: "1"}
        {{- end }}
        - {name: HF_HOME, value: {{ include "rayfleet.hubFolder" .root }}}
      securityContext: {{- toYaml $values.pod.containerSecurityContext | nindent 8 }}
      resources: {{- toYaml $values.benchmark.resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if $results }}
        - {name: results, mountPath: /results}
        {{- end }}
        {{- if $values.modelCache.enabled }}
        - {name: models, mountPath: {{ $values.modelCache.mountPath }}}
        {{- end }}
  volumes:
    {{- if $results }}
    - name: results
      persistentVolumeClaim: {claimName: {{ $results }}}
    {{- end }}
    - name: tmp
      emptyDir: {sizeLimit: {{ $values.pod.tmpSize }}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.pod.shmSize }}}
    {{- if $values.modelCache.enabled }}
    - name: models
      {{- if or $values.modelCache.persistent $values.modelCache.existingClaim }}
      persistentVolumeClaim: {claimName: {{ include "rayfleet.modelCacheClaim" .root }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ $values.modelCache.size }}}
      {{- end }}
    {{- end }}
{{- end -}}
