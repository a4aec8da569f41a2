"""The status of both resources: what observing writes and `kubectl get` shows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from banyan_operator.api.base import Count32, Count64, Format, Int32, ListType, Model, Time

Truth = Literal["True", "False", "Unknown"]


class Condition(Model):
    type: Annotated[str, Field(min_length=1, max_length=316)]
    status: Truth
    observed_generation: Count64 | None = None
    last_transition_time: Time
    reason: Annotated[str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", min_length=1, max_length=1024)]
    message: Annotated[str, Field(max_length=32768)]


Conditions = Annotated[tuple[Condition, ...], Field(max_length=16), ListType("map", ("type",))]
Uri = Annotated[str, Field(max_length=1100)]


class LastFailure(Model):
    time: Time | None = None
    pod: Annotated[str, Field(max_length=253)] | None = None
    container: Annotated[str, Field(max_length=253)] | None = None
    reason: Annotated[str, Field(max_length=128)] | None = None
    message: Annotated[str, Field(max_length=4096)] | None = None
    exit_code: Int32 | None = None
    count: Int32 | None = None


Url = Annotated[str, Field(max_length=1024)]  # a host and a path as long as the spec has them, and more


class Address(Model):
    type: Literal["Internal", "LoadBalancer", "Ingress"]
    url: Url


class ServedModel(Model):
    uri: Annotated[str, Field(max_length=1024)] | None = None
    revision: Annotated[str, Field(max_length=256)] | None = Field(default=None, description="Resolved revision or digest.")
    context_length: Count32 | None = None


ServerPhase = Literal["Pending", "Loading", "Ready", "Degraded", "Updating", "Stopped", "Failed", "Paused", "Terminating"]
Revision = Annotated[str, Field(max_length=16)]


class InferenceServerStatus(Model):
    observed_generation: Count64 | None = None
    phase: ServerPhase | None = Field(
        default=None, description="One word for printing, made from the conditions and counts: machines read those."
    )
    conditions: Conditions = Field(
        default=(),
        description="Accepted: the spec can be carried out. Available: at least one replica takes requests. Ready: the spec is accepted, "
        "and all wanted replicas (of none it is False) take requests, during a rollout those of earlier revisions too (fewer by "
        "maxUnavailable). Progressing: the pods are not yet as the spec wants them; False with reason UpToDate once they are, "
        "DeadlineExceeded when it takes too long. Degraded: something fails while others serve. Where they have something to say "
        "also RouteReady (the Ingress), Monitored (the monitors, whose API a cluster may lack) and Contested (somebody else keeps "
        "changing an object).",
    )
    replicas: Count32 | None = Field(default=None, description="Pods of its own Deployment, of all revisions.")
    ready_replicas: Count32 | None = Field(default=None, description="Pods that take requests, of all revisions.")
    updated_replicas: Count32 | None = Field(default=None, description="Pods of the revision that is wanted.")
    desired_replicas: Count32 | None = Field(default=None, description="Pods that are wanted.")
    ready: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description="readyReplicas/desiredReplicas for printing; during a rollout that surges it may be 4/3."
    )
    selector: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None, description="Label selector of the pods, for the scale subresource."
    )
    url: Url | None = Field(default=None, description="First external URL, else the in-cluster one.")
    addresses: Annotated[tuple[Address, ...], Field(max_length=16), ListType("atomic")] = Field(
        default=(), description="Where requests can be sent: in the cluster first."
    )
    served_names: Annotated[tuple[Annotated[str, Field(max_length=128)], ...], Field(max_length=8), ListType("atomic")] = Field(
        default=(), description="Names that the model field of requests may have."
    )
    accelerator: Annotated[str, Field(max_length=160)] | None = Field(
        default=None, description="For printing, for example 2 x nvidia.com/gpu."
    )
    model: ServedModel | None = Field(default=None, description="What is served.")
    current_revision: Revision | None = Field(default=None, description="Spec hash that all ready pods run.")
    update_revision: Revision | None = Field(default=None, description="Spec hash being rolled out.")
    restarts: Count32 | None = Field(default=None, description="Container restarts of the current pods.")
    last_failure: LastFailure | None = Field(default=None, description="Most recent failure.")
    runtime_version: Annotated[str, Field(max_length=64)] | None = Field(default=None, description="As the server itself says.")


BatchPhase = Literal[
    "Pending",
    "Planning",
    "Running",
    "Merging",
    "Succeeded",
    "Failed",
    "Cancelling",
    "Cancelled",
    "Expired",
    "Suspended",
    "Terminating",
]


class RequestCounts(Model):
    total: Count64 | None = None
    completed: Count64 | None = None
    failed: Count64 | None = None


class Shards(Model):
    total: Count32 | None = None
    completed: Count32 | None = None
    running: Count32 | None = None


class Workers(Model):
    desired: Count32 | None = None
    active: Count32 | None = None
    ready: Count32 | None = None
    failed: Count32 | None = None


class Usage(Model):
    prompt_tokens: Count64 | None = None
    cached_tokens: Count64 | None = None
    completion_tokens: Count64 | None = None
    total_tokens: Count64 | None = None


MADE = 4
"""How often one Job of a BatchJob is made: once, and again where somebody deleted it."""
JobUids = Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=MADE), ListType("atomic")]


class MadeJobs(Model):
    """The uids of the Jobs that were seen, by what they do."""

    plan: JobUids = ()
    work: JobUids = ()
    merge: JobUids = ()


class BatchJobStatus(Model):
    observed_generation: Count64 | None = None
    phase: BatchPhase | None = Field(
        default=None, description="One word for printing, made from the conditions and counts: machines read those."
    )
    conditions: Conditions = Field(
        default=(),
        description="Accepted: the spec can be carried out. Planned: the input was read and cut into shards. Fenced: the storage has "
        "conditional writes, so that a worker that was given up for lost can spoil nothing. Running: a worker runs; Unknown with reason "
        "NodeLost while its node does not answer. Complete: all of the work is done and published; else its reason is what holds the work "
        "up, or how it ended. Cancelled, Expired: the work has ended early, and what was done by then is published. Failed: the work has "
        "failed, with the worker's own reason. Suspended: spec.suspend is true and nothing runs any more. Where they have something to "
        "say also ProgressKnown (the workers answer), Stalled (nothing was done for half an hour), Monitored and Contested.",
    )
    request_counts: RequestCounts | None = Field(
        default=None,
        description="Same meaning as in the OpenAI batch object. Of a finished job as its merge reported them; where that report was "
        "never seen, the condition says so, and counts are as last known, or left out where they lack some of what is published.",
    )
    shards: Shards | None = Field(default=None, description="Parts of the input that workers claim, one at a time.")
    shards_text: Annotated[str, Field(max_length=24)] | None = Field(
        default=None, description="COMPLETED/TOTAL for printing: machines read shards."
    )
    progress_percent: Annotated[int, Format("int32"), Field(ge=0, le=100)] | None = None
    progress: Annotated[str, Field(max_length=32)] | None = Field(
        default=None, description="A bar for printing: machines read progressPercent."
    )
    requests: Annotated[str, Field(max_length=48)] | None = Field(
        default=None, description="DONE/TOTAL for printing: machines read requestCounts."
    )
    workers: Workers | None = Field(default=None, description="Worker pods of the phase that works on the lines.")
    tokens_per_second: Count64 | None = Field(default=None, description="Output tokens per second over the last minute, of all workers.")
    requests_per_hour: Count64 | None = Field(
        default=None, description="Finished requests per hour, a mean in which what is five minutes old weighs half: eta follows from it."
    )
    eta: Time | None = Field(default=None, description="Expected end.")
    eta_text: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description="Time left for printing, for example 12m: machines read eta."
    )
    usage: Usage | None = Field(default=None, description="Tokens of all lines so far.")
    output_uri: Uri | None = Field(default=None, description="Where the answers are, once the work is published.")
    errors_uri: Uri | None = Field(default=None, description="Where the lines that failed are, once the work is published.")
    manifest_uri: Uri | None = Field(default=None, description="What the run was and what came of it; written last.")
    run_id: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="Names the run in storage: the same for every attempt of this BatchJob."
    )
    jobs: MadeJobs | None = Field(
        default=None, description="The Jobs that were made; one that somebody deletes is made again, three times."
    )
    plan_time: Time | None = Field(default=None, description="When the plan was made.")
    start_time: Time | None = None
    completion_time: Time | None = None
    last_progress_time: Time | None = None
    last_failure: LastFailure | None = Field(default=None, description="Most recent failure.")
