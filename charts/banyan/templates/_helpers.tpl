{{- define "banyan.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "banyan.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "banyan.name" .) .Release.Name -}}
{{- printf "%s-operator" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s-operator" .Release.Name (include "banyan.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "banyan.selector" -}}
app.kubernetes.io/name: banyan-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "banyan.labels" -}}
{{ include "banyan.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: banyan
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "banyan.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "banyan.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* An image reference: {image: {...}, root: $} */ -}}
{{- define "banyan.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* The rules that the operator needs where it looks after resources. A test compares them with what the operator watches. */ -}}
{{- define "banyan.rules" -}}
- apiGroups: [serving.banyan.dev]
  resources: [inferenceservers]
  verbs: [get, list, watch]
- apiGroups: [serving.banyan.dev]
  resources: [batchjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [serving.banyan.dev]
  resources: [inferenceservers/status, batchjobs/status]
  verbs: [patch]
- apiGroups: [serving.banyan.dev]
  resources: [inferenceservers/finalizers, batchjobs/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [get, list, watch]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [services, serviceaccounts, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get]
- apiGroups: [networking.k8s.io]
  resources: [ingresses]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
{{- if .Values.operator.checkSecrets }}
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end }}
{{- end -}}
