{{/*
The pods of the Ray cluster; (dict "root" $ "role" ROLE), where "head" is a role too.
*/}}

{{/* Ports of Ray that probes ask. */}}
{{- define "baton.agentPort" -}}52365{{- end -}}

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
XDG_CACHE_HOME: {{ .Values.modelCache.mountPath }}
HF_HOME: {{ .Values.modelCache.mountPath }}/huggingface
{{- end -}}

{{/* UCX in the pods of a worker role: what is set for all, what RDMA needs, what is given. */}}
{{- define "baton.ucxEnv" -}}
{{- $env := deepCopy (.root.Values.kvTransfer.ucx.env | default dict) -}}
{{- if include "baton.rdma" . -}}
{{- $rdma := .root.Values.rdma -}}
{{- range $name, $value := dict "UCX_TLS" $rdma.ucxTls "UCX_NET_DEVICES" $rdma.netDevices "UCX_IB_GID_INDEX" $rdma.ibGidIndex "UCX_IB_ADDR_TYPE" $rdma.ibAddrType -}}
{{- with $value -}}{{- $_ := set $env $name (toString .) -}}{{- end -}}
{{- end -}}
{{- $env = mergeOverwrite $env ($rdma.env | default dict) -}}
{{- end -}}
{{- toYaml $env -}}
{{- end -}}

{{/* The list `env` of a pod: a role's own entries take the place of those of the same name. */}}
{{- define "baton.env" -}}
{{- $values := index .root.Values .role -}}
{{- $own := dict -}}
{{- range $values.env -}}{{- $_ := set $own .name true -}}{{- end -}}
{{- $env := include "baton.rayEnv" .root | fromYaml -}}
{{- if has .role (list "prefill" "decode" "mixed") -}}
{{- $env = mergeOverwrite $env (include "baton.ucxEnv" . | fromYaml) -}}
{{- end -}}
{{- $env = mergeOverwrite $env (.root.Values.ray.env | default dict) -}}
{{- range $name, $value := $env -}}
{{- if not (hasKey $own $name) }}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ $value = int64 $value }}{{ end }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end -}}
{{- end -}}
{{- if and (include "baton.hubTokenSecretName" .root) (not (hasKey $own "HF_TOKEN")) }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "baton.hubTokenSecretName" .root }}
      key: {{ .root.Values.secrets.hubToken.key }}
{{- end -}}
{{- with $values.env }}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{/*
Seconds that `baton leave` has, by role, of them 20 to start a replica elsewhere. A worker hands back
what it does; a router lets its requests end, for at most a quarter of an hour.
*/}}
{{- define "baton.leaveSeconds" -}}
{{- $place := 20 -}}
{{- if eq .role "router" -}}
{{- $timeout := (.root.Values.router.config | default dict).request_timeout_s | default 600 | float64 | ceil | int -}}
{{- min (add $timeout 10 $place) 900 -}}
{{- else -}}
{{- $config := (index .root.Values .role).config | default dict -}}
{{- $drain := hasKey $config "drain_s" | ternary (get $config "drain_s") 30 | float64 | ceil | int -}}
{{- add $drain 10 $place -}}
{{- end -}}
{{- end -}}

{{/*
Seconds that a pod waits for others when the whole cluster goes, as after an upgrade: workers for the
routers, the head for all. A router waits for nobody.
*/}}
{{- define "baton.patienceSeconds" -}}
{{- $root := .root -}}
{{- $routers := include "baton.leaveSeconds" (dict "root" $root "role" "router") | int -}}
{{- if eq .role "router" -}}
0
{{- else if eq .role "head" -}}
{{- $longest := 0 -}}
{{- range $role := list "prefill" "decode" "mixed" -}}
{{- $longest = max $longest (include "baton.leaveSeconds" (dict "root" $root "role" $role) | int) -}}
{{- end -}}
{{- add $routers $longest 30 -}}
{{- else -}}
{{- add $routers 15 -}}
{{- end -}}
{{- end -}}

{{/* What a pod does when it is told to go; services/leave.py. */}}
{{- define "baton.preStop" -}}
{{- $leave := list "baton" "leave" -}}
{{- if ne .role "head" -}}
{{- $leave = concat $leave (list "--deadline" (include "baton.leaveSeconds" .)) -}}
{{- end -}}
{{- if ne .role "router" -}}
{{- $leave = concat $leave (list "--after" (eq .role "head" | ternary "all" "routers") "--patience" (include "baton.patienceSeconds" .)) -}}
{{- end -}}
{{- toYaml $leave -}}
{{- end -}}

