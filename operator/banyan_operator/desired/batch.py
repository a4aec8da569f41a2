"""The child objects of a BatchJob: a Job that runs `banyan-runtime batch`, with a server beside it where the spec has one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from banyan_operator.api import BatchJob
from banyan_operator.api.uris import ClaimPath, HostPath, locate
from banyan_operator.desired import podspec, serverpod
from banyan_operator.desired.companions import cache_claim, service_account
from banyan_operator.desired.metadata import SPEC_HASH, child, digest, labels, owner_references
from banyan_operator.desired.monitors import monitors
from banyan_operator.desired.names import Names
from banyan_operator.desired.network import network_policy
from banyan_operator.desired.podspec import Mount
from banyan_operator.desired.podtemplate import merged
from banyan_operator.kube.addresses import PROGRESS_PORT, PROGRESS_PORT_NAME, SERVER_PORT
from banyan_operator.kube.kinds import JOB
from banyan_operator.kube.objects import Ref, find_object, is_true
from banyan_operator.kube.ownership import APPLIED_HASH
from banyan_operator.plan import Manifest, Settings

CONTAINER: Final = "worker"
RUN_ID: Final = "BANYAN_RUN_ID"
GRACE_S: Final = 120  # after SIGTERM the worker takes what is in flight, and says how far it came
FINAL_CODES: Final = (64, 65, 77, 78)  # bad configuration, bad input or model, access denied, incompatible: again is the same again


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker reads or writes: the argument for it, and the claim behind it."""

    argument: str
    mount: Mount | None = None


def children(
    job: BatchJob,
    settings: Settings,
    *,
    server_url: str | None,
    suspend: bool,
    live: Iterable[Manifest] = (),
    absent: frozenset[str] = frozenset(),
) -> tuple[Manifest, ...]:
    """All objects that `job` wants while it runs, in the order in which they are applied.

    `server_url`: base URL of the InferenceServer of serverRef. `live`: its children as they are; a Job among them keeps what it
    was made with, for that cannot change. `suspend`: no worker may run now.
    `absent`: optional kinds that the cluster does not have, which are left out.
    Raises SpecError when spec.podTemplate cannot be merged.
    """
    live = tuple(live)
    existing = find_object(live, Ref.to(JOB, Names.of(job, live).work))
    names = Names.of(job, live, existing["spec"]["template"] if existing is not None else None)
    found: list[Manifest] = []
    if job.spec.service_account_name is None:
        found.append(service_account(job, settings, names.service_account))
    own = job.spec.server
    if own is not None and own.cache.type == "PersistentVolumeClaim" and own.cache.claim_name is None:
        found.append(cache_claim(job, settings, names.cache_claim, own.cache))
    if existing is not None:
        found.append(_as_made(job, existing, suspend))
    elif not suspend:  # it is not made before it may run
        found.append(work(job, settings, names, server_url=server_url))
    if settings.platform == "local":  # there is nobody to act on the rest
        return tuple(found)
    if job.spec.network_policy.enabled:
        found.append(network_policy(job, settings))
    return (*found, *monitors(job, settings, absent))


def _as_made(job: BatchJob, live: Manifest, suspend: bool) -> Manifest:
    """The Job that exists, as it was made, whoever made it: of all its fields only `suspend` is still to be decided."""
    metadata = live["metadata"]
    annotations = dict(metadata.get("annotations") or {})
    if not live["spec"].get("suspend", False) and is_true(live, "Suspended"):
        # its controller has yet to take up that it was resumed; until then its condition would be taken for an answer to this write
        suspend = False
    if live["spec"].get("suspend", False) != suspend:  # our own change must not look like somebody else's
        made, _, _ = annotations.get(APPLIED_HASH, "").partition("-")
        annotations[APPLIED_HASH] = f"{made}-{'suspended' if suspend else 'running'}"
    kept = {"name": metadata["name"], "namespace": metadata["namespace"], "ownerReferences": owner_references(job)}
    return {
        "apiVersion": live["apiVersion"],
        "kind": live["kind"],
        "metadata": {**kept, "labels": {**(metadata.get("labels") or {}), **labels(job)}, "annotations": annotations},
        "spec": {**live["spec"], "suspend": suspend},
    }


def run_id(job: BatchJob) -> str:
    """Names the run in storage: the same for every attempt of this BatchJob, another one for a new BatchJob of its name."""
    return job.metadata.uid.replace("-", "")[:12]


def run_of(work: Manifest) -> str:
    """The run that a Job's workers write for."""
    for container in work["spec"]["template"]["spec"]["containers"]:
        for variable in container.get("env") or ():
            if variable["name"] == RUN_ID:
                return str(variable.get("value") or "")
    return ""


def work(job: BatchJob, settings: Settings, names: Names, *, server_url: str | None) -> Manifest:
    """The Job. Indexed with one worker: sharding over several keeps this shape."""
    return child(
        job,
        settings,
        api_version="batch/v1",
        kind="Job",
        name=names.work,
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
                "suspend": False,
                "template": _template(job, settings, names, server_url),
            }
        },
    )


def _template(job: BatchJob, settings: Settings, names: Names, server_url: str | None) -> Manifest:
    spec = job.spec
    image = spec.image or settings.runtime_image
    worker, worker_mounts = _worker(job, image, settings, server_url)
    pod: Manifest = {
        "serviceAccountName": spec.service_account_name or names.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": podspec.pod_security(spec.security),
    }
    scheduling, where = spec.scheduling, "spec.scheduling"
    accelerator, server_mounts, secrets = None, list[Mount](), [spec.image_pull_secrets]
    if spec.server is not None:
        own = spec.server
        server = serverpod.of_own_server(job.metadata.name, own, spec.security, names.cache_claim)
        sidecar, server_mounts = serverpod.container(server, own.runtime.image or image, settings)
        pod["initContainers"] = [sidecar]
        accelerator = own.accelerator
        secrets.append(own.runtime.image_pull_secrets)
        if own.scheduling.dump():  # the server is what needs a particular node
            scheduling, where = own.scheduling, "spec.server.scheduling"
    pod["containers"] = [worker]
    pod["volumes"] = podspec.volumes(server_mounts, worker_mounts)
    pod |= podspec.placement(scheduling, accelerator, labels(job), spread=False, path=where)
    if pull_secrets := podspec.pull_secrets(*secrets, settings.image_pull_secrets):
        pod["imagePullSecrets"] = pull_secrets
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
        RUN_ID: run_id(job),  # a worker that is started again finds what it has published already
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
        "ports": [{"name": PROGRESS_PORT_NAME, "containerPort": PROGRESS_PORT, "protocol": "TCP"}],
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
