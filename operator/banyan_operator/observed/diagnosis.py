"""Why a pod waits or last failed, in words a user can act on: what happened, where, and the next step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from banyan_operator.desired.batchpod import CONTAINER, FIELDS
from banyan_operator.kube.kinds import CLAIM
from banyan_operator.observed.answers import Readiness
from banyan_operator.observed.pods import Container, End, Pod, age_s
from banyan_operator.plan import Manifest

SHORT: Final = 512  # characters of a scheduler's or kubelet's text
VOLUME_PATIENCE_S: Final = 120.0

PULL_REASONS: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
START_REASONS: Final = ("CreateContainerError", "RunContainerError", "StartError", "ContainerCannotRun")
_BACK_OFF: Final = re.compile(r'(Back-off pulling image "[^"]*"|ImagePullBackOff)[.]?')
_PULL_SECRET: Final = "Name a pull secret in imagePullSecrets"
_PULL_NAME: Final = "Check the image's name and that the node can reach its registry"
_PULL_STEP: Final = re.compile(rf"\. (?={_PULL_SECRET}|{_PULL_NAME})")  # behind what the registry answered
EARLY: Final = frozenset({"Starting", "Loading", "NotReady"})
"""Reasons that a healthy pod passes through."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What keeps one pod from working."""

    reason: str
    message: str
    pod: str = ""
    container: str = ""
    end: End | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """What else explains a pod."""

    now: float
    startup_timeout_s: float
    accelerators: str  # "2 x nvidia.com/gpu", or ""
    rolling: bool = False  # pods of another revision still hold their accelerators
    local: bool = False  # limits are not enforced, so nothing dies of them
    default_image: bool = False  # the spec names no image: pods keep the operator's of the time when they were decided
    sole: bool = False  # a pod is replaced only when its processes are known to be gone: two would write to one output
    final: bool = False  # nothing of it is started any more
    readyz: Readiness | None = None
    model_uri: str = ""
    events: Sequence[Manifest] = ()
    told: Sequence[str] = ()  # messages of the conditions as they were


def creation_diagnosis(messages: Iterable[str]) -> Diagnosis | None:
    """Why no pod could be made at all, from what the ReplicaSet or Job controller was told."""
    for text in messages:
        if "exceeded quota" in text:
            return Diagnosis(
                "QuotaExceeded", f"the namespace's quota allows no more pods: {_short(text)}. Raise the quota or ask for less."
            )
        if "violates PodSecurity" in text:
            return Diagnosis(
                "PodSecurityDenied",
                f"the namespace's Pod Security level refuses the pods: {_short(text)}. Remove it from spec.podTemplate.",
            )
    return next((Diagnosis("PodsNotCreated", f"pods cannot be created: {_short(text)}.") for text in messages if text), None)


def worst(pods: Iterable[Pod], view: View) -> Diagnosis | None:
    """The first row of the table that any pod shows; of several such pods the newest. `pods`: newest first."""
    known = list(pods)
    for row in _ROWS:
        for pod in known:
            if found := row(pod, view):
                return found
    return None


# --- rows, in the order in which they are looked at ---


_TAINT: Final = re.compile(r"untolerated taint \{([^:}]+)")
_PASSING: Final = (  # taints that nobody should tolerate, and those of control planes
    "node-role.kubernetes.io/", "node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "karpenter.sh/",
    "ToBeDeletedByClusterAutoscaler", "DeletionCandidateOfClusterAutoscaler",
)  # fmt: skip


_OLD_FIRST: Final = "spec.rollout.maxSurge to 0 and spec.rollout.maxUnavailable to 1, so that old pods free theirs first"


