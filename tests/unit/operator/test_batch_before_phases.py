"""Work that a release before phases began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from banyan_operator.plan import Manifest
from tests.unit.operator.batches import (
    COMPLETE,
    FAILED,
    PROGRESS,
    PUBLISHED,
    SERVING,
    SUSPENDED,
    after,
    condition,
    ended,
    observe,
    planned,
    running,
)
from tests.unit.operator.conftest import a_batch, merge
from tests.unit.operator.test_batch_phases import GONE, ON_S3, SILENT, made

BEFORE = Path(__file__).parent / "golden" / "before-phases"


def alone(**status: Any) -> Manifest:
    """The one Job that does everything."""
    found = next(one for one in yaml.safe_load_all((BEFORE / "batch-serverref-claims.yaml").read_text()) if one["kind"] == "Job")
    return merge(found, {"metadata": {"uid": "uid-work"}}) | {"status": status}


THEN = a_batch(apiKeySecretRef={"name": "key"}, modelName="llama")


def test_work_that_an_earlier_release_began_is_carried_to_its_end_without_plan_or_merge():
    going = observe(THEN, alone(active=1), running(), progress=PROGRESS)
    assert made(going) == {}
    assert (going.status["phase"], going.status["requests"]) == ("Running", "412/1000")
    assert not any(one["type"] in ("Planned", "Fenced") for one in going.status["conditions"])
    publishing = observe(after(going, THEN), alone(active=1), running(), progress=PROGRESS | {"phase": "publishing"})
    assert publishing.status["phase"] == "Merging"
    over = observe(after(going, THEN), alone(**COMPLETE), ended(0, PUBLISHED))
    assert (over.status["phase"], over.status["requestCounts"]) == ("Succeeded", PUBLISHED["requestCounts"])
    assert made(over) == {}
    failed = observe(after(going, THEN), alone(**FAILED), ended(65, {"code": "InputInvalid", "message": "line 7"}))
    assert (failed.status["phase"], condition(failed, "Failed")["reason"], made(failed)) == ("Failed", "InputInvalid", {})


def test_work_that_an_earlier_release_began_is_suspended_resumed_and_cancelled_as_then():
    suspended = merge(THEN, {"spec": {"suspend": True}})
    plan = observe(suspended, alone(active=1), running())
    assert list(made(plan)) == ["work"]
    assert made(plan)["work"]["spec"] == alone()["spec"] | {"suspend": True}
    at_rest = merge(alone(**SUSPENDED), {"spec": {"suspend": True}})
    assert observe(suspended, at_rest).status["phase"] == "Suspended"
    assert made(observe(THEN, at_rest))["work"]["spec"]["suspend"] is False
    cancelled = merge(THEN, {"spec": {"cancel": True}})
    lost = merge(merge(running(), SILENT), GONE)
    waits = observe(cancelled, merge(at_rest, {"status": {"terminating": 1}}), lost)
    assert (waits.status["phase"], made(waits)) == ("Cancelling", {}), "nothing keeps that worker from writing"
    over = observe(cancelled, at_rest)
    assert (over.status["phase"], over.apply) == ("Cancelled", ())
    assert condition(over, "Complete")["reason"] == "Cancelled"


def test_workers_are_not_added_to_work_that_an_earlier_release_began():
    plan = observe(merge(THEN, {"spec": {"workers": 3, **ON_S3}}), alone(active=1), running())
    assert made(plan) == {}


def test_a_server_keeps_its_pods_when_batches_ask_for_them_one_by_one():
    """The headless Service is there since the release before; its name is what workers are given."""
    assert SERVING["metadata"]["name"] == "tiny"
    plan = observe(planned())
    env = made(plan)["work"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "BANYAN_SERVER_URL", "value": "http://tiny--pods.team.svc:8000"} in env
