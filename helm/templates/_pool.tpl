{{/* A name that Kubernetes takes, from any model's name: two models never share one. */}}
{{- define "countersign.slug" -}}
{{- $plain := . | lower | replace "/" "-" | replace "." "-" | replace "_" "-" | replace ":" "-" -}}
{{- $plain = regexReplaceAll "[^a-z0-9-]" $plain "" | trunc 30 | trimAll "-" -}}
{{- if eq $plain . -}}
{{- $plain -}}
{{- else -}}
{{- printf "%s-%s" $plain (sha256sum . | trunc 6) | trimPrefix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of a Deployment, no longer than a label may be. Takes (dict "root" $ "suffix" "worker"). */}}
{{- define "countersign.partName" -}}
{{- $name := printf "%s-%s" (include "countersign.fullname" .root) .suffix -}}
{{- if le (len $name) 63 -}}
{{- $name -}}
{{- else -}}
{{- $room := sub 55 (len .suffix) | int -}}
{{- $short := include "countersign.fullname" .root | trunc $room | trimSuffix "-" -}}
{{- printf "%s-%s-%s" $short (sha256sum $name | trunc 6) .suffix -}}
{{- end -}}
{{- end -}}

{{/* Whether any reference of the settings is an engine in the process, as text: true or empty. */}}
{{- define "countersign.anyEngine" -}}
{{- range .Values.settings.models -}}
{{- range list (get . "reference") (get . "second_reference") -}}
{{- if and . (eq .kind "vllm_engine") -}}true{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Every reference of the settings, as JSON: {"items": [{model, engine, suffix, label, only, part}]}. Stops the
     release when reference.perModel names a model that has none, or a second one that is not there. */}}
{{- define "countersign.references" -}}
{{- $items := list -}}
{{- $models := .Values.settings.models | default dict -}}
{{- $shared := omit .Values.reference "perModel" -}}
{{- range $model, $own := .Values.reference.perModel -}}
{{- $settings := get $models $model | default dict -}}
{{- if not (get $settings "reference") -}}
{{- fail (printf "reference.perModel.%s: settings.models has no reference of that name" $model) -}}
{{- else if and (get $own "second") (not (get $settings "second_reference")) -}}
{{- fail (printf "reference.perModel.%s.second: the model has no second_reference" $model) -}}
{{- end -}}
{{- end -}}
{{- range $model, $settings := $models -}}
{{- $own := get $.Values.reference.perModel $model | default dict -}}
{{- $part := mergeOverwrite (deepCopy $shared) (deepCopy (omit $own "second")) -}}
{{- $label := include "countersign.slug" $model -}}
{{- $only := list "--only" "replay" "--model" $model -}}
{{- $second := get $settings "second_reference" -}}
{{- with get $settings "reference" -}}
{{- $first := ternary (concat $only (list "--reference" "first")) $only (not (empty $second)) -}}
{{- $item := dict "model" $model "engine" (eq .kind "vllm_engine") "only" $first "part" $part -}}
{{- $items = append $items (merge $item (dict "label" $label "suffix" (printf "reference-%s" $label))) -}}
{{- end -}}
{{- with $second -}}
{{- $part = mergeOverwrite (deepCopy $part) (deepCopy (get $own "second" | default dict)) -}}
{{- $only = concat $only (list "--reference" "second") -}}
{{- $item := dict "model" $model "engine" (eq .kind "vllm_engine") "only" $only "part" $part -}}
{{- $named := dict "label" (printf "%s.2" $label) "suffix" (printf "second-reference-%s" $label) -}}
{{- $items = append $items (merge $item $named) -}}
{{- end -}}
{{- end -}}
{{- dict "items" $items | toJson -}}
{{- end -}}

{{/* Seconds in which a worker finishes what it has at hand when it is told to stop, and a minute more: a job ends by its
     time-out, a replay by three of them while others get on. Takes the same dict as countersign.drainer. */}}
{{- define "countersign.finishing" -}}
{{- $replays := or (eq .component "reference") .root.Values.allInOne -}}
{{- add 60 (mul (ternary 3 1 $replays) (int (dig "verification" "job_timeout" 300 .root.Values.settings))) -}}
{{- end -}}

