{{- define "magnetar.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Labels that never change, of a role: (dict "root" $ "role" "bookie") */}}
{{- define "magnetar.selector" -}}
app.kubernetes.io/name: magnetar
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "magnetar.labels" -}}
{{ include "magnetar.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{/* The environment of a section of settings: (dict "prefix" "MAGNETAR_BOOKIE" "settings" {…}) */}}
{{- define "magnetar.settings" -}}
{{- $prefix := .prefix }}
{{- range $name, $value := .settings }}
{{- if kindIs "map" $value }}
{{ include "magnetar.settings" (dict "prefix" (printf "%s__%s" $prefix (upper $name)) "settings" $value) }}
{{- else }}
- name: {{ printf "%s__%s" $prefix (upper $name) }}
  value: {{ if kindIs "slice" $value }}{{ join "," $value | quote }}{{ else if kindIs "float64" $value }}{{ if eq (floor $value) $value }}{{ printf "%.0f" $value | quote }}{{ else }}{{ $value | quote }}{{ end }}{{ else }}{{ $value | quote }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The environment of every server: (dict "root" $ "section" "bookie" or "") */}}
{{- define "magnetar.environment" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: MAGNETAR_HEALTH
  value: "0.0.0.0:7670"
{{- if .root.Values.security.enabled }}
- name: MAGNETAR_SECURITY
  value: /security/security.toml
{{- end }}
{{- if .root.Values.metrics.enabled }}
- name: MAGNETAR_METRICS
  value: "0.0.0.0:9464"
{{- end }}
{{- if or .root.Values.metrics.enabled (not .root.Values.security.enabled) }}
- name: MAGNETAR_INSECURE
  value: "1"
{{- end }}
{{- with include "magnetar.settings" (dict "prefix" "MAGNETAR_PROCESS" "settings" .root.Values.settings.process) }}
{{ trim . }}
{{- end }}
{{- if .section }}
{{- with include "magnetar.settings" (dict "prefix" (printf "MAGNETAR_%s" (upper .section)) "settings" (index .root.Values.settings .section)) }}
{{ trim . }}
{{- end }}
{{- end }}
{{- end }}

{{/* What pods of all roles have. */}}
{{- define "magnetar.pod" -}}
serviceAccountName: {{ include "magnetar.name" .root }}
automountServiceAccountToken: false
enableServiceLinks: false # its variables would be settings that do not exist
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "magnetar.selector" . | fromYaml | toJson }}
{{- if .root.Values.security.enabled }}
initContainers:
  # A server takes a secret that its own user alone may read, and a mounted one is root's: it is copied to memory.
  - name: security
    image: {{ include "magnetar.image" .root }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [sh, -c, "umask 077 && cp -RLf /mounted/* /security/"]
    securityContext: {{ include "magnetar.container" . | fromYaml | toJson }}
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    volumeMounts:
      - {name: mounted, mountPath: /mounted, readOnly: true}
      - {name: security, mountPath: /security}
{{- end }}
{{- end }}

{{- define "magnetar.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "magnetar.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Probes: (dict "period" seconds between two looks at a start "failures" so many looks at most) */}}
{{- define "magnetar.probes" -}}
startupProbe: # it has started, ready or not: a bookie that restores lost data for hours is not restarted
  httpGet: {path: /startz, port: health}
  periodSeconds: {{ .period }}
  timeoutSeconds: 3
  failureThreshold: {{ .failures }}
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 2
  timeoutSeconds: 3
livenessProbe:
  httpGet: {path: /livez, port: health}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 6
{{- end }}

{{- define "magnetar.ports" -}}
- {name: health, containerPort: 7670}
{{- if .Values.metrics.enabled }}
- {name: metrics, containerPort: 9464}
{{- end }}
{{- end }}

{{/* Volumes: (dict "root" $ "role" "bookie" "member" the secret) */}}
{{- define "magnetar.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if .root.Values.security.enabled }}
- name: security
  emptyDir: {medium: Memory, sizeLimit: 4Mi}
- name: mounted
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ .root.Values.security.secret }}
          {{- if ne .role "broker" }}
          items:
            - {key: security.toml, path: security.toml}
            - {key: ca.pem, path: ca.pem}
          {{- end }}
      - secret:
          name: {{ .member }}
          items:
            - {key: {{ .role }}.pem, path: members/{{ .role }}.pem}
            - {key: {{ .role }}-key.pem, path: members/{{ .role }}-key.pem}
{{- end }}
{{- end }}

{{- define "magnetar.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.security.enabled }}
- {name: security, mountPath: /security, readOnly: true}
{{- end }}
{{- end }}
