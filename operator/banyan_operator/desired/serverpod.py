"""The container that runs `banyan-runtime serve`, in an InferenceServer's pods and beside a BatchJob's worker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from banyan_operator.api import BatchJob, InferenceServer
from banyan_operator.api.batchjob import OwnServer
from banyan_operator.api.lifecycle import Drain, Probes
from banyan_operator.api.parts import Accelerator, ApiKeysRef, Cache, ModelSource, Resources, Runtime, Security
from banyan_operator.api.uris import ClaimPath, HostPath, Remote, locate
from banyan_operator.desired import podspec
from banyan_operator.desired.podspec import Mount
from banyan_operator.kube.addresses import SERVER_PORT, SERVER_PORT_NAME
from banyan_operator.plan import Manifest, Settings

CONTAINER: Final = "server"

PROBE_TIMEOUT_S: Final = 3
STARTUP_PERIOD_S: Final = 5
READINESS_FAILURES: Final = 2
LIVENESS_TIMEOUT_S: Final = 10  # /livez answers at once unless the whole machine stalls
DRAIN_MARGIN_S: Final = 5  # between the end of draining and SIGKILL, for the process to end
SIDECAR_DRAIN_S: Final = 5  # beside a worker that has ended nothing is in flight


@dataclass(frozen=True, slots=True)
class Server:
    """All that the container depends on, from either resource."""

    served_names: tuple[str, ...]
    model: ModelSource
    runtime: Runtime
    accelerator: Accelerator
    resources: Resources
    shared_memory: int | str
    cache: Cache
    cache_claim: str
    probes: Probes
    security: Security
    drain_s: int
    api_keys: ApiKeysRef | None = None
    pre_stop_s: int = 0
    sidecar: bool = False
    vectors: bool = False  # it is asked for embeddings


def of_server(server: InferenceServer, cache_claim: str) -> Server:
    spec = server.spec
    return Server(
        served_names=server.served_names,
        model=spec.model,
        runtime=spec.runtime,
        accelerator=spec.accelerator,
        resources=spec.resources,
        shared_memory=_shared_memory(spec.shared_memory, spec.accelerator),
        cache=spec.cache,
        cache_claim=spec.cache.claim_name or cache_claim,
        probes=spec.probes,
        security=spec.security,
        drain_s=_drain_seconds(spec.drain),
        api_keys=spec.auth.api_keys_secret_ref,
        pre_stop_s=spec.drain.pre_stop_seconds,
    )


def of_own_server(job: BatchJob, own: OwnServer, cache_claim: str) -> Server:
    """`own`: that of the job, whose name the model gets where it was given none."""
    return Server(
        served_names=own.model.served_names or (job.metadata.name,),
        model=own.model,
        runtime=own.runtime,
        accelerator=own.accelerator,
        resources=own.resources,
        shared_memory=_shared_memory(own.shared_memory, own.accelerator),
        cache=own.cache,
        cache_claim=own.cache.claim_name or cache_claim,
        probes=Probes(startup_timeout_seconds=own.probes.startup_timeout_seconds),
        security=job.spec.security,
        drain_s=SIDECAR_DRAIN_S,
        sidecar=True,
        vectors=job.spec.endpoint == "/v1/embeddings",
    )


def container(server: Server, image: str, settings: Settings) -> tuple[Manifest, list[Mount]]:
    """The container, and what it mounts."""
    source_env, source_mounts = _source(server.model)
    mounts = _mounts(server) + source_mounts
    result: Manifest = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": server.runtime.image_pull_policy or settings.image_pull_policy,
        "command": ["banyan-runtime", "serve"],
        "args": _args(server),
        "ports": [{"name": SERVER_PORT_NAME, "containerPort": SERVER_PORT, "protocol": "TCP"}],
        "env": podspec.environment(_environment(server, settings) | source_env, server.runtime.env),
        "volumeMounts": podspec.mounts(mounts),
        "startupProbe": _probe("/readyz", STARTUP_PERIOD_S, PROBE_TIMEOUT_S, _startup_failures(server.probes)),
        "livenessProbe": _probe(
            "/livez", server.probes.liveness_period_seconds, LIVENESS_TIMEOUT_S, server.probes.liveness_failure_threshold
        ),
        "securityContext": podspec.container_security(server.security),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if sources := podspec.environment_sources(server.runtime.env_from):
        result["envFrom"] = sources
    if amounts := podspec.resources(server.resources, server.accelerator):
        result["resources"] = amounts
    if server.sidecar:
        result["restartPolicy"] = "Always"
    else:
        result["readinessProbe"] = _probe("/readyz", server.probes.readiness_period_seconds, PROBE_TIMEOUT_S, READINESS_FAILURES)
    if server.pre_stop_s:
        result["lifecycle"] = {"preStop": {"sleep": {"seconds": server.pre_stop_s}}}
    return result, mounts


def _args(server: Server) -> list[str]:
    runtime = server.runtime
    args = [
        f"--model-path={_model_path(server.model)}",
        "--host=$(BANYAN_HOST)",
        "--port=$(BANYAN_PORT)",
        "--served-model-name",
        *map(podspec.escaped, server.served_names),
        f"--device={'cuda' if server.accelerator.count else 'cpu'}",
        f"--dtype={runtime.dtype}",
        f"--log-level={runtime.log_level}",
    ]
    if runtime.quantization:
        args.append(f"--quantization={runtime.quantization}")
    if runtime.context_length is not None:
        args.append(f"--context-length={runtime.context_length}")
    if runtime.memory_percent is not None:
        args.append(f"--mem-fraction-static={runtime.memory_percent / 100:.2f}")
    if runtime.kv_cache is not None:
        if runtime.kv_cache.dtype != "auto":
            args.append(f"--kv-cache-dtype={runtime.kv_cache.dtype}")
        if runtime.kv_cache.page_size is not None:
            args.append(f"--page-size={runtime.kv_cache.page_size}")
        if runtime.kv_cache.max_tokens is not None:
            args.append(f"--max-total-tokens={runtime.kv_cache.max_tokens}")
        if not runtime.kv_cache.prefix_cache:
            args.append("--disable-radix-cache")
    if runtime.max_running_requests is not None:
        args.append(f"--max-running-requests={runtime.max_running_requests}")
    if runtime.max_queued_requests is not None:
        args.append(f"--max-queued-requests={runtime.max_queued_requests}")
    if runtime.chunked_prefill_tokens is not None:
        args.append(f"--chunked-prefill-size={runtime.chunked_prefill_tokens or -1}")
    if server.model.chat_template is not None:
        args.append("--chat-template=$(BANYAN_CHAT_TEMPLATE)")
    if server.api_keys is not None:
        args.append("--api-keys-file=$(BANYAN_API_KEYS_FILE)")
    if server.vectors:
        args.append("--enable-embeddings")
    return [*args, *runtime.args]


def _model_path(model: ModelSource) -> str:
    match locate(model.uri):
        case ClaimPath():
            return "$(BANYAN_MODEL_DIR)"
        case HostPath(path):  # local mode alone: a folder of this very machine, nothing is mounted
            return podspec.escaped(path)
        case _:
            return podspec.escaped(model.uri)


def _environment(server: Server, settings: Settings) -> dict[str, str]:
    cache = "/tmp/cache" if server.cache.type == "None" else "/cache"  # fetched weights and compiled kernels need some place
    env = {
        "BANYAN_HOST": settings.listen,  # the kubelet's probes and the Service reach the pod's address
        "BANYAN_PORT": str(SERVER_PORT),
        "BANYAN_CACHE": cache,
        "BANYAN_DRAIN_SECONDS": str(server.drain_s),
        "HOME": "/tmp",
        "HF_HOME": f"{cache}/hf",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
    }
    place = locate(server.model.uri)
    if isinstance(place, ClaimPath):
        env["BANYAN_MODEL_DIR"] = f"/model/{place.path}".rstrip("/")
    if server.model.chat_template is not None:
        env["BANYAN_CHAT_TEMPLATE"] = f"/config/chat-template/{server.model.chat_template.key}"
    if server.api_keys is not None:
        env["BANYAN_API_KEYS_FILE"] = f"/secrets/api-keys/{server.api_keys.key}"
    return env


def _source(model: ModelSource) -> tuple[dict[str, str], list[Mount]]:
    """Environment and files with which the runtime fetches an s3:// or hf:// model. Tokens are files: they stay out of the pod's spec."""
    match locate(model.uri):
        case Remote("s3"):
            return podspec.s3(model.s3, "model-")
        case Remote("hf") if model.hugging_face is not None:
            options, env, mounts = model.hugging_face, dict[str, str](), list[Mount]()
            if options.endpoint:
                env["HF_ENDPOINT"] = options.endpoint
            if options.token_secret_ref:
                env["HF_TOKEN_PATH"] = f"/secrets/hf/{options.token_secret_ref.key}"
                mounts.append(
                    podspec.secret_files("hf-token", options.token_secret_ref.name, "/secrets/hf", [options.token_secret_ref.key])
                )
            return env, mounts
        case _:
            return {}, []