def _unschedulable(pod: Pod, view: View) -> Diagnosis | None:
    if pod.unschedulable is None or pod.deleted:
        return None
    text = _short(pod.unschedulable)
    resource = view.accelerators.partition(" x ")[2]
    if resource and f"Insufficient {resource}" in text:
        step = f"Set {_OLD_FIRST}" if view.rolling else "Free some, add nodes, or ask for fewer"
        taint = next((name for name in _TAINT.findall(text) if not name.startswith(_PASSING)), None)
        if taint is None and "untolerated taint" in text and not _TAINT.search(text):  # Kubernetes names them no more
            taint = "the taint that kubectl describe node shows"
        if taint is not None:
            step += f"; or, where the nodes that have some bear it, tolerate {taint} in spec.scheduling.tolerations"
        return Diagnosis("InsufficientAccelerators", f"no node has {view.accelerators} free (pod {pod.name}): {text}. {step}.", pod.name)
    if "persistentvolumeclaim" in text.lower():
        if told := next((one for one in view.events if one.get("involvedObject", {}).get("kind") == CLAIM.kind), None):
            name, why = told["involvedObject"].get("name"), _short(str(told.get("message") or ""))
            step = "Name a class that 'kubectl get storageclass' shows, or a claim that exists"
            return Diagnosis("VolumeNotReady", f"claim {name} gets no volume (pod {pod.name}): {why}. {step}.", pod.name)
        step = "Create the claim, or check its storage class"
        return Diagnosis("VolumeNotReady", f"a claim cannot be used (pod {pod.name}): {text}. {step}.", pod.name)
    step = "Lower spec.resources.requests, change spec.scheduling, or add nodes"
    if view.rolling and "Insufficient" in text:
        step += f"; or set {_OLD_FIRST}"
    return Diagnosis("Unschedulable", f"no node fits (pod {pod.name}): {text}. {step}.", pod.name)


def _image(pod: Pod, view: View) -> Diagnosis | None:
    for container in _waiting(pod, PULL_REASONS):
        text = container.waiting_message or container.waiting
        if _BACK_OFF.fullmatch(text):
            # between two attempts the kubelet says only that it waits; what the registry answered was said before
            what = f"image {container.image} cannot be pulled (pod {pod.name}, container {container.name}): "
            if told := next((one for one in view.told if one.startswith(what) and not _BACK_OFF.search(one)), None):
                text = _PULL_STEP.split(told.removeprefix(what))[0]
            else:
                text = _event(pod, view, ("Failed",), "Failed to pull image") or text
        denied = any(word in text.lower() for word in ("401", "403", "unauthorized", "denied", "forbidden"))
        step = _PULL_SECRET if denied else _PULL_NAME
        if view.default_image and not denied:
            step += ". It is the operator's default and is kept for this spec: once the chart names another, set spec.rollout.refresh"
        return _at(pod, container, "ImagePullFailed", f"image {container.image} cannot be pulled", text, step)
    return None


def _config(pod: Pod, view: View) -> Diagnosis | None:
    for container in _waiting(pod, ("CreateContainerConfigError",)):
        what = "something the pod refers to is missing or cannot be used"
        return _at(pod, container, "ConfigMissing", what, container.waiting_message, "Create it, or correct it")
    return None


def _volume(pod: Pod, view: View) -> Diagnosis | None:
    waits = pod.active and not any(container.running_since or container.last_end or container.ended for container in pod.containers)
    if not waits or pod.unschedulable is not None or age_s(pod.created, view.now) <= VOLUME_PATIENCE_S:
        return None
    text = _event(pod, view, ("FailedMount", "FailedAttachVolume"))
    if text is None:
        return None
    step = "Check the claim, Secret or ConfigMap that it names"
    return Diagnosis("VolumeNotReady", f"a volume cannot be mounted (pod {pod.name}): {_short(text)}. {step}.", pod.name)


def _not_started(pod: Pod, view: View) -> Diagnosis | None:
    for container in pod.containers:
        end = container.failure
        if container.waiting in START_REASONS or (end is not None and end.reason in START_REASONS):
            text = container.waiting_message or (end.message.message if end else "")
            step = "Check that the image is a Banyan runtime image of this version"
            return _at(pod, container, "ContainerStartFailed", "the container cannot be started", text, step, end)
    return None


def _crash(wanted: Callable[[str], bool]) -> Callable[[Pod, View], Diagnosis | None]:

    def row(pod: Pod, view: View) -> Diagnosis | None:
        for container in pod.containers:
            end = container.failure
            if end is not None and not pod.disrupted and pod.reason not in _DISRUPTIONS:
                found = crash(pod, container, end, view)
                if wanted(found.reason):
                    return found
        return None

    return row


def _loading(pod: Pod, view: View) -> Diagnosis | None:
    for container in pod.containers:
        if pod.active and container.running_since and not container.started and container.last_end is None:
            took = age_s(container.running_since, view.now)
            text = _load_state(view.readyz)
            if took > view.startup_timeout_s / 2:
                step = f"It is restarted after {view.startup_timeout_s:.0f} s; raise spec.probes.startupTimeoutSeconds if it needs more"
                return _at(pod, container, "LoadingSlow", f"still loading after {took:.0f} s", text, step)
            return _at(pod, container, "Loading", "the model is loading", text, "")
    return None


