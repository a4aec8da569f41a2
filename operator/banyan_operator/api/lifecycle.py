"""How a server's pods come, stay and go: probes, drain, rollout, disruption budget."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from banyan_operator.api.base import CountOrPercent, Format, Model
from banyan_operator.api.rules import Rule

_ZERO: Final = ["0%", "00%", "000%"]

StartupTimeout = Annotated[int, Format("int32"), Field(ge=30, le=86400)]


class Probes(Model):
    startup_timeout_seconds: StartupTimeout = Field(default=1800, description="Longest time from container start to ready.")
    readiness_period_seconds: Annotated[int, Format("int32"), Field(ge=1, le=300)] = Field(
        default=5, description="Time between two looks at whether requests can come (/readyz)."
    )
    liveness_period_seconds: Annotated[int, Format("int32"), Field(ge=1, le=300)] = Field(
        default=10, description="Time between two looks at whether the server gets on (/livez)."
    )
    liveness_failure_threshold: Annotated[int, Format("int32"), Field(ge=1, le=100)] = Field(
        default=6, description="Looks in a row that must fail before the container is started again."
    )


class StartupProbe(Model):
    """The probe of a server beside a batch worker: it has no endpoints to be kept out of."""

    startup_timeout_seconds: StartupTimeout = Field(default=1800, description="Longest time from container start to ready.")


class Drain(Model):
    RULES: ClassVar = (
        Rule(
            "self.preStopSeconds < self.terminationGracePeriodSeconds",
            "preStopSeconds must be smaller than terminationGracePeriodSeconds",
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
            f"self.strategy == 'Recreate' || !((type(self.maxSurge) == int ? self.maxSurge == 0 : self.maxSurge in {_ZERO}) && "
            f"(type(self.maxUnavailable) == int ? self.maxUnavailable == 0 : self.maxUnavailable in {_ZERO}))",
            "maxSurge and maxUnavailable must not both be 0",
        ),
    )

    strategy: Literal["RollingUpdate", "Recreate"] = Field(
        default="RollingUpdate",
        description="RollingUpdate: pods are replaced a few at a time. Recreate: all go before new ones come.",
    )
    max_surge: CountOrPercent = Field(default=1, description="Extra pods during a rollout; needs free accelerators.")
    max_unavailable: CountOrPercent = Field(default=0, description="Pods that may be missing during a rollout.")
    progress_deadline_seconds: Annotated[int, Format("int32"), Field(ge=60, le=172800)] = Field(
        default=3600, description="Time without progress after which the condition Progressing says DeadlineExceeded."
    )
    revision_history_limit: Annotated[int, Format("int32"), Field(ge=0, le=50)] = Field(
        default=3, description="Earlier pod templates that are kept. An earlier spec gets its own again, with the image that it had then."
    )
    refresh: Annotated[str, Field(max_length=63)] | None = Field(
        default=None,
        description="Any text, such as a date. Pods keep the template that was made for their spec, also when the operator is upgraded. "
        "A text that was not here before makes it anew from the operator's present defaults (image, pull policy, pull secrets) and rolls "
        "it out; the text from before, or none again, goes back.",
    )


class Disruption(Model):
    RULES: ClassVar = (
        Rule(
            "!(has(self.maxUnavailable) && has(self.minAvailable))",
            "maxUnavailable and minAvailable are mutually exclusive",
        ),
    )

    max_unavailable: CountOrPercent | None = Field(default=None, description="Pods that an eviction may take at a time. Default: 1.")
    min_available: CountOrPercent | None = Field(default=None, description="Pods that evictions must leave, in place of maxUnavailable.")
    enabled: bool = Field(default=True, description="Make a PodDisruptionBudget where there are two replicas or more.")