{{/* A Deployment that takes work from queues. Takes a dict of
       root        the chart's context
       component   worker, reference or webhooks
       suffix      what its name ends in
       labels      labels that tell it from others of the component, a dict
       part        its values
       engine      whether vLLM runs in it
       only        arguments after `countersign worker`, which the probe takes too
       more        further arguments of the worker alone */}}
{{- define "countersign.drainer" -}}
{{- $labels := dict "root" .root "component" .component -}}
{{- $part := .part -}}
{{- $image := ternary .root.Values.image.verifier .root.Values.image.proxy .engine -}}
{{- $resources := deepCopy $part.resources -}}
{{- $gpus := 0 -}}
{{- if .engine -}}
{{- $gpus = int $part.gpu.count -}}
{{- end -}}
{{- if $gpus -}}
{{- $_ := set $resources "limits" (merge (dict $part.gpu.resource $gpus) (default dict $resources.limits)) -}}
{{- end -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "countersign.partName" (dict "root" .root "suffix" .suffix) | quote }}
  labels:
    {{- include "countersign.labels" (merge (dict "own" (list .labels)) $labels) | nindent 4 }}
spec:
  {{- if not (dig "autoscaling" "enabled" false $part) }}
  replicas: {{ $part.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "countersign.selector" $labels | nindent 6 }}
      {{- with .labels }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  strategy:
    rollingUpdate:
      {{- /* A new pod beside the old ones would wait for a GPU that they hold. */}}
      maxSurge: {{ ternary 0 1 (gt $gpus 0) }}
      maxUnavailable: {{ ternary 1 0 (gt $gpus 0) }}
  template:
    metadata:
      labels:
        {{- include "countersign.labels" (merge (dict "own" (list .labels $part.podLabels)) $labels) | nindent 8 }}
      {{- with include "countersign.podAnnotations" (dict "root" .root "part" $part) }}
      {{- . | nindent 6 }}
      {{- end }}
    spec:
      {{- include "countersign.pod" .root | nindent 6 }}
      terminationGracePeriodSeconds: {{ include "countersign.finishing" . }}
      {{- if .engine }}
      {{- with $part.runtimeClassName }}
      runtimeClassName: {{ . | quote }}
      {{- end }}
      {{- end }}
      {{- with include "countersign.spread" (merge (dict "labels" .labels) $labels) }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- with include "countersign.placement" $part }}
      {{- . | nindent 6 }}
      {{- end }}
      containers:
        - name: {{ .component | quote }}
          image: {{ include "countersign.image" (dict "root" .root "image" $image) | quote }}
          imagePullPolicy: {{ $image.pullPolicy | quote }}
          command: {{ concat (list "countersign" "worker") .only (default list .more) | toJson }}
          {{- include "countersign.env" (dict "root" .root "part" $part) | nindent 10 }}
          {{- if .root.Values.monitoring.podMonitor.enabled }}
          ports:
            - name: metrics
              containerPort: {{ .root.Values.monitoring.podMonitor.port }}
          {{- end }}
          startupProbe:
            exec:
              command: {{ concat (list "python3" "-m" "verifier_pool.ready") .only | toJson }}
            periodSeconds: 5
            timeoutSeconds: 10
            failureThreshold: {{ div (add (int $part.startupSeconds) 4) 5 }}
          {{- /* Dead is a process that Redis has not heard of for as long as it may take to start, while Redis
                answers: an outage of the store must not cost a loaded engine. */}}
          livenessProbe:
            exec:
              command: {{ concat (list "python3" "-m" "verifier_pool.ready" "--alive") .only | toJson }}
            periodSeconds: 60
            timeoutSeconds: 20
            failureThreshold: {{ max 3 (div (add (int $part.startupSeconds) 59) 60) }}
          resources:
            {{- toYaml $resources | nindent 12 }}
          {{- include "countersign.container" .root | nindent 10 }}
          volumeMounts:
            {{- include "countersign.mounts" .root | nindent 12 }}
            {{- if .engine }}
            - name: shm
              mountPath: /dev/shm
            {{- if $part.cacheClaim }}
            - name: cache
              mountPath: /home/countersign/.cache
            {{- end }}
            {{- end }}
      volumes:
        {{- include "countersign.volumes" .root | nindent 8 }}
        - name: scratch
          emptyDir:
            sizeLimit: {{ ternary (get $part "scratch") "256Mi" .engine | quote }}
        {{- if .engine }}
        - name: shm
          emptyDir:
            medium: Memory
            sizeLimit: {{ $part.sharedMemory | quote }}
        {{- with $part.cacheClaim }}
        - name: cache
          persistentVolumeClaim:
            claimName: {{ . | quote }}
        {{- end }}
        {{- end }}
{{- end -}}