def _mounts(server: Server) -> list[Mount]:
    found = [podspec.scratch("tmp", "/tmp"), podspec.shared_memory(server.shared_memory)]
    if server.cache.type == "EmptyDir":
        found.append(podspec.scratch("cache", "/cache", server.cache.size))
    elif server.cache.type == "PersistentVolumeClaim":
        found.append(podspec.claim(server.cache_claim, "/cache"))
    place = locate(server.model.uri)
    if isinstance(place, ClaimPath):
        found.append(podspec.claim(place.claim, "/model", read_only=True))
    template = server.model.chat_template
    if template is not None:
        optional = bool(template.optional)
        found.append(podspec.config_file("chat-template", template.name, "/config/chat-template", template.key, optional=optional))
    if server.api_keys is not None:
        found.append(podspec.secret_files("api-keys", server.api_keys.name, "/secrets/api-keys", [server.api_keys.key]))
    return found


def _probe(path: str, period_s: int, timeout_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": SERVER_PORT_NAME},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def _startup_failures(probes: Probes) -> int:
    return math.ceil(probes.startup_timeout_seconds / STARTUP_PERIOD_S)


def _shared_memory(asked: int | str | None, accelerator: Accelerator) -> int | str:
    if asked is not None:
        return asked
    return "1Gi" if accelerator.count else "64Mi"


def _drain_seconds(drain: Drain) -> int:
    """What running requests get to finish within the pod's grace period."""
    return max(1, drain.termination_grace_period_seconds - drain.pre_stop_seconds - DRAIN_MARGIN_S)
