"""The pods of a BatchJob's Jobs: `banyan-runtime batch`, and where lines are worked on a server beside it where the spec has one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, Literal

from banyan_operator.api import BatchJob, Problem, SpecError
from banyan_operator.api.batchjob import WORKER_REQUESTS
from banyan_operator.api.uris import ClaimPath, HostPath, locate
from banyan_operator.desired import podspec, serverpod
from banyan_operator.desired.metadata import SPEC_HASH, digest, labels
from banyan_operator.desired.names import Names
from banyan_operator.desired.podspec import Mount
from banyan_operator.desired.podtemplate import merged
from banyan_operator.kube.addresses import PROGRESS_PORT, PROGRESS_PORT_NAME, SERVER_PORT
from banyan_operator.plan import Manifest, Settings

Phase = Literal["plan", "work", "merge"]
PHASES: Final[tuple[Phase, ...]] = ("plan", "work", "merge")
Partial = Literal["cancelled", "expired", "failed", "too-many-errors"]
"""Why a merge publishes what is not done."""

CONTAINER: Final = "worker"
SHELLS: Final = ("sh", "bash", "dash", "ash", "zsh")
_SCRIPT_FLAG: Final = re.compile("-[a-z]*c")
FIELDS: Final = {
    "--run-id": "spec.output.resume",
    "--input": "spec.input.uri",
    "--retry-failed": "spec.input.failedOf",
    "--output": "spec.output.uri",
    "--endpoint": "spec.endpoint",
    "--workers": "spec.workers",
    "--api-key-file": "spec.apiKeySecretRef",
    "--max-error-percent": "spec.maxErrorPercent",
}
"""The fields behind the worker's options that its termination messages name."""
RUN_ID: Final = "BANYAN_RUN_ID"
GRACE_S: Final = 120  # after SIGTERM the worker takes what is in flight, and says how far it came


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker reads or writes: the argument for it, and the claim behind it."""

    argument: str
    mount: Mount | None = None


def run_id(job: BatchJob) -> str:
    """Names the run in storage: the same for every attempt of this BatchJob, another one for a new BatchJob of its name, unless it is to go
    on with the one before."""
    return job.spec.output.resume or job.metadata.uid.replace("-", "")[:12]


def template(job: BatchJob, settings: Settings, phase: Phase, *, server_url: str | None = None, partial: Partial | None = None) -> Manifest:
    """The pod template of one phase. `server_url`: base URL of the InferenceServer of serverRef. `partial`: of a merge.

    Raises SpecError when spec.podTemplate cannot be merged, or takes from the worker what it is to do.
    """
    spec, names = job.spec, Names.of(job)
    image = spec.image or settings.runtime_image
    worker, worker_mounts = _worker(job, image, settings, phase, server_url, partial)
    pod: Manifest = {
        "serviceAccountName": spec.service_account_name or names.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **podspec.NOTHING_OF_THE_HOST,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": podspec.pod_security(spec.security),
    }
    scheduling, where = spec.scheduling, "spec.scheduling"
    accelerator, server_mounts, secrets = None, list[Mount](), [spec.image_pull_secrets]
    if spec.server is not None and phase == "work":
        own = spec.server
        server = serverpod.of_own_server(job, own, names.cache_claim)
        sidecar, server_mounts = serverpod.container(server, own.runtime.image or image, settings)
        pod["initContainers"] = [sidecar]
        accelerator = own.accelerator
        secrets.append(own.runtime.image_pull_secrets)
        if own.scheduling.dump():  # the server is what needs a particular node
            scheduling, where = own.scheduling, "spec.server.scheduling"
    pod["containers"] = [worker]
    pod["volumes"] = podspec.volumes(server_mounts, worker_mounts)
    # as with spec.workers: 1, too: that may grow, and the Job keeps its template
    pod |= podspec.placement(scheduling, accelerator, labels(job, phase), spread=phase == "work", path=where)
    if pull_secrets := podspec.pull_secrets(*secrets, settings.image_pull_secrets):
        pod["imagePullSecrets"] = pull_secrets
    found = merged({"metadata": {"labels": labels(job, phase)}, "spec": pod}, spec.pod_template)
    _refuse_other_work(job, worker, found["spec"])
    containers = [_requesting(one) if one["name"] == CONTAINER else one for one in found["spec"]["containers"]]
    found = {**found, "spec": {**found["spec"], "containers": containers}}
    if phase != "work" and "initContainers" in found["spec"]:  # what a podTemplate says of the server is meant for where one is
        beside = [one for one in found["spec"]["initContainers"] if one["name"] != serverpod.CONTAINER]
        found = {**found, "spec": {**found["spec"], "initContainers": beside}}
    annotations = {**found["metadata"].get("annotations", {}), SPEC_HASH: digest(found)}
    return {"metadata": {**found["metadata"], "annotations": annotations}, "spec": found["spec"]}


def _refuse_other_work(job: BatchJob, worker: Manifest, pod: Manifest) -> None:
    """The three Jobs differ in their worker's arguments alone: without them each would do the work of all. Raises SpecError."""
    theirs = next(one for one in pod["containers"] if one["name"] == CONTAINER)
    if theirs is worker or job.spec.pod_template is None:
        return
    why = f"of container {CONTAINER}: each of the three Jobs is told by its arguments which part of the work it does"
    problems: list[Problem] = []
    for number, one in enumerate(job.spec.pod_template.spec["containers"]):
        path = f"spec.podTemplate.spec.containers[{number}]"
        if one["name"] == CONTAINER and "args" in one and theirs.get("args") != worker["args"]:
            problems.append(Problem(f"{path}.args", f"{one['args']!r} would replace those {why}; remove it"))
        if one["name"] == CONTAINER and _drops_arguments(one.get("command")):
            remedy = """end it with '... "$@"' and one more word, which the shell takes for its own name, or remove it"""
            problems.append(Problem(f"{path}.command", f"{one['command']!r} would drop those {why}; {remedy}"))
    if problems:
        raise SpecError(problems)


