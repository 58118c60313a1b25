{{- /*
The Pod of a component. Takes a dict: root, component, args, mounts (names of what is mounted, below), and where there is
such a thing: port (that it has the plain listener, and probes), ports (more of them), preStop, env, annotations, may
(what its container may do besides), called (its container's name), before (init containers), beside (more containers),
volumes.
*/ -}}
{{- define "gpuwarden.podTemplate" -}}
{{- $root := .root -}}{{- $values := $root.Values -}}{{- $own := index $values .component -}}{{- $mounts := default list .mounts -}}
metadata:
  labels:
    {{- include "gpuwarden.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with merge (dict) $own.podLabels $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $notes := merge (dict) (default dict .annotations) $own.podAnnotations $values.podAnnotations }}
  {{- with $notes }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "gpuwarden.account" (list $root .component) }}
  automountServiceAccountToken: {{ or (ne .component "attest") (has "plugins" $mounts) }}
  # A Service named gpuwarden would add environment variables that look like settings.
  enableServiceLinks: false
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with default $values.priorityClassName $own.priorityClassName }}
  priorityClassName: {{ quote . }}
  {{- end }}
  {{- with $values.podSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add $values.drainSeconds (default 0 .preStop) 15 }}
  {{- with .before }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ default .component .called }}
      image: {{ include "gpuwarden.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args:
        {{- toYaml .args | nindent 8 }}
      {{- with concat (default list .env) $own.env }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .envFrom }}
      envFrom:
        {{- range . }}
        - secretRef: {name: {{ . }}}
        {{- end }}
      {{- end }}
      {{- if .port }}
      ports:
        - {name: http, containerPort: {{ .port }}}
        {{- range $name, $number := default dict .ports }}
        - {name: {{ $name }}, containerPort: {{ $number }}}
        {{- end }}
      # A Pod is ready once caches and the first evidence are loaded.
      startupProbe:
        httpGet: {path: /healthz, port: http}
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /healthz, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
      {{- end }}
      {{- with .preStop }}
      # After this sleep no API server and no Service sends new requests.
      lifecycle:
        preStop:
          sleep: {seconds: {{ . }}}
      {{- end }}
      {{- with mergeOverwrite (dict) $values.securityContext (default dict .may) }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $own.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if has "settings" $mounts }}
        - {name: settings, mountPath: /etc/gpuwarden/settings, readOnly: true}
        {{- end }}
        {{- if has "exportSettings" $mounts }}
        - {name: settings, mountPath: /etc/gpuwarden/export, readOnly: true}
        {{- end }}
        {{- if has "outbox" $mounts }}
        - {name: outbox, mountPath: /var/lib/gpuwarden}
        {{- end }}
        {{- if has "tls" $mounts }}
        - {name: tls, mountPath: /etc/gpuwarden/tls, readOnly: true}
        {{- end }}
        {{- if has "ca" $mounts }}
        - {name: ca, mountPath: /etc/gpuwarden/ca, readOnly: true}
        {{- end }}
        {{- if has "nonce" $mounts }}
        - {name: nonce, mountPath: /etc/gpuwarden/nonce, readOnly: true}
        {{- end }}
        {{- if has "spire" $mounts }}
        - {name: spire, mountPath: {{ $values.spire.mountPath }}, readOnly: true}
        {{- end }}
        {{- if has "runtime" $mounts }}
        - {name: runtime, mountPath: /run/gpuwarden/runtime, readOnly: true}
        - {name: kubelet, mountPath: /run/gpuwarden/kubelet, readOnly: true}
        {{- end }}
        {{- if has "plugins" $mounts }}
        # Under the paths of the node, because the kubelet is told the path of a socket.
        - {name: plugin, mountPath: {{ clean $own.kubeletPlugins }}/plugins/attested.gpuwarden.io}
        - {name: plugins-registry, mountPath: {{ clean $own.kubeletPlugins }}/plugins_registry}
        {{- end }}
        {{- if has "cdi" $mounts }}
        - {name: cdi, mountPath: {{ clean $own.cdiDirectory }}}
        {{- end }}
        {{- if has "schedulerCerts" $mounts }}
        - {name: scheduler-certs, mountPath: /etc/gpuwarden/scheduler, readOnly: true}
        {{- end }}
        {{- with $own.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with .beside }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- if has "settings" $mounts }}
    - name: settings
      configMap: {name: {{ include "gpuwarden.fullname" $root }}-settings}
    {{- end }}
    {{- if has "exportSettings" $mounts }}
    - name: settings
      configMap: {name: {{ include "gpuwarden.component" (list $root "export") }}-settings}
    {{- end }}
    {{- if has "outbox" $mounts }}
    - name: outbox
      {{- toYaml (include "gpuwarden.outbox" $root | fromYaml) | nindent 6 }}
    {{- end }}
    {{- if has "tls" $mounts }}
    - name: tls
      # Not the CA's key, which may be in the same Secret.
      secret: {secretName: {{ include "gpuwarden.tlsSecret" $root }}, items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]}
    {{- end }}
    {{- if has "ca" $mounts }}
    - name: ca
      {{- if eq $values.tls.mode "existingSecret" }}
      configMap: {name: {{ include "gpuwarden.fullname" $root }}-settings, items: [{key: ca.crt, path: ca.crt}]}
      {{- else }}
      # Not the key in the same Secret.
      secret: {secretName: {{ include "gpuwarden.tlsSecret" $root }}, items: [{key: ca.crt, path: ca.crt}]}
      {{- end }}
    {{- end }}
    {{- if has "nonce" $mounts }}
    - name: nonce
      secret: {secretName: {{ include "gpuwarden.nonceSecret" $root }}, items: [{key: {{ $values.nonceKey.key }}, path: nonce.key}]}
    {{- end }}
    {{- if has "spire" $mounts }}
    - name: spire
      {{- if $values.spire.csiDriver }}
      csi: {driver: {{ $values.spire.csiDriver }}, readOnly: true}
      {{- else }}
      hostPath: {path: {{ $values.spire.socketDirectory }}, type: Directory}
      {{- end }}
    {{- end }}
    {{- if has "runtime" $mounts }}
    # Directories, because runtime and kubelet recreate their sockets when they restart.
    - name: runtime
      hostPath: {path: {{ dir $own.runtimeSocket }}, type: Directory}
    - name: kubelet
      hostPath: {path: {{ $own.podResourcesDirectory }}, type: Directory}
    {{- end }}
    {{- if has "plugins" $mounts }}
    - name: plugin
      hostPath: {path: {{ clean $own.kubeletPlugins }}/plugins/attested.gpuwarden.io, type: DirectoryOrCreate}
    - name: plugins-registry
      hostPath: {path: {{ clean $own.kubeletPlugins }}/plugins_registry, type: Directory}
    {{- end }}
    {{- if has "cdi" $mounts }}
    - name: cdi
      hostPath: {path: {{ clean $own.cdiDirectory }}, type: DirectoryOrCreate}
    {{- end }}
    {{- with concat (default list .volumes) $own.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with (ternary $own.nodeSelector (default $values.nodeSelector $own.nodeSelector) (eq .component "attest")) }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with (ternary $own.tolerations (default $values.tolerations $own.tolerations) (eq .component "attest")) }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if eq .component "attest" }}
  {{- with $own.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- else }}
  affinity:
    {{- with default $values.affinity $own.affinity }}
    {{- toYaml . | nindent 4 }}
    {{- else }}
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels:
                {{- include "gpuwarden.selector" $root | nindent 16 }}
                app.kubernetes.io/component: {{ .component }}
    {{- end }}
  {{- $component := .component }}
  {{- with $values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    -
      {{- toYaml . | nindent 6 }}
      labelSelector:
        matchLabels:
          {{- include "gpuwarden.selector" $root | nindent 10 }}
          app.kubernetes.io/component: {{ $component }}
    {{- end }}
  {{- end }}
  {{- end }}
{{- end }}

{{- /* A Deployment, and its disruption budget if it has several Pods. Takes the arguments of podTemplate, and oneAtATime:
a new Pod starts only after the old one has ended. */ -}}
{{- define "gpuwarden.deployment" -}}
{{- $root := .root -}}{{- $own := index $root.Values .component -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "gpuwarden.component" (list $root .component) }}
  namespace: {{ quote $root.Release.Namespace }}
  labels:
    {{- include "gpuwarden.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  replicas: {{ $own.replicas }}
  selector:
    matchLabels:
      {{- include "gpuwarden.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
  strategy:
    {{- if .oneAtATime }}
    type: Recreate
    {{- else }}
    type: RollingUpdate
    rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
    {{- end }}
  template:
    {{- include "gpuwarden.podTemplate" . | nindent 4 }}
{{- if and $root.Values.podDisruptionBudget.enabled (gt (int $own.replicas) 1) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "gpuwarden.component" (list $root .component) }}
  namespace: {{ quote $root.Release.Namespace }}
  labels:
    {{- include "gpuwarden.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  maxUnavailable: {{ $root.Values.podDisruptionBudget.maxUnavailable }}
  # Pods that are not ready may always be evicted.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "gpuwarden.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
{{- end }}
{{- end }}

{{- /* Environment variables about the Pod, for every process with `settings`. */ -}}
{{- define "gpuwarden.commonArgs" -}}
- --config=/etc/gpuwarden/settings/settings.yaml
- --in-cluster=true
- --host=0.0.0.0
- --ui-port={{ .Values.service.uiPort }}
- --drain-timeout={{ .Values.drainSeconds }}s
{{- end }}
