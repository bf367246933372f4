{{/*
The environment of the pods, and what is mounted into them; (dict "root" $ "role" ROLE).
*/}}

{{/* What Serve and Ray read from the environment of each of their processes. */}}
{{- define "baton.rayEnv" -}}
{{- $timeout := (.Values.router.config | default dict).request_timeout_s | default 600 | float64 | ceil | int -}}
RAY_SERVE_ENABLE_HA_PROXY: "1"
RAY_SERVE_HAPROXY_BINARY_PATH: /usr/local/bin/baton-haproxy
{{- /* HAProxy that was reloaded lets requests end for so long */}}
RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S: {{ add $timeout 10 | quote }}
RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S: "1"
{{- /* time for Kubernetes to tell everybody that a pod gets no new connections */}}
RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S: "10"
RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS: "1"
RAY_USAGE_STATS_ENABLED: "0"
RAY_task_events_report_interval_ms: "0"
HOME: /tmp
{{- end -}}

{{/*
Where models and compiled kernels are kept. In a volume that all share, root has a folder of its own:
without capabilities it could not write into what user 1000 has made, nor user 1000 into root's.
*/}}
{{- define "baton.cacheEnv" -}}
{{- $cache := .root.Values.modelCache.mountPath | trimSuffix "/" -}}
{{- if include "baton.asRoot" . -}}{{- $cache = printf "%s/root" $cache -}}{{- end -}}
XDG_CACHE_HOME: {{ $cache | quote }}
HF_HOME: {{ printf "%s/huggingface" $cache | quote }}
{{- end -}}

{{/* UCX in the pods of a worker role: what is set for all, what RDMA needs, what is given. */}}
{{- define "baton.ucxEnv" -}}
{{- $env := deepCopy (.root.Values.kvTransfer.ucx.env | default dict) -}}
{{- if include "baton.rdma" . -}}
{{- $rdma := .root.Values.rdma -}}
{{- range $name, $value := dict "UCX_TLS" $rdma.ucxTls "UCX_NET_DEVICES" $rdma.netDevices "UCX_IB_GID_INDEX" $rdma.ibGidIndex "UCX_IB_ADDR_TYPE" $rdma.ibAddrType -}}
{{- /* 0 is an index as well */ -}}
{{- if not (has $value (list nil "")) -}}{{- $_ := set $env $name (include "baton.text" $value) -}}{{- end -}}
{{- end -}}
{{- include "baton.put" (dict "into" $env "from" $rdma.env) -}}
{{- end -}}
{{- toYaml $env -}}
{{- end -}}

{{/* The list `env` of a pod: a role's own entries take the place of those of the same name. */}}
{{- define "baton.env" -}}
{{- $values := index .root.Values .role -}}
{{- $own := dict -}}
{{- range $values.env -}}{{- $_ := set $own .name true -}}{{- end -}}
{{- $env := printf "%s\n%s" (include "baton.rayEnv" .root) (include "baton.cacheEnv" .) | fromYaml -}}
{{- if has .role (list "prefill" "decode" "mixed") -}}
{{- include "baton.put" (dict "into" $env "from" (include "baton.ucxEnv" . | fromYaml)) -}}
{{- end -}}
{{- include "baton.put" (dict "into" $env "from" .root.Values.ray.env) -}}
{{- range $name, $value := $env -}}
{{- if not (hasKey $own $name) }}
- name: {{ $name | quote }}
  value: {{ include "baton.text" $value | quote }}
{{- end -}}
{{- end -}}
{{- if and (include "baton.hubTokenSecretName" .root) (not (hasKey $own "HF_TOKEN")) }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "baton.hubTokenSecretName" .root | quote }}
      key: {{ .root.Values.secrets.hubToken.key | quote }}
{{- end -}}
{{- /* a number or true is what people mean by it; Kubernetes takes texts only */ -}}
{{- range $values.env -}}
{{- $entry := deepCopy . -}}
{{- if hasKey $entry "value" -}}{{- $_ := set $entry "value" (include "baton.text" $entry.value) -}}{{- end }}
{{ toYaml (list $entry) }}
{{- end -}}
{{- end -}}

{{/*
Secrets that are files in a pod, as YAML: the volume's name, with the Secret, the key in it and the file.

The cluster's and, as a variable, the hub's token are in all pods of Ray: Serve builds the application
by a task that may run on any node, and that reads the one and asks the hub by the other. API keys are
read by routers only.
*/}}
{{- define "baton.secretFiles" -}}
{{- $secrets := .root.Values.secrets -}}
{{- $files := dict "cluster-secret" (dict "secret" (include "baton.clusterSecretName" .root) "key" $secrets.clusterSecret.key "file" (include "baton.secretFile" .)) -}}
{{- $keys := include "baton.apiKeysSecretName" .root -}}
{{- if and $keys (eq .role "router") -}}
{{- $_ := set $files "api-keys" (dict "secret" $keys "key" $secrets.apiKeys.key "file" (include "baton.apiKeysFile" .)) -}}
{{- end -}}
{{- toYaml $files -}}
{{- end -}}

{{/* Ray does not start where its object store is larger than /dev/shm. */}}
{{- define "baton.checkShm" -}}
{{- $size := (index .root.Values .role).shm.size -}}
{{- if lt (include "baton.bytes" $size | int64) (int64 .root.Values.ray.objectStoreBytes) -}}
{{- fail (printf "%s.shm.size: %s is less than Ray's object store, which lies in it (ray.objectStoreBytes, %d)" .role (include "baton.text" $size) (int64 .root.Values.ray.objectStoreBytes)) -}}
{{- end -}}
{{- end -}}

{{/*
Kubernetes refuses a pod in which two volumes are mounted at one place, or have one name; (dict "root"
"role" "secrets" {...}), with what "baton.secretFiles" says.
*/}}
{{- define "baton.checkVolumes" -}}
{{- $values := index .root.Values .role -}}
{{- $names := list "tmp" "shared-mem" "cache" -}}
{{- $paths := list "/tmp" "/dev/shm" -}}
{{- $cache := .root.Values.modelCache.mountPath | trimSuffix "/" -}}
{{- range $name, $file := .secrets -}}
{{- $names = append $names $name -}}
{{- $paths = append $paths (dir $file.file) -}}
{{- end -}}
{{- if regexMatch "^/opt(/baton(/.*)?)?$" $cache -}}
{{- fail (printf "modelCache.mountPath: %s would hide the program itself, which is in /opt/baton" $cache) -}}
{{- end -}}
{{- if has $cache $paths -}}
{{- fail (printf "modelCache.mountPath: something else is mounted at %s" $cache) -}}
{{- end -}}
{{- $paths = append $paths $cache -}}
{{- range $values.extraVolumeMounts -}}
{{- $path := .mountPath | trimSuffix "/" -}}
{{- if has $path $paths -}}
{{- fail (printf "%s.extraVolumeMounts: something else is mounted at %s already" $.role $path) -}}
{{- end -}}
{{- $paths = append $paths $path -}}
{{- end -}}
{{- range $values.extraVolumes -}}
{{- if has .name $names -}}
{{- fail (printf "%s.extraVolumes: there is a volume %s already" $.role .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- end -}}
