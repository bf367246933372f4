{{/*
Names, labels and other things that several templates must agree on.

Templates that take a role are called with (dict "root" $ "role" "prefill").
*/}}

{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | include "baton.trimmed" -}}
{{- end -}}

{{/*
The name of the RayService, and the start of all other names.

KubeRay takes at most 47 characters, and the longest suffix here needs more than the 16 that would be
left of 63: so 40. A longer name ends in a hash of all of it; two releases that begin alike stay two. So
does a name that ends as those of accounts and services do that are ours or KubeRay's: `baton-metrics`
is a service of the release `baton`, and so no other's.
*/}}
{{- define "baton.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $chart := include "baton.name" . -}}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- end -}}
{{- $short := include "baton.short" (dict "name" (include "baton.dnsLabel" $name) "limit" 40) -}}
{{- if regexMatch "-(head|metrics|head-svc|serve-svc)$" $short -}}
{{- printf "%s-%s" ($short | trunc 31 | include "baton.trimmed") ($name | sha256sum | trunc 8) -}}
{{- else -}}
{{- $short -}}
{{- end -}}
{{- end -}}

{{/* A name as services have one: no dots, first a letter. One that was changed ends in a hash. */}}
{{- define "baton.dnsLabel" -}}
{{- $label := regexReplaceAll "^([^a-z])" (replace "." "-" .) "b${1}" -}}
{{- if eq $label . -}}
{{- $label -}}
{{- else -}}
{{- printf "%s-%s" $label (sha256sum . | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/* A name of at most "limit" characters; a longer one ends in a hash. */}}
{{- define "baton.short" -}}
{{- $limit := int .limit -}}
{{- if gt (len .name) $limit -}}
{{- printf "%s-%s" (.name | trunc (int (sub $limit 9)) | include "baton.trimmed") (.name | sha256sum | trunc 8) -}}
{{- else -}}
{{- include "baton.trimmed" .name -}}
{{- end -}}
{{- end -}}

{{/* Neither a name nor a label's value may end in one of these, as one that was cut could. */}}
{{- define "baton.trimmed" -}}
{{- regexReplaceAll "[-._]+$" . "" -}}
{{- end -}}

{{/* A value as a text. Numbers are floats here, of which Go would write some as 1.6777216e+07. */}}
{{- define "baton.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{- int64 . -}}{{- else -}}{{- . -}}{{- end -}}
{{- end -}}

{{/* A quantity of Kubernetes', such as 2Gi, in bytes. */}}
{{- define "baton.bytes" -}}
{{- $text := include "baton.text" . -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $factor := get (dict "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0) $unit | default 1.0 -}}
{{- mulf (trimSuffix $unit $text | float64) $factor | int64 -}}
{{- end -}}

{{/*
Puts all that is in "from" into the dict "into": also what is 0, false or empty, which `merge` and
`mergeOverwrite` take for nothing. It prints nothing.
*/}}
{{- define "baton.put" -}}
{{- range $key, $value := .from -}}
{{- if not (kindIs "invalid" $value) -}}{{- $_ := set $.into $key $value -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | include "baton.trimmed" -}}
{{- end -}}

{{/*
What selects this release's objects; never changes in a release's life. Quoted, as is each name
here: a release may be called 123, 1e3 or true.
*/}}
{{- define "baton.selectorLabels" -}}
app.kubernetes.io/name: {{ include "baton.name" . | quote }}
app.kubernetes.io/instance: {{ include "baton.short" (dict "name" .Release.Name "limit" 63) | quote }}
{{- end -}}

{{/* Our own, of every object. */}}
{{- define "baton.labels" -}}
{{- $own := dict "helm.sh/chart" (include "baton.chart" .) "app.kubernetes.io/version" (.Chart.AppVersion | toString) "app.kubernetes.io/managed-by" .Release.Service "app.kubernetes.io/part-of" "baton" -}}
{{- toYaml (merge (include "baton.selectorLabels" . | fromYaml) $own) -}}
{{- end -}}

{{/* What selects the pods of one role; roles are head, router, prefill, decode, mixed. */}}
{{- define "baton.roleSelectorLabels" -}}
{{ include "baton.selectorLabels" .root }}
baton/role: {{ .role }}
{{- end -}}

{{/* Of the pods of one role; KubeRay's app.kubernetes.io/* give way to ours. */}}
{{- define "baton.roleLabels" -}}
{{- $labels := dict -}}
{{- $own := dict "app.kubernetes.io/component" .role -}}
{{- range list .root.Values.commonLabels (index .root.Values .role).podLabels $own (include "baton.roleSelectorLabels" . | fromYaml) -}}
{{- include "baton.put" (dict "into" $labels "from" .) -}}
{{- end -}}
{{- toYaml $labels -}}
{{- end -}}

{{/* Annotations of an object: the common ones, under the given. Empty if there are none. */}}
{{- define "baton.annotations" -}}
{{- $all := dict -}}
{{- include "baton.put" (dict "into" $all "from" .root.Values.commonAnnotations) -}}
{{- include "baton.put" (dict "into" $all "from" .annotations) -}}
{{- if $all -}}
{{- toYaml $all -}}
{{- end -}}
{{- end -}}

{{/* Of the two variants of the image, the one for GPUs is tagged VERSION-cuda. */}}
{{- define "baton.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- $tag := .Chart.AppVersion -}}
{{- $gpus := 0 -}}
{{- range list "prefill" "decode" "mixed" -}}
{{- $pool := index $.Values . -}}
{{- if $pool.replicas -}}{{- $gpus = add $gpus ($pool.gpus | default 0 | int) -}}{{- end -}}
{{- end -}}
{{- if $gpus -}}{{- $tag = printf "%s-cuda" $tag -}}{{- end -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default $tag) -}}
{{- end -}}
{{- end -}}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "baton.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* The head's own where it needs rights, so that no other pod has them. */}}
{{- define "baton.headServiceAccountName" -}}
{{- if and .Values.autoscaling.enabled .Values.serviceAccount.create -}}
{{- printf "%s-head" (include "baton.fullname" .) -}}
{{- else -}}
{{- include "baton.serviceAccountName" . -}}
{{- end -}}
{{- end -}}

{{- define "baton.clusterSecretName" -}}
{{- .Values.secrets.clusterSecret.existingSecret | default (printf "%s-cluster-secret" (include "baton.fullname" .)) -}}
{{- end -}}

{{/* Empty if no key is asked for. */}}
{{- define "baton.apiKeysSecretName" -}}
{{- if .Values.secrets.apiKeys.existingSecret -}}
{{- .Values.secrets.apiKeys.existingSecret -}}
{{- else if .Values.secrets.apiKeys.create -}}
{{- printf "%s-api-keys" (include "baton.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* Empty without a token. */}}
{{- define "baton.hubTokenSecretName" -}}
{{- if .Values.secrets.hubToken.existingSecret -}}
{{- .Values.secrets.hubToken.existingSecret -}}
{{- else if .Values.secrets.hubToken.create -}}
{{- printf "%s-hub-token" (include "baton.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "baton.modelCacheClaimName" -}}
{{- .Values.modelCache.existingClaim | default (printf "%s-model-cache" (include "baton.fullname" .)) -}}
{{- end -}}

{{/* Where Serve's HAProxy listens in the pods. */}}
{{- define "baton.apiPort" -}}8000{{- end -}}

{{/* Where each router and worker serves its metrics. */}}
{{- define "baton.metricsPort" -}}
{{- .Values.config.metrics_port -}}
{{- end -}}

{{/* The roles that have pods, as a YAML list. */}}
{{- define "baton.roles" -}}
{{- $roles := list -}}
{{- range $role := list "router" "prefill" "decode" "mixed" -}}
{{- if gt (int (index $.Values $role).replicas) 0 -}}
{{- $roles = append $roles $role -}}
{{- end -}}
{{- end -}}
{{- toYaml $roles -}}
{{- end -}}