def _drops_arguments(command: Any) -> bool:
    """Whether a command is a shell's script that passes nothing on: what follows the script is $0, and then what "$@" stands for."""
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    shell = next((place for place, word in enumerate(words) if word.rpartition("/")[2] in SHELLS), None)
    script = next((place for place, word in enumerate(words) if _SCRIPT_FLAG.fullmatch(word)), None)
    if shell is None or script is None or script < shell:
        return False
    text = words[script + 1 : script + 2]
    return not text or not any(all_of_them in text[0] for all_of_them in ("$@", "${@}", "$*")) or len(words) < script + 3


def _worker(
    job: BatchJob, image: str, settings: Settings, phase: Phase, server_url: str | None, partial: Partial | None
) -> tuple[Manifest, list[Mount]]:
    spec = job.spec
    source = _place(spec.input.source, "input", read_only=True)
    target = _place(spec.output.uri, "output", read_only=False)
    store_env, store_mounts = podspec.s3(spec.s3)
    env = {
        "BANYAN_GRACE_SECONDS": str(GRACE_S),
        "BANYAN_PROGRESS_HOST": settings.listen,  # the operator and Prometheus ask the pod's address
        "BANYAN_PROGRESS_PORT": str(PROGRESS_PORT),
        RUN_ID: run_id(job),  # a worker that is started again finds what it has done already
        "HOME": "/tmp",
        **store_env,
    }
    for name, place in (("INPUT", source), ("OUTPUT", target)):
        if place.mount is not None:
            env[f"BANYAN_{name}_DIR"] = f"/{name.lower()}"
    args = [*_common(job, phase, source, target)]
    mounts = [podspec.scratch("worker-tmp", "/tmp"), *store_mounts, *(place.mount for place in (source, target) if place.mount)]
    match phase:
        case "plan":
            args += [
                f"--workers={spec.workers}",
                f"--shard-requests={spec.sharding.target_requests}",
                f"--shard-bytes={spec.sharding.target_bytes}",
                f"--max-error-percent={spec.max_error_percent}",
            ]
        case "work":
            args += _of_work(job)
            env["BANYAN_SERVER_URL"] = server_url if spec.server is None and server_url else f"http://127.0.0.1:{SERVER_PORT}"
            if spec.api_key_secret_ref is not None:
                key = spec.api_key_secret_ref
                env["BANYAN_API_KEY_FILE"] = f"/secrets/api-key/{key.key}"
                args.append("--api-key-file=$(BANYAN_API_KEY_FILE)")
                mounts.append(podspec.secret_files("api-key", key.name, "/secrets/api-key", [key.key]))
        case "merge" if partial is not None:
            args.append(f"--partial={partial}")
    container: Manifest = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["banyan-runtime", "batch"],
        "args": args,
        "ports": [{"name": PROGRESS_PORT_NAME, "containerPort": PROGRESS_PORT, "protocol": "TCP"}],
        "env": podspec.environment(env, spec.env),
        "volumeMounts": podspec.mounts(mounts),
        "securityContext": podspec.container_security(spec.security),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if amounts := podspec.resources(spec.resources):
        container["resources"] = amounts
    return container, mounts