def _not_ready(pod: Pod, view: View) -> Diagnosis | None:
    for container in pod.containers:
        if pod.active and container.running_since and container.started and not container.ready:
            serves = view.readyz is not None and view.readyz.state == "ready"  # an answer of a moment ago, or of another pod
            text = pod.ready_message if serves else _load_state(view.readyz) or pod.ready_message
            return _at(pod, container, "NotReady", "the server takes no requests", text, "")
    return None


def node_lost(pod: Pod, view: View) -> Diagnosis | None:
    """The pod's node does not answer, so nobody knows whether its processes still run."""
    if not pod.lost:
        return None
    what = f"node {pod.node} does not answer (pod {pod.name})"
    back = f"node {pod.node} is back. {off(pod.node)}"
    if pod.deleted is not None:
        what += f": the pod was evicted ({_short(pod.disrupted)})" if pod.disrupted else ": the pod is deleted"
        then = f"The worker may still run, and two must not write to one output, so the work waits until {back}"
        return Diagnosis("NodeLost", f"{what}. {then if view.sole else 'Another one takes its place'}.", pod.name)
    if pod.evicted_after_s is None:
        then = f"The pod tolerates this for ever: it stays until {back}"
    elif view.sole:
        then = f"If it stays away, the pod is evicted after {pod.evicted_after_s} s; the work then waits until {back}"
    else:
        then = f"If it stays away, the pod is evicted and replaced after {pod.evicted_after_s} s"
    return Diagnosis("NodeLost", f"{what}: nobody knows whether it still runs. {then}.", pod.name)


def off(node: str) -> str:
    """How to say that a machine is off, so that what ran there is given up. Deleting a pod does not say so."""
    taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    return f"If its machine is off, say so: kubectl taint nodes {node} {taint}; if it is gone for good: kubectl delete node {node}"


_DISRUPTIONS: Final = ("Evicted", "NodeLost", "Preempted", "Preempting", "Shutdown", "Terminated", "NodeShutdown")


def _disrupted(pod: Pod, view: View) -> Diagnosis | None:
    if (pod.reason not in _DISRUPTIONS and pod.disrupted is None) or pod.lost:
        return None
    text = _short(pod.disrupted or f"{pod.reason}: {pod.message}")
    return Diagnosis("Disrupted", f"the pod was taken away (pod {pod.name}): {text}. It is replaced.", pod.name)


def _stuck(pod: Pod, view: View) -> Diagnosis | None:
    if not pod.stuck(view.now):
        return None
    step = f"Check node {pod.node or '(none)'}; if it is gone, delete the Node object"
    return Diagnosis("TerminationStuck", f"the pod does not go away (pod {pod.name}). {step}.", pod.name)


def _starting(pod: Pod, view: View) -> Diagnosis | None:
    if not pod.active or pod.ready or any(container.ended is not None for container in pod.containers):
        return None
    waits = next((container for container in pod.containers if container.waiting), None)
    text = f" ({waits.waiting_message or waits.waiting})" if waits else ""
    return Diagnosis("Starting", f"the pod is being started (pod {pod.name}){text}.", pod.name)


# --- how a process of ours ended ---

_CLAIM: Final = "pvc://"
_MODELS_CLAIM: Final = "models"  # as in local/volumes.py


@dataclass(frozen=True, slots=True)
class _Exit:
    reason: str
    what: str
    step: str
    again: bool = False  # what ended so is started again, as often as its Job allows

    def advice(self, *, final: bool) -> str:
        if not self.again:
            return self.step
        then = "The worker was started again as often as may be: make a new BatchJob" if final else "The worker is started again"
        return f"{self.step}. {then}" if self.step else then


