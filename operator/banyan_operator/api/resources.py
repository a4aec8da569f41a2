"""The two kinds as a whole: names, columns, subresources, and the typed resource that everything else works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from banyan_operator.api.base import Model
from banyan_operator.api.batchjob import BatchJobSpec
from banyan_operator.api.inferenceserver import InferenceServerSpec
from banyan_operator.api.rules import Rule
from banyan_operator.api.status import BatchJobStatus, InferenceServerStatus

GROUP: Final = "serving.banyan.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

_NAME: Final = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
MAX_NAME: Final = 50  # so that pods of `<name>--work` with an index still have a host name of at most 63

_FORM: Final = Rule(
    f"self.metadata.name.matches('{_NAME}') && size(self.metadata.name) <= {MAX_NAME}",
    f"metadata.name must be lower-case letters, digits and -, start with a letter, and have at most {MAX_NAME} characters",
)
_SEPARATOR: Final = Rule(
    "!self.metadata.name.contains('--')",
    "metadata.name must not contain --, which is kept for the names of what belongs to a resource",
)
NAME_RULES: Final = (_FORM, _SEPARATOR)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of `kubectl get`; priority 1 is shown with -o wide only."""

    name: str
    type: str
    path: str
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """What the API server is told about one kind."""

    kind: str
    singular: str
    plural: str
    short: str
    description: str
    spec: type[Model]
    status: type[Model]
    columns: tuple[Column, ...]
    scale: Mapping[str, str] | None = None


INFERENCE_SERVER: Final = Kind(
    kind="InferenceServer",
    singular="inferenceserver",
    plural="inferenceservers",
    short="isrv",
    description="A model served over the OpenAI HTTP API.",
    spec=InferenceServerSpec,
    status=InferenceServerStatus,
    columns=(
        Column("Ready", "string", ".status.ready"),
        Column("Phase", "string", ".status.phase"),
        Column("Model", "string", ".spec.model.uri"),
        Column("Accelerator", "string", ".status.accelerator"),
        Column("URL", "string", ".status.url"),
        Column("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
        Column("Restarts", "integer", ".status.restarts", 1),
        Column("Revision", "string", ".status.currentRevision", 1),
        Column("Age", "date", ".metadata.creationTimestamp"),
    ),
    scale={
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    },
)

BATCH_JOB: Final = Kind(
    kind="BatchJob",
    singular="batchjob",
    plural="batchjobs",
    short="bj",
    description="A file of OpenAI batch requests, run to completion. Once made, only workers, suspend, cancel, "
    "deadlineSeconds, ttlSecondsAfterFinished, metrics and networkPolicy can change.",
    spec=BatchJobSpec,
    status=BatchJobStatus,
    columns=(
        Column("Phase", "string", ".status.phase"),
        Column("Progress", "string", ".status.progress"),
        Column("Requests", "string", ".status.requests"),
        Column("Failed", "integer", ".status.requestCounts.failed"),
        Column("Tok/s", "integer", ".status.tokensPerSecond", 1),
        Column("ETA", "string", ".status.etaText"),
        Column("Workers", "integer", ".status.workers.active", 1),
        Column("Shards", "string", ".status.shardsText", 1),
        Column("Reason", "string", '.status.conditions[?(@.type=="Complete")].reason', 1),
        Column("Output", "string", ".status.outputURI", 1),
        Column("Age", "date", ".metadata.creationTimestamp"),
    ),
)

KINDS: Final = {kind.kind: kind for kind in (INFERENCE_SERVER, BATCH_JOB)}


@dataclass(frozen=True, slots=True)
class Metadata:
    """What the operator needs of an object's metadata."""

    name: str
    namespace: str
    uid: str
    generation: int = 1
    annotations: Mapping[str, str] = field(default_factory=dict)
    deleting: bool = False

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> Metadata:
        metadata = manifest["metadata"]
        return Metadata(
            name=metadata["name"],
            namespace=metadata.get("namespace") or "default",
            uid=metadata.get("uid") or "",
            generation=metadata.get("generation") or 1,
            annotations=metadata.get("annotations") or {},
            deleting=bool(metadata.get("deletionTimestamp")),
        )


@dataclass(frozen=True, slots=True)
class InferenceServer:
    """A checked InferenceServer."""

    metadata: Metadata
    spec: InferenceServerSpec

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.spec.model.served_names or (self.metadata.name,)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A checked BatchJob."""

    metadata: Metadata
    spec: BatchJobSpec


Resource = InferenceServer | BatchJob
