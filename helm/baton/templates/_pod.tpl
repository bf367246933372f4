{{/*
The pods of the Ray cluster; (dict "root" $ "role" ROLE), where "head" is a role too.
*/}}

{{/* Ports of Ray that probes ask. */}}
{{- define "baton.agentPort" -}}52365{{- end -}}

{{/*
A container's security context. An added capability is only root's to use: so where RDMA needs one to
register memory, these containers are root's, with no other; else none is added.
*/}}
{{- define "baton.securityContext" -}}
{{- $context := deepCopy .root.Values.securityContext -}}
{{- if include "baton.asRoot" . -}}
{{- $capabilities := deepCopy ($context.capabilities | default dict) -}}
{{- with .root.Values.rdma.capabilities -}}
{{- $_ := set $capabilities "add" (concat ($capabilities.add | default list) . | uniq) -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- $_ := set $context "runAsUser" 0 -}}
{{- $_ := set $context "runAsNonRoot" false -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* Requests and limits: GPUs and adapters, under those given. */}}
{{- define "baton.resources" -}}
{{- $values := index .root.Values .role -}}
{{- $resources := deepCopy $values.resources -}}
{{- $devices := dict -}}
{{- if gt (dig "gpus" 0 $values | int) 0 -}}
{{- $_ := set $devices $values.gpuResource (int $values.gpus) -}}
{{- end -}}
{{- if and (include "baton.rdma" .) .root.Values.rdma.resource -}}
{{- $_ := set $devices .root.Values.rdma.resource (int .root.Values.rdma.count) -}}
{{- end -}}
{{- if $devices -}}
{{- range $kind := list "requests" "limits" -}}
{{- $all := deepCopy $devices -}}
{{- include "baton.put" (dict "into" $all "from" (index $resources $kind)) -}}
{{- $_ := set $resources $kind $all -}}
{{- end -}}
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

{{/*
The role's own affinity. Pods on their nodes' network have the same ports, so no two of a release fit on
one node: Kubernetes would find that out by the ports, and say so less clearly.
*/}}
{{- define "baton.affinity" -}}
{{- $affinity := deepCopy ((index .root.Values .role).affinity | default dict) -}}
{{- if and (include "baton.hostNetwork" .) (not (hasKey $affinity "podAntiAffinity")) -}}
{{- $roles := include "baton.hostNetworkRoles" .root | fromYamlArray -}}
{{- $others := dict "key" "baton/role" "operator" "In" "values" $roles -}}
{{- $selector := dict "matchLabels" (include "baton.selectorLabels" .root | fromYaml) "matchExpressions" (list $others) -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $selector -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- end -}}
{{- if $affinity -}}
{{- toYaml $affinity -}}
{{- end -}}
{{- end -}}

{{- define "baton.podAnnotations" -}}
{{- $annotations := dict -}}
{{- if include "baton.rdma" . -}}
{{- include "baton.put" (dict "into" $annotations "from" .root.Values.rdma.annotations) -}}
{{- with .root.Values.rdma.networks -}}{{- $_ := set $annotations "k8s.v1.cni.cncf.io/networks" . -}}{{- end -}}
{{- end -}}
{{- include "baton.put" (dict "into" $annotations "from" (index .root.Values .role).podAnnotations) -}}
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
{{- $head := eq $role "head" -}}
{{- $secrets := include "baton.secretFiles" . | fromYaml -}}
{{- include "baton.checkShm" . -}}
{{- include "baton.checkVolumes" (dict "root" $root "role" $role "secrets" $secrets) -}}
{{- $end := include "baton.end" . | fromYaml -}}
metadata:
  labels:
    {{- include "baton.roleLabels" . | nindent 4 }}
  {{- with include "baton.podAnnotations" . }}
  annotations:
    {{- . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ $head | ternary (include "baton.headServiceAccountName" $root) (include "baton.serviceAccountName" $root) | quote }}
  automountServiceAccountToken: {{ or $root.Values.serviceAccount.automountToken (and $head $root.Values.autoscaling.enabled) }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $end.grace | int }}
  {{- if include "baton.hostNetwork" . }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "baton.affinity" . }}
  affinity:
    {{- . | nindent 4 }}
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
      {{- with include "baton.preStop" (dict "role" $role "end" $end) }}
      lifecycle:
        preStop:
          exec:
            command:
              {{- . | nindent 14 }}
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shared-mem, mountPath: /dev/shm}
        - {name: cache, mountPath: {{ $root.Values.modelCache.mountPath | quote }}}
        {{- range $name, $file := $secrets }}
        - {name: {{ $name }}, mountPath: {{ dir $file.file }}, readOnly: true}
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
      emptyDir: {medium: Memory, sizeLimit: {{ include "baton.text" $values.shm.size | quote }}}
    - name: cache
      {{- if $root.Values.modelCache.enabled }}
      persistentVolumeClaim:
        claimName: {{ include "baton.modelCacheClaimName" $root | quote }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- range $name, $file := $secrets }}
    - name: {{ $name }}
      secret:
        secretName: {{ $file.secret | quote }}
        defaultMode: 0440
        items:
          - {key: {{ $file.key | quote }}, path: {{ base $file.file }}}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
