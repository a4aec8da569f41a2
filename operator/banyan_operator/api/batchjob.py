"""BatchJob: a file of OpenAI batch requests, run to completion."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from banyan_operator.api.base import Format, Model, ObjectName, Quantity
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
        "s3://BUCKET/KEY, pvc://CLAIM/PATH, file:///PATH (local mode only)."
    )
    compression: Literal["auto", "none", "gzip"] = Field(default="auto", description="gzip input is one shard per object.")
    on_invalid_line: Literal["Record", "Fail"] = Field(
        default="Record", description="Record: one error record per bad line. Fail: planning fails."
    )


class Output(Model):
    RULES: ClassVar = (Rule("self.uri.endsWith('/')", "output.uri must end with /", lambda o: o.uri.endswith("/")), _NO_DOTS)

    uri: DataUri = Field(description="Prefix ending in /; receives output.jsonl, errors.jsonl, manifest.json and .banyan/.")
    overwrite: bool = Field(default=False, description="Accept a prefix that holds results of another job.")


class Sharding(Model):
    target_requests: Annotated[int, Format("int32"), Field(ge=1, le=1000000)] = Field(default=1000, description="Lines per shard.")
    target_bytes: Annotated[int, Format("int64"), Field(ge=65536, le=1073741824)] = Field(default=67108864, description="Bytes per shard.")


class Retries(Model):
    max_attempts: Annotated[int, Format("int32"), Field(ge=1, le=20)] = Field(
        default=5, description="Attempts per request, for 408, 409, 429, 5xx and connection errors."
    )
    max_backoff_seconds: Annotated[int, Format("int32"), Field(ge=1, le=600)] = 60


def _same_server(new: BatchJobSpec, old: BatchJobSpec) -> bool:
    if new.server is None or old.server is None:
        return new.server is old.server
    return new.server.model.uri == old.server.model.uri and new.server.accelerator == old.server.accelerator


class BatchJobSpec(Model):
    RULES: ClassVar = (
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
        Transition(
            "has(self.serverRef) == has(oldSelf.serverRef) && (!has(self.serverRef) || self.serverRef == oldSelf.serverRef)",
            "spec.serverRef is immutable",
            lambda new, old: new.server_ref == old.server_ref,
        ),
        Transition(
            "has(self.server) == has(oldSelf.server) && (!has(self.server) || (self.server.model.uri == oldSelf.server.model.uri && "
            "self.server.accelerator == oldSelf.server.accelerator))",
            "spec.server.model.uri and spec.server.accelerator are immutable",
            _same_server,
        ),
        Transition("self.input == oldSelf.input", "spec.input is immutable", lambda new, old: new.input == old.input),
        Transition(
            "self.output.uri == oldSelf.output.uri", "spec.output.uri is immutable", lambda new, old: new.output.uri == old.output.uri
        ),
        Transition("self.endpoint == oldSelf.endpoint", "spec.endpoint is immutable", lambda new, old: new.endpoint == old.endpoint),
        Transition("self.sharding == oldSelf.sharding", "spec.sharding is immutable", lambda new, old: new.sharding == old.sharding),
        Transition(
            "has(self.modelName) == has(oldSelf.modelName) && (!has(self.modelName) || self.modelName == oldSelf.modelName)",
            "spec.modelName is immutable",
            lambda new, old: new.model_name == old.model_name,
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
        default="/v1/chat/completions", description="Endpoint for every line; a line with another url is an error record."
    )
    model_name: Annotated[str, Field(max_length=128)] | None = Field(default=None, description="Overrides the model of every line.")
    api_key_secret_ref: ApiKeyRef | None = Field(default=None, description="API key for serverRef.")
    workers: Annotated[int, Format("int32"), Field(ge=1, le=1000)] = Field(
        default=1, description="Parallel workers. May be changed while running."
    )
    sharding: Sharding = Field(default=Sharding(), description="Input is cut at line ends when either target is reached.")
    max_concurrency: Annotated[int, Format("int32"), Field(ge=1, le=4096)] = Field(default=64, description="In-flight requests per worker.")
    request_timeout_seconds: Annotated[int, Format("int32"), Field(ge=1, le=86400)] = 1800
    retries: Retries = Field(default=Retries(), description="Retries of one request.")
    worker_backoff_limit: Annotated[int, Format("int32"), Field(ge=0, le=100)] = Field(
        default=6, description="Pod failures per worker index before that worker is given up."
    )
    max_error_percent: Annotated[int, Format("int32"), Field(ge=0, le=100)] = Field(
        default=100,
        description="Fail the job when more than this share of finished requests are error records (checked after 100 requests or at "
        "the end). 100 means never.",
    )
    deadline_seconds: Annotated[int, Format("int32"), Field(ge=60, le=31536000)] | None = Field(
        default=None,
        description="Wall time from the first start, suspended time included; then the job expires and finished results are published.",
    )
    ttl_seconds_after_finished: Annotated[int, Format("int32"), Field(ge=0, le=31536000)] | None = Field(
        default=None, description="Delete this resource that long after it finished. Results in storage stay."
    )
    suspend: bool = Field(default=False, description="Stop workers, keep checkpoints.")
    cancel: bool = Field(default=False, description="Stop for good and publish what is finished. Cannot be unset.")
    priority: Annotated[int, Format("int32"), Field(ge=-100, le=100)] = Field(
        default=-10, description="Request priority sent to the server; below 0 yields to interactive traffic."
    )
    resources: Resources = Field(
        default=Resources(), description="CPU, memory, ephemeral storage of the runtime container. Accelerators belong in accelerator."
    )
    scheduling: Scheduling = Field(default=Scheduling(), description="Where pods may run.")
    image: ImageName | None = Field(default=None, description="Worker image. Default: the runtime image of the operator.")
    image_pull_secrets: PullSecrets = Field(default=(), description="Pull secrets.")
    env: EnvVars = Field(default=(), description="Extra environment of the runtime container.")
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
