"""The digest of a spec: it changes with what pods see of it, and with nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from banyan_operator import api
from banyan_operator.api import crds
from banyan_operator.api.inferenceserver import InferenceServerSpec
from banyan_operator.api.lifecycle import Drain
from banyan_operator.api.parts import Runtime
from banyan_operator.desired import revisions, server
from banyan_operator.plan import Manifest
from tests.unit.operator.conftest import SETTINGS, a_server, merge
from tests.unit.operator.test_desired import CASES, EVERYTHING

SERVERS = {name: manifest for name, manifest in CASES.items() if manifest["kind"] == "InferenceServer"}
BASES = {
    "cpu": a_server(cache={"type": "EmptyDir"}),
    "claim": EVERYTHING,
    "a claim of the user's": merge(EVERYTHING, {"spec": {"cache": {"type": "PersistentVolumeClaim", "claimName": "own", "size": None}}}),
    "two devices": merge(EVERYTHING, {"spec": {"accelerator": {"count": 2}}}),
    "one replica": merge(EVERYTHING, {"spec": {"replicas": 1}}),
}
OTHER: dict[str, Any] = {
    "model.uri": "pvc://models/other",
    "model.servedNames": ["other"],
    "model.chatTemplate.name": "other",
    "model.chatTemplate.key": "other",
    "model.s3.endpoint": None,  # of s3:// models alone
    "model.s3.region": None,
    "model.s3.credentialsSecretRef.name": None,
    "model.s3.caConfigMapRef.name": None,
    "model.s3.caConfigMapRef.key": None,
    "model.s3.forcePathStyle": None,
    "model.huggingFace.tokenSecretRef.name": None,
    "model.huggingFace.tokenSecretRef.key": None,
    "model.huggingFace.endpoint": None,
    "runtime.image": "other",
    "runtime.imagePullSecrets": [{"name": "other"}],
    "runtime.quantization": "w4a16",
    "runtime.tensorParallelSize": 2,
    "runtime.args": ["--schedule-policy=fcfs"],
    "runtime.env": [{"name": "OTHER", "value": "1"}],
    "runtime.envFrom": [{"secretRef": {"name": "other"}}],
    "runtime.kvCache.pageSize": 32,
    "accelerator.count": 2,
    "accelerator.resourceName": "amd.com/gpu",
    "accelerator.products": ["OTHER"],
    "resources.requests": {"cpu": "3"},
    "resources.limits": {"memory": "99Gi"},
    "scheduling.nodeSelector": {"other": "yes"},
    "scheduling.tolerations": [{"key": "other"}],
    "scheduling.affinity": {"podAffinity": {}},
    "scheduling.topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}],
    "scheduling.priorityClassName": "other",
    "scheduling.runtimeClassName": "other",
    "scheduling.schedulerName": "other",
    "sharedMemory": "3Gi",
    "cache.size": "300Gi",
    "cache.claimName": "other",
    "cache.storageClassName": "other",
    "auth.apiKeysSecretRef.name": "other",
    "auth.apiKeysSecretRef.key": "other",
    "service.annotations": {"other": "yes"},
    "service.labels": {"other": "yes"},
    "ingress.className": "other",
    "ingress.hosts": ["other.example"],
    "ingress.path": "/other",
    "ingress.tlsSecretName": "other",
    "ingress.annotations": {"other": "yes"},
    "rollout.refresh": "other",
    "rollout.maxSurge": 3,
    "rollout.maxUnavailable": 3,
    "disruption.maxUnavailable": 3,
    "disruption.minAvailable": 3,
    "metrics.podMonitor.interval": "9s",
    "metrics.podMonitor.additionalLabels": {"other": "yes"},
    "metrics.serviceMonitor.interval": "9s",
    "metrics.serviceMonitor.additionalLabels": {"other": "yes"},
    "networkPolicy.from": [{"podSelector": {}}],
    "networkPolicy.metricsFrom": [{"podSelector": {}}],
    "networkPolicy.egress": [{}],
    "serviceAccountName": "other",
    "podTemplate.metadata.labels": {"other": "yes"},
    "podTemplate.metadata.annotations": {"other": "yes"},
    "podTemplate.spec": {"hostname": "other"},
}
"""Another value for what is neither a number, a truth nor a choice. None: without meaning until something is built."""


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, part in schema["properties"].items():
        where = f"{path}.{name}".removeprefix(".")
        if "properties" in part:
            yield from leaves(part, where)
        else:
            yield where, part


SPEC = crds.generate(api.KINDS["InferenceServer"])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
LEAVES = dict(leaves(SPEC))


def others(path: str, now: Any) -> list[Any]:
    """Values of the field that are valid and not what it is."""
    part = LEAVES[path]
    if path in OTHER:
        return [] if OTHER[path] is None else [OTHER[path]]
    if part.get("type") == "boolean":
        return [not (part.get("default", False) if now is None else now)]
    if "enum" in part:
        return [choice for choice in part["enum"] if choice != (now or part.get("default"))]
    assert part.get("type") == "integer", f"{path}: name another value of it in OTHER"
    number = now if now is not None else part.get("default", part["minimum"] + 4096)
    return [number + 1 if number + 1 <= part.get("maximum", number + 1) else number - 1]


def at(manifest: Manifest, path: str) -> Any:
    node: Any = manifest["spec"]
    for step in path.split("."):
        node = (node or {}).get(step)
    return node


def changed(manifest: Manifest, path: str, value: Any) -> Manifest:
    patch: Any = value
    for step in reversed(path.split(".")):
        patch = {step: patch}
    return {**manifest, "spec": merge(manifest["spec"], patch)}


def not_built(manifest: Manifest) -> set[str]:
    return {problem.field for problem in api.unsupported(api.parse(manifest), "cluster")}


def seen_by_pods(manifest: Manifest) -> tuple[Any, str]:
    parsed = api.parse(manifest)
    assert isinstance(parsed, api.InferenceServer)
    (deployment,) = (one for one in server.children(parsed, SETTINGS) if one["kind"] == "Deployment")
    return deployment["spec"]["template"], revisions.spec_digest(parsed)


@pytest.mark.parametrize("path", LEAVES)
def test_a_field_changes_the_digest_if_and_only_if_it_changes_the_pods(path):
    tried, built, pods_change, digest_changes = 0, True, False, False
    for base in BASES.values():
        template, digest = seen_by_pods(base)
        lacking = not_built(base)
        for value in others(path, at(base, path)):
            manifest = changed(base, path, value)
            try:
                template_then, digest_then = seen_by_pods(manifest)
            except api.SpecError:
                continue
            tried += 1
            built = built and not_built(manifest) <= lacking
            if template_then != template:
                assert digest_then != digest, f"{path}: {value} changes pods"
            pods_change |= template_then != template
            digest_changes |= digest_then != digest
    assert tried or OTHER.get(path, 0) is None, f"no valid other value of {path}"
    if built:
        assert pods_change == digest_changes
    else:
        assert digest_changes, "it will change pods once it is built"


def test_a_claim_that_grows_restarts_nothing():
    before, after = (seen_by_pods(changed(EVERYTHING, "cache.size", size)) for size in ("200Gi", "300Gi"))
    assert before == after


class NewerRuntime(Runtime):
    tomorrow: bool = False
    choice: tuple[str, ...] = ("auto",)


class NewerSpec(InferenceServerSpec):
    runtime: NewerRuntime = NewerRuntime()
    ahead: Drain = Drain()


@pytest.mark.parametrize("base", BASES)
def test_a_schema_with_further_fields_that_have_defaults_says_the_same_of_the_same_spec(base):
    today = api.parse(BASES[base])
    assert isinstance(today, api.InferenceServer)

    def newer(**more: Any) -> str:
        text = json.dumps(merge(BASES[base]["spec"], more))
        spec = NewerSpec.model_validate_json(text, by_alias=True, by_name=False)
        return revisions.spec_digest(api.InferenceServer(today.metadata, spec))

    assert newer() == newer(runtime={"tomorrow": False}) == revisions.spec_digest(today)
    assert newer(runtime={"tomorrow": True}) != revisions.spec_digest(today)


def test_the_digest_of_a_spec_is_the_same_in_every_release():
    """Another digest here restarts every server at the next upgrade."""
    assert {name: seen_by_pods(manifest)[1] for name, manifest in SERVERS.items()} == {
        "server-minimal": "0ac2b1adf1",
        "server-everything": "b0c7844d55",
        "server-catalog-no-cache": "a1bb5b01a9",
    }