{{/*
From the news that a pod goes until it is killed: what its preStop may take, and some seconds for the
start of that and the end of Ray. It is the limit; most pods are gone long before.
*/}}
{{- define "baton.graceSeconds" -}}
{{- $given := (index .root.Values .role).terminationGracePeriodSeconds -}}
{{- if not (kindIs "invalid" $given) -}}
{{- int $given -}}
{{- else -}}
{{- $own := eq .role "head" | ternary 15 (include "baton.leaveSeconds" (eq .role "head" | ternary (dict "root" .root "role" "router") .) | int) -}}
{{- add $own (include "baton.patienceSeconds" .) 45 -}}
{{- end -}}
{{- end -}}

{{/* A container's security context; RDMA adds what registering memory needs. */}}
{{- define "baton.securityContext" -}}
{{- $context := deepCopy .root.Values.securityContext -}}
{{- if and (has .role (list "prefill" "decode" "mixed")) (include "baton.rdma" .) -}}
{{- with .root.Values.rdma.capabilities -}}
{{- $_ := set $context "capabilities" (merge (dict "add" .) ($context.capabilities | default dict)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* Requests and limits: those given, GPUs, and adapters. */}}
{{- define "baton.resources" -}}
{{- $values := index .root.Values .role -}}
{{- $resources := deepCopy $values.resources -}}
{{- $devices := dict -}}
{{- if gt (dig "gpus" 0 $values | int) 0 -}}
{{- $_ := set $devices $values.gpuResource (int $values.gpus) -}}
{{- end -}}
{{- if and (has .role (list "prefill" "decode" "mixed")) (include "baton.rdma" .) .root.Values.rdma.resource -}}
{{- $_ := set $devices .root.Values.rdma.resource (int .root.Values.rdma.count) -}}
{{- end -}}
{{- if $devices -}}
{{- $_ := set $resources "requests" (merge (deepCopy $devices) ($resources.requests | default dict)) -}}
{{- $_ := set $resources "limits" (merge (deepCopy $devices) ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* A probe: the role's own, or the given one; (dict "root" "role" "name" "default"). Empty: none. */}}
{{- define "baton.probe" -}}
{{- $own := index .root.Values .role .name | default dict -}}
{{- if not (eq (dig "enabled" true $own) false) -}}
{{- with omit $own "enabled" -}}
{{ $.name }}:
  {{- toYaml . | nindent 2 }}
{{- else -}}
{{- with .default -}}
{{ $.name }}:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Probes. Of all pods: does Ray live? Serve itself looks after replicas, and a pod that has none yet is
in order. A router's pod is ready once its HAProxy reaches a router whose workers have proven
themselves, and goes on being ready through a short lack of workers: requests wait for those in the
router. The head's is ready with Ray's GCS.
*/}}
{{- define "baton.probes" -}}
{{- $raylet := dict "path" "/api/local_raylet_healthz" "port" (include "baton.agentPort" . | int) -}}
{{- $alive := dict "httpGet" $raylet -}}
{{- $ready := merge (dict "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" 3) $alive -}}
{{- if eq .role "router" -}}
{{- $ready = dict "httpGet" (dict "path" "/ready?settled=120" "port" "serve") "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" 6 -}}
{{- else if eq .role "head" -}}
{{- $ready = dict "httpGet" (dict "path" "/api/gcs_healthz" "port" "dashboard") "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" 6 -}}
{{- end -}}
{{- range $name, $probe := dict "startupProbe" (merge (dict "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" 60) (deepCopy $alive)) "livenessProbe" (merge (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 12) (deepCopy $alive)) "readinessProbe" $ready -}}
{{- with include "baton.probe" (dict "root" $.root "role" $.role "name" $name "default" $probe) }}
{{ . }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Spreads routers over nodes, unless the values say otherwise. */}}
{{- define "baton.spread" -}}
{{- $values := index .root.Values .role -}}
{{- if $values.topologySpreadConstraints -}}
{{- toYaml $values.topologySpreadConstraints -}}
{{- else if eq .role "router" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "baton.roleSelectorLabels" . | nindent 6 }}
{{- end -}}
{{- end -}}

{{- define "baton.podAnnotations" -}}
{{- $annotations := deepCopy ((index .root.Values .role).podAnnotations | default dict) -}}
{{- if and (has .role (list "prefill" "decode" "mixed")) (include "baton.rdma" .) -}}
{{- $rdma := deepCopy (.root.Values.rdma.annotations | default dict) -}}
{{- with .root.Values.rdma.networks -}}{{- $_ := set $rdma "k8s.v1.cni.cncf.io/networks" . -}}{{- end -}}
{{- $annotations = merge $annotations $rdma -}}
{{- end -}}
{{- if and (eq .role "head") (eq .root.Values.ray.upgradeStrategy.onConfigChange "NewCluster") -}}
{{- $_ := set $annotations "baton/config" (include "baton.args" .root | sha256sum) -}}
{{- end -}}
{{- include "baton.annotations" (dict "root" .root "annotations" $annotations) -}}
{{- end -}}

{{/* Ports by role. */}}
{{- define "baton.ports" -}}
{{- if eq .role "head" -}}
- {name: gcs-server, containerPort: 6379}
- {name: dashboard, containerPort: {{ include "baton.dashboardPort" . }}}
- {name: client, containerPort: 10001}
{{ end -}}
{{- if has .role (list "head" "router") -}}
- {name: serve, containerPort: {{ include "baton.apiPort" . }}}
{{ end -}}
{{- if ne .role "head" -}}
- {name: baton-metrics, containerPort: {{ include "baton.metricsPort" .root }}}
{{ end -}}
- {name: metrics, containerPort: 8080}
{{- end -}}

{{/* metadata and spec of a pod template. */}}
{{- define "baton.podTemplate" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $values := index $root.Values $role -}}
{{- $worker := has $role (list "prefill" "decode" "mixed") -}}
{{- $hostNetwork := or (dig "hostNetwork" false $values) (and $worker (include "baton.rdma" .) $root.Values.rdma.hostNetwork) -}}
{{- $head := eq $role "head" -}}
metadata:
  labels:
    {{- include "baton.roleLabels" . | nindent 4 }}
  {{- with include "baton.podAnnotations" . }}
  annotations:
    {{- . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ $head | ternary (include "baton.headServiceAccountName" $root) (include "baton.serviceAccountName" $root) }}
  automountServiceAccountToken: {{ or $root.Values.serviceAccount.automountToken (and $head $root.Values.autoscaling.enabled) }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "baton.graceSeconds" . }}
  {{- if $hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "baton.spread" . }}
  topologySpreadConstraints:
    {{- . | nindent 4 }}
  {{- end }}
  {{- with $values.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ $head | ternary "ray-head" "ray-worker" }}
      image: {{ include "baton.image" $root | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        {{- include "baton.securityContext" . | nindent 8 }}
      ports:
        {{- include "baton.ports" . | nindent 8 }}
      env:
        {{- include "baton.env" . | trim | nindent 8 }}
      {{- with $values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- include "baton.resources" . | nindent 8 }}
      {{- with include "baton.probes" . | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      lifecycle:
        preStop:
          exec:
            command:
              {{- include "baton.preStop" . | nindent 14 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shared-mem, mountPath: /dev/shm}
        - {name: cache, mountPath: {{ $root.Values.modelCache.mountPath }}}
        - {name: cluster-secret, mountPath: {{ include "baton.secretFile" . | dir }}, readOnly: true}
        {{- if include "baton.apiKeysSecretName" $root }}
        - {name: api-keys, mountPath: {{ include "baton.apiKeysFile" . | dir }}, readOnly: true}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $values.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: shared-mem
      emptyDir: {medium: Memory, sizeLimit: {{ $values.shm.size }}}
    - name: cache
      {{- if $root.Values.modelCache.enabled }}
      persistentVolumeClaim:
        claimName: {{ include "baton.modelCacheClaimName" $root }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: cluster-secret
      secret:
        secretName: {{ include "baton.clusterSecretName" $root }}
        defaultMode: 0440
        items:
          - {key: {{ $root.Values.secrets.clusterSecret.key | quote }}, path: {{ include "baton.secretFile" . | base }}}
    {{- with include "baton.apiKeysSecretName" $root }}
    - name: api-keys
      secret:
        secretName: {{ . }}
        defaultMode: 0440
        items:
          - {key: {{ $root.Values.secrets.apiKeys.key | quote }}, path: {{ include "baton.apiKeysFile" $root | base }}}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
