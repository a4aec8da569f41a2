from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from banyan_operator.cluster import app
from banyan_operator.cluster.health import BEAT_LIMIT_S, Health
from banyan_operator.cluster.mergepatch import merge_patch
from banyan_operator.cluster.metrics import Metrics, QueueCollector, StoreCollector
from banyan_operator.cluster.podclient import newest
from banyan_operator.cluster.queue import WorkQueue
from banyan_operator.cluster.repairs import LIMIT, Repairs
from banyan_operator.cluster.store import Store

VALUES = st.recursive(st.integers() | st.text(max_size=3) | st.booleans(), lambda inner: st.lists(inner, max_size=3), max_leaves=4)
OBJECTS: Any = st.recursive(
    st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner | VALUES),
    max_leaves=8,
)


def patched(target: Any, patch: Any) -> Any:
    """RFC 7386, as the API server does it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = patched(result.get(name), value)
    return result


@given(OBJECTS, OBJECTS)
def test_a_merge_patch_makes_the_new_of_the_old_and_is_empty_for_equals(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert patched(old, merge_patch(old, new)) == new
    assert merge_patch(new, json.loads(json.dumps(new))) == {}


def test_repairs_are_slowed_once_there_are_too_many_and_forgotten_in_time() -> None:
    repairs, place = Repairs(), ("Deployment", "team", "smollm2")
    for second in range(LIMIT):
        repairs.note(place, second)
    assert repairs.wait_s(place, 5) == 0
    repairs.note(place, 5)
    assert repairs.wait_s(place, 6) == pytest.approx(59)
    assert repairs.wait_s(place, 65) == 0
    assert repairs.wait_s(place, 1000) == 0


def pod(name: str, made: str, running: str = "server", **meta: Any) -> dict[str, Any]:
    status = {"podIP": "10.0.0.1", "containerStatuses": [{"name": running, "state": {"running": {}}}]}
    return {"kind": "Pod", "metadata": {"name": name, "uid": name, "creationTimestamp": made, **meta}, "status": status}


def test_the_newest_pod_that_can_be_asked_is_asked() -> None:
    pods = [
        pod("old", "2026-01-01T00:00:00Z"),
        pod("new", "2026-01-01T00:00:05Z"),
        pod("leaving", "2026-01-01T00:00:07Z", deletionTimestamp="2026-01-01T00:01:00Z"),
        pod("other", "2026-01-01T00:00:09Z", running="worker"),
    ]
    found = newest(pods, "server")
    assert found is not None
    assert found["metadata"]["name"] == "new"
    assert newest([], "server") is None


def test_every_series_is_declared_and_a_resource_brings_its_own() -> None:
    metrics, store, queue = Metrics("1.2.3"), Store(), WorkQueue(lambda: 0.0)
    metrics.registry.register(StoreCollector(store))
    metrics.registry.register(QueueCollector(queue))
    status = {
        "replicas": 2, "readyReplicas": 1, "desiredReplicas": 2, "updatedReplicas": 2, "conditions": [{"type": "Ready", "status": "False"}],
    }  # fmt: skip
    resource = {"kind": "InferenceServer", "metadata": {"name": "smollm2", "namespace": "team", "uid": "u"}, "status": status}
    store.put(resource)
    job = {"phase": "Running", "requestCounts": {"total": 9, "completed": 4, "failed": 1}}
    store.put({"kind": "BatchJob", "metadata": {"name": "nightly", "namespace": "team", "uid": "j"}, "status": job})
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    assert {
        "controller_runtime_reconcile",
        "controller_runtime_reconcile_errors",
        "controller_runtime_reconcile_time_seconds",
        "workqueue_depth",
        "workqueue_adds",
        "banyan_operator_build_info",
        "banyan_operator_leader",
        "banyan_operator_watch_restarts",
        "banyan_inferenceserver_replicas",
        "banyan_batchjob_lines",
    } <= families.keys()
    replicas = {sample.labels["state"]: sample.value for sample in families["banyan_inferenceserver_replicas"].samples}
    assert replicas == {"desired": 2, "current": 2, "ready": 1, "updated": 2}
    ready = {s.labels["status"]: s.value for s in families["banyan_inferenceserver_status_condition"].samples}
    assert ready == {"True": 0, "False": 1, "Unknown": 0}
    assert {s.labels["state"]: s.value for s in families["banyan_batchjob_lines"].samples} == {"total": 9, "completed": 4, "failed": 1}
    store.remove(resource)
    assert 'name="smollm2"' not in metrics.render().decode()


def test_livez_fails_when_a_leaders_workers_are_silent_and_readyz_until_all_is_listed() -> None:
    async def scenario() -> list[tuple[int, str]]:
        beat = [0.0]
        health = Health(Metrics("0"), lambda: beat[0])
        port = await health.start("127.0.0.1", 0)

        def ask(path: str) -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as page:
                    return page.status, page.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        answers = [await asyncio.to_thread(ask, "/livez"), await asyncio.to_thread(ask, "/readyz")]
        health.leading = health.synced = True
        beat[0] = -2 * BEAT_LIMIT_S
        answers += [await asyncio.to_thread(ask, "/livez"), await asyncio.to_thread(ask, "/readyz")]
        await health.stop()
        return answers

    standby, listing, silent, listed = asyncio.run(scenario())
    assert standby == (200, "ok")
    assert listing == (503, "not synced yet")
    assert silent[0] == 503
    assert "no worker gave a sign of life" in silent[1]
    assert listed == (200, "ok")


def test_options_come_from_flags_and_environment() -> None:
    options = app.parse(["--workers", "3"], {"BANYAN_RUNTIME_IMAGE": "i:1", "BANYAN_NAMESPACES": "a, b", "BANYAN_WORKERS": "5"})
    assert (options.runtime_image, options.namespaces, options.workers, options.host) == ("i:1", ("a", "b"), 3, "127.0.0.1")


@pytest.mark.parametrize("argv", [[], ["--runtime-image", "i", "--workers", "0"], ["--runtime-image", "i", "--no-such-flag"]])
def test_bad_options_end_with_code_64(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        app.parse(argv, {})
    assert stop.value.code == 64
    assert "--" in capsys.readouterr().err
