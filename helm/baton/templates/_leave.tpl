{{/*
How a pod ends: what `baton leave` (services/leave.py), its preStop, does, and how long that may take;
(dict "root" $ "role" ROLE), where "head" is a role too.
*/}}

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

{{/*
All of it as YAML: "grace" from the news that a pod goes until it is killed, and of that "leave" for its
own work and "patience" for others. It is the limit; most pods are gone long before.

Of the rest, 20 s are for finding out whether the whole cluster goes (only where there is patience),
the others for the start of the command and the end of Ray. A grace that is given and is shorter takes
from the patience first; where that is not even time to find out, nobody is waited for ("waits" is
false), and what is left is for the pod's own work. The head has none.
*/}}
{{- define "baton.end" -}}
{{- $own := eq .role "head" | ternary 15 0 | int -}}
{{- if ne .role "head" -}}{{- $own = include "baton.leaveSeconds" . | int -}}{{- end -}}
{{- $patience := include "baton.patienceSeconds" . | int -}}
{{- $grace := add $own $patience 45 -}}
{{- $waits := ne .role "router" -}}
{{- $given := (index .root.Values .role).terminationGracePeriodSeconds -}}
{{- if not (kindIs "invalid" $given) -}}
{{- $grace = int $given -}}
{{- $left := sub (sub $grace 45) $own | int -}}
{{- $patience = min $patience (max 0 $left) -}}
{{- $waits = and $waits (ge $left 0) -}}
{{- $own = max 1 (min $own (sub $grace 15)) -}}
{{- end -}}
{{- toYaml (dict "grace" $grace "leave" $own "patience" $patience "waits" $waits) -}}
{{- end -}}

{{/* The command: (dict "role" ROLE "end" {...}), with what "baton.end" says. Empty: no time for any. */}}
{{- define "baton.preStop" -}}
{{- $leave := list "baton" "leave" -}}
{{- if ne .role "head" -}}
{{- $leave = concat $leave (list "--deadline" (.end.leave | int | toString)) -}}
{{- end -}}
{{- if .end.waits -}}
{{- $leave = concat $leave (list "--after" (eq .role "head" | ternary "all" "routers") "--patience" (.end.patience | int | toString)) -}}
{{- end -}}
{{- if gt (len $leave) 2 -}}
{{- toYaml $leave -}}
{{- end -}}
{{- end -}}
