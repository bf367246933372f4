{{/*
"true" if this monitor is enabled: (dict "root" $ "kind" "podMonitor"). Two would scrape the same
processes twice, and each sum would be twice what it is.
*/}}
{{- define "baton.monitor" -}}
{{- $enabled := list -}}
{{- range $kind := list "podMonitor" "serviceMonitor" "scrapeConfig" -}}
{{- if (index $.root.Values.monitoring $kind).enabled -}}{{- $enabled = append $enabled $kind -}}{{- end -}}
{{- end -}}
{{- if gt (len $enabled) 1 -}}
{{- fail (printf "monitoring: %s would scrape the same processes, and every sum would be wrong: enable one of them" (join " and " $enabled)) -}}
{{- end -}}
{{- if has .kind $enabled -}}true{{- end -}}
{{- end -}}

{{/*
What a PodMonitor and a ServiceMonitor say of an endpoint: (dict "root" $ "monitor" VALUES). The job
is "baton" for all, as in deploy/observability/prometheus.yaml: alerts ask for it. Series have labels
of their own (role, model, replica); those that have none get role and instance from the pod.
*/}}
{{- define "baton.scrape" -}}
interval: {{ .monitor.interval }}
{{- with .monitor.scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
honorLabels: true
relabelings:
  - {targetLabel: job, replacement: baton}
  - {sourceLabels: [__meta_kubernetes_pod_label_baton_role], targetLabel: role}
  - {sourceLabels: [__meta_kubernetes_pod_name], targetLabel: instance}
  {{- with .root.Values.config.served_model_name }}
  - {targetLabel: model, replacement: {{ . | quote }}}
  {{- end }}
  {{- with .monitor.relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
