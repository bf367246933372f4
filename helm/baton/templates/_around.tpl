{{/*
What the objects around the Ray cluster agree on: where clients go, and who is who on the network.
*/}}

{{/*
The service of clients. Not the one that KubeRay makes beside it (...-serve-svc): that has the pods
of all roles in it, so a stream would pass through a worker that may leave before it ends; and KubeRay
looks at its own type, labels and annotations again only when a new cluster takes over.
*/}}
{{- define "baton.serviceName" -}}
{{- include "baton.fullname" . -}}
{{- end -}}

{{/* Where pods of this cluster find the API. */}}
{{- define "baton.serviceUrl" -}}
{{- printf "http://%s.%s.svc:%d" (include "baton.serviceName" .) .Release.Namespace (int .Values.service.port) -}}
{{- end -}}

{{/*
Metadata of an object: (dict "root" $ "name" NAME "labels" {...} "annotations" {...}). The labels are the
common ones, over these the given, over these our own.
*/}}
{{- define "baton.metadata" -}}
{{- $labels := dict -}}
{{- range list .root.Values.commonLabels .labels (include "baton.labels" .root | fromYaml) -}}
{{- include "baton.put" (dict "into" $labels "from" .) -}}
{{- end -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- toYaml $labels | nindent 2 }}
{{- with include "baton.annotations" (dict "root" .root "annotations" .annotations) }}
annotations:
  {{- . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Every pod of the Ray cluster, whatever its role; as a LabelSelector. */}}
{{- define "baton.raySelector" -}}
matchLabels:
  {{- include "baton.selectorLabels" . | nindent 2 }}
matchExpressions:
  - {key: baton/role, operator: Exists}
{{- end -}}

{{/* The pods that serve metrics of ours; as a LabelSelector. */}}
{{- define "baton.meteredSelector" -}}
matchLabels:
  {{- include "baton.selectorLabels" . | nindent 2 }}
matchExpressions:
  - {key: baton/role, operator: In, values: [router, prefill, decode, mixed]}
{{- end -}}

{{/* Of the pod of `helm test`; it has no role, so nothing that selects pods of Ray selects it. */}}
{{- define "baton.testLabels" -}}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/component: test
{{- end -}}

{{/* Where the head takes Serve's configuration, from KubeRay. */}}
{{- define "baton.dashboardPort" -}}8265{{- end -}}
