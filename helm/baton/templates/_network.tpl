{{/*
Parts of the network policies. A rule without "from" or "to" is for everybody, one without "ports"
for all ports.
*/}}

{{/* Host and port of an address such as redis://host:6379 or http://host:4318/v1. */}}
{{- define "baton.hostAndPort" -}}
{{- regexReplaceAll "^[a-z+]+://" . "" | splitList "/" | first | splitList "@" | last -}}
{{- end -}}

{{/* The port of an address: (dict "address" "" "default" 80). */}}
{{- define "baton.portOf" -}}
{{- regexFind ":[0-9]+$" (include "baton.hostAndPort" .address) | trimPrefix ":" | default (.default | toString) -}}
{{- end -}}

{{/*
Where an address can be, as a YAML list of peers; empty: anywhere. An IP address is itself, a name as
services of Kubernetes have one is in its namespace: NAME (in this one), NAME.NAMESPACE, or
NAME.NAMESPACE.svc with what may follow. Of other names nothing is known.
*/}}
{{- define "baton.peersOf" -}}
{{- $host := regexReplaceAll ":[0-9]+$" (include "baton.hostAndPort" .) "" -}}
{{- $parts := splitList "." $host -}}
{{- if regexMatch "^[0-9]+([.][0-9]+){3}$" $host -}}
- ipBlock: {cidr: {{ printf "%s/32" $host | quote }}}
{{- else if hasPrefix "[" $host -}}
- ipBlock: {cidr: {{ printf "%s/128" (trimAll "[]" $host) | quote }}}
{{- else if eq (len $parts) 1 -}}
- podSelector: {}
{{- else if or (eq (len $parts) 2) (eq (index $parts 2) "svc") -}}
- namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ index $parts 1 | quote }}}}
{{- end -}}
{{- end -}}

{{/*
Egress to an address: (dict "address" "" "default" PORT "to" PEERS), where peers that are given win
over those that the address tells.
*/}}
{{- define "baton.addressEgress" -}}
- ports:
    - {port: {{ include "baton.portOf" . }}, protocol: TCP}
  {{- with .to | default (include "baton.peersOf" .address | fromYamlArray) }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* "true" if pods use the network of their nodes: no policy holds for these, and peers see a node. */}}
{{- define "baton.onHostNetwork" -}}
{{- if include "baton.hostNetworkRoles" . -}}true{{- end -}}
{{- end -}}

{{/* Peers: the pods of the Ray cluster, and nodes whose network some of them use. */}}
{{- define "baton.rayPeers" -}}
- podSelector:
    {{- include "baton.raySelector" . | nindent 4 }}
{{- if include "baton.onHostNetwork" . }}
{{- if not .Values.networkPolicy.nodeCIDRs }}
{{- fail "networkPolicy.nodeCIDRs: with hostNetwork, pods talk from the addresses of their nodes: name the nodes' networks, such as 10.0.0.0/16, or set networkPolicy.enabled to false" }}
{{- end }}
{{- range .Values.networkPolicy.nodeCIDRs }}
- ipBlock: {cidr: {{ . | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Egress: names. */}}
{{- define "baton.dnsEgress" -}}
- ports:
    {{- range .Values.networkPolicy.dns.ports }}
    - {port: {{ . }}, protocol: UDP}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  {{- with .Values.networkPolicy.dns.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* Egress: HTTPS, but to no private address, and to no metadata service of a cloud. */}}
{{- define "baton.internetEgress" -}}
- ports:
    - {port: 443, protocol: TCP}
  to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except: [10.0.0.0/8, 100.64.0.0/10, 169.254.0.0/16, 172.16.0.0/12, 192.168.0.0/16]
    - ipBlock:
        cidr: ::/0
        except: [fc00::/7, fe80::/10]
{{- end -}}
