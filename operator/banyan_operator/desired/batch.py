"""The child objects of a BatchJob: a Job that runs `banyan-runtime batch`, with a server beside it where the spec has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from banyan_operator.api import BatchJob
from banyan_operator.api.uris import ClaimPath, HostPath, locate
from banyan_operator.desired import podspec, serverpod
from banyan_operator.desired.companions import cache_claim, service_account
from banyan_operator.desired.metadata import (
    DEFAULT_IMAGE,
    RENDERED_GENERATION,
    RENDERED_TEMPLATE,
    SPEC_HASH,
    TEMPLATE_LAYOUT,
    child,
    default_image,
    digest,
    labels,
)
from banyan_operator.desired.podspec import Mount
from banyan_operator.desired.podtemplate import merged
from banyan_operator.kube.addresses import PROGRESS_PORT, SERVER_PORT
from banyan_operator.plan import Manifest, Settings

CONTAINER: Final = "worker"
GRACE_S: Final = 120  # after SIGTERM the worker takes what is in flight, and says how far it came
FINAL_CODES: Final = (64, 65, 77, 78)  # bad configuration, bad input or model, access denied, incompatible: again is the same again


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker reads or writes: the argument for it, and the claim behind it."""

    argument: str
    mount: Mount | None = None


def children(
    job: BatchJob, settings: Settings, *, server_url: str | None, suspend: bool, live: Manifest | None = None
) -> tuple[Manifest, ...]:
    """All objects that `job` wants while it runs, in the order in which they are applied.

    `server_url`: base URL of the InferenceServer of serverRef. `live`: the Job as it is, if there is one.
    Raises SpecError when spec.podTemplate cannot be merged.
    """
    found: list[Manifest] = []
    if job.spec.service_account_name is None:
        found.append(service_account(job, settings, f"{job.metadata.name}-batch"))
    own = job.spec.server
    if own is not None and own.cache.type == "PersistentVolumeClaim" and own.cache.claim_name is None:
        found.append(cache_claim(job, settings, own.cache))
    found.append(work(job, settings, server_url=server_url, suspend=suspend, live=live))
    return tuple(found)


def work_name(job: BatchJob) -> str:
    return f"{job.metadata.name}-work"


def run_id(job: BatchJob) -> str:
    """Names the run in storage: the same for every attempt of this BatchJob, another one for a new BatchJob of its name."""
    return job.metadata.uid.replace("-", "")[:12]


def work(job: BatchJob, settings: Settings, *, server_url: str | None, suspend: bool, live: Manifest | None = None) -> Manifest:
    """The Job. Indexed with one worker: sharding over several keeps this shape."""
    image = job.spec.image or default_image(job, live, settings)
    annotations = {RENDERED_GENERATION: str(job.metadata.generation), RENDERED_TEMPLATE: TEMPLATE_LAYOUT}
    if job.spec.image is None:
        annotations[DEFAULT_IMAGE] = image
    return child(
        job,
        settings,
        api_version="batch/v1",
        kind="Job",
        name=work_name(job),
        annotations=annotations,
        body={
            "spec": {
                "completionMode": "Indexed",
                "completions": job.spec.workers,
                "parallelism": job.spec.workers,
                "backoffLimitPerIndex": job.spec.worker_backoff_limit,
                "podReplacementPolicy": "Failed",  # never two workers of one index: they would write to one place
                "podFailurePolicy": {
                    "rules": [
                        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                        {
                            "action": "FailJob",
                            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(FINAL_CODES)},
                        },
                    ]
                },
                "successPolicy": {"rules": [{"succeededCount": 1}]},
                "suspend": suspend,
                "template": _template(job, image, settings, server_url),
            }
        },
    )


