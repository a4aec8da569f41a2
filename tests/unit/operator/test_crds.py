"""The CRDs: they are what the models say, and the API server's rules judge as Python's do."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import celpy
import jsonschema
import pytest
import yaml

from banyan_operator import api
from banyan_operator.api import crds
from banyan_operator.api.validation import Problem
from tests.support.paths import ROOT
from tests.unit.operator.conftest import a_batch, a_server, an_own_server_batch
from tests.unit.operator.test_api import BAD_BATCHES, BAD_CHANGES, BAD_SERVERS

GOOD = [
    a_server(),
    a_server(accelerator={"count": 1, "minMemoryMiB": 40000}, runtime={"tensorParallelSize": 1, "args": ["--page-size=16"]}),
    a_server(cache={"type": "PersistentVolumeClaim", "size": "10Gi"}, rollout={"maxSurge": 0, "maxUnavailable": "25%"}),
    a_server(rollout={"strategy": "Recreate", "maxSurge": 0}, resources={"limits": {"cpu": 2, "memory": "4Gi"}}),
    a_server(cache={"type": "PersistentVolumeClaim", "claimName": "other", "accessMode": "ReadWriteMany"}, replicas=3),
    a_server(model={"uri": "catalog://smollm2-135m", "servedNames": ["a"]}, rollout={"refresh": "2026-11"}),
    a_server(runtime={"kvCache": {"pageSize": 16}}, metrics={"serviceMonitor": {"enabled": True, "interval": "1m"}}),
    a_server(networkPolicy={"enabled": True, "from": [{"podSelector": {}}], "egress": [{"ports": [{"port": 3128}]}]}),
    a_server(runtime={"env": [{"name": "A", "value": "b"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}),
    a_batch(),
    a_batch(apiKeySecretRef={"name": "k"}, s3={"endpoint": "http://s3:9000", "forcePathStyle": True}),
    an_own_server_batch(input={"uri": "s3://abc/in/"}, output={"uri": "s3://abc/out/"}, workers=4),
    a_batch(input={"uri": None, "failedOf": "s3://abc/before/"}, output={"uri": "s3://abc/out/", "allowUnfenced": True}),
]
BAD = [
    *(a_server(**spec) for spec, *_ in BAD_SERVERS),
    *(a_batch(**spec) for spec, *_ in BAD_BATCHES),
    an_own_server_batch(apiKeySecretRef={"name": "k"}),
    a_server("x--pods"),
    a_server(model={"huggingFace": {}}),
    a_server(resources={"requests": {"x.com/y": 1}}),
]
IN_PYTHON_ALONE = {
    "spec.resources.requests.memory",
    "spec.runtime.chunkedPrefillTokens",
    "spec.model.served_names",
    "spec.replica",
    "spec.autoscaling",
    "spec.model.servedNames",
    "spec.runtime.env",
}
"""Fields of which no CRD can say what is wrong above, or of which the API server judges by other means (strict field names, list types)."""


@functools.cache
def schema(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = crds.generate(api.KINDS[kind])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def nodes(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from nodes(part, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


def defaulted(schema: Mapping[str, Any], value: Any) -> Any:
    """As the API server fills in defaults."""
    if isinstance(value, dict):
        found = dict(value)
        for name, part in schema.get("properties", {}).items():
            if name not in found and "default" in part:
                found[name] = part["default"]
            if name in found:
                found[name] = defaulted(part, found[name])
        return found
    if isinstance(value, list):
        return [defaulted(schema.get("items", {}), item) for item in value]
    return value


@functools.cache
def program(rule: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def broken_rules(schema: Mapping[str, Any], value: Any, old: Any = None) -> Iterator[str]:
    """Messages of the CEL rules that a value breaks, evaluated as the API server does: transition rules on updates only."""
    for rule in schema.get("x-kubernetes-validations", ()):
        text = rule["rule"]
        if "oldSelf" in text and old is None:
            continue
        names = {"self": celpy.json_to_cel(value)} | ({"oldSelf": celpy.json_to_cel(old)} if old is not None else {})
        if not program(text).evaluate(names):
            yield rule["message"]
    if isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            if name in value:
                yield from broken_rules(part, value[name], (old or {}).get(name))
    elif isinstance(value, list):
        for item in value:
            yield from broken_rules(schema.get("items", {}), item)


def server_side(manifest: dict[str, Any]) -> list[str]:
    """What an API server would say to a manifest: the schema's errors, or else the broken rules."""
    of_kind = schema(manifest["kind"])
    filled = defaulted(of_kind, manifest)
    errors = [error.message for error in jsonschema.Draft202012Validator(of_kind).iter_errors(filled)]
    return errors or list(broken_rules(of_kind, filled))


def python_side(manifest: dict[str, Any]) -> tuple[Problem, ...]:
    try:
        api.parse(manifest)
    except api.SpecError as error:
        return error.problems
    return ()


def field_of(message: str) -> str:
    """Of a rule on updates."""
    return message.partition(" ")[0]


