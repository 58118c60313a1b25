{{- define "gpuwarden.chartName" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "gpuwarden.fullname" -}}
{{- $name := include "gpuwarden.chartName" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- /* The name of a component's objects; `serve` has the full name without suffix. Takes (list root component). */ -}}
{{- define "gpuwarden.component" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
{{ include "gpuwarden.fullname" $root }}{{ if ne $component "serve" }}-{{ $component }}{{ end }}
{{- end }}

{{- define "gpuwarden.account" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
{{ default (include "gpuwarden.component" .) (index $root.Values $component).serviceAccountName }}
{{- end }}

{{- define "gpuwarden.selector" -}}
app.kubernetes.io/name: {{ include "gpuwarden.chartName" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpuwarden.labels" -}}
{{ include "gpuwarden.selector" . }}
app.kubernetes.io/part-of: gpuwarden
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "gpuwarden.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end }}

{{- /* Each tls.mode has its own Secret: cert-manager's has another type than ours, and stays after cert-manager is removed. */ -}}
{{- define "gpuwarden.tlsSecret" -}}
{{- if eq .Values.tls.mode "existingSecret" -}}
{{ .Values.tls.existingSecret }}
{{- else -}}
{{ include "gpuwarden.fullname" . }}-{{ ternary "tls" "certs" (eq .Values.tls.mode "certManager") }}
{{- end -}}
{{- end }}

{{- /* The CA of `serve` in base64, if it is known while rendering. */ -}}
{{- define "gpuwarden.caBundle" -}}
{{- if eq .Values.tls.mode "existingSecret" -}}
{{- if contains "-----BEGIN CERTIFICATE-----" .Values.tls.caBundle }}{{ .Values.tls.caBundle | b64enc }}{{ else }}{{ .Values.tls.caBundle | nospace }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "gpuwarden.scorer" -}}
{{- if .Values.settings.scorer -}}
{{ .Values.settings.scorer }}
{{- else if .Values.score.enabled -}}
http://{{ include "gpuwarden.component" (list . "score") }}.{{ .Release.Namespace }}.svc:{{ .Values.service.uiPort }}
{{- end -}}
{{- end }}

{{- define "gpuwarden.evidence" -}}
{{- $said := .Values.settings.evidence -}}
{{- if kindIs "slice" $said }}{{ join "," $said }}{{ else }}{{ default "static" $said }}{{ end -}}
{{- end }}

{{- define "gpuwarden.challenges" -}}
{{- if has "jwt-svid" (splitList "," (include "gpuwarden.evidence" . | nospace)) }}true{{ end -}}
{{- end }}

{{- /* Helm merges a configured volume source with the default one; the configured one counts. */ -}}
{{- define "gpuwarden.outbox" -}}
{{- $said := .Values.export.outbox -}}
{{ toYaml (ternary (omit $said "emptyDir") $said (gt (len $said) 1)) }}
{{- end }}

{{- /* Whether the outbox outlives its Pod. Then only one process at a time can use it. */ -}}
{{- define "gpuwarden.keepsOutbox" -}}
{{- $source := include "gpuwarden.outbox" . | fromYaml -}}
{{- if not (or (hasKey $source "emptyDir") (hasKey $source "ephemeral")) }}true{{ end -}}
{{- end }}

{{- define "gpuwarden.nonceSecret" -}}
{{ default (printf "%s-nonce" (include "gpuwarden.fullname" .)) .Values.nonceKey.existingSecret }}
{{- end }}

{{- /* Whether webhooks review pods. Native pods need none. */ -}}
{{- define "gpuwarden.reviews" -}}
{{- if and .Values.webhooks.enabled (not .Values.native) }}true{{ end -}}
{{- end }}

{{- /* Whether kube-scheduler chooses the GPUs of pods, by claims from templates. */ -}}
{{- define "gpuwarden.templates" -}}
{{- if or .Values.native (and (eq (default "nvidia" .Values.settings.injection) "dra") (eq (default "create" .Values.settings.reserve) "bind")) }}true{{ end -}}
{{- end }}

{{- /* Whether reviews of creations reserve nothing. A device plugin needs GPUs that are reserved at creation. */ -}}
{{- define "gpuwarden.reservesLater" -}}
{{- if and (eq (default "create" .Values.settings.reserve) "bind") (ne (default "nvidia" .Values.settings.injection) "plugin") }}true{{ end -}}
{{- end }}

{{- /* Whether there are proof devices, by which these claims take GPUs. */ -}}
{{- define "gpuwarden.proofs" -}}
{{- if or (include "gpuwarden.templates" .) .Values.settings.proofDevices }}true{{ end -}}
{{- end }}

{{- define "gpuwarden.strips" -}}
{{- if eq .Values.policies.strip "true" }}true
{{- else if and (eq .Values.policies.strip "auto") (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version) }}true
{{- end -}}
{{- end }}

{{- /* What hides GPUs from pods without a claim: policy, webhook or nobody. */ -}}
{{- define "gpuwarden.blinds" -}}
{{- if ne .Values.policies.blind "auto" }}{{ .Values.policies.blind }}
{{- else if and (ne (default "nvidia" .Values.settings.injection) "cuda") (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version) }}policy
{{- else }}nobody
{{- end -}}
{{- end }}

{{- /* What processes with evidence providers need besides their settings. */ -}}
{{- define "gpuwarden.evidenceMounts" -}}
{{- $found := list -}}
{{- if include "gpuwarden.challenges" . }}{{ $found = append $found "nonce" }}{{ end -}}
{{- if .Values.settings.spireWorkloadApi }}{{ $found = append $found "spire" }}{{ end -}}
{{ toYaml $found }}
{{- end }}

{{- /* The enabled components. */ -}}
{{- define "gpuwarden.components" -}}
{{- $found := list -}}
{{- range $name := list "serve" "reconcile" "attest" "score" "export" -}}
{{- if (index $.Values $name).enabled }}{{ $found = append $found $name }}{{ end -}}
{{- end -}}
{{- if include "gpuwarden.makesCerts" . }}{{ $found = append $found "certs" }}{{ end -}}
{{ toYaml $found }}
{{- end }}

{{- /* Whether gpuwarden issues the certificate. */ -}}
{{- define "gpuwarden.makesCerts" -}}
{{- if and (eq .Values.tls.mode "selfManaged") .Values.serve.enabled }}true{{ end -}}
{{- end }}

{{- /* These settings as flags. Takes (list root keys). Values other than strings become JSON: printed, a number of seven
digits would have an exponent. */ -}}
{{- define "gpuwarden.flags" -}}
{{- $root := index . 0 -}}{{- $flags := list -}}
{{- range $key := index . 1 -}}
{{- $value := index $root.Values.settings $key -}}
{{- if not (kindIs "invalid" $value) -}}
{{- if kindIs "slice" $value }}{{ $value = join "," $value }}{{ else if not (kindIs "string" $value) }}{{ $value = toJson $value }}{{ end -}}
{{- $flags = append $flags (printf "--%s=%v" (kebabcase $key) $value) -}}
{{- end -}}
{{- end -}}
{{ toYaml $flags }}
{{- end }}

{{- /* A duration in seconds; takes `1h30m`, `500ms` or a number of seconds. */ -}}
{{- define "gpuwarden.seconds" -}}
{{- $units := dict "ns" 1e-9 "us" 1e-6 "µs" 1e-6 "ms" 1e-3 "s" 1.0 "m" 60.0 "h" 3600.0 "" 1.0 -}}
{{- $whole := 0.0 -}}
{{- range $part := regexFindAll "[0-9.]+[a-zµ]*" (ternary . (toJson .) (kindIs "string" .)) -1 -}}
{{- $unit := regexFind "[a-zµ]*$" $part -}}
{{- $whole = addf $whole (mulf (trimSuffix $unit $part | float64) (get $units $unit)) -}}
{{- end -}}
{{ toJson $whole }}
{{- end }}

{{- /* The port of a URL or HOST:PORT; empty for a socket. */ -}}
{{- define "gpuwarden.portOf" -}}
{{- if not (hasPrefix "unix:" .) -}}
{{- $authority := regexReplaceAll "^[A-Za-z]+://" . "" | regexFind "^[^/]*" -}}
{{ regexFind "[0-9]+$" (regexFind ":[0-9]+$" $authority) | default (ternary "443" "80" (hasPrefix "https://" .)) }}
{{- end -}}
{{- end }}

{{- /* The ports of external addresses in a component's settings. Takes (list root component). */ -}}
{{- define "gpuwarden.namedPorts" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}{{- $places := list -}}{{- $ports := list -}}
{{- $settings := $root.Values.settings -}}{{- $export := $root.Values.export.settings -}}
{{- if has $component (list "serve" "reconcile") -}}
{{- $places = list (ternary $settings.scorer "" (eq $component "serve")) -}}
{{- range $root.Files.Get "files/evidence.yaml" | fromYaml }}{{ with .address }}{{ $places = append $places (get $settings .) }}{{ end }}{{ end -}}
{{- else if eq $component "export" -}}
{{- range include "gpuwarden.stores" $root | fromYaml -}}
{{- with .address }}{{ $places = append $places (get $export .) }}{{ end -}}
{{- if .port }}{{ $ports = append $ports (get $export (default "" .portSetting) | default .port | int) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range $place := $places -}}
{{- if $place }}{{ with include "gpuwarden.portOf" $place }}{{ $ports = append $ports (int .) }}{{ end }}{{ end -}}
{{- end -}}
{{ toYaml (uniq $ports) }}
{{- end }}

{{- /* The stores that the exporter uses, with what the templates need to know of each. */ -}}
{{- define "gpuwarden.stores" -}}
{{- $types := .Values.export.settings.exporterType | default "stdout" -}}
{{- if kindIs "slice" $types }}{{ $types = join "," $types }}{{ end -}}
{{- $stores := .Files.Get "files/stores.yaml" | fromYaml -}}
{{- range $name := keys $stores }}{{ if not (has $name (splitList "," (nospace $types))) }}{{ $_ := unset $stores $name }}{{ end }}{{ end -}}
{{ toYaml $stores }}
{{- end }}

{{- /* The users whose Bindings continue while no replica answers. */ -}}
{{- define "gpuwarden.schedulers" -}}
'system:kube-scheduler'{{ range .Values.webhooks.moreSchedulers }}, '{{ . }}'{{ end }}
{{- end }}
