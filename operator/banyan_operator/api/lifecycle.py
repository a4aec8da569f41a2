"""How a server's pods come, stay and go: probes, drain, rollout, disruption budget, autoscaling."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from banyan_operator.api.base import CountOrPercent, Format, ListType, Model, is_zero
from banyan_operator.api.parts import URL
from banyan_operator.api.rules import Rule

StartupTimeout = Annotated[int, Format("int32"), Field(ge=30, le=86400)]


class Probes(Model):
    startup_timeout_seconds: StartupTimeout = Field(default=1800, description="Longest time from container start to ready.")
    readiness_period_seconds: Annotated[int, Format("int32"), Field(ge=1, le=300)] = 5
    liveness_period_seconds: Annotated[int, Format("int32"), Field(ge=1, le=300)] = 10
    liveness_failure_threshold: Annotated[int, Format("int32"), Field(ge=1, le=100)] = 6


class StartupProbe(Model):
    """The probe of a server beside a batch worker: it has no endpoints to be kept out of."""

    startup_timeout_seconds: StartupTimeout = 1800


class Drain(Model):
    RULES: ClassVar = (
        Rule(
            "self.preStopSeconds < self.terminationGracePeriodSeconds",
            "preStopSeconds must be smaller than terminationGracePeriodSeconds",
            lambda d: d.pre_stop_seconds < d.termination_grace_period_seconds,
        ),
    )

    termination_grace_period_seconds: Annotated[int, Format("int32"), Field(ge=5, le=7200)] = Field(
        default=300, description="Total time for running requests to finish."
    )
    pre_stop_seconds: Annotated[int, Format("int32"), Field(ge=0, le=120)] = Field(
        default=5, description="Pause before SIGTERM so that endpoints drain."
    )


class Rollout(Model):
    RULES: ClassVar = (
        Rule(
            "self.strategy == 'Recreate' || !((type(self.maxSurge) == int ? self.maxSurge == 0 : self.maxSurge in ['0', '0%']) && "
            "(type(self.maxUnavailable) == int ? self.maxUnavailable == 0 : self.maxUnavailable in ['0', '0%']))",
            "maxSurge and maxUnavailable must not both be 0",
            lambda r: r.strategy == "Recreate" or not (is_zero(r.max_surge) and is_zero(r.max_unavailable)),
        ),
    )

    strategy: Literal["RollingUpdate", "Recreate"] = "RollingUpdate"
    max_surge: CountOrPercent = Field(default=1, description="Extra pods during a rollout; needs free accelerators.")
    max_unavailable: CountOrPercent = 0
    progress_deadline_seconds: Annotated[int, Format("int32"), Field(ge=60, le=172800)] = 3600
    revision_history_limit: Annotated[int, Format("int32"), Field(ge=0, le=50)] = 3


class Disruption(Model):
    RULES: ClassVar = (
        Rule(
            "!(has(self.maxUnavailable) && has(self.minAvailable))",
            "maxUnavailable and minAvailable are mutually exclusive",
            lambda d: d.max_unavailable is None or d.min_available is None,
        ),
    )

    max_unavailable: CountOrPercent | None = None
    min_available: CountOrPercent | None = None
    enabled: bool = True


class ScaleSignal(Model):
    type: Literal["QueuedRequests", "RunningRequests", "KVCacheUsagePercent", "TokensPerSecond"]
    target: Annotated[int, Format("int32"), Field(ge=1, le=100000000)] = Field(description="Average per replica.")


class Keda(Model):
    prometheus_address: Annotated[str, Field(pattern=URL, min_length=1, max_length=512)]
    polling_interval_seconds: Annotated[int, Format("int32"), Field(ge=1, le=600)] = 15
    cooldown_seconds: Annotated[int, Format("int32"), Field(ge=0, le=86400)] = Field(
        default=300, description="Idle time before going to 0."
    )


Stabilization = Annotated[int, Format("int32"), Field(ge=0, le=3600)]


class Autoscaling(Model):
    RULES: ClassVar = (
        Rule("self.minReplicas <= self.maxReplicas", "minReplicas must not exceed maxReplicas", lambda a: a.min_replicas <= a.max_replicas),
        Rule(
            "self.minReplicas > 0 || self.engine == 'KEDA'",
            "minReplicas 0 needs engine KEDA",
            lambda a: a.min_replicas > 0 or a.engine == "KEDA",
        ),
        Rule(
            "self.engine != 'KEDA' || has(self.keda)",
            "engine KEDA needs autoscaling.keda.prometheusAddress",
            lambda a: a.engine != "KEDA" or a.keda is not None,
        ),
    )

    engine: Literal["HPA", "KEDA"] = Field(default="HPA", description="HPA needs a custom metrics adapter; KEDA needs its CRDs.")
    min_replicas: Annotated[int, Format("int32"), Field(ge=0, le=1000)] = Field(default=1, description="0 needs engine KEDA.")
    max_replicas: Annotated[int, Format("int32"), Field(ge=1, le=1000)]
    metrics: Annotated[tuple[ScaleSignal, ...], Field(max_length=4), ListType("map", ("type",))] = Field(
        default=(ScaleSignal(type="QueuedRequests", target=8),), description="Scale signals; the largest result wins."
    )
    scale_up_stabilization_seconds: Stabilization = 0
    scale_down_stabilization_seconds: Stabilization = 300
    keda: Keda | None = Field(default=None, description="KEDA settings.")
