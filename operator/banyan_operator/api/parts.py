"""Parts that both resources use: references, the model, the runtime, where pods run, and what they may do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from banyan_operator.api.base import (
    Annotations,
    FieldRule,
    Format,
    Int64,
    KeyName,
    Labels,
    ListType,
    Model,
    ObjectName,
    Quantity,
    RawObject,
)
from banyan_operator.api.rules import Rule

MODEL_URI: Final = (
    r"^(pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^\s]*)?|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?"
    r"|hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+(:[A-Za-z0-9_-]+|/[A-Za-z0-9._+/-]+[.]gguf)?(@[A-Za-z0-9._/-]+)?"
    r"|catalog://[a-z0-9]([-a-z0-9._]*[a-z0-9])?|file:///[^\s]+)$"
)
DATA_URI: Final = r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[^\s]+|file:///[^\s]+)$"
URL: Final = r"^https?://([^\s/?#@]*@)?([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?([/?#][^\s]*)?$"

PullPolicy = Literal["Always", "IfNotPresent", "Never"]
ServedName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", min_length=1, max_length=128)]
EnvName = Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", min_length=1, max_length=128)]
ImageName = Annotated[str, Field(min_length=1, max_length=512)]
Argument = Annotated[str, Field(min_length=1, max_length=1024)]
ModelUri = Annotated[str, Field(pattern=MODEL_URI, min_length=7, max_length=1024)]
DataUri = Annotated[str, Field(pattern=DATA_URI, min_length=6, max_length=1024)]
Url = Annotated[str, Field(pattern=URL, max_length=512)]


# --- references to other objects of the same namespace ---


class ObjectRef(Model):
    name: ObjectName = Field(description="Object name, same namespace.")


class CaRef(Model):
    name: ObjectName
    key: Annotated[str, Field(max_length=253)] = "ca.crt"


class ApiKeysRef(Model):
    name: ObjectName = Field(description="Secret name, same namespace.")
    key: KeyName = Field(default="keys", description="Key inside the Secret.")


class ApiKeyRef(Model):
    name: ObjectName = Field(description="Secret name, same namespace.")
    key: KeyName = Field(default="key", description="Key inside the Secret.")


class TokenRef(Model):
    name: ObjectName = Field(description="Secret name, same namespace.")
    key: KeyName = Field(default="token", description="Key inside the Secret.")


class KeySelector(Model):
    name: ObjectName
    key: KeyName
    optional: bool | None = None


class FieldSelector(Model):
    field_path: Annotated[str, Field(min_length=1, max_length=256)]
    api_version: Annotated[str, Field(max_length=16)] | None = None


class SourceRef(Model):
    name: ObjectName
    optional: bool | None = None


# --- the model ---


class S3Options(Model):
    endpoint: Url | None = Field(default=None, description="Endpoint URL; empty means AWS.")
    region: Annotated[str, Field(max_length=64)] | None = Field(default=None, description="Region name.")
    credentials_secret_ref: ObjectRef | None = Field(
        default=None,
        description="Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and optionally AWS_SESSION_TOKEN. "
        "Empty: the pod identity of serviceAccountName.",
    )
    force_path_style: bool = Field(default=False, description="Path-style addressing; most non-AWS stores need it.")
    ca_config_map_ref: CaRef | None = Field(default=None, description="PEM bundle for the endpoint.")


class HuggingFaceOptions(Model):
    token_secret_ref: TokenRef | None = Field(default=None, description="Secret with the access token.")
    endpoint: Url | None = Field(default=None, description="Hub mirror URL.")


class ModelSource(Model):
    RULES: ClassVar = (
        Rule("!has(self.s3) || self.uri.startsWith('s3://')", "model.s3 needs an s3:// uri"),
        Rule(
            "!has(self.huggingFace) || self.uri.startsWith('hf://')",
            "model.huggingFace needs an hf:// uri",
        ),
        Rule(
            "!self.uri.contains('/../') && !self.uri.endsWith('/..')",
            "model.uri must not contain .. segments",
        ),
    )

    uri: ModelUri = Field(
        description="Where the weights are. pvc://CLAIM/PATH, catalog://NAME (a model that the runtime knows by hash and fetches into the "
        "cache), s3://BUCKET/PREFIX, hf://ORG/NAME[:QUANTIZATION|/FILE.gguf][@REVISION] (fetched into the cache, checked), file:///PATH "
        "(local mode only)."
    )
    served_names: Annotated[tuple[ServedName, ...], Field(max_length=8), ListType("set")] = Field(
        default=(), description="Names accepted in the model field of requests. The first is the canonical one. Default: metadata.name."
    )
    s3: S3Options | None = Field(default=None, description="Options of s3:// URIs.")
    hugging_face: HuggingFaceOptions | None = Field(default=None, description="Options of hf:// URIs.")
    chat_template: KeySelector | None = Field(
        default=None, description="ConfigMap key with a Jinja chat template that replaces that of the tokenizer."
    )


# --- the runtime ---


class ValueSource(Model):
    RULES: ClassVar = (
        Rule(
            "(has(self.secretKeyRef)?1:0)+(has(self.configMapKeyRef)?1:0)+(has(self.fieldRef)?1:0) == 1",
            "exactly one of secretKeyRef, configMapKeyRef, fieldRef",
        ),
    )

    secret_key_ref: KeySelector | None = Field(default=None, description="Key of a Secret.")
    config_map_key_ref: KeySelector | None = Field(default=None, description="Key of a ConfigMap.")
    field_ref: FieldSelector | None = None


class EnvVar(Model):
    RULES: ClassVar = (
        Rule(
            "!(has(self.value) && has(self.valueFrom))",
            "value and valueFrom are mutually exclusive",
        ),
        Rule(
            "!self.name.startsWith('BANYAN_')",
            "names starting with BANYAN_ are set by the operator",
        ),
    )

    name: EnvName
    value: Annotated[str, Field(max_length=8192)] | None = None
    value_from: ValueSource | None = Field(default=None, description="Source of the value.")


class EnvFrom(Model):
    prefix: Annotated[str, Field(max_length=64)] | None = None
    secret_ref: SourceRef | None = None
    config_map_ref: SourceRef | None = None


EnvVars = Annotated[tuple[EnvVar, ...], Field(max_length=64), ListType("map", ("name",))]
PullSecrets = Annotated[tuple[ObjectRef, ...], Field(max_length=8), ListType("map", ("name",))]

_FIELDS: Final = {
    "model": "model.uri",
    "model-path": "model.uri",
    "model-dir": "model.uri",
    "served-model-name": "model.servedNames",
    "api-key": "spec.auth.apiKeysSecretRef",
    "api-keys-file": "spec.auth.apiKeysSecretRef",
    "tp": "runtime.tensorParallelSize",
    "tensor-parallel-size": "runtime.tensorParallelSize",
    "dtype": "runtime.dtype",
    "context-length": "runtime.contextLength",
}
"""In place of which argument which field is there."""


def _owned(args: Sequence[str]) -> str:
    names = [found[1] for arg in args if (found := re.match(_OWNED, arg))]
    return ", ".join(f"--{name}" + (f" (use {_FIELDS[name]})" if name in _FIELDS else " (leave it out)") for name in names)


_OWNED = (
    r"^--(host|port|model|model-path|served-model-name|api-key|api-keys-file|tp|tensor-parallel-size"
    r"|dtype|context-length|metrics-port|model-dir)(=.*)?$"
)
_NO_OWNED_OPTION = FieldRule(
    Rule(
        f"self.all(a, !a.matches('{_OWNED}'))",
        "args must not set options that the operator owns (host, port, model, served name, keys, parallelism, dtype, context length)",
        _owned,
    )
)


QUANTIZATIONS: Final = ("w8a16", "w4a16")
"""Those that the runtime can do while it loads a model."""


PAGE_SIZES: Final = (1, 16, 32, 64)
_PAGE_SIZE = FieldRule(Rule(f"self in {list(PAGE_SIZES)}", f"must be one of {', '.join(map(str, PAGE_SIZES))}"))


class KvCache(Model):
    dtype: Literal["auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = Field(
        default="auto",
        description="auto is the type of the weights; fp8_* keeps more tokens, less exactly. bfloat16 is not built yet: Accepted=False.",
    )
    page_size: Annotated[int, Format("int32"), Field(ge=1, le=64), _PAGE_SIZE] | None = Field(
        default=None, description="Tokens per page: 1, 16, 32 or 64."
    )
    max_tokens: Annotated[int, Format("int64"), Field(ge=1024)] | None = Field(default=None, description="Cap of the KV pool in tokens.")
    prefix_cache: bool = Field(default=True, description="Radix prefix cache.")


class Runtime(Model):
    image: ImageName | None = Field(
        default=None, description="Runtime image. Default: the operator's when pods were last made for another spec."
    )
    image_pull_policy: PullPolicy | None = Field(default=None, description="When the image is pulled. Default: as the operator was told.")
    image_pull_secrets: PullSecrets = Field(default=(), description="Pull secrets.")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(default="auto", description="Weight type.")
    quantization: Annotated[str, Field(pattern=r"^[a-z0-9_-]*$", max_length=32)] | None = Field(
        default=None,
        description=(
            "Make weights smaller while they are loaded: w8a16 (8 bits) or w4a16 (4 bits). Others are not built yet: Accepted=False. "
            "Quantized .gguf files need none."
        ),
    )
    context_length: Annotated[int, Format("int32"), Field(ge=128, le=16777216)] | None = Field(
        default=None, description="Longest sequence in tokens. Default: the model configuration."
    )
    tensor_parallel_size: Annotated[int, Format("int32"), Field(ge=1, le=16)] | None = Field(
        default=None,
        description="Devices that share one replica. Default: accelerator.count, or 1 on CPU. More are not built yet: Accepted=False.",
    )
    memory_percent: Annotated[int, Format("int32"), Field(ge=10, le=98)] | None = Field(
        default=None, description="Share of device memory for weights plus KV pool, in percent."
    )
    kv_cache: KvCache | None = Field(default=None, description="KV cache.")
    max_running_requests: Annotated[int, Format("int32"), Field(ge=1, le=65536)] | None = Field(
        default=None, description="Concurrent sequences per replica."
    )
    max_queued_requests: Annotated[int, Format("int32"), Field(ge=1, le=1000000)] | None = Field(
        default=None, description="Waiting requests per replica before new ones are refused."
    )
    chunked_prefill_tokens: Annotated[int, Format("int32"), Field(ge=0, le=1048576)] | None = Field(
        default=None, description="Prefill chunk; 0 turns chunking off."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least severe messages that are logged.")
    args: Annotated[tuple[Argument, ...], Field(max_length=64), ListType("atomic"), _NO_OWNED_OPTION] = Field(
        default=(), description="Further arguments of the runtime. One argument per item; no shell is involved."
    )
    env: EnvVars = Field(default=(), description="Extra environment of the runtime container.")
    env_from: Annotated[tuple[EnvFrom, ...], Field(max_length=16), ListType("atomic")] = Field(
        default=(), description="Kubernetes EnvFromSource items."
    )


# --- where pods run, and on what ---


class Accelerator(Model):
    count: Annotated[int, Format("int32"), Field(ge=0, le=16)] = Field(default=0, description="Devices per replica; 0 runs on CPU.")
    resource_name: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", min_length=3, max_length=128)] = Field(
        default="nvidia.com/gpu", description="Extended resource to request."
    )
    products: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=63)], ...], Field(max_length=16), ListType("set")] = Field(
        default=(), description="Accepted values of the node label nvidia.com/gpu.product (required node affinity)."
    )
    min_memory_mib: Annotated[int, Format("int32"), Field(ge=1, le=4194304)] | None = Field(
        default=None, description="Smallest nvidia.com/gpu.memory (MiB) accepted."
    )

    @property
    def text(self) -> str:
        """`2 x nvidia.com/gpu`, or "" on CPU."""
        return f"{self.count} x {self.resource_name}" if self.count else ""


ResourceMap = Annotated[dict[str, Quantity], Field(max_length=16)]


class Resources(Model):
    RULES: ClassVar = (
        Rule(
            "!has(self.limits) || !self.limits.exists(k, k.contains('/'))",
            "extended resources belong in spec.accelerator",
        ),
        Rule(
            "!has(self.requests) || !self.requests.exists(k, k.contains('/'))",
            "extended resources belong in spec.accelerator",
        ),
    )

    requests: ResourceMap = Field(default={}, description="Requested amounts.")
    limits: ResourceMap = Field(default={}, description="Limits.")


class Toleration(Model):
    key: Annotated[str, Field(max_length=253)] | None = None
    operator: Literal["Exists", "Equal", "Lt", "Gt"] | None = None
    value: Annotated[str, Field(max_length=63)] | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: Int64 | None = None


class Scheduling(Model):
    node_selector: Labels = Field(default={}, description="Pod node selector.")
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32), ListType("atomic")] = Field(
        default=(), description="Pod tolerations."
    )
    affinity: RawObject | None = Field(default=None, description="Kubernetes Affinity, passed through.")
    topology_spread_constraints: Annotated[tuple[RawObject, ...], Field(max_length=8), ListType("atomic")] = Field(
        default=(),
        description="Kubernetes TopologySpreadConstraint items; labelSelector defaults to the pods of this resource. Default: servers, and "
        "workers of a batch, prefer different nodes.",
    )
    priority_class_name: ObjectName | None = Field(default=None, description="PriorityClass of the pods.")
    runtime_class_name: ObjectName | None = Field(default=None, description="RuntimeClass, for example nvidia.")
    scheduler_name: ObjectName | None = Field(default=None, description="Scheduler name.")


class Cache(Model):
    RULES: ClassVar = (
        Rule(
            "self.type == 'PersistentVolumeClaim' || !has(self.claimName)",
            "cache.claimName needs type PersistentVolumeClaim",
        ),
        Rule(
            "self.type != 'PersistentVolumeClaim' || has(self.claimName) || has(self.size)",
            "a created claim needs cache.size",
        ),
    )

    type: Literal["None", "EmptyDir", "PersistentVolumeClaim"] = Field(
        default="EmptyDir",
        description="None: /tmp. EmptyDir: node disk, lost with the pod. PersistentVolumeClaim: existing or created claim, "
        "shared by replicas when ReadWriteMany.",
    )
    size: Quantity | None = Field(default=None, description="Size limit (EmptyDir) or requested size (created claim).")
    claim_name: ObjectName | None = Field(default=None, description="Existing claim. Empty: the operator creates one.")
    storage_class_name: Annotated[str, Field(max_length=253)] | None = Field(default=None, description="Storage class of a created claim.")
    access_mode: Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"] = Field(
        default="ReadWriteOnce", description="Access mode of a created claim."
    )
    retain: bool = Field(default=False, description="Keep a created claim when the resource is deleted.")


# --- what pods may do, and the way out ---

UserId = Annotated[int, Format("int64"), Field(ge=1, le=4294967294)]


class Security(Model):
    run_as_user: UserId | None = Field(default=None, description="UID; must not be 0.")
    fs_group: UserId | None = Field(default=None, description="fsGroup of the pod.")
    read_only_root_filesystem: bool = Field(default=True, description="Containers can write to their volumes alone.")


class PodMetadata(Model):
    labels: Labels = Field(default={}, description="Added labels.")
    annotations: Annotations = Field(default={}, description="Added annotations.")


class PodTemplate(Model):
    metadata: PodMetadata = Field(default=PodMetadata(), description="Labels and annotations of the pods, added.")
    spec: RawObject = Field(
        default={},
        description="Partial Kubernetes PodSpec merged over the generated one (strategic merge; the runtime container is named server, "
        "a batch worker's is named worker).",
    )
