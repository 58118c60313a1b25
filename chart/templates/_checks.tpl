{{- /* Values that cannot work stop the installation with one message. */ -}}
{{- define "gpuwarden.checks" -}}
{{- $moved := list }}
{{- range $path, $sentence := .Files.Get "files/moved.yaml" | fromYaml }}
  {{- $place := $.Values }}{{ $found := true }}
  {{- range $name := splitList "." $path }}
    {{- if and $found (kindIs "map" $place) (hasKey $place $name) }}{{ $place = index $place $name }}{{ else }}{{ $found = false }}{{ end }}
  {{- end }}
  {{- if $found }}{{ $moved = append $moved (printf "%s." $sentence) }}{{ end }}
{{- end }}
{{- with $moved }}{{ fail (printf "\n\n%s" (join "\n" .)) }}{{ end }}
{{- $values := .Values }}{{ $settings := .Values.settings }}
{{- $evidence := splitList "," (include "gpuwarden.evidence" . | nospace) }}
{{- if has .Release.Namespace (list "kube-system" "kube-public" "kube-node-lease") }}
  {{- fail (printf "\n\nThe release's namespace is %s, whose pods are never reviewed. Install into a namespace of its own, for example with --namespace gpuwarden --create-namespace." .Release.Namespace) }}
{{- end }}
{{- if and (include "gpuwarden.reviews" .) (not $values.serve.enabled) }}
  {{- fail "\n\nwebhooks.enabled is true and serve.enabled is false: nothing would answer the API server, and every pod that requests GPUs would be refused. Set serve.enabled=true." }}
{{- end }}
{{- if and $settings.challengeAtBind (not (and $values.native $values.attest.enabled $values.attest.kubeletPlugins (include "gpuwarden.challenges" .))) }}
  {{- fail "\n\nsettings.challengeAtBind is true: native pods ask for challenges, and nodes have to answer them. Set native=true, settings.evidence=jwt-svid, attest.enabled=true and attest.kubeletPlugins." }}
{{- end }}
{{- if $values.native }}
  {{- if semverCompare "<1.36.0-0" .Capabilities.KubeVersion.Version }}
    {{- fail (printf "\n\nnative is true and requires MutatingAdmissionPolicy v1 of Kubernetes 1.36; this is %s. Set native=false." .Capabilities.KubeVersion.Version) }}
  {{- end }}
  {{- if not $values.reconcile.enabled }}
    {{- fail "\n\nnative is true and reconcile.enabled is false: nothing would publish the proven GPUs. Set reconcile.enabled=true." }}
  {{- end }}
  {{- if and (kindIs "bool" $settings.proofDevices) (not $settings.proofDevices) }}
    {{- fail "\n\nnative is true and settings.proofDevices is false: native pods get their GPUs by proof devices. Remove settings.proofDevices." }}
  {{- end }}
  {{- if ne (include "gpuwarden.blinds" .) "policy" }}
    {{- fail (printf "\n\nnative is true and no policy hides GPUs from pods without a claim: policies.blind is %s and settings.injection is %s. No webhook does it for native pods. Set policies.blind=policy and settings.injection=nvidia." $values.policies.blind (default "nvidia" $settings.injection)) }}
  {{- end }}
  {{- $isForReservations := and (eq (default "nvidia" $settings.injection) "dra") (eq (default "create" $settings.reserve) "create") }}
  {{- if or $isForReservations (eq (default "nvidia" $settings.injection) "plugin") }}
    {{- fail (printf "\n\nnative is true and settings.injection is %s: native pods would get no GPUs of nodes without the label gpuwarden.io/injection. Set settings.injection=nvidia." $settings.injection) }}
  {{- end }}
{{- end }}
{{- /* The reservations do not show GPUs that kube-scheduler has chosen: another pod would get the same ones. */ -}}
{{- if and (include "gpuwarden.reviews" .) (not (include "gpuwarden.templates" .)) (.Capabilities.APIVersions.Has "resource.k8s.io/v1/ResourceClaim") }}
  {{- range (lookup "resource.k8s.io/v1" "ResourceClaim" "" "").items }}
    {{- $annotations := default dict .metadata.annotations }}
    {{- $labels := default dict .metadata.labels }}
    {{- $isChosen := or (eq (get $annotations "resource.kubernetes.io/pod-claim-name") "gpuwarden") (contains "'native'" (toJson .spec)) }}
    {{- if and $isChosen (dig "status" "allocation" "" .) (eq (get $labels "gpuwarden.io/gpu-claim") "true") }}
      {{- fail (printf "\n\nkube-scheduler has chosen the GPUs of pods, such as the pod of ResourceClaim %s/%s: webhooks would give the same GPUs to other pods. Delete these pods first, or set native=true, or settings.injection=dra and settings.reserve=bind, as before." .metadata.namespace .metadata.name) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- if and $values.prometheusRule.enabled (not $values.serve.enabled) }}
  {{- fail "\n\nprometheusRule.enabled is true and serve.enabled is false: the alerts are about serve, and the first of them would always fire." }}
{{- end }}
{{- if eq $values.tls.mode "existingSecret" }}
  {{- if not $values.tls.existingSecret }}
    {{- fail "\n\ntls.mode is existingSecret: set tls.existingSecret to the Secret with tls.crt and tls.key." }}
  {{- end }}
  {{- if and (not $values.tls.caBundle) (or (include "gpuwarden.reviews" .) (and $values.attest.enabled (include "gpuwarden.challenges" .))) }}
    {{- fail "\n\ntls.mode is existingSecret: set tls.caBundle to the CA of its certificate (PEM or base64 of PEM). Without it the API server cannot call the webhooks." }}
  {{- end }}
  {{- if and $values.tls.caBundle (not (contains "-----BEGIN CERTIFICATE-----" (include "gpuwarden.caBundle" . | b64dec))) }}
    {{- fail "\n\ntls.caBundle contains no certificate: set it to the CA in PEM, or base64 of PEM." }}
  {{- end }}
{{- else }}
  {{- if $values.tls.existingSecret }}
    {{- fail (printf "\n\ntls.existingSecret is set and tls.mode is %s: set tls.mode=existingSecret, or remove the Secret." $values.tls.mode) }}
  {{- end }}
  {{- if $values.tls.caBundle }}
    {{- fail (printf "\n\ntls.caBundle is set and tls.mode is %s, which creates its own bundle: set tls.mode=existingSecret, or remove the bundle." $values.tls.mode) }}
  {{- end }}
{{- end }}
{{- if and (eq $values.tls.mode "certManager") (not (.Capabilities.APIVersions.Has "cert-manager.io/v1")) }}
  {{- fail "\n\ntls.mode is certManager and this cluster has no cert-manager.io/v1: install cert-manager first, or set tls.mode=selfManaged. (For helm template, pass --api-versions cert-manager.io/v1.)" }}
{{- end }}
{{- if and (ne $values.tls.mode "certManager") $values.tls.certManager.issuer.name }}
  {{- fail (printf "\n\ntls.certManager.issuer.name is set and tls.mode is %s: set tls.mode=certManager, or remove the issuer." $values.tls.mode) }}
{{- end }}
{{- if and (eq $values.tls.mode "certManager") (eq $values.tls.certManager.issuer.kind "ClusterIssuer") (not $values.tls.certManager.issuer.name) }}
  {{- fail "\n\ntls.certManager.issuer.kind is ClusterIssuer: set tls.certManager.issuer.name." }}
{{- end }}
{{- range $what, $api := dict "serviceMonitor" "ServiceMonitor" "prometheusRule" "PrometheusRule" }}
  {{- if and (index $values $what).enabled (not ($.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" $api))) }}
    {{- fail (printf "\n\n%s.enabled is true and this cluster has no %s of monitoring.coreos.com/v1: install the Prometheus operator first, or disable it. (For helm template, pass --api-versions monitoring.coreos.com/v1/%s.)" $what $api $api) }}
  {{- end }}
{{- end }}
{{- if and (eq $values.policies.strip "true") (semverCompare "<1.36.0-0" .Capabilities.KubeVersion.Version) }}
  {{- fail (printf "\n\npolicies.strip is true and requires MutatingAdmissionPolicy v1 of Kubernetes 1.36; this is %s. Set policies.strip=auto." .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and (eq $values.policies.blind "policy") (semverCompare "<1.36.0-0" .Capabilities.KubeVersion.Version) }}
  {{- fail (printf "\n\npolicies.blind is policy and requires MutatingAdmissionPolicy v1 of Kubernetes 1.36; this is %s. Set policies.blind=webhook." .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and (has $values.policies.blind (list "policy" "webhook")) (eq (default "nvidia" $settings.injection) "cuda") }}
  {{- fail (printf "\n\npolicies.blind is %s and settings.injection is cuda, where every container sees all GPUs: set policies.blind=nobody." $values.policies.blind) }}
{{- end }}
{{- if and $settings.proofDevices (semverCompare "<1.34.0-0" .Capabilities.KubeVersion.Version) }}
  {{- fail (printf "\n\nsettings.proofDevices is true and requires resource.k8s.io/v1 of Kubernetes 1.34; this is %s. Set settings.proofDevices=false." .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- range $class := $values.dra.deviceClasses }}
  {{- if has $class (list "attested.gpuwarden.io" (default "gpu.nvidia.com" $settings.gpuDriver) (default "gpu.nvidia.com" $settings.gpuDeviceClass) (default "mig.nvidia.com" $settings.migDeviceClass)) }}
    {{- fail (printf "\n\ndra.deviceClasses contains %s: with this class a claim takes GPUs or their proofs. List classes of other devices." $class) }}
  {{- end }}
{{- end }}
{{- $paths := .Files.Get "files/hostpaths.yaml" | fromYaml }}
{{- range $path := $values.policies.hostPaths }}
  {{- range $place := concat $paths.places $paths.writable }}
    {{- if or (hasPrefix (printf "%s/" $place) (printf "%s/" $path)) (hasPrefix (printf "%s/" $path) (printf "%s/" $place)) }}
      {{- fail (printf "\n\npolicies.hostPaths contains %s, and %s. Use a separate directory." $path (ternary (printf "pods can create links in %s that lead to any path" $place) (printf "%s contains devices, sockets, programs or keys of the node" $place) (has $place $paths.writable))) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- if eq (default "cluster" $settings.ledger) "memory" }}
  {{- if gt (int $values.serve.replicas) 1 }}
    {{- fail "\n\nsettings.ledger is memory, which replicas do not share: set serve.replicas=1, or settings.ledger=cluster." }}
  {{- end }}
  {{- if $values.reconcile.enabled }}
    {{- fail "\n\nsettings.ledger is memory, where the reconciler sees no reservations: set reconcile.enabled=false, or settings.ledger=cluster." }}
  {{- end }}
  {{- if not $values.inventory }}
    {{- fail "\n\nsettings.ledger is memory, where the annotations of nodes are not read: list nodes and devices in inventory, or set inventory.nodes=[] if you only use settings.nodeHashMap." }}
  {{- end }}
  {{- if include "gpuwarden.reviews" . }}
    {{- fail "\n\nsettings.ledger is memory, which is empty after a restart and forgets a pod when its deletion is requested. Other pods would get GPUs that containers still use. Set webhooks.enabled=false, or settings.ledger=cluster." }}
  {{- end }}
{{- else if and $values.serve.enabled (not $values.reconcile.enabled) }}
  {{- fail "\n\nreconcile.enabled is false: reservations would not be confirmed or released, and each pod would block its GPUs for a while. Set reconcile.enabled=true, or settings.ledger=memory and webhooks.enabled=false." }}
{{- end }}
{{- if and (eq (default "create" $settings.reserve) "bind") (eq (default "cluster" $settings.ledger) "memory") }}
  {{- fail "\n\nsettings.reserve is bind, but only reservations in the cluster can be made for a pod that exists: set settings.ledger=cluster or settings.reserve=create." }}
{{- end }}
{{- if and (eq (default "create" $settings.reserve) "bind") (eq (default "nvidia" $settings.injection) "dra") }}
  {{- if and (kindIs "bool" $settings.proofDevices) (not $settings.proofDevices) }}
    {{- fail "\n\nsettings.reserve is bind with settings.injection dra, and settings.proofDevices is false: kube-scheduler chooses GPUs by their proof devices. Remove settings.proofDevices." }}
  {{- end }}
  {{- if semverCompare "<1.34.0-0" .Capabilities.KubeVersion.Version }}
    {{- fail (printf "\n\nsettings.reserve is bind with settings.injection dra, which requires resource.k8s.io/v1 of Kubernetes 1.34; this is %s. Set settings.reserve=create." .Capabilities.KubeVersion.Version) }}
  {{- end }}
{{- end }}
{{- if and (eq (default "uuid" $settings.mapVisible) "index") (ne (default "nvidia" $settings.injection) "cuda") }}
  {{- fail "\n\nsettings.mapVisible is index, but a container that sees some of its node's GPUs counts them from 0: set settings.injection=cuda or settings.mapVisible=uuid." }}
{{- end }}
{{- /* serve and reconcile read these in every tls.mode. */ -}}
{{- $leaf := include "gpuwarden.seconds" (default "2160h" $settings.certsLeafLife) | float64 }}
{{- $before := include "gpuwarden.seconds" (default "360h" $settings.certsRenewBefore) | float64 }}
{{- if le $leaf $before }}
  {{- fail "\n\nsettings.certsRenewBefore is not shorter than settings.certsLeafLife: a certificate must be renewed at once." }}
{{- end }}
{{- if le (include "gpuwarden.seconds" (default "8760h" $settings.certsCaLife) | float64) (addf $leaf $before) }}
  {{- fail "\n\nsettings.certsCaLife is not longer than settings.certsLeafLife and settings.certsRenewBefore together: a CA has to be valid longer than the certificates that it signs." }}
{{- end }}
{{- range $name, $provider := .Files.Get "files/evidence.yaml" | fromYaml }}
  {{- if has $name $evidence }}
    {{- $missing := false }}
    {{- range $provider.settings }}{{ if not (get $settings .) }}{{ $missing = true }}{{ end }}{{ end }}
    {{- if $missing }}
      {{- fail (printf "\n\nsettings.evidence has %s: set settings.%s." $name (join " and settings." $provider.settings)) }}
    {{- end }}
    {{- range $provider.settingsOverTcp }}
      {{- if and (not (get $settings .)) (not (hasPrefix "unix:" (get $settings $provider.address))) }}
        {{- fail (printf "\n\nsettings.evidence has %s, and settings.%s is not a socket: set settings.%s." $name $provider.address .) }}
      {{- end }}
    {{- end }}
  {{- end }}
{{- end }}
{{- if has "jwt-svid" $evidence }}
  {{- if not (or $settings.bundleEndpoint $settings.spireWorkloadApi) }}
    {{- fail "\n\nsettings.evidence has jwt-svid, which reads its keys from settings.bundleEndpoint or settings.spireWorkloadApi: set one." }}
  {{- end }}
  {{- if and (eq (default "https_web" $settings.bundleEndpointProfile) "https_spiffe") (not $values.bundleEndpointCa) (not $settings.spireWorkloadApi) }}
    {{- fail "\n\nsettings.bundleEndpointProfile is https_spiffe, and the endpoint's SVID is verified with its roots: set them by bundleEndpointCa (PEM), or settings.spireWorkloadApi to get them from the agent." }}
  {{- end }}
{{- else if and $values.attest.enabled (not $values.attest.kubeletPlugins) }}
  {{- fail "\n\nattest.enabled is true and settings.evidence has no jwt-svid: the nodes would not be challenged. As the kubelet's plugin alone, attest needs attest.kubeletPlugins." }}
{{- else if and $values.attest.enabled $values.attest.runtimeSocket }}
  {{- fail "\n\nattest.runtimeSocket is set and settings.evidence has no jwt-svid: the ends of pods are reported with the proofs. Remove attest.runtimeSocket." }}
{{- else if and $values.attest.enabled (not $settings.spireTrustDomain) }}
  {{- fail "\n\nattest.enabled is true: set settings.spireTrustDomain." }}
{{- end }}
{{- if and $values.attest.enabled (include "gpuwarden.challenges" .) (not $values.serve.enabled) }}
  {{- fail "\n\nattest.enabled is true and serve.enabled is false: the nodes' proofs would not be accepted." }}
{{- end }}
{{- if and $values.attest.enabled (not $settings.spireWorkloadApi) }}
  {{- fail (printf "\n\nattest.enabled is true: set settings.spireWorkloadApi to the agent's socket, such as unix:%s/spire-agent.sock." $values.spire.mountPath) }}
{{- end }}
{{- with $settings.spireWorkloadApi }}
  {{- $socket := trimPrefix "unix:" . | trimPrefix "//" }}
  {{- if not (hasPrefix (printf "%s/" (trimSuffix "/" $values.spire.mountPath)) $socket) }}
    {{- fail (printf "\n\nsettings.spireWorkloadApi is %s, but the agent's socket is mounted under spire.mountPath, which is %s." . $values.spire.mountPath) }}
  {{- end }}
{{- end }}
{{- if and $settings.reviewCallers (not $settings.reviewTokenAudience) }}
  {{- fail "\n\nsettings.reviewCallers is set, but callers need no token: set settings.reviewTokenAudience." }}
{{- end }}
{{- if and $values.extender.bind (not $values.extender.enabled) }}
  {{- fail "\n\nextender.bind is true and extender.enabled is false: schedulers could not reach the extender." }}
{{- end }}
{{- if and $values.scheduler.enabled (not $values.serve.enabled) }}
  {{- fail "\n\nscheduler.enabled is true and serve.enabled is false: kube-scheduler runs in the Pods of serve, which answers it. Set serve.enabled=true." }}
{{- end }}
{{- $ports := list (int $values.service.port) (int $values.service.uiPort) }}
{{- if $values.extender.enabled }}{{ $ports = append $ports (int $values.extender.port) }}{{ end }}
{{- with $values.extender.plainPort }}{{ $ports = append $ports (int .) }}{{ end }}
{{- if ne (len $ports) (len (uniq $ports)) }}
  {{- fail "\n\nservice.port, service.uiPort, extender.port and extender.plainPort are ports of one Service and have to differ." }}
{{- end }}
{{- $taken := concat (list 8443 8444) (ternary (list 8445 10259) list $values.scheduler.enabled) }}
{{- if or (has (int $values.service.uiPort) $taken) (has (int $values.extender.plainPort) $taken) }}
  {{- fail (printf "\n\nservice.uiPort and extender.plainPort are also ports of the container, where %s are the TLS listeners: choose another." (join " and " $taken)) }}
{{- end }}
{{- if and $values.score.enabled $settings.scorer }}
  {{- fail "\n\nscore.enabled is true and settings.scorer names another scorer: choose one." }}
{{- end }}
{{- if and (eq (default "deny" $settings.whenUnavailable) "queue") (not $values.reconcile.enabled) }}
  {{- fail "\n\nsettings.whenUnavailable is queue and reconcile.enabled is false: the gates would never be removed." }}
{{- end }}
{{- if $values.export.enabled }}
  {{- $export := $values.export.settings }}{{ $secrets := $values.export.credentials }}
  {{- if not $export.clusterName }}
    {{- fail "\n\nexport.enabled is true: every record contains the cluster's name, so set export.settings.clusterName." }}
  {{- end }}
  {{- if and (include "gpuwarden.keepsOutbox" .) (gt (int $values.export.replicas) 1) }}
    {{- fail "\n\nexport.outbox outlives its Pod, and only one process at a time can use it: set export.replicas=1." }}
  {{- end }}
  {{- $plugin := default "gpu-operator" $export.namespace }}
  {{- if and (lookup "v1" "Namespace" "" "kube-system") (not (lookup "v1" "Namespace" "" $plugin)) }}
    {{- fail (printf "\n\nexport.enabled is true and there is no namespace %s: set export.settings.namespace to the namespace of the device plugin's pods." $plugin) }}
  {{- end }}
  {{- range $name, $store := include "gpuwarden.stores" . | fromYaml }}
    {{- $secret := get $secrets $name }}{{ $missing := and $store.needsSecret (not $secret) }}
    {{- range $store.settings }}{{ if not (get $export .) }}{{ $missing = true }}{{ end }}{{ end }}
    {{- if $missing }}
      {{- fail (printf "\n\nexport.settings.exporterType has %s: set %s." $name $store.sentence) }}
    {{- end }}
    {{- if and $store.address $secret (not (get $export (default "" $store.allowsPlain))) }}
      {{- $address := get $export $store.address }}
      {{- if and (regexMatch "^[hH][tT][tT][pP]://" $address) (not (regexMatch "^.{4}://(localhost|127[.][0-9.]+|\\[::1\\])(:[0-9]+)?(/|$)" $address)) }}
        {{- fail (printf "\n\nexport.settings.%s is plain http and export.credentials.%s is set: the token would be sent unencrypted. Use https%s." $store.address $name (empty $store.allowsPlain | ternary "" (printf ", or set export.settings.%s=true" $store.allowsPlain))) }}
      {{- end }}
    {{- end }}
  {{- end }}
  {{- if lt (default 100 $export.burst | float64) (default 50 $export.qps | float64) }}
    {{- fail "\n\nexport.settings.burst is less than export.settings.qps: it has to be at least qps." }}
  {{- end }}
  {{- $lease := include "gpuwarden.seconds" (default "15s" $export.leaseDuration) | float64 }}
  {{- $deadline := include "gpuwarden.seconds" (default "10s" $export.leaseRenewDeadline) | float64 }}
  {{- $retry := include "gpuwarden.seconds" (default "2s" $export.leaseRetryPeriod) | float64 }}
  {{- if or (le $lease $deadline) (le $deadline $retry) }}
    {{- fail "\n\nexport.settings.leaseDuration, leaseRenewDeadline and leaseRetryPeriod: each must be shorter than the previous one." }}
  {{- end }}
{{- end }}
{{- /* An upgrade keeps what was accepted by an older version. */ -}}
{{- if and .Release.IsInstall (include "gpuwarden.reviews" .) (not (or (include "gpuwarden.reservesLater" .) $settings.reviewTokenAudience $values.webhooks.clientCa $values.webhooks.acceptUnverifiedCallers)) }}
  {{- fail "\n\nGPUs are reserved when pods are created, and callers of the webhooks are not verified: any client that reaches them could reserve GPUs. Set settings.reviewTokenAudience or webhooks.clientCa (docs/how-to/access.md), settings.reserve=bind (not with settings.injection=plugin), or accept it by webhooks.acceptUnverifiedCallers=true." }}
{{- end }}
{{- end }}
