{{/*
The Serve config of the RayService. Its `args` are the keys of `baton serve --config`.
*/}}

{{/* Where secrets are mounted. */}}
{{- define "baton.secretFile" -}}/etc/baton/cluster/secret{{- end -}}
{{- define "baton.apiKeysFile" -}}/etc/baton/api/keys{{- end -}}

{{/*
Ports that Ray and Serve have in the pods: those with a number of their own, and the ranges of
replicas' HTTP servers and of Ray's own processes.
*/}}
{{- define "baton.checkPorts" -}}
{{- $port := int .Values.config.metrics_port -}}
{{- $whose := get (dict "6379" "Ray's GCS" "8000" "Serve's HAProxy" "8080" "Ray's own metrics" "8265" "Ray's dashboard" "8404" "HAProxy's statistics" "8500" "Serve's fallback proxy" "9101" "HAProxy's metrics" "10001" "Ray's client server" "52365" "Ray's agent") (toString $port) -}}
{{- if and (ge $port 10002) (le $port 19999) -}}{{- $whose = "Ray's workers (10002 to 19999)" -}}{{- end -}}
{{- if and (ge $port 30000) (le $port 31000) -}}{{- $whose = "Serve's replicas (30000 to 31000)" -}}{{- end -}}
{{- with $whose -}}
{{- fail (printf "config.metrics_port: %d is the port of %s in the pods; take another, such as 9400" $port .) -}}
{{- end -}}
{{- end -}}

{{/* Names of the deployments in services/app.py. */}}
{{- define "baton.deployment" -}}
{{- get (dict "router" "Router" "prefill" "PrefillWorker" "decode" "DecodeWorker" "mixed" "MixedWorker") . -}}
{{- end -}}

{{/* "true" if a role takes part in rdma, as only those of workers can. */}}
{{- define "baton.rdma" -}}
{{- if and .root.Values.rdma.enabled (index .root.Values .role).rdma -}}true{{- end -}}
{{- end -}}

{{/* "true" if containers of Ray of this role are root's. */}}
{{- define "baton.asRoot" -}}
{{- if and (include "baton.rdma" .) .root.Values.rdma.runAsRoot -}}true{{- end -}}
{{- end -}}

{{/* "true" if pods of this role use their nodes' network. */}}
{{- define "baton.hostNetwork" -}}
{{- if or (index .root.Values .role).hostNetwork (and .root.Values.rdma.hostNetwork (include "baton.rdma" .)) -}}true{{- end -}}
{{- end -}}

{{/* The roles of which that is so, as a YAML list; empty: none. */}}
{{- define "baton.hostNetworkRoles" -}}
{{- range $role := list "router" "prefill" "decode" "mixed" -}}
{{- if and (gt (int (index $.Values $role).replicas) 0) (include "baton.hostNetwork" (dict "root" $ "role" $role)) }}
- {{ $role }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
How KV moves. One transport for all: what is sent by one is read by the other. Plain TCP reads host
memory only; what is on GPUs goes by NIXL, which finds RDMA, or takes TCP itself.
*/}}
{{- define "baton.transport" -}}
{{- $gpus := 0 -}}
{{- range $role := list "prefill" "decode" "mixed" -}}
{{- $pool := index $.Values $role -}}
{{- if $pool.replicas -}}{{- $gpus = add $gpus $pool.gpus -}}{{- end -}}
{{- end -}}
{{- $transport := .Values.kvTransfer.transport -}}
{{- if ne $transport "auto" -}}
{{- $transport -}}
{{- else -}}
{{- ternary "nixl" "tcp" (or .Values.rdma.enabled (gt $gpus 0)) -}}
{{- end -}}
{{- end -}}

{{/*
Threads of an engine: the pod's CPUs, from its limit or else its request. A pod sees all cores of
its node, so none of these would be found out there.
*/}}
{{- define "baton.threads" -}}
{{- $cpu := dig "limits" "cpu" (dig "requests" "cpu" "" .resources) .resources | toString -}}
{{- if hasSuffix "m" $cpu -}}
{{- max 1 (div (trimSuffix "m" $cpu | int) 1000) -}}
{{- else if $cpu -}}
{{- max 1 ($cpu | float64 | int) -}}
{{- end -}}
{{- end -}}

