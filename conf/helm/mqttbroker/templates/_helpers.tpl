{{- define "mqttbroker.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "mqttbroker.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "mqttbroker.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "mqttbroker.selector" -}}
app.kubernetes.io/name: {{ include "mqttbroker.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "mqttbroker.labels" -}}
{{ include "mqttbroker.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "mqttbroker.image" -}}
{{- $repository := required "image.repository is required: where the image of the Dockerfile was pushed to" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ printf "%s@%s" $repository .Values.image.digest }}
{{- else -}}
{{ printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end -}}
{{- end -}}

{{- define "mqttbroker.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "mqttbroker.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "mqttbroker.tokenSecret" -}}
{{ default (printf "%s-http" (include "mqttbroker.fullname" .)) .Values.http.tokenSecret }}
{{- end -}}

{{- define "mqttbroker.filesSecret" -}}
{{ default (printf "%s-files" (include "mqttbroker.fullname" .)) .Values.files.secret }}
{{- end -}}

{{/* Keys of tables must follow the other keys of a TOML file, so the listeners stand behind `config`. */}}
{{- define "mqttbroker.toml" -}}
{{ .Values.config | trim }}
{{- range .Values.listeners }}

[[listeners]]
host = ""
type = {{ .type | quote }}
port = {{ .port | int }}
{{- if has .type (list "tls" "wss") }}
{{- if not $.Values.tls.secret }}{{ fail (printf "listener %s: type %s needs tls.secret" .name .type) }}{{ end }}
certfile = "/etc/mqttbroker/tls/tls.crt"
keyfile = "/etc/mqttbroker/tls/tls.key"
{{- end }}
{{- with .settings }}
{{ . | trim }}
{{- end }}
{{- end }}
{{ end -}}
