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


_NO_DOTS = Rule(
    "!self.uri.contains('/../') && !self.uri.endsWith('/..')",
    "uri must not contain .. segments",
    lambda part: "/../" not in part.uri and not part.uri.endswith("/.."),
)


class Input(Model):
    RULES: ClassVar = (_NO_DOTS,)

    uri: DataUri = Field(
        description="JSON Lines file, or a prefix ending in / whose *.jsonl objects are read in name order. "
        "Names ending in .gz are gzip. s3://BUCKET/KEY, pvc://CLAIM/PATH, file:///PATH (local mode only)."
    )
    on_invalid_line: Literal["Record", "Fail"] = Field(
        default="Record", description="Record: one error record per bad line. Fail: the job fails at the first."
    )


class Output(Model):
    RULES: ClassVar = (Rule("self.uri.endsWith('/')", "output.uri must end with /", lambda o: o.uri.endswith("/")), _NO_DOTS)

    uri: DataUri = Field(
        description="Prefix ending in /; receives output.jsonl, errors.jsonl and manifest.json, all of them once everything is done."
    )
    overwrite: bool = Field(default=False, description="Accept a prefix that holds results of another job.")


class Sharding(Model):
    target_requests: Annotated[int, Format("int32"), Field(ge=1, le=1000000)] = Field(default=1000, description="Lines per shard.")
    target_bytes: Annotated[int, Format("int64"), Field(ge=65536, le=1073741824)] = Field(default=67108864, description="Bytes per shard.")


class Retries(Model):
    max_attempts: Annotated[int, Format("int32"), Field(ge=1, le=20)] = Field(
        default=5, description="Attempts per request, for 408, 409, 429, 5xx and connection errors."
    )
    max_backoff_seconds: Annotated[int, Format("int32"), Field(ge=1, le=600)] = 60


class BatchJobSpec(Model):
    RULES: ClassVar[tuple[Rule | Transition, ...]] = (
        Rule(
            "has(self.serverRef) != has(self.server)",
            "exactly one of serverRef and server is required",
            lambda s: (s.server_ref is None) != (s.server is None),
        ),
        Rule(
            "!has(self.apiKeySecretRef) || has(self.serverRef)",
            "apiKeySecretRef needs serverRef",
            lambda s: s.api_key_secret_ref is None or s.server_ref is not None,
        ),
        Transition("!oldSelf.cancel || self.cancel", "spec.cancel cannot be unset", lambda new, old: not old.cancel or new.cancel),
        Rule(
            "!self.output.uri.startsWith('pvc://') || self.workers <= 1",
            "a pvc:// output allows one worker",
            lambda s: not s.output.uri.startswith("pvc://") or s.workers <= 1,
        ),
        Rule("self.input.uri != self.output.uri", "input and output must differ", lambda s: s.input.uri != s.output.uri),
    )

    server_ref: ServerRef | None = Field(default=None, description="Send requests to this InferenceServer.")
    server: OwnServer | None = Field(default=None, description="Own server beside every worker (native sidecar).")
    input: Input = Field(description="Requests, one OpenAI batch line each.")
    output: Output = Field(description="Results.")
    s3: S3Options | None = Field(default=None, description="Options of s3:// URIs.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"] = Field(
        default="/v1/chat/completions",
        description="Endpoint for every line; a line with another url is an error record. "
        "/v1/embeddings and /v1/responses are not built yet: Accepted=False.",
    )
    model_name: Annotated[str, Field(max_length=128)] | None = Field(default=None, description="Overrides the model of every line.")
    api_key_secret_ref: ApiKeyRef | None = Field(default=None, description="API key for serverRef.")
    workers: Annotated[int, Format("int32"), Field(ge=1, le=1000)] = Field(
        default=1, description="Parallel workers. More than 1 is not built yet: Accepted=False."
    )
    sharding: Sharding = Field(
        default=Sharding(), description="How input is cut among workers. Not built yet: other values than the defaults are Accepted=False."
    )
    max_concurrency: Annotated[int, Format("int32"), Field(ge=1, le=4096)] = Field(default=64, description="In-flight requests per worker.")
    request_timeout_seconds: Annotated[int, Format("int32"), Field(ge=1, le=86400)] = 1800
    retries: Retries = Field(default=Retries(), description="Retries of one request.")
    worker_backoff_limit: Annotated[int, Format("int32"), Field(ge=0, le=100)] = Field(
        default=6, description="Pod failures per worker index before that worker is given up."
    )
    max_error_percent: Annotated[int, Format("int32"), Field(ge=0, le=100)] = Field(
        default=100,
        description="Share of error records from which the job fails; 100 means never. Others are not built yet: Accepted=False.",
    )
    deadline_seconds: Annotated[int, Format("int32"), Field(ge=60, le=31536000)] | None = Field(
        default=None,
        description="Wall time from the first start, suspended time included; then the job is ended as Expired, without results.",
    )
    ttl_seconds_after_finished: Annotated[int, Format("int32"), Field(ge=0, le=31536000)] | None = Field(
        default=None, description="Delete this resource that long after it finished. Results in storage stay."
    )
    suspend: bool = Field(
        default=False, description="Stop the worker. Work that was begun is lost: it starts from the beginning when this is false again."
    )
    cancel: bool = Field(default=False, description="Stop for good, without results. Cannot be unset.")
    priority: Annotated[int, Format("int32"), Field(ge=-100, le=100)] = Field(
        default=-10, description="Request priority at the server. Not built yet: other values than the default are Accepted=False."
    )
    resources: Resources = Field(
        default=Resources(), description="CPU, memory, ephemeral storage of the runtime container. Accelerators belong in accelerator."
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


MUTABLE: Final = frozenset({"suspend", "cancel", "deadline_seconds", "ttl_seconds_after_finished", "metrics", "network_policy"})
"""What can change in a BatchJob that exists. All else is in the pods of its Job, which cannot change."""


def _fixed(field: str) -> Transition:
    name = api_name(field)
    return Transition(
        f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})",
        f"spec.{name} cannot change; make a new BatchJob",
        lambda new, old: getattr(new, field) == getattr(old, field),
    )


BatchJobSpec.RULES = (*BatchJobSpec.RULES, *(_fixed(field) for field in BatchJobSpec.model_fields if field not in MUTABLE))
