"""What the schema already knows and this version cannot do yet. It is said in a condition, never silently ignored."""

from __future__ import annotations

from typing import Literal

from banyan_operator.api.batchjob import BatchJobSpec
from banyan_operator.api.inferenceserver import InferenceServerSpec
from banyan_operator.api.parts import QUANTIZATIONS, Accelerator, ModelSource, Runtime
from banyan_operator.api.resources import InferenceServer, Resource
from banyan_operator.api.validation import Problem

Platform = Literal["cluster", "local"]


def unsupported(resource: Resource, platform: Platform) -> list[Problem]:
    """Fields of a valid resource that ask for something that is not built, each with what to do instead."""
    if isinstance(resource, InferenceServer):
        return _server(resource.spec, platform)
    return _batch(resource.spec, platform)


def _server(spec: InferenceServerSpec, platform: Platform) -> list[Problem]:
    return _model("spec.model", spec.model, platform) + _runtime("spec", spec.runtime, spec.accelerator)


def _batch(spec: BatchJobSpec, platform: Platform) -> list[Problem]:
    found: list[Problem] = []
    if spec.server is not None:
        found += _model("spec.server.model", spec.server.model, platform)
        found += _runtime("spec.server", spec.server.runtime, spec.server.accelerator)
    for path, uri in (("input.uri", spec.input.uri), ("input.failedOf", spec.input.failed_of), ("output.uri", spec.output.uri)):
        if uri is not None and uri.startswith("file://") and platform == "cluster":
            found.append(Problem(f"spec.{path}", f"{uri}: file:// exists in local mode only; use s3:// or pvc://"))
    return found


def _model(path: str, model: ModelSource, platform: Platform) -> list[Problem]:
    scheme = model.uri.partition("://")[0]
    found: list[Problem] = []
    if scheme == "file" and platform == "cluster":
        found.append(Problem(f"{path}.uri", f"{model.uri}: file:// exists in local mode only; copy the model to a claim and use pvc://"))
    return found


def _runtime(path: str, runtime: Runtime, accelerator: Accelerator) -> list[Problem]:
    found: list[Problem] = []
    parallel = runtime.tensor_parallel_size
    if parallel is not None and parallel > 1:
        found.append(Problem(f"{path}.runtime.tensorParallelSize", f"{parallel}: tensor parallelism is not built yet; use 1"))
    elif parallel is None and accelerator.count > 1:
        found.append(
            Problem(f"{path}.accelerator.count", f"{accelerator.count} devices mean tensor parallelism, which is not built yet; use 1")
        )
    if runtime.quantization and runtime.quantization not in QUANTIZATIONS:
        known = f"use one of {', '.join(QUANTIZATIONS)}, or remove it (quantized .gguf files need no option)"
        found.append(Problem(f"{path}.runtime.quantization", f"{runtime.quantization} is not built yet; {known}"))
    cache = runtime.kv_cache
    if cache is not None and cache.dtype == "bfloat16":
        found.append(Problem(f"{path}.runtime.kvCache.dtype", f"{cache.dtype} is not built yet; use auto, fp8_e4m3 or fp8_e5m2"))
    return found