_MODEL_DENIED: Final = _Exit("ModelAccessDenied", "access to the model is refused", "")
_DENIED: Final = "access to the input, the output or the server is refused"
_NO_SERVER: Final = "the server did not answer"
_SERVER_EXITS: Final = {
    "invalid_flag": _Exit("RuntimeConfigInvalid", "the server refuses its configuration", "Correct spec.runtime"),
    "invalid_model": _Exit("ModelInvalid", "the model cannot be served", "Check spec.model.uri and the model's files"),
    "model_not_found": _Exit("ModelInvalid", "the model is not there", "Check spec.model.uri"),
    "access_denied": _MODEL_DENIED,
    "storage_denied": _MODEL_DENIED,
    "cache_not_writable": _Exit("CacheNotWritable", "the volume that models are fetched to cannot be written",
        "Mount it for writing, by a group that may (spec.security.fsGroup), or name another spec.cache"),
    "source_unreachable": _Exit("ModelDownloadFailed", "the model's source does not answer", "The server is started again"),
    "unavailable": _Exit("TemporaryFailure", "something it needs is not to be had for now", "The server is started again"),
    "out_of_memory": _Exit("AcceleratorOutOfMemory", "the accelerator's memory is full",
        "Lower spec.runtime.memoryPercent or contextLength, or use larger accelerators"),
}  # fmt: skip
_WORKER_EXITS: Final = {
    "invalid_flag": _Exit("InvalidSpec", "the worker refuses its configuration", "Correct the spec in a new BatchJob"),
    "model_not_found": _Exit("ModelNotFound", "the server does not serve it", "Correct spec.modelName or spec.endpoint in a new BatchJob"),
    "input_not_found": _Exit("InputNotFound", "the input cannot be read", "Correct spec.input in a new BatchJob"),
    "input_invalid": _Exit("InputInvalid", "the input or output cannot be used", "Correct spec.input or spec.output in a new BatchJob"),
    "invalid_line": _Exit("InputInvalid", "a line is invalid", "Correct it, or set spec.input.onInvalidLine: Record, in a new BatchJob"),
    "input_changed": _Exit("InputChanged", "the input is not what it was when the run began",
        "Put it back as it was and name this output in spec.input.failedOf of a new BatchJob, or give that what is there now and another "
        "output"),
    "output_not_found": _Exit("OutputNotFound", "the output cannot be used", "Create it, or correct spec.output.uri in a new BatchJob"),
    "output_exists": _Exit("OutputExists", "the output cannot be used",
        "Name another spec.output.uri in a new BatchJob; spec.output.resume there goes on with a run that was left, by its name; "
        "spec.output.overwrite takes the output from whoever has it, results included"),
    "conditional_writes_unsupported": _Exit("ConditionalWritesUnsupported", "the output cannot be used",
        "Name another storage in spec.output.uri of a new BatchJob, or set spec.output.allowUnfenced and spec.workers: 1"),
    "run_ended": _Exit("RunEnded", "the run has ended before all of it was done",
        "Name this output in spec.input.failedOf of a new BatchJob, with another spec.output.uri: that runs the rest"),
    "results_damaged": _Exit("ResultsDamaged", "what the run keeps in its output cannot be read",
        "Put it back and name the run in spec.output.resume of a new BatchJob, or set spec.output.overwrite there"),
    "all_lines_failed": _Exit("AllLinesFailed", "every request failed", "See the errors file"),
    "too_many_errors": _Exit("TooManyErrors", "more requests failed than spec.maxErrorPercent allows", "See the errors file"),
    "server_gone": _Exit("ServerGone", _NO_SERVER, "Check the InferenceServer", again=True),
    "server_not_ready": _Exit("ServerNotReady", _NO_SERVER,
        "Check the server; one of the batch's own gets spec.server.probes.startupTimeoutSeconds", again=True),
    "api_key_denied": _Exit("AccessDenied", _DENIED, "Name a key that the server takes in spec.apiKeySecretRef of a new BatchJob"),
    "storage_denied": _Exit("AccessDenied", _DENIED, ""),
    "storage_unavailable": _Exit("StorageUnavailable", "the storage does not answer", "", again=True),
    "unavailable": _Exit("TemporaryFailure", "something it depends on is down", "", again=True),
    "unfinished": _Exit("Unfinished", "the run is not done", "", again=True),
    "interrupted": _Exit("Interrupted", "the worker was stopped before it was done", "", again=True),
}  # fmt: skip
_SERVER_CODES: Final = {64: "invalid_flag", 65: "invalid_model", 75: "unavailable", 77: "access_denied"}
_WORKER_CODES: Final = {
    64: "invalid_flag", 65: "input_invalid", 69: "server_gone", 75: "unavailable", 77: "storage_denied", 79: "too_many_errors",
    143: "interrupted",
}  # fmt: skip
"""By exit code, where the termination message was lost or its code is unknown."""
_READABLE: Final = "Let the pods' user read the files (chmod -R a+rX), or name their group in spec.security.fsGroup"
_MODEL_ACCESS: Final = {
    "hf": "Name a token that may read the repository in spec.model.huggingFace.tokenSecretRef",
    "s3": "Name keys that may read the bucket in spec.model.s3.credentialsSecretRef",
}
_BUCKET_ACCESS: Final = "Name keys that may read the input and write the output in spec.s3.credentialsSecretRef of a new BatchJob"
_FOLDER_ACCESS: Final = (
    "Let the pods' user read the input and write the output (chmod), or name their group in spec.security.fsGroup of a new BatchJob"
)