def test_the_files_in_crds_are_what_the_models_say():
    for name, text in crds.manifests().items():
        assert (ROOT / "crds" / name).read_text() == text, "run 'make crds'"


@pytest.mark.parametrize("manifest", GOOD, ids=lambda manifest: str(manifest["spec"])[:60])
def test_both_sides_accept_a_good_manifest(manifest):
    assert server_side(manifest) == []
    assert python_side(manifest) == ()


@pytest.mark.parametrize("manifest", BAD, ids=lambda manifest: str(manifest["spec"])[:60])
def test_both_sides_refuse_a_bad_manifest_for_the_same_reason(manifest):
    problems = python_side(manifest)
    assert problems
    if any(problem.field in IN_PYTHON_ALONE for problem in problems):
        return
    said = "; ".join(map(str, problems))
    by_server = server_side(manifest)
    assert by_server
    declared = {rule["message"] for _, node in nodes(schema(manifest["kind"])) for rule in node.get("x-kubernetes-validations", ())}
    assert all(message in said for message in by_server if message in declared)


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize("field", BAD_CHANGES)
def test_the_rules_on_updates_judge_as_python_does(field):
    of_kind = schema("BatchJob")
    old, new = (defaulted(of_kind, manifest) for manifest in (a_batch(), a_batch(**{field: BAD_CHANGES[field]})))
    assert [field_of(message) for message in broken_rules(of_kind, new, old)] == [f"spec.{field}"]
    assert list(broken_rules(of_kind, old, old)) == []


def test_every_rule_is_broken_by_some_case_above():
    told = {message for manifest in BAD for message in server_side(manifest)}
    changed = {f"spec.{field}" for field in (*BAD_CHANGES, "cancel", "server")}  # the last two below
    declared = {
        rule["message"] for kind in api.KINDS for _, node in nodes(schema(kind)) for rule in node.get("x-kubernetes-validations", ())
    }
    assert {message for message in declared - told if field_of(message) not in {*changed, "metadata.name"}} == set()


def test_cancel_workers_and_own_server_rules_on_updates():
    of_kind = schema("BatchJob")
    cancelled, running = (defaulted(of_kind, a_batch(cancel=value)) for value in (True, False))
    assert [field_of(message) for message in broken_rules(of_kind, running, cancelled)] == ["spec.cancel"]
    one, two = (defaulted(of_kind, an_own_server_batch(server={"model": {"uri": f"pvc://models/{name}"}})) for name in "ab")
    assert [field_of(message) for message in broken_rules(of_kind, two, one)] == ["spec.server"]
    assert python_update(two, one) == ["spec.server"]
    one, two = (defaulted(of_kind, a_batch(output={"uri": "s3://out/x/"}, workers=workers)) for workers in (1, 2))
    assert list(broken_rules(of_kind, two, one)) == []


def python_update(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    with pytest.raises(api.SpecError) as caught:
        api.check_update(api.parse(new), api.parse(old))
    return [problem.field for problem in caught.value.problems]


def test_every_field_of_a_batch_is_fixed_or_known_to_be_carried_out_on_a_running_one():
    spec = schema("BatchJob")["properties"]["spec"]
    changes = [rule for rule in spec["x-kubernetes-validations"] if "oldSelf" in rule["rule"]]
    fixed = {field_of(rule["message"]).removeprefix("spec.") for rule in changes} - {"cancel"}  # which can be set, and not unset
    assert spec["properties"].keys() - fixed == {
        "workers",
        "suspend",
        "cancel",
        "deadlineSeconds",
        "ttlSecondsAfterFinished",
        "metrics",
        "networkPolicy",
    }


def test_a_default_that_a_rule_looks_at_spells_out_its_values():
    """The API server refuses a CRD whose rule fails on a bare default."""
    for kind in api.KINDS:
        for path, node in nodes(schema(kind)):
            if "default" in node and isinstance(node["default"], dict):
                assert list(broken_rules(node, node["default"])) == [], path
                assert defaulted(node, node["default"]) == node["default"], path


def test_every_string_list_and_map_of_the_spec_is_bounded():
    """Unbounded ones make the API server's estimate of a rule's cost infinite."""
    limits = {"string": "maxLength", "array": "maxItems"}
    for kind in api.KINDS:
        for path, node in nodes(schema(kind)["properties"]["spec"]):
            bounded = node.get("type") not in limits or "enum" in node or limits[node["type"]] in node
            assert bounded, path
            assert not isinstance(node.get("additionalProperties"), dict) or "maxProperties" in node, path


def test_columns_read_fields_that_the_status_has():
    for kind in api.KINDS.values():
        known = {path for path, _ in nodes(schema(kind.kind))}
        for column in kind.columns:
            plain = column.path.partition("[?")[0]
            assert plain in known or plain.startswith(".metadata"), column.name


def test_the_generated_yaml_holds_no_anchors():
    for text in crds.manifests().values():
        assert not any(token for token in yaml.scan(text) if isinstance(token, yaml.AnchorToken | yaml.AliasToken))
