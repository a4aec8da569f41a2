"""BatchJob: a file of OpenAI batch requests, run to completion."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from banyan_operator.api.base import Format, Model, ObjectName, Quantity, api_name
from banyan_operator.api.lifecycle import StartupProbe
from banyan_operator.api.parts import (
    Accelerator,
    ApiKeyRef,
    Cache,
    DataUri,
    EnvVars,
    ImageName,
    ModelSource,
    PodTemplate,
    PullSecrets,
    Resources,
    Runtime,
    S3Options,
    Scheduling,
    Security,
)
from banyan_operator.api.rules import Rule, Transition
from banyan_operator.api.traffic import BatchMonitoring, NetworkPolicy

WORKER_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi"}
"""What a worker asks for where nobody says more: a tenth of a core sends 15,000 short lines a minute, and a phase takes some 100 MiB."""


class ServerRef(Model):
    name: ObjectName = Field(description="InferenceServer in the same namespace.")


class OwnServer(Model):
    """A server beside every worker."""

    model: ModelSource = Field(description="The model.")
    runtime: Runtime = Field(default=Runtime(), description="Image and engine settings.")
    accelerator: Accelerator = Field(default=Accelerator(), description="Accelerators of one replica.")
    resources: Resources = Field(
        default=Resources(), description="CPU, memory, ephemeral storage of the runtime container. Accelerators belong in accelerator."
    )
    scheduling: Scheduling = Field(default=Scheduling(), description="Where pods may run.")
    shared_memory: Quantity | None = Field(default=None, description="Size of /dev/shm.")
    cache: Cache = Field(default=Cache(), description="Volume for downloaded weights and compiled kernels.")
    probes: StartupProbe = Field(default=StartupProbe(), description="Probe timing.")


def _no_dots(name: str) -> Rule:
    return Rule(
        f"!has(self.{name}) || (!self.{name}.contains('/../') && !self.{name}.endsWith('/..'))",
        f"{name} must not contain .. segments",
    )


class Input(Model):
    RULES: ClassVar = (
        Rule(
            "has(self.uri) != has(self.failedOf)",
            "exactly one of input.uri and input.failedOf is required",
        ),
        Rule(
            "!has(self.failedOf) || self.failedOf.endsWith('/')",
            "input.failedOf must end with /",
        ),
        _no_dots("uri"),
        _no_dots("failedOf"),
    )

    uri: DataUri | None = Field(
        default=None,
        description="JSON Lines file, or a prefix ending in / whose *.jsonl objects are read in name order. "
        "Names ending in .gz are gzip. s3://BUCKET/KEY, pvc://CLAIM/PATH, file:///PATH (local mode only).",
    )
    failed_of: DataUri | None = Field(
        default=None,
        description="In place of uri: spec.output.uri of a run that is over. Its failed lines run again, and the output of this one "
        "is the completed whole.",
    )
    on_invalid_line: Literal["Record", "Fail"] = Field(
        default="Record", description="Record: one error record per bad line. Fail: the job fails at the first."
    )

    @property
    def source(self) -> str:
        """Where lines are read, whichever field names it."""
        source = self.uri or self.failed_of
        assert source is not None  # a rule
        return source


class Output(Model):
    RULES: ClassVar = (
        Rule("self.uri.endsWith('/')", "output.uri must end with /"),
        _no_dots("uri"),
    )

    uri: DataUri = Field(
        description="Prefix ending in /; receives output.jsonl, errors.jsonl and manifest.json, all of them once everything is done. "
        "Below .banyan/ in it lies how far the work is."
    )
    overwrite: bool = Field(default=False, description="Accept a prefix that holds results of another job.")
    resume: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", min_length=1, max_length=64)] | None = Field(
        default=None,
        description="Run to go on with, of a BatchJob with this input and output that was deleted before it had published: its "
        "status.runID, which the reason OutputExists tells as well. What it has finished is kept. Default: a run of its own.",
    )
    allow_unfenced: bool = Field(
        default=False,
        description="Accept a storage without conditional writes, which cannot keep a worker that was given up for lost from writing. "
        "One worker only.",
    )


class Sharding(Model):
    target_requests: Annotated[int, Format("int32"), Field(ge=1, le=1000000)] = Field(default=1000, description="Lines per shard.")
    target_bytes: Annotated[int, Format("int64"), Field(ge=65536, le=1073741824)] = Field(default=67108864, description="Bytes per shard.")


class Retries(Model):
    max_attempts: Annotated[int, Format("int32"), Field(ge=1, le=20)] = Field(
        default=5,
        description="Attempts per request, for 408, 409, 5xx and connection errors. 429 and 503, which ask for patience, do not count.",
    )
    max_backoff_seconds: Annotated[int, Format("int32"), Field(ge=1, le=600)] = Field(
        default=60, description="Longest wait between two attempts."
    )


class BatchJobSpec(Model):
    RULES: ClassVar[tuple[Rule | Transition, ...]] = (
        Rule(
            "has(self.serverRef) != has(self.server)",
            "exactly one of serverRef and server is required",
        ),
        Rule(
            "!has(self.apiKeySecretRef) || has(self.serverRef)",
            "apiKeySecretRef needs serverRef",
        ),
        Transition("!oldSelf.cancel || self.cancel", "spec.cancel cannot be unset"),
        Rule(
            "self.output.uri.startsWith('s3://') || self.workers <= 1",
            "several workers need an s3:// output: in a folder the results of one are written in turn",
        ),
        Rule(
            "!self.output.allowUnfenced || self.workers <= 1",
            "output.allowUnfenced allows one worker",
        ),
        Rule(
            "(!has(self.input.uri) || self.input.uri != self.output.uri)"
            " && (!has(self.input.failedOf) || self.input.failedOf != self.output.uri)",
            "input and output must differ",
        ),
    )

    server_ref: ServerRef | None = Field(default=None, description="Send requests to this InferenceServer.")
    server: OwnServer | None = Field(default=None, description="Own server beside every worker (native sidecar).")
    input: Input = Field(description="Requests, one OpenAI batch line each.")
    output: Output = Field(description="Results.")
    s3: S3Options | None = Field(default=None, description="Options of s3:// URIs.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"] = Field(
        default="/v1/chat/completions",
        description="Endpoint for every line; a line with another url is an error record. "
        "A server of serverRef has /v1/embeddings with --enable-embeddings or --is-embedding in its runtime.args, a server of one's own "
        "without.",
    )
    model_name: Annotated[str, Field(max_length=128)] | None = Field(default=None, description="Overrides the model of every line.")
    api_key_secret_ref: ApiKeyRef | None = Field(default=None, description="API key for serverRef.")
    workers: Annotated[int, Format("int32"), Field(ge=1, le=1000)] = Field(
        default=1, description="Parallel workers. Can change while they work: what one gives up or loses, the others take over."
    )
    sharding: Sharding = Field(default=Sharding(), description="How input is cut among workers.")
    max_concurrency: Annotated[int, Format("int32"), Field(ge=1, le=4096)] = Field(default=64, description="In-flight requests per worker.")
    request_timeout_seconds: Annotated[int, Format("int32"), Field(ge=1, le=86400)] = Field(
        default=1800, description="Time that one attempt of a request may take."
    )
    retries: Retries = Field(default=Retries(), description="Retries of one request.")
    worker_backoff_limit: Annotated[int, Format("int32"), Field(ge=0, le=100)] = Field(
        default=6, description="Pod failures per worker index before that worker is given up."
    )
    max_error_percent: Annotated[int, Format("int32"), Field(ge=0, le=100)] = Field(
        default=100,
        description="Share of error records from which the work is ended early, and the job fails with what was done published; "
        "100 means never.",
    )
    deadline_seconds: Annotated[int, Format("int32"), Field(ge=60, le=31536000)] | None = Field(
        default=None,
        description="Wall time from the first start, suspended time included; then the job is ended as Expired, with what was done by "
        "then published.",
    )
    ttl_seconds_after_finished: Annotated[int, Format("int32"), Field(ge=0, le=31536000)] | None = Field(
        default=None, description="Delete this resource that long after it finished. Results in storage stay."
    )
    suspend: bool = Field(
        default=False, description="Stop the workers. What was done is kept, and the work goes on from there when this is false again."
    )
    cancel: bool = Field(default=False, description="Stop for good; what was done by then is published. Cannot be unset.")
    priority: Annotated[int, Format("int32"), Field(ge=-100, le=100)] = Field(
        default=-10, description="Priority at the server of requests that name none; those of online users have 0."
    )
    resources: Resources = Field(
        default=Resources(),
        description="CPU, memory, ephemeral storage of the worker container of every phase. Requested where neither a request nor a limit "
        f"is given: {', '.join(f'{name} {amount}' for name, amount in WORKER_REQUESTS.items())}.",
    )
    scheduling: Scheduling = Field(default=Scheduling(), description="Where pods may run.")
    image: ImageName | None = Field(default=None, description="Worker image. Default: the runtime image of the operator.")
    image_pull_secrets: PullSecrets = Field(default=(), description="Pull secrets.")
    env: EnvVars = Field(default=(), description="Extra environment of the runtime container.")
    metrics: BatchMonitoring = Field(default=BatchMonitoring(), description="Objects of the Prometheus operator.")
    network_policy: NetworkPolicy = Field(
        default=NetworkPolicy(), description="NetworkPolicy of the pods; the port is that of progress and metrics."
    )
    service_account_name: ObjectName | None = Field(
        default=None,
        description="ServiceAccount of all pods; carries the cloud identity (IRSA, workload identity). Default: one created per resource, "
        "without API token.",
    )
    security: Security = Field(
        default=Security(), description="Security knobs. All other fields of the restricted profile are fixed by the operator."
    )
    pod_template: PodTemplate | None = Field(
        default=None,
        description="Escape hatch, applied last. Not validated by the schema; invalid results surface in the Accepted condition.",
    )


MUTABLE: Final = frozenset({"workers", "suspend", "cancel", "deadline_seconds", "ttl_seconds_after_finished", "metrics", "network_policy"})
"""What can change in a BatchJob that exists. All else is in the pods of its Jobs, which cannot change."""


def _fixed(field: str) -> Transition:
    name = api_name(field)
    return Transition(
        f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})",
        f"spec.{name} cannot change; make a new BatchJob",
    )


BatchJobSpec.RULES = (*BatchJobSpec.RULES, *(_fixed(field) for field in BatchJobSpec.model_fields if field not in MUTABLE))
