"""The two resources as a user writes them: defaults, refusals, and the fields that refusals name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from banyan_operator import api
from banyan_operator.api.quantity import amount, same
from banyan_operator.api.validation import Problem
from tests.support.paths import ROOT
from tests.unit.operator.conftest import a_batch, a_server, an_own_server_batch


def problems(manifest: dict[str, Any], *, strict: bool = True) -> tuple[Problem, ...]:
    with pytest.raises(api.SpecError) as caught:
        api.parse(manifest, strict=strict)
    return caught.value.problems


def the_problem(manifest: dict[str, Any], *, strict: bool = True) -> Problem:
    (problem,) = problems(manifest, strict=strict)
    return problem


def fields(manifest: dict[str, Any]) -> list[str]:
    return [problem.field for problem in problems(manifest)]


def test_the_smallest_server_gets_every_default():
    server = api.parse(a_server())
    assert isinstance(server, api.InferenceServer)
    assert server.spec.replicas == 1
    assert server.spec.probes.startup_timeout_seconds == 1800
    assert server.spec.rollout.max_surge == 1
    assert server.spec.cache.type == "EmptyDir"
    assert server.served_names == ("tiny",)


def test_null_counts_as_left_out():
    with_null = a_server(runtime={"contextLength": 4096})
    with_null["spec"]["runtime"]["memoryPercent"] = None
    assert api.parse(with_null) == api.parse(a_server(runtime={"contextLength": 4096}))


# --- resources of another version's schema, as an API server gives them ---

DEEP_SERVER = a_server(
    model={"chatTemplate": {"name": "t", "key": "k"}, "s3": None},
    runtime={
        "kvCache": {"maxTokens": 4096},
        "imagePullSecrets": [{"name": "a"}, {"name": "b"}],
        "env": [{"name": "A", "value": "b"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "envFrom": [{"secretRef": {"name": "s"}}, {"configMapRef": {"name": "c"}}],
    },
    scheduling={"tolerations": [{"key": "a"}, {"key": "b"}]},
    ingress={"hosts": ["a.example"]},
    metrics={"podMonitor": {"enabled": True}},
    podTemplate={"metadata": {"labels": {"a": "b"}}},
)
DEEP_BATCH = an_own_server_batch(server={"runtime": {"env": [{"name": "A"}]}}, s3={"caConfigMapRef": {"name": "c"}}, env=[{"name": "A"}])
FREE = ("labels", "annotations", "nodeSelector", "requests", "limits")  # maps, whose keys are the user's


def objects_in(value: Any) -> list[dict[str, Any]]:
    """Every object that the schema describes, at any depth."""
    if isinstance(value, list):
        return [found for item in value for found in objects_in(item)]
    if not isinstance(value, dict):
        return []
    return [value, *(found for key, item in value.items() if key not in FREE for found in objects_in(item))]


@pytest.mark.parametrize("manifest", [DEEP_SERVER, DEEP_BATCH], ids=["server", "batch"])
def test_a_field_of_a_newer_schema_is_ignored_at_every_depth_in_a_cluster(manifest):
    places = len(objects_in(manifest["spec"]))
    assert places > 5
    every = copy.deepcopy(manifest)
    for number in range(places):
        newer = copy.deepcopy(manifest)
        for one in (newer, every):
            objects_in(one["spec"])[number]["fromTomorrow"] = [{"deep": number}]
        assert api.parse(newer, strict=False) == api.parse(manifest)
        assert the_problem(newer).field.endswith(".fromTomorrow")
    assert api.parse(every, strict=False) == api.parse(manifest)


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [
        ({"runtime": {"dtype": "float4"}}, "spec.runtime.dtype", "'float4'"),
        ({"scheduling": {"tolerations": [{"effect": "Later"}]}}, "spec.scheduling.tolerations[0].effect", "'Later'"),
        ({"cache": {"type": "Cloud"}, "fromTomorrow": 1}, "spec.cache.type", "'Cloud'"),
        ({"replicas": "50%", "service": {"fromTomorrow": 1}}, "spec.replicas", "'50%'"),
    ],
)
def test_a_value_of_a_newer_schema_is_named_without_a_word_of_its_new_fields(spec, field, value):
    problem = the_problem(a_server(**spec), strict=False)
    assert problem.field == field
    assert value in problem.message
    assert "fromTomorrow" not in problem.message


BAD_SERVERS: list[tuple[Any, ...]] = [
    ({"model": None}, "spec.model"),
    ({"model": {"uri": "models/tiny"}}, "spec.model.uri"),
    ({"model": {"uri": "x"}}, "spec.model.uri"),
    ({"model": {"uri": "pvc://models/../etc"}}, "spec.model", ".."),
    ({"model": {"s3": {"region": "x"}}}, "spec.model", "model.s3"),
    ({"model": {"servedNames": ["a", "a"]}}, "spec.model.servedNames"),
    ({"model": {"served_names": ["a"]}}, "spec.model.served_names", "servedNames"),
    ({"replicas": -1}, "spec.replicas", "-1"),
    ({"replicas": "3"}, "spec.replicas", "'3'"),
    ({"replicas": 1.5}, "spec.replicas", "1.5"),
    ({"replica": 3}, "spec.replica", "replicas"),
    ({"paused": "yes"}, "spec.paused"),
    ({"runtime": {"dtype": "fp8"}}, "spec.runtime.dtype", "'fp8'", "auto, float32, float16, bfloat16"),
    ({"runtime": {"args": ["--port=1"]}}, "spec.runtime.args", "--port"),
    ({"runtime": {"args": ["--a", "--port", "1"]}}, "spec.runtime.args", "--port"),
    ({"runtime": {"args": ["--dtype=x"]}}, "spec.runtime.args", "--dtype", "runtime.dtype"),
    ({"resources": {"requests": {"cpu": -1}}}, "spec.resources.requests.cpu", "-1"),
    ({"resources": {"limits": {"memory": "-4Gi"}}}, "spec.resources.limits.memory", "'-4Gi'"),
    ({"rollout": {"maxSurge": -1}}, "spec.rollout.maxSurge", "-1"),
    ({"model": {"uri": "s3://Bu_cket/x"}}, "spec.model.uri", "'Bu_cket'"),
    ({"runtime": {"env": [{"name": "BANYAN_PORT", "value": "1"}]}}, "spec.runtime.env[0]"),
    ({"runtime": {"env": [{"name": "A"}, {"name": "A"}]}}, "spec.runtime.env", "A"),
    (
        {"runtime": {"env": [{"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}},
        "spec.runtime.env[0]",
        "value",
        "valueFrom",
    ),
    ({"runtime": {"env": [{"name": "A", "valueFrom": {}}]}}, "spec.runtime.env[0].valueFrom"),
    ({"runtime": {"contextLength": 64}}, "spec.runtime.contextLength", "64", "128"),
    (
        {"runtime": {"chunkedPrefillTokens": 100, "kvCache": {"pageSize": 16}}},
        "spec.runtime.chunkedPrefillTokens",
        "kvCache.pageSize",
        "96",
    ),
    ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "spec.resources", "spec.accelerator"),
    ({"resources": {"limits": {"cpu": 0.5}}}, "spec.resources.limits.cpu", "0.5"),
    ({"resources": {"limits": {"memory": "4 GB"}}}, "spec.resources.limits.memory", "'4 GB'"),
    ({"resources": {"requests": {"memory": "8Gi"}, "limits": {"memory": "4Gi"}}}, "spec.resources.requests.memory", "8Gi", "4Gi"),
    ({"cache": {"type": "PersistentVolumeClaim"}}, "spec.cache", "cache.size"),
    ({"cache": {"claimName": "c"}}, "spec.cache", "PersistentVolumeClaim"),
    ({"cache": {"type": "PersistentVolumeClaim", "claimName": "models"}}, "spec", "cache.claimName"),
    ({"cache": {"type": "PersistentVolumeClaim", "size": "1Gi"}, "replicas": 2}, "spec", "cache.accessMode", "ReadWriteMany"),
    ({"drain": {"terminationGracePeriodSeconds": 5, "preStopSeconds": 5}}, "spec.drain", "preStopSeconds", "terminationGracePeriodSeconds"),
    ({"rollout": {"maxSurge": 0}}, "spec.rollout", "maxSurge", "maxUnavailable"),
    ({"rollout": {"maxSurge": "half"}}, "spec.rollout.maxSurge", "'half'"),
    ({"rollout": {"maxSurge": "1"}}, "spec.rollout.maxSurge", "'1'"),
    ({"rollout": {"maxSurge": "00%", "maxUnavailable": "0%"}}, "spec.rollout", "maxSurge", "maxUnavailable"),
    ({"disruption": {"maxUnavailable": "1"}}, "spec.disruption.maxUnavailable", "'1'"),
    ({"autoscaling": {"maxReplicas": 2}}, "spec.autoscaling"),
    ({"model": {"uri": "oci://registry/model:1"}}, "spec.model.uri"),
    ({"runtime": {"kvCache": {"pageSize": 8}}}, "spec.runtime.kvCache.pageSize", "1, 16, 32, 64"),
    ({"runtime": {"maxQueuedRequests": 0}}, "spec.runtime.maxQueuedRequests"),
    ({"disruption": {"maxUnavailable": 1, "minAvailable": 1}}, "spec.disruption", "maxUnavailable", "minAvailable"),
    ({"metrics": {"podMonitor": {"enabled": True, "interval": "soon"}}}, "spec.metrics.podMonitor.interval", "'soon'"),
    ({"ingress": {"hosts": []}}, "spec.ingress.hosts"),
    ({"security": {"runAsUser": 0}}, "spec.security.runAsUser"),
    ({"accelerator": {"count": 1}, "runtime": {"tensorParallelSize": 2}}, "spec", "tensorParallelSize", "accelerator.count"),
    ({"service": []}, "spec.service"),
]


@pytest.mark.parametrize("case", BAD_SERVERS, ids=lambda case: f"{case[1]}-{case[2:]}")
def test_a_server_that_breaks_the_schema_is_told_where_and_what_to_do(case):
    spec, field, *named = case
    problem = the_problem(a_server(**spec))
    assert problem.field == field
    assert [name for name in named if name not in problem.message] == []


BAD_BATCHES: list[tuple[Any, ...]] = [
    ({"serverRef": None}, "spec", "serverRef", "server"),
    ({"server": {"model": {"uri": "pvc://m/x"}}}, "spec", "serverRef", "server"),
    ({"input": {"uri": "in.jsonl"}}, "spec.input.uri", "'in.jsonl'"),
    ({"input": {"uri": "pvc://batches/../x"}}, "spec.input", ".."),
    ({"output": {"uri": "pvc://batches/out"}}, "spec.output", "/"),
    ({"input": {"uri": "pvc://batches/out/"}}, "spec", "input", "output"),
    ({"input": {"failedOf": "pvc://batches/before/"}}, "spec.input", "input.uri", "input.failedOf"),
    ({"input": {"uri": None}}, "spec.input", "input.uri", "input.failedOf"),
    ({"input": {"uri": None, "failedOf": "pvc://batches/before"}}, "spec.input", "input.failedOf", "/"),
    ({"input": {"uri": None, "failedOf": "pvc://batches/../before/"}}, "spec.input", "failedOf", ".."),
    ({"input": {"uri": None, "failedOf": "pvc://batches/out/"}}, "spec", "input", "output"),
    ({"workers": 2}, "spec", "workers", "s3://"),
    ({"output": {"uri": "file:///out/"}, "workers": 2}, "spec", "workers", "s3://"),
    ({"output": {"uri": "s3://out/x/", "allowUnfenced": True}, "workers": 2}, "spec", "output.allowUnfenced"),
    ({"endpoint": "/v1/chat"}, "spec.endpoint", "/v1/chat/completions"),
    ({"output": {"uri": "s3://out/x/", "resume": "../other"}}, "spec.output.resume", "../other"),
    ({"deadlineSeconds": 5}, "spec.deadlineSeconds", "60"),
    ({"s3": {"endpoint": "http://minio:port"}}, "spec.s3.endpoint"),
    ({"s3": {"endpoint": "http://[::1"}}, "spec.s3.endpoint"),
    ({"s3": {"endpoint": "https://"}}, "spec.s3.endpoint"),
    ({"s3": {"endpoint": "127.0.0.1:20999"}}, "spec.s3.endpoint", "http://", "https://"),
    ({"input": {"uri": "s3://b/x.jsonl"}}, "spec.input.uri", "'b'"),
]


@pytest.mark.parametrize("case", BAD_BATCHES, ids=lambda case: f"{case[1]}-{case[2:]}")
def test_a_batch_that_breaks_the_schema_is_told_where_and_what_to_do(case):
    spec, field, *named = case
    problem = the_problem(a_batch(**spec))
    assert problem.field == field
    assert [name for name in named if name not in problem.message] == []


def test_an_api_key_without_a_server_reference_is_refused():
    problem = the_problem(an_own_server_batch(apiKeySecretRef={"name": "k"}))
    assert problem.field == "spec"
    assert "apiKeySecretRef" in problem.message


def test_several_problems_are_told_at_once():
    several = a_server(replicas=-1, runtime={"dtype": "fp8"}, service={"port": 0})
    assert sorted(fields(several)) == ["spec.replicas", "spec.runtime.dtype", "spec.service.port"]


@pytest.mark.parametrize("name", ["Tiny", "9b", "a_b", "a" * 51, "a-", "a--b"])
def test_a_name_that_no_child_could_carry_is_refused(name):
    assert fields(a_server(name)) == ["metadata.name"]


def test_a_foreign_kind_or_version_is_refused():
    assert fields(a_server() | {"kind": "Pod"}) == ["kind"]
    assert fields(a_server() | {"apiVersion": "v1"}) == ["apiVersion"]


BAD_CHANGES: dict[str, Any] = {
    "input": {"uri": "pvc://batches/other.jsonl"},
    "output": {"overwrite": True},
    "s3": {"region": "x"},
    "serverRef": {"name": "other"},
    "apiKeySecretRef": {"name": "k"},
    "modelName": "m",
    "endpoint": "/v1/completions",
    "sharding": {"targetRequests": 5},
    "maxConcurrency": 8,
    "requestTimeoutSeconds": 5,
    "retries": {"maxAttempts": 2},
    "workerBackoffLimit": 1,
    "maxErrorPercent": 5,
    "priority": 1,
    "resources": {"requests": {"cpu": "1"}},
    "scheduling": {"nodeSelector": {"a": "b"}},
    "image": "x",
    "imagePullSecrets": [{"name": "s"}],
    "env": [{"name": "A", "value": "b"}],
    "serviceAccountName": "sa",
    "security": {"runAsUser": 1000},
    "podTemplate": {"spec": {"hostNetwork": True}},
}


def refused_change(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """The fields that may not change so."""
    with pytest.raises(api.SpecError) as caught:
        api.check_update(api.parse(new), api.parse(old))
    return [problem.field for problem in caught.value.problems]


@pytest.mark.parametrize("field", BAD_CHANGES)
def test_what_is_in_the_pods_of_a_batch_cannot_be_changed(field):
    assert refused_change(a_batch(**{field: BAD_CHANGES[field]}), a_batch()) == [f"spec.{field}"]


def test_a_batch_can_be_cancelled_but_not_uncancelled():
    api.check_update(api.parse(a_batch(cancel=True)), api.parse(a_batch()))
    assert refused_change(a_batch(), a_batch(cancel=True)) == ["spec.cancel"]


def test_what_the_operator_carries_out_on_a_running_batch_can_be_changed():
    on_s3 = {"output": {"uri": "s3://out/x/"}}
    api.check_update(api.parse(a_batch(**on_s3, workers=4)), api.parse(a_batch(**on_s3)))
    changed = a_batch(
        suspend=True,
        deadlineSeconds=60,
        ttlSecondsAfterFinished=5,
        metrics={"podMonitor": {"enabled": True}},
        networkPolicy={"enabled": True},
    )
    api.check_update(api.parse(changed), api.parse(a_batch()))


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {"uri": "file:///models/x"}}, "spec.model.uri"),
        ({"accelerator": {"count": 2}}, "spec.accelerator.count"),
        ({"accelerator": {"count": 2}, "runtime": {"tensorParallelSize": 2}}, "spec.runtime.tensorParallelSize"),
        ({"runtime": {"quantization": "awq"}}, "spec.runtime.quantization"),
        ({"runtime": {"kvCache": {"dtype": "bfloat16"}}}, "spec.runtime.kvCache.dtype"),
    ],
)
def test_what_is_not_built_is_named_never_ignored(spec, field):
    found = api.unsupported(api.parse(a_server(**spec)), "cluster")
    assert [problem.field for problem in found] == [field]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"input": {"uri": None, "failedOf": "file:///out/"}}, "spec.input.failedOf"),
        ({"input": {"uri": "file:///in.jsonl"}}, "spec.input.uri"),
        ({"output": {"uri": "file:///out/"}}, "spec.output.uri"),
    ],
)
def test_what_is_not_built_for_batches_is_named_never_ignored(spec, field):
    found = api.unsupported(api.parse(a_batch(**spec)), "cluster")
    assert [problem.field for problem in found] == [field]


def test_files_of_the_machine_are_for_local_mode():
    server = api.parse(a_server(model={"uri": "file:///models/x"}))
    batch = api.parse(a_batch(input={"uri": "file:///in.jsonl"}, output={"uri": "file:///out/"}))
    assert not api.unsupported(server, "local")
    assert not api.unsupported(batch, "local")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_accepted_as_they_are(path):
    for manifest in yaml.safe_load_all(path.read_text()):
        if manifest["kind"] in api.KINDS:
            parsed = api.parse(manifest)
            assert api.unsupported(parsed, "cluster") == api.unsupported(parsed, "local") == []


def test_quantities_are_compared_by_what_they_mean():
    assert amount("1.5Gi") == 1536 * 2**20
    assert amount("2e3") == amount("2k") == 2000
    assert same("1000m", 1)
    assert same("1Gi", "1024Mi")
    assert not same("1G", "1Gi")
    with pytest.raises(ValueError, match="4 GB"):
        amount("4 GB")


@pytest.mark.parametrize("text", ["1e999999999", "1E-999999999", "71e4730912"])
def test_a_quantity_of_a_billion_digits_keeps_nobody_busy(text):
    """As of a spec, or of an annotation that is compared and happens to look like one."""
    with pytest.raises(ValueError, match=text):
        amount(text)
    assert not same(text, "1")
    asks = {"limits": {"memory": "1Gi"}, "requests": {"memory": text}}
    assert fields(a_server(resources=asks)) == ["spec.resources.requests.memory"]
