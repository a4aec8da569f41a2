{{- /* The label app.kubernetes.io/name. Part of the Deployment's selector, which can never change: it does not follow the chart's name. */ -}}
{{- define "banyan.name" -}}
{{- default "banyan-operator" .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "banyan.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- printf "%s-operator" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s-operator" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "banyan.selector" -}}
app.kubernetes.io/name: {{ include "banyan.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* What is no pod of the operator, and must not be selected as one, says so: {component: ..., root: $} */ -}}
{{- define "banyan.labelsOf" -}}
app.kubernetes.io/name: {{ if eq .component "operator" }}{{ include "banyan.name" .root }}{{ else }}{{ printf "%s-%s" (include "banyan.name" .root) .component | trunc 63 }}{{ end }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: banyan
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "banyan.labels" -}}
{{ include "banyan.labelsOf" (dict "component" "operator" "root" .) }}
{{- end -}}

{{- /* The names of Secrets, as the operator's environment wants them. */ -}}
{{- define "banyan.names" -}}
{{- $names := list -}}
{{- range . -}}{{- $names = append $names .name -}}{{- end -}}
{{- join "," $names -}}
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

{{- /* The rules that the operator needs where it looks after resources. A test holds them equal to the table of kinds in the code. */ -}}
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
- apiGroups: [""]
  resources: [services, serviceaccounts, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [ingresses, networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Of the Prometheus operator; the right does no harm where its API is not there.
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, servicemonitors]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
# To give up those on nodes that do not answer.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
{{- if .Values.operator.checkSecrets }}
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end }}
{{- end -}}

{{- /* Whose a definition is: "own" or "others". One that an earlier release left, or that somebody applied, stays as it is: Helm would refuse
to install what another release owns. */ -}}
{{- define "banyan.definition" -}}
{{- if .root.Values.crds.enabled -}}
{{- $live := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" .name -}}
{{- $said := default dict (dig "metadata" "annotations" dict $live) -}}
{{- $mine := and (eq (get $said "meta.helm.sh/release-name") .root.Release.Name) (eq (get $said "meta.helm.sh/release-namespace") .root.Release.Namespace) -}}
{{- if or (not $live) $mine }}own{{ else }}others{{ end -}}
{{- else -}}others{{- end -}}
{{- end -}}

{{- /* Whose a pod is: the labels by which dashboards and rules tell servers and batches apart. */ -}}
{{- define "banyan.relabelings" -}}
- {action: replace, sourceLabels: [__meta_kubernetes_pod_label_serving_banyan_dev_server], targetLabel: inferenceserver}
- {action: replace, sourceLabels: [__meta_kubernetes_pod_label_serving_banyan_dev_batchjob], targetLabel: batchjob}
{{- end -}}
