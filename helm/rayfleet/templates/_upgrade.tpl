{{/* Settings that KubeRay ignores when it compares a changed RayService with the running RayCluster. */}}

{{/* Shell word with the name of the serving RayCluster. */}}
{{- define "rayfleet.activeCluster" -}}
"$(kubectl -n {{ .Release.Namespace }} get rayservice {{ include "rayfleet.fullname" . }} -o jsonpath='{.status.activeServiceStatus.rayClusterName}')"
{{- end -}}

{{/* JSON patch that sets the numbers of pods and the tolerations of a RayCluster to these values. It fails if
the cluster has other groups. With the autoscaler, Ray sets `replicas`. */}}
{{- define "rayfleet.clusterPatch" -}}
{{- $gateways := int .Values.gateway.replicas -}}
{{- $scale := dict "replicas" $gateways "minReplicas" $gateways "maxReplicas" (include "rayfleet.maxGateways" . | int) -}}
{{- $groups := list (dict "name" "gateway" "scale" $scale "pod" .Values.gateway.pod) -}}
{{- range .Values.workerGroups -}}
{{- $scale := include "rayfleet.groupScale" (dict "root" $ "group" .) | fromYaml -}}
{{- $groups = append $groups (dict "name" .name "scale" $scale "pod" .pod) -}}
{{- end -}}
{{- $patch := list (include "rayfleet.tolerationPatch" (dict "root" . "path" "/spec/headGroupSpec" "pod" .Values.head.pod) | fromYaml) -}}
{{- range $i, $group := $groups -}}
{{- $path := printf "/spec/workerGroupSpecs/%d" $i -}}
{{- $patch = append $patch (dict "op" "test" "path" (printf "%s/groupName" $path) "value" $group.name) -}}
{{- range $name, $value := ternary (omit $group.scale "replicas") $group.scale $.Values.autoscaler.enabled -}}
{{- $patch = append $patch (dict "op" "add" "path" (printf "%s/%s" $path $name) "value" (int $value)) -}}
{{- end -}}
{{- $patch = append $patch (include "rayfleet.tolerationPatch" (dict "root" $ "path" $path "pod" $group.pod) | fromYaml) -}}
{{- end -}}
{{- toJson $patch -}}
{{- end -}}

{{- define "rayfleet.tolerationPatch" -}}
{{- $pod := mergeOverwrite (deepCopy .root.Values.pod) (deepCopy (default dict .pod)) -}}
{{- dict "op" "add" "path" (printf "%s/template/spec/tolerations" .path) "value" $pod.tolerations | toYaml -}}
{{- end -}}