{{/* The block of a worker role. What its own `config` says wins. */}}
{{- define "baton.workerArgs" -}}
{{- $values := index .root.Values .role -}}
{{- $args := dict "transport" (include "baton.transport" .root) "device" (ternary "cuda" "cpu" (gt (int $values.gpus) 0)) -}}
{{- with include "baton.threads" $values -}}
{{- $_ := set $args "threads" (int .) -}}
{{- end -}}
{{- /* One, whatever there are: how many is said beside `args`, so that scaling restarts nobody. */ -}}
{{- include "baton.put" (dict "into" $args "from" $values.config) -}}
{{- $_ := set $args "replicas" 1 -}}
{{- if and (eq $args.device "cuda") (eq $args.transport "tcp") -}}
{{- fail (printf "%s: its KV is on a GPU, which the transport tcp does not reach; set kvTransfer.transport to nixl, which takes TCP where there is no RDMA" .role) -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}

{{/* "true" if workers with these arguments, in pods with so many GPUs, compute on one. */}}
{{- define "baton.onGpu" -}}
{{- $device := .args.device | default "" -}}
{{- if or (eq $device "cuda") (and (eq $device "auto") (gt (int .gpus) 0)) -}}true{{- end -}}
{{- end -}}

{{/* As the code has it: a pair of pools, or mixed workers, which need no other pool. */}}
{{- define "baton.checkPools" -}}
{{- $p := int .Values.prefill.replicas -}}
{{- $d := int .Values.decode.replicas -}}
{{- $m := int .Values.mixed.replicas -}}
{{- if or (ne (eq $p 0) (eq $d 0)) (eq 0 (add $p $d $m)) -}}
{{- fail (printf "prefill.replicas %d, decode.replicas %d, mixed.replicas %d: needs at least one prefill and one decode worker, or none of both and a mixed one" $p $d $m) -}}
{{- end -}}
{{- end -}}

{{/*
The block `autoscaling`, where Baton decides on the pools: their bounds are those of the pods, and an
accelerator of the budget is a GPU, or a worker where there are none. Empty: it does not.
*/}}
{{- define "baton.scalingArgs" -}}
{{- if .Values.autoscaling.byLoad -}}
{{- if not .Values.autoscaling.enabled -}}
{{- fail "autoscaling.byLoad needs autoscaling.enabled: pods have to come and go with the workers" -}}
{{- end -}}
{{- if eq 0 (int .Values.prefill.replicas) -}}
{{- fail "autoscaling.byLoad decides on prefill and decode workers, and with mixed ones only there are none: set prefill.replicas and decode.replicas, or byLoad to false" -}}
{{- end -}}
{{- $args := deepCopy (.Values.autoscaling.config | default dict) -}}
{{- range $role := list "prefill" "decode" -}}
{{- $values := index $.Values $role -}}
{{- if gt (int $values.replicas) 0 -}}
{{- $bounds := include "baton.bounds" (dict "root" $ "role" $role) | fromYaml -}}
{{- $own := dict "min" (int $bounds.min) "max" (int $bounds.max) "devices" (max 1 (int $values.gpus)) -}}
{{- $block := get $args $role | default dict -}}
{{- include "baton.put" (dict "into" $block "from" $own) -}}
{{- $_ := set $args $role $block -}}
{{- end -}}
{{- end -}}
{{- include "baton.checkScaling" (dict "root" . "args" $args) -}}
{{- toYaml $args -}}
{{- end -}}
{{- end -}}

{{/* As services/planner/config.py has it: objectives, and a budget that the smallest pools fit into. */}}
{{- define "baton.checkScaling" -}}
{{- $least := 0 -}}
{{- range $role, $kind := dict "prefill" "ttft" "decode" "tpot" -}}
{{- $pool := index $.args $role -}}
{{- $least = add $least (mul (max 1 $pool.min) $pool.devices) -}}
{{- $given := get ($.root.Values.router.config | default dict) (printf "slo_%s_s" $kind) -}}
{{- $objective := $given | default (index $.root.Values.slo (printf "%sSeconds" $kind)) -}}
{{- if and (gt (float64 $objective) 3600.0) (not $pool.objective_s) -}}
{{- fail (printf "slo.%sSeconds: with autoscaling.byLoad it is what %s scales by, and can be 3600 at most" $kind $role) -}}
{{- end -}}
{{- end -}}
{{- $budget := int .args.budget -}}
{{- if and $budget (lt $budget (int $least)) -}}
{{- fail (printf "autoscaling.config.budget: %d is less than the %d that the smallest prefill and decode pools take (one worker each at least): raise it, or lower minReplicas" $budget $least) -}}
{{- end -}}
{{- end -}}

{{/* All of `args`. */}}
{{- define "baton.args" -}}
{{- include "baton.checkPools" . -}}
{{- include "baton.checkPorts" . -}}
{{- $args := dict "secret_file" (include "baton.secretFile" .) "workers_per_host" 1 -}}
{{- include "baton.put" (dict "into" $args "from" .Values.config) -}}
{{- $router := dict "slo_ttft_s" .Values.slo.ttftSeconds "slo_tpot_s" .Values.slo.tpotSeconds -}}
{{- include "baton.put" (dict "into" $router "from" .Values.router.config) -}}
{{- if include "baton.apiKeysSecretName" . -}}
{{- $_ := set $router "api_keys_file" (include "baton.apiKeysFile" .) -}}
{{- end -}}
{{- $_ := set $args "router" $router -}}
{{- with include "baton.scalingArgs" . -}}
{{- /* Then who scales the pools is told of all replicas, and their numbers stand in `args`. */ -}}
{{- $_ := set $args "autoscaling" (fromYaml .) -}}
{{- $_ := set $args "routers" (int $.Values.router.replicas) -}}
{{- end -}}
{{- range $role := list "prefill" "decode" "mixed" -}}
{{- if gt (int (index $.Values $role).replicas) 0 -}}
{{- $_ := set $args $role (include "baton.workerArgs" (dict "root" $ "role" $role) | fromYaml) -}}
{{- else -}}
{{- $_ := set $args $role (dict "replicas" 0) -}}
{{- end -}}
{{- end -}}
{{- if ne (include "baton.onGpu" (dict "args" $args.prefill "gpus" .Values.prefill.gpus)) (include "baton.onGpu" (dict "args" $args.decode "gpus" .Values.decode.gpus)) -}}
{{- fail (printf "prefill.gpus %d, decode.gpus %d: KV goes from the one to the other, so both have GPUs, or none has" (int .Values.prefill.gpus) (int .Values.decode.gpus)) -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}

{{/* The number of pods of a role: (dict "root" $ "role" ROLE) to "min" and "max", as YAML. */}}
{{- define "baton.bounds" -}}
{{- $values := index .root.Values .role -}}
{{- $replicas := int $values.replicas -}}
{{- if .root.Values.autoscaling.enabled -}}
{{- $min := kindIs "invalid" $values.minReplicas | ternary $replicas $values.minReplicas | int -}}
{{- $max := kindIs "invalid" $values.maxReplicas | ternary (add $replicas 1) $values.maxReplicas | int -}}
{{- if or (gt $replicas $max) (gt $min $max) -}}
{{- fail (printf "%s: replicas %d and minReplicas %d must be at most maxReplicas %d" .role $replicas $min $max) -}}
{{- end -}}
{{- toYaml (dict "min" $min "max" $max) -}}
{{- else -}}
{{- toYaml (dict "min" $replicas "max" $replicas) -}}
{{- end -}}
{{- end -}}

{{/*
serveConfigV2.

A pod holds one replica: Ray takes a pod's CPU for 1, whatever Kubernetes gives it, and a replica
claims it. The label sends it to the pods of its role. Where there are pods to spare, a rollout
starts a new replica before it stops an old one; else the old one must go first.
*/}}
{{- define "baton.serveConfig" -}}
{{- $deployments := list -}}
{{- $wanted := dict -}}
{{- range $role := include "baton.roles" . | fromYamlArray -}}
{{- $values := index $.Values $role -}}
{{- $options := dict "num_cpus" 1 "label_selector" (dict "baton/role" $role) -}}
{{- if gt (dig "gpus" 0 $values | int) 0 -}}
{{- $_ := set $options "num_gpus" (int $values.gpus) -}}
{{- end -}}
{{- $bounds := include "baton.bounds" (dict "root" $ "role" $role) | fromYaml -}}
{{- $surge := ternary 1 0 (gt (int $bounds.max) (int $values.replicas)) -}}
{{- if ne $role "router" -}}
{{- $_ := set $wanted $role (int $values.replicas) -}}
{{- end -}}
{{- $deployment := dict "name" (include "baton.deployment" $role) "max_surge_percent" $surge "ray_actor_options" $options -}}
{{- if or (not $.Values.autoscaling.byLoad) (eq $role "mixed") -}}
{{- $_ := set $deployment "num_replicas" (int $values.replicas) -}}
{{- end -}}
{{- $deployments = append $deployments $deployment -}}
{{- end -}}
{{- /* Routers are told how many there shall be; they take a change without a restart. */ -}}
{{- $_ := set (first $deployments) "user_config" (dict "routers" (int .Values.router.replicas) "workers" $wanted) -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ include "baton.apiPort" . }}
logging_config:
  encoding: {{ .Values.ray.logEncoding }}
applications:
  - name: baton
    route_prefix: /
    import_path: services.app:build_app
    args:
      {{- include "baton.args" . | nindent 6 }}
    deployments:
      {{- toYaml $deployments | nindent 6 }}
{{- end -}}
