"""Whether a live object is as we want it, where the API server writes the same in another way."""

from __future__ import annotations

import json

import pytest

from banyan_operator.desired.drift import settled
from banyan_operator.plan import Manifest
from tests.unit.operator.conftest import a_server
from tests.unit.operator.test_desired import CASES, render, workload


def as_stored(manifest: Manifest) -> Manifest:
    """As the API server gives it back: with defaults, canonical quantities, and status."""
    live: Manifest = json.loads(json.dumps(manifest))
    live["metadata"] |= {"uid": "u", "generation": 3, "resourceVersion": "7", "creationTimestamp": "2026-01-01T00:00:00Z"}
    live["status"] = {"replicas": 1}
    if live["kind"] == "Deployment":
        live["spec"]["minReadySeconds"] = 0
        pod = live["spec"]["template"]["spec"]
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.get(name) is False:
                del pod[name]
        pod |= {"dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler"}
        container = pod["containers"][0]
        container["resources"] = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4096Mi"}}
        container["terminationMessagePath"] = "/dev/termination-log"
        container["env"].append({"name": "INJECTED", "value": "by somebody"})
        container["startupProbe"]["httpGet"]["scheme"] = "HTTP"
    return live


def test_defaults_and_foreign_fields_are_no_drift():
    for child in render(CASES["server-minimal"]):
        assert settled(as_stored(child), child)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda live: live["spec"].update(replicas=5),
        lambda live: live["spec"]["template"]["spec"]["containers"][0].update(image="evil"),
        lambda live: live["spec"]["template"]["spec"]["containers"][0]["args"].append("--x"),
        lambda live: live["spec"]["template"]["spec"]["containers"][0]["env"].pop(0),
        lambda live: live["spec"]["template"]["spec"]["volumes"].pop(0),
        lambda live: live["spec"]["template"]["spec"]["securityContext"].update(runAsNonRoot=False),
        lambda live: live["spec"]["template"]["spec"]["containers"][0]["securityContext"].update(privileged=True),
        lambda live: live["spec"]["template"]["spec"].update(hostNetwork=True),
        lambda live: live["metadata"]["labels"].pop("app.kubernetes.io/instance"),
        lambda live: live["metadata"].update(ownerReferences=[]),
        lambda live: live["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"].update(memory="8Gi"),
    ],
)
def test_what_we_own_is_seen_when_it_changes(spoil):
    wanted = workload(render(CASES["server-minimal"]))
    live = as_stored(wanted)
    spoil(live)
    assert not settled(live, wanted)


def test_a_selector_with_a_key_of_somebody_elses_selects_something_else():
    children = render(CASES["server-everything"])
    selectors = 0
    for child in children:
        for path in _maps(child, ("selector", "podSelector", "labelSelector")):
            live = as_stored(child)
            found = live
            for step in path:
                found = found[step]
            found["somebody"] = "else"
            assert not settled(live, child), (child["kind"], path)
            selectors += 1
    assert selectors >= 4


def _maps(part, names, path=()):
    """Where maps of these names lie."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        if key in names and isinstance(value, dict):
            yield (*path, key)
        yield from _maps(value, names, (*path, key))


def test_a_field_that_is_no_longer_wanted_is_seen_by_the_hash():
    live = as_stored(workload(render(a_server(runtime={"env": [{"name": "A", "value": "b"}]}))))
    assert not settled(live, workload(render(a_server())))


def test_only_amounts_are_compared_by_what_they_mean():
    """A variable of 1000 is not one of 1k, and no hash is a number, though it may look like one."""
    for names, alike in ((("limits", "cpu"), True), (("requests", "memory"), True), (("emptyDir", "sizeLimit"), True),
                         (("env", "value"), False), (("annotations", "serving.banyan.dev/spec-hash"), False)):  # fmt: skip
        live, wanted = ({"kind": "Deployment", "spec": {names[0]: {names[1]: text}}} for text in ("1k", "1000"))
        assert settled(live, wanted) == alike, names


@pytest.mark.parametrize(
    ("written", "kept"), [(0.5, "500m"), (2.0, "2"), ("100u", "1m"), ("1.0005", "1001m"), ("1.00001Gi", "1073752561419m")]
)
def test_amounts_are_as_the_api_server_keeps_them(written, kept):
    """Unquoted numbers among them, and what it rounds up to thousandths."""
    live, wanted = ({"kind": "Deployment", "spec": {"limits": {"cpu": text}}} for text in (kept, written))
    assert settled(live, wanted)
    assert not settled(live, {"kind": "Deployment", "spec": {"limits": {"cpu": "3"}}})