def _template(job: BatchJob, image: str, settings: Settings, server_url: str | None) -> Manifest:
    spec = job.spec
    worker, worker_mounts = _worker(job, image, settings, server_url)
    pod: Manifest = {
        "serviceAccountName": spec.service_account_name or f"{job.metadata.name}-batch",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": podspec.pod_security(spec.security),
    }
    scheduling, accelerator, server_mounts, secrets = spec.scheduling, None, list[Mount](), [spec.image_pull_secrets]
    if spec.server is not None:
        own = spec.server
        server = serverpod.of_own_server(job.metadata.name, own, spec.security)
        sidecar, server_mounts = serverpod.container(server, own.runtime.image or image, settings)
        pod["initContainers"] = [sidecar]
        accelerator = own.accelerator
        secrets.append(own.runtime.image_pull_secrets)
        if own.scheduling.dump():  # the server is what needs a particular node
            scheduling = own.scheduling
    pod["containers"] = [worker]
    pod["volumes"] = podspec.volumes(server_mounts, worker_mounts)
    pod |= podspec.placement(scheduling, accelerator, labels(job), spread=False)
    if names := podspec.pull_secrets(*secrets, settings.image_pull_secrets):
        pod["imagePullSecrets"] = names
    template = merged({"metadata": {"labels": labels(job)}, "spec": pod}, spec.pod_template)
    annotations = {**template["metadata"].get("annotations", {}), SPEC_HASH: digest(template)}
    return {"metadata": {**template["metadata"], "annotations": annotations}, "spec": template["spec"]}


def _worker(job: BatchJob, image: str, settings: Settings, server_url: str | None) -> tuple[Manifest, list[Mount]]:
    spec = job.spec
    source, target = _place(spec.input.uri, "input", read_only=True), _place(spec.output.uri, "output", read_only=False)
    store_env, store_mounts = podspec.s3(spec.s3, settings.default_storage)
    env = {
        "BANYAN_PROGRESS_HOST": "0.0.0.0",  # the operator and Prometheus ask the pod's address
        "BANYAN_PROGRESS_PORT": str(PROGRESS_PORT),
        "BANYAN_SERVER_URL": server_url if spec.server is None and server_url else f"http://127.0.0.1:{SERVER_PORT}",
        "BANYAN_RUN_ID": run_id(job),  # a worker that is started again finds what it has published already
        "HOME": "/tmp",
        **store_env,
    }
    args = [
        f"--input={source.argument}",
        f"--output={target.argument}",
        "--server=$(BANYAN_SERVER_URL)",
        f"--endpoint={spec.endpoint}",
        f"--max-concurrency={spec.max_concurrency}",
        f"--request-timeout={spec.request_timeout_seconds}",
        f"--max-attempts={spec.retries.max_attempts}",
        f"--max-backoff={spec.retries.max_backoff_seconds}",
        f"--on-invalid-line={spec.input.on_invalid_line.lower()}",
        "--progress-host=$(BANYAN_PROGRESS_HOST)",
        "--progress-port=$(BANYAN_PROGRESS_PORT)",
    ]
    if spec.server is not None:
        args.append(f"--server-timeout={spec.server.probes.startup_timeout_seconds}")
    if spec.output.overwrite:
        args.append("--overwrite")
    model = spec.model_name
    if spec.server is not None and not spec.server.model.served_names:
        model = model or job.metadata.name  # a server of one's own that was given no name answers whatever the lines ask for
    if model:
        args.append(f"--model={podspec.escaped(model)}")
    mounts = [podspec.scratch("worker-tmp", "/tmp"), *store_mounts, *(place.mount for place in (source, target) if place.mount)]
    for name, place in (("input", source), ("output", target)):
        if place.mount is not None:
            env[f"BANYAN_{name.upper()}_DIR"] = f"/{name}"
    if spec.api_key_secret_ref is not None:
        key = spec.api_key_secret_ref
        env["BANYAN_API_KEY_FILE"] = f"/secrets/api-key/{key.key}"
        args.append("--api-key-file=$(BANYAN_API_KEY_FILE)")
        mounts.append(podspec.secret_files("api-key", key.name, "/secrets/api-key", [key.key]))
    container: Manifest = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["banyan-runtime", "batch"],
        "args": args,
        "ports": [{"name": "progress", "containerPort": PROGRESS_PORT, "protocol": "TCP"}],
        "env": podspec.environment(env, spec.env),
        "volumeMounts": podspec.mounts(mounts),
        "securityContext": podspec.container_security(spec.security),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if amounts := podspec.resources(spec.resources):
        container["resources"] = amounts
    return container, mounts


def _place(uri: str, name: str, *, read_only: bool) -> Place:
    match locate(uri):
        case ClaimPath(claim, path):
            return Place(f"$(BANYAN_{name.upper()}_DIR)/{podspec.escaped(path)}", podspec.claim(claim, f"/{name}", read_only=read_only))
        case HostPath(path):  # local mode alone: a folder of this very machine, nothing is mounted
            return Place(podspec.escaped(path))
        case _:
            return Place(podspec.escaped(uri))