def crash(pod: Pod, container: Container, end: End, view: View) -> Diagnosis:
    """Why a container ended as it did."""
    worker, code = container.name == CONTAINER, end.message.code
    text = _text(end, FIELDS if worker else {})
    if end.reason == "OOMKilled" or (end.exit_code == 137 and container.memory_limit and not view.local):
        limit = container.memory_limit or "none of its own"
        step = "Raise resources.limits.memory (shared memory counts against it)"
        return _at(pod, container, "OOMKilled", f"killed at its memory limit ({limit})", text, step, end)
    exits, codes = (_WORKER_EXITS, _WORKER_CODES) if worker else (_SERVER_EXITS, _SERVER_CODES)
    known = exits.get(code) or exits.get(codes.get(end.exit_code, ""))
    if known is not None:
        step = known.advice(final=view.final)
        if known.reason == "ModelAccessDenied":
            step = _MODEL_ACCESS.get(view.model_uri.partition("://")[0], _READABLE)
        elif known is _WORKER_EXITS["storage_denied"]:
            step = _BUCKET_ACCESS if end.message.value.startswith("s3://") else _FOLDER_ACCESS
        elif view.local and code == "cache_not_writable":
            step = "Give this user the right to write there"
        elif view.local and code == "model_not_found" and view.model_uri.startswith(_CLAIM):
            step = _local_claim(view.model_uri)
        return _at(pod, container, known.reason, known.what, text, step, end)
    what = f"the {container.name} ended with exit code {end.exit_code}" + (" (killed)" if end.exit_code == 137 else "")
    step = f"See 'kubectl logs {pod.name} -c {container.name} --previous'" if not view.local else "See its log"
    return _at(pod, container, "CrashLoop", what, text, step, end)


def _local_claim(uri: str) -> str:
    """Which folder of this machine a model's claim is, and how it gets there."""
    claim, _, path = uri.removeprefix(_CLAIM).partition("/")
    if claim == _MODELS_CLAIM:
        otherwise = f"else the folder that 'banyan-runtime models fetch {path.partition('/')[0] or 'NAME'}' fills"
    else:
        otherwise = "else an empty one below the state folder"
    return f"Here claim {claim} is the folder of that name beside the manifests, {otherwise}; --volume {claim}=DIR names another"


_ROWS: Final = (
    _unschedulable,
    _image,
    _config,
    _volume,
    _not_started,
    _crash(lambda reason: reason == "RuntimeConfigInvalid"),
    _crash(lambda reason: reason == "OOMKilled"),
    _crash(lambda reason: reason == "AcceleratorOutOfMemory"),
    _crash(lambda reason: reason != "CrashLoop"),
    _crash(lambda reason: True),
    node_lost,
    _loading,
    _not_ready,
    _disrupted,
    _stuck,
    _starting,
)


# --- wording ---


def _event(pod: Pod, view: View, reasons: Sequence[str], begins: str = "") -> str | None:
    """The newest Event of the pod with one of these reasons."""
    for event in view.events:
        text = str(event.get("message") or "")
        if event.get("reason") in reasons and text.startswith(begins) and event.get("involvedObject", {}).get("name") == pod.name:
            return text
    return None


def _waiting(pod: Pod, reasons: Sequence[str]) -> Iterable[Container]:
    return (container for container in pod.containers if container.waiting in reasons)


def _at(pod: Pod, container: Container, reason: str, what: str, text: str, step: str, end: End | None = None) -> Diagnosis:
    said = f": {_short(text)}" if text else ""
    message = f"{what} (pod {pod.name}, container {container.name}){said}."
    return Diagnosis(reason, f"{message} {step}." if step else message, pod.name, container.name, end, container.restarts)


def _short(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


def _text(end: End, fields: Mapping[str, str]) -> str:
    """What a container's end says: field, value and message. `fields`: those behind its flags."""
    said = end.message
    blamed = "=".join(part for part in (fields.get(said.field, said.field), said.value) if part)
    text = ": ".join(part for part in (blamed, said.message) if part)
    return text or (end.reason if end.reason not in ("Error", "Completed") else "")


def _load_state(readyz: Readiness | None) -> str:
    if readyz is None:
        return ""
    return f"{readyz.state} {readyz.percent} %" + (f", {readyz.detail}" if readyz.detail else "")
