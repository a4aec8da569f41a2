"""Resources by hand, for the tests of the operator's decisions."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest
from hypothesis import strategies as st

from banyan_operator import api
from banyan_operator.api import crds
from banyan_operator.plan import Event, Manifest, Outcome, Plan, Report, Settings, World
from banyan_operator.reconcile import decide
from tests.support.kube.apiserver import merged

SETTINGS = Settings(runtime_image="registry.example/banyan-runtime:0.1", operator_version="0.1.0")
LOCAL = Settings(runtime_image="local", operator_version="0.1.0", platform="local")


def anything(*names: str) -> st.SearchStrategy[Any]:
    """JSON as a program that is not ours may write it, NaN and numbers of any size included; keys of objects are often `names`."""
    leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
    keys = st.sampled_from(names) | st.text(max_size=8) if names else st.text(max_size=8)
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=5)


def spoilt(body: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """`body` with anything in the place of some of its values, and some of it left out."""
    values = {name: st.just(value) | anything(*(value if isinstance(value, Mapping) else ())) for name, value in body.items()}
    return st.fixed_dictionaries({}, optional=values)


def merge(base: Any, over: Any) -> Any:
    """`over` merged into a copy of `base`; None removes a key."""
    return copy.deepcopy(merged(base, over))


def resource(kind: str, name: str, spec: dict[str, Any], **metadata: Any) -> Manifest:
    meta = {"name": name, "namespace": "team", "uid": f"uid-of-{name}", "generation": 1} | metadata
    return {"apiVersion": "serving.banyan.dev/v1alpha1", "kind": kind, "metadata": meta, "spec": spec}


def a_server(name: str = "tiny", /, **spec: Any) -> Manifest:
    """An InferenceServer from a claim, with `spec` merged in."""
    base = {"model": {"uri": "pvc://models/tiny-llama"}}
    return resource("InferenceServer", name, merge(base, spec))


def a_batch(name: str = "nightly", /, **spec: Any) -> Manifest:
    """A BatchJob against the server `tiny`, with `spec` merged in."""
    base = {
        "serverRef": {"name": "tiny"},
        "input": {"uri": "pvc://batches/in/prompts.jsonl"},
        "output": {"uri": "pvc://batches/out/"},
    }
    return resource("BatchJob", name, merge(base, spec))


def an_own_server_batch(name: str = "nightly", /, **spec: Any) -> Manifest:
    return a_batch(name, **merge({"serverRef": None, "server": {"model": {"uri": "pvc://models/tiny-llama"}}}, spec))


@functools.cache
def status_schema(kind: str) -> jsonschema.Draft202012Validator:
    """What the API server takes as the status of this kind."""
    schema = crds.generate(api.KINDS[kind])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return jsonschema.Draft202012Validator(schema["properties"]["status"])


@dataclass(frozen=True)
class Turn:
    """One turn of the operator: its plan, and the report on what came of it."""

    kind: str
    plan: Plan
    report: Report

    def __post_init__(self) -> None:
        if self.report.status is not None and self.report.status.get("conditions"):
            status_schema(self.kind).validate(self.report.status)

    @property
    def apply(self) -> tuple[Manifest, ...]:
        return self.plan.apply

    @property
    def delete(self) -> tuple[Manifest, ...]:
        return self.plan.delete

    @property
    def status(self) -> Mapping[str, Any]:
        assert self.report.status is not None, "the status is as it was"
        return self.report.status

    @property
    def events(self) -> tuple[Event, ...]:
        return self.report.events

    @property
    def requeue_after_s(self) -> float | None:
        return self.report.requeue_after_s

    def condition(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = next(one for one in self.status["conditions"] if one["type"] == kind)
        return found


DONE = Outcome()


def turn(manifest: Manifest, world: World, settings: Settings = SETTINGS, outcome: Outcome = DONE) -> Turn:
    decision = decide(manifest, world, settings)
    return Turn(manifest["kind"], decision.plan, decision.report(outcome))


def controlled(child: Manifest, owner: Manifest) -> Manifest:
    """`child` with the owner reference of whom it belongs to."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    return merge(child, {"metadata": {"ownerReferences": [reference]}})


@pytest.fixture
def settings() -> Settings:
    return SETTINGS