def _requesting(container: Manifest) -> Manifest:
    """The worker with a request for what nobody has named: a pod without any is the first to go when its node is short of memory.
    Where a limit is named, Kubernetes makes it the request."""
    amounts = container.get("resources") or {}
    if not isinstance(amounts, dict) or not all(isinstance(one, dict) for one in amounts.values() if one is not None):
        return container  # a podTemplate's, which the API server will refuse
    requests, limits = amounts.get("requests") or {}, amounts.get("limits") or {}
    least = {name: amount for name, amount in WORKER_REQUESTS.items() if name not in requests and name not in limits}
    return {**container, "resources": {**amounts, "requests": {**least, **requests}}} if least else container


def _common(job: BatchJob, phase: Phase, source: Place, target: Place) -> list[str]:
    """What every phase is told: what is read, what becomes of it, and how a line is judged."""
    spec = job.spec
    args = [
        f"--phase={phase}",
        f"--{'input' if spec.input.uri is not None else 'retry-failed'}={source.argument}",
        f"--output={target.argument}",
        f"--endpoint={spec.endpoint}",
        f"--on-invalid-line={spec.input.on_invalid_line.lower()}",
        f"--priority={spec.priority}",
        "--progress-host=$(BANYAN_PROGRESS_HOST)",
        "--progress-port=$(BANYAN_PROGRESS_PORT)",
    ]
    if spec.output.overwrite:
        args.append("--overwrite")
    if spec.output.allow_unfenced:
        args.append("--allow-unfenced")
    model = spec.model_name
    if spec.server is not None and not spec.server.model.served_names:
        model = model or job.metadata.name  # a server of one's own that was given no name answers whatever the lines ask for
    if model:
        args.append(f"--model={podspec.escaped(model)}")
    return args


def _of_work(job: BatchJob) -> list[str]:
    spec = job.spec
    args = [
        "--server=$(BANYAN_SERVER_URL)",
        f"--max-concurrency={spec.max_concurrency}",
        f"--request-timeout={spec.request_timeout_seconds}",
        f"--max-attempts={spec.retries.max_attempts}",
        f"--max-backoff={spec.retries.max_backoff_seconds}",
    ]
    if spec.server is not None:
        args.append(f"--server-timeout={spec.server.probes.startup_timeout_seconds}")
    return args


def _place(uri: str, name: str, *, read_only: bool) -> Place:
    match locate(uri):
        case ClaimPath(claim, path):
            return Place(f"$(BANYAN_{name.upper()}_DIR)/{podspec.escaped(path)}", podspec.claim(claim, f"/{name}", read_only=read_only))
        case HostPath(path):  # local mode alone: a folder of this very machine, nothing is mounted
            return Place(podspec.escaped(path))
        case _:
            return Place(podspec.escaped(uri))
