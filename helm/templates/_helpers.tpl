{{- define "countersign.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{- define "countersign.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- else if contains (include "countersign.name" .) .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "countersign.name" .) | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Selector labels. Takes (dict "root" $ "component" "proxy"). */}}
{{- define "countersign.selector" -}}
app.kubernetes.io/name: {{ include "countersign.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | quote }}
{{- end -}}

{{/* Takes the same, and as "own" a list of further labels; what is in several is said by the first one, and by
     commonLabels last. A key that is there twice is no valid object to whoever reads strictly. */}}
{{- define "countersign.labels" -}}
{{- $labels := include "countersign.selector" . | fromYaml -}}
{{- $chart := printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" -}}
{{- $labels = merge $labels (dict "app.kubernetes.io/version" (toString .root.Chart.AppVersion) "helm.sh/chart" $chart) -}}
{{- $labels = merge $labels (dict "app.kubernetes.io/managed-by" (toString .root.Release.Service)) -}}
{{- range .own -}}
{{- $labels = merge $labels (. | default dict) -}}
{{- end -}}
{{- merge $labels (.root.Values.commonLabels | default dict) | toYaml -}}
{{- end -}}

{{/* Annotations of a pod. Takes (dict "root" $ "part" .Values.proxy); empty where there are none. */}}
{{- define "countersign.podAnnotations" -}}
{{- with merge (include "countersign.checksum" .root | fromYaml) (.part.podAnnotations | default dict) -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* Image reference. Takes (dict "root" $ "image" .Values.image.proxy). */}}
{{- define "countersign.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "countersign.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "countersign.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What every pod of the release shares. Service links would put COUNTERSIGN_PORT=tcp://… into the
     environment of a release called countersign, and the program would read it as a setting. */}}
{{- define "countersign.pod" -}}
serviceAccountName: {{ include "countersign.serviceAccount" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "countersign.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* Where a pod runs. Takes the values of a part, such as .Values.proxy. */}}
{{- define "countersign.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Environment of a Countersign container: where its settings are, and its secrets by reference only.
     Takes (dict "root" $ "part" .Values.proxy), and as "more" further variables. */}}
{{- define "countersign.env" -}}
env:
  - name: COUNTERSIGN_CONFIG
    value: /etc/countersign/countersign.yaml
  - name: HOME
    value: /home/countersign
  {{- if .root.Values.redis.existingSecret }}
  - name: COUNTERSIGN_REDIS_URL
    valueFrom:
      secretKeyRef:
        name: {{ .root.Values.redis.existingSecret | quote }}
        key: {{ .root.Values.redis.existingSecretKey | quote }}
  {{- end }}
  {{- with .root.Values.monitoring.credentials }}
  {{- if .existingSecret }}
  - name: COUNTERSIGN_METRICS__TOKEN
    valueFrom:
      secretKeyRef:
        name: {{ .existingSecret | quote }}
        key: {{ .existingSecretKey | quote }}
  {{- end }}
  {{- end }}
  {{- with .more }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .part.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if or .root.Values.existingSecret .part.existingSecret }}
envFrom:
  {{- with .root.Values.existingSecret }}
  - secretRef:
      name: {{ . | quote }}
  {{- end }}
  {{- with .part.existingSecret }}
  - secretRef:
      name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Environment of the admin API; empty without one. */}}
{{- define "countersign.admin" -}}
{{- with .Values.proxy.admin -}}
{{- if .enabled -}}
- name: COUNTERSIGN_ADMIN__HOST
  value: 0.0.0.0
- name: COUNTERSIGN_ADMIN__PORT
  value: {{ .port | quote }}
- name: COUNTERSIGN_ADMIN__KEYS
  valueFrom:
    secretKeyRef:
      name: {{ required "proxy.admin.existingSecret: a Secret with the admin API's keys is needed" .existingSecret | quote }}
      key: {{ .existingSecretKey | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Stops a release whose pods would never start, or whose settings the program would refuse once it is out. */}}
{{- define "countersign.consistent" -}}
{{- if not (regexMatch "^[a-z]" (include "countersign.fullname" .)) -}}
{{- fail (printf "fullnameOverride: a Service's name begins with a letter, and %s does not" (include "countersign.fullname" .)) -}}
{{- end -}}
{{- if and .Values.proxy.admin.enabled (eq (int .Values.proxy.admin.port) (int .Values.proxy.port)) -}}
{{- fail "proxy.admin.port: it is proxy.port" -}}
{{- end -}}
{{- $models := .Values.settings.models | default dict -}}
{{- $names := list -}}
{{- range .Values.settings.backends -}}
{{- if has .name $names -}}
{{- fail (printf "settings.backends: two are called %s" .name) -}}
{{- else if not (hasKey $models .model) -}}
{{- fail (printf "settings.backends: the model %s of %s is not among settings.models" .model .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- /* As the program's own validators have it, with its defaults; tests hold these against it. */ -}}
{{- $less := list
  (list "breaker" "longest" 60.0 "open_seconds" 2.0 "it is shorter than open_seconds")
  (list "verification" "verdict_ttl" 604800 "evidence_ttl" 3600 "it is shorter than evidence_ttl") -}}
{{- range $less -}}
{{- $section := get $.Values.settings (index . 0) | default dict -}}
{{- $one := get $section (index . 1) | default (index . 2) | float64 -}}
{{- if lt $one (get $section (index . 3) | default (index . 4) | float64) -}}
{{- fail (printf "settings.%s.%s: %s" (index . 0) (index . 1) (index . 5)) -}}
{{- end -}}
{{- end -}}
{{- $verification := .Values.settings.verification | default dict -}}
{{- if ge (get $verification "replay_wait" | default 900 | float64) (get $verification "evidence_ttl" | default 3600 | float64) -}}
{{- fail "settings.verification.replay_wait: it is no shorter than evidence_ttl" -}}
{{- end -}}
{{- end -}}

{{/* Bytes of a quantity as Kubernetes writes it, or as Valkey does (512mb); a number is bytes. */}}
{{- define "countersign.bytes" -}}
{{- if kindIs "string" . -}}
{{- $number := regexFind "^[0-9.]+" . | float64 -}}
{{- $unit := regexFind "[a-zA-Z]*$" . -}}
{{- $base := ternary 1024 1000 (or (hasSuffix "i" $unit) (hasSuffix "b" $unit)) -}}
{{- $times := dict "K" 1 "M" 2 "G" 3 "T" 4 "P" 5 -}}
{{- range until (get $times (trunc 1 $unit | upper) | default 0 | int) -}}
{{- $number = mulf $number $base -}}
{{- end -}}
{{- $number | int64 -}}
{{- else -}}
{{- int64 . -}}
{{- end -}}
{{- end -}}

{{/* Annotation that replaces pods when settings change, unless they follow them. Takes the root. */}}
{{- define "countersign.checksum" -}}
{{- if eq .Values.settingsChange "restart" -}}
checksum/config: {{ include (print .Template.BasePath "/configmap.yaml") . | sha256sum }}
{{- end -}}
{{- end -}}

{{- define "countersign.mounts" -}}
- name: config
  mountPath: /etc/countersign
  readOnly: true
- name: scratch
  mountPath: /tmp
  subPath: tmp
- name: scratch
  mountPath: /home/countersign
  subPath: home
{{- if .Values.models.existingClaim }}
- name: models
  mountPath: {{ .Values.models.mountPath | quote }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "countersign.volumes" -}}
- name: config
  configMap:
    name: {{ include "countersign.fullname" . | quote }}
{{- if .Values.models.existingClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Values.models.existingClaim | quote }}
    readOnly: true
{{- end }}
{{- end -}}

{{/* How the pods of one Deployment are spread. Takes (dict "root" $ "component" "proxy" "labels" dict), where labels
     tell it from others of the component. */}}
{{- define "countersign.spread" -}}
{{- $selector := include "countersign.selector" . | fromYaml -}}
{{- $selector = merge $selector (default dict .labels) -}}
{{- $all := list -}}
{{- range .root.Values.topologySpread -}}
{{- $all = append $all (merge (dict "labelSelector" (dict "matchLabels" $selector)) .) -}}
{{- end -}}
{{- with $all -}}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* What a leaving proxy's time goes to, all of it from proxy.drainSeconds, as JSON: {"preStop", "grace"} in seconds.
     It goes on listening while load balancers forget it, then finishes its streams (`serve --drain`), then breaks off the
     rest, which takes a second and never more than 5, and has 10 to write the last evidence. */}}
{{- define "countersign.drain" -}}
{{- $seconds := int .Values.proxy.drainSeconds -}}
{{- $preStop := min 15 $seconds -}}
{{- dict "preStop" $preStop "grace" (add $preStop $seconds 15) | toJson -}}
{{- end -}}

{{/* How a scrape says that it may see everything, for an endpoint of a monitor; empty without a Secret. */}}
{{- define "countersign.credentials" -}}
{{- with .Values.monitoring.credentials -}}
{{- if .existingSecret -}}
authorization:
  type: Bearer
  credentials:
    name: {{ .existingSecret | quote }}
    key: {{ .existingSecretKey | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Selector of this release's series in PromQL, without braces. */}}
{{- define "countersign.series" -}}
{{- if .Values.monitoring.prometheus.selector -}}
{{- .Values.monitoring.prometheus.selector -}}
{{- else -}}
{{- printf "namespace=%q,service=%q" .Release.Namespace (include "countersign.fullname" .) -}}
{{- end -}}
{{- end -}}
