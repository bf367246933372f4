{{/*
Parts of the network policies. A rule without "from" or "to" is for everybody, one without "ports"
for all ports.
*/}}

{{/* The port of an address such as redis://host:6379 or http://host:4318/v1: (dict "address" "" "default" 80). */}}
{{- define "baton.portOf" -}}
{{- $host := regexReplaceAll "^[a-z+]+://" .address "" | splitList "/" | first -}}
{{- regexFind ":[0-9]+$" $host | trimPrefix ":" | default (.default | toString) -}}
{{- end -}}

{{/* "true" if pods use the network of their nodes: no policy holds for these, and peers see a node. */}}
{{- define "baton.onHostNetwork" -}}
{{- range $role := include "baton.roles" . | fromYamlArray -}}
{{- $values := index $.Values $role -}}
{{- if or $values.hostNetwork (and (ne $role "router") $.Values.rdma.enabled $.Values.rdma.hostNetwork $values.rdma) -}}true{{- end -}}
{{- end -}}
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
