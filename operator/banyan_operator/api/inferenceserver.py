"""InferenceServer: a model served over the OpenAI HTTP API."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from banyan_operator.api.base import Format, Model, ObjectName, Quantity
from banyan_operator.api.lifecycle import Disruption, Drain, Probes, Rollout
from banyan_operator.api.parts import Accelerator, Cache, ModelSource, PodTemplate, Resources, Runtime, Scheduling, Security
from banyan_operator.api.rules import Rule
from banyan_operator.api.traffic import Auth, Ingress, Monitoring, NetworkPolicy, Service


class InferenceServerSpec(Model):
    RULES: ClassVar = (
        Rule(
            "!has(self.runtime) || !has(self.runtime.tensorParallelSize) || self.accelerator.count == 0 || "
            "self.runtime.tensorParallelSize <= self.accelerator.count",
            "runtime.tensorParallelSize must not exceed accelerator.count",
        ),
        Rule(
            "!has(self.cache.claimName) || !self.model.uri.startsWith('pvc://') || "
            "!self.model.uri.startsWith('pvc://' + self.cache.claimName + '/')",
            "cache.claimName must not be the model claim",
        ),
        Rule(
            "self.cache.accessMode == 'ReadWriteMany' || self.cache.type != 'PersistentVolumeClaim' || self.replicas <= 1",
            "more than one replica needs cache.accessMode ReadWriteMany",
        ),
    )

    model: ModelSource = Field(description="The model.")
    runtime: Runtime = Field(default=Runtime(), description="Image and engine settings.")
    replicas: Annotated[int, Format("int32"), Field(ge=0, le=1000)] = Field(
        default=1,
        description="Wanted replicas. kubectl scale, a HorizontalPodAutoscaler or KEDA may target this resource and write it through the "
        "scale subresource: leave it out of manifests then.",
    )
    accelerator: Accelerator = Field(default=Accelerator(), description="Accelerators of one replica.")
    resources: Resources = Field(
        default=Resources(), description="CPU, memory, ephemeral storage of the runtime container. Accelerators belong in accelerator."
    )
    scheduling: Scheduling = Field(default=Scheduling(), description="Where pods may run.")
    shared_memory: Quantity | None = Field(default=None, description="Size of /dev/shm. Default: 64Mi on CPU, else 1Gi.")
    cache: Cache = Field(default=Cache(), description="Volume for downloaded weights and compiled kernels.")
    auth: Auth = Field(default=Auth(), description="Access to the HTTP API.")
    service: Service = Field(default=Service(), description="Service in front of the replicas.")
    ingress: Ingress | None = Field(default=None, description="Ingress (networking.k8s.io/v1).")
    probes: Probes = Field(default=Probes(), description="Probe timing.")
    drain: Drain = Field(default=Drain(), description="Graceful shutdown.")
    rollout: Rollout = Field(default=Rollout(), description="How changes reach pods.")
    disruption: Disruption = Field(default=Disruption(), description="PodDisruptionBudget, while more than one replica is wanted.")
    metrics: Monitoring = Field(default=Monitoring(), description="Objects of the Prometheus operator.")
    network_policy: NetworkPolicy = Field(default=NetworkPolicy(), description="NetworkPolicy of the pods.")
    service_account_name: ObjectName | None = Field(
        default=None, description="ServiceAccount of the pods. Default: one created per resource, without API token."
    )
    security: Security = Field(
        default=Security(), description="Security knobs. All other fields of the restricted profile are fixed by the operator."
    )
    pod_template: PodTemplate | None = Field(
        default=None,
        description="Escape hatch, applied last. Not validated by the schema; invalid results surface in the Accepted condition.",
    )
    paused: bool = Field(default=False, description="Leave the children as they are; status is still reported.")
