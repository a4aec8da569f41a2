from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import banyan_operator.cluster
from banyan_operator.cluster import podclient
from banyan_operator.cluster.apply import LIMIT, Repairs
from banyan_operator.cluster.client import ApiError
from banyan_operator.cluster.health import Health
from banyan_operator.cluster.metrics import Metrics, QueueCollector, StoreCollector
from banyan_operator.cluster.options import parse
from banyan_operator.cluster.podclient import AT_ONCE, PROGRESS_EVERY_S, TIMEOUT_S, Pods, newest
from banyan_operator.cluster.queue import WorkQueue
from banyan_operator.cluster.report import Reporter, merge_patch
from banyan_operator.cluster.store import Store
from banyan_operator.kube.addresses import PROGRESS_PORT, SERVER_PORT, in_url
from banyan_operator.kube.objects import Key
from banyan_operator.plan import Report

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
    repairs, place = Repairs(), Key("Deployment", "team", "smollm2")
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


def owned(kind: str, uid: str, by: str) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": uid, "uid": uid, "ownerReferences": [{"uid": by, "controller": True}]}}


def test_the_newest_pod_that_can_be_asked_is_asked() -> None:
    server = {"kind": "InferenceServer", "metadata": {"name": "s", "uid": "s"}}
    children = [owned("Deployment", "d", "s"), owned("ReplicaSet", "rs", "d"), owned("ReplicaSet", "theirs", "another")]
    ours = {"ownerReferences": [{"uid": "rs", "controller": True}]}
    pods = [
        pod("old", "2026-01-01T00:00:00Z", **ours),
        pod("new", "2026-01-01T00:00:05Z", **ours),
        pod("leaving", "2026-01-01T00:00:07Z", deletionTimestamp="2026-01-01T00:01:00Z", **ours),
        pod("other", "2026-01-01T00:00:09Z", running="worker", **ours),
        pod("labelled alone", "2026-01-01T00:00:10Z"),
        pod("another's", "2026-01-01T00:00:11Z", ownerReferences=[{"uid": "theirs", "controller": True}]),
    ]
    found = newest(server, [*children, *pods], "server")
    assert found is not None
    assert found["metadata"]["name"] == "new"
    assert newest(server, children, "server") is None
    job = {"kind": "BatchJob", "metadata": {"name": "b", "uid": "b"}}
    worker = pod("worker", "2026-01-01T00:00:00Z", running="worker", ownerReferences=[{"uid": "j", "controller": True}])
    assert newest(job, [worker, owned("Job", "j", "b")], "worker") == worker


def test_every_series_is_declared_and_a_resource_brings_its_own() -> None:
    metrics, store, queue = Metrics("1.2.3"), Store(), WorkQueue(lambda: 0.0)
    metrics.registry.register(StoreCollector(store))
    metrics.registry.register(QueueCollector(queue))
    status = {
        "replicas": 2, "readyReplicas": 1, "desiredReplicas": 2, "updatedReplicas": 2, "conditions": [{"type": "Ready", "status": "False"}],
    }  # fmt: skip
    resource = {"kind": "InferenceServer", "metadata": {"name": "smollm2", "namespace": "team", "uid": "u"}, "status": status}
    store.note(resource)
    job = {"phase": "Running", "requestCounts": {"total": 9, "completed": 4, "failed": 1}}
    store.note({"kind": "BatchJob", "metadata": {"name": "nightly", "namespace": "team", "uid": "j"}, "status": job})
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    assert {
        "controller_runtime_reconcile",
        "controller_runtime_reconcile_errors",
        "controller_runtime_reconcile_time_seconds",
        "workqueue_depth",
        "workqueue_adds",
        "banyan_operator_build_info",
        "banyan_operator_leader",
        "banyan_inferenceserver_replicas",
        "banyan_batchjob_lines",
    } <= families.keys()
    replicas = {sample.labels["state"]: sample.value for sample in families["banyan_inferenceserver_replicas"].samples}
    assert replicas == {"desired": 2, "current": 2, "ready": 1, "updated": 2}
    ready = {s.labels["status"]: s.value for s in families["banyan_inferenceserver_status_condition"].samples}
    assert ready == {"True": 0, "False": 1, "Unknown": 0}
    assert {s.labels["state"]: s.value for s in families["banyan_batchjob_lines"].samples} == {"total": 9, "completed": 4, "failed": 1}
    store.note_gone(resource)
    assert 'name="smollm2"' not in metrics.render().decode()


def test_how_many_lines_were_completed_is_no_0_where_it_was_never_heard() -> None:
    metrics, store = Metrics("0"), Store()
    metrics.registry.register(StoreCollector(store))
    for name, counts in (("lost", {"total": 9}), ("new", {})):
        job = {"phase": "Succeeded", "requestCounts": counts}
        store.note({"kind": "BatchJob", "metadata": {"name": name, "namespace": "team", "uid": name}, "status": job})
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    told = [(one.labels["name"], one.labels["state"], one.value) for one in families["banyan_batchjob_lines"].samples]
    assert sorted(told) == [("lost", "total", 9), ("new", "completed", 0), ("new", "failed", 0), ("new", "total", 0)]


def test_livez_tells_what_is_wrong_and_readyz_what_is_waited_for() -> None:
    async def scenario() -> list[tuple[int, str]]:
        said: dict[str, str | None] = {"trouble": None, "unready": "what is waited for"}
        health = Health(Metrics("0"), lambda: said["trouble"], lambda: said["unready"])
        port = await health.start("127.0.0.1", 0)

        def ask(path: str) -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as page:
                    return page.status, page.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        answers = [await asyncio.to_thread(ask, "/livez"), await asyncio.to_thread(ask, "/readyz")]
        said |= {"trouble": "what is wrong", "unready": None}
        answers += [await asyncio.to_thread(ask, "/livez"), await asyncio.to_thread(ask, "/readyz")]
        await health.stop()
        return answers

    assert asyncio.run(scenario()) == [
        (200, "ok"),
        (503, "what is waited for"),
        (503, "what is wrong"),
        (200, "ok"),
    ]


IPV6 = {"KUBERNETES_SERVICE_HOST": "fd00:10:96::1"}
IPV4 = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.mark.parametrize(
    ("env", "host", "listen"),
    [
        ({}, "127.0.0.1", "0.0.0.0"),  # beside a cluster
        (IPV4, "0.0.0.0", "0.0.0.0"),
        (IPV6, "::", "::"),
        (IPV6 | {"BANYAN_HOST": "127.0.0.1"}, "127.0.0.1", "::"),
        ({"BANYAN_HOST": "::1"}, "::1", "0.0.0.0"),
    ],
)
def test_the_operator_and_its_pods_listen_where_the_cluster_reaches_them(env: dict[str, str], host: str, listen: str) -> None:
    options = parse(["--runtime-image=x"], env)
    assert (options.host, options.listen) == (host, listen)


@pytest.mark.parametrize(
    ("host", "written"), [("::", "[::]"), ("::1", "[::1]"), ("[::1]", "[::1]"), ("0.0.0.0", "0.0.0.0"), ("a.b", "a.b")]
)
def test_an_address_of_ipv6_stands_in_brackets_in_a_url(host: str, written: str) -> None:
    assert in_url(host) == written


def test_the_operator_answers_on_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")

    async def scenario(host: str) -> str:
        health = Health(Metrics("0"), lambda: None, lambda: None)
        try:
            port = await health.start(host, 0)
        except OSError as error:
            pytest.skip(f"this machine has no IPv6: {error}")
        try:
            page = await asyncio.to_thread(urllib.request.urlopen, f"http://{in_url('::1')}:{port}/livez", timeout=5)
            return str(page.read().decode())
        finally:
            await health.stop()

    assert asyncio.run(scenario("::1")) == "ok"
    assert asyncio.run(scenario(parse(["--runtime-image=x"], IPV6).host)) == "ok"


def test_a_pod_that_does_not_answer_costs_no_worker_its_time_and_one_that_does_brings_news() -> None:
    async def scenario() -> None:
        news: list[str] = []
        told = asyncio.Event()

        def hear(pod: dict[str, Any]) -> None:
            news.append(pod["metadata"]["name"])
            told.set()

        pods = Pods(hear)
        hole = pod("hole", "2026-01-01T00:00:00Z")
        hole["status"]["podIP"] = "127.0.0.2"
        with socket.socket() as silent:  # takes the connection, and says nothing
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            silent.bind(("127.0.0.2", SERVER_PORT))
            silent.listen()
            began = time.monotonic()
            assert await pods.readyz(hole) is None
            assert time.monotonic() - began < TIMEOUT_S
        app = web.Application()

        async def progress(_: web.Request) -> web.Response:
            return web.json_response({"completed": 4, "pad": "x" * 20_000})

        app.router.add_get("/progress", progress)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", PROGRESS_PORT).start()
        worker = pod("worker", "2026-01-01T00:00:00Z", running="worker")
        worker["status"]["podIP"] = "127.0.0.1"
        assert await pods.progress([worker]) == {}  # not yet
        await told.wait()
        assert news == ["worker"]
        assert (await pods.progress([worker]))["worker"]["completed"] == 4
        await pods.close()
        await runner.cleanup()

    asyncio.run(scenario())


def test_options_come_from_flags_and_environment() -> None:
    options = parse(["--workers", "3"], {"BANYAN_RUNTIME_IMAGE": "i:1", "BANYAN_NAMESPACES": "a, b", "BANYAN_WORKERS": "5"})
    assert (options.runtime_image, options.namespaces, options.workers, options.host) == ("i:1", ("a", "b"), 3, "127.0.0.1")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--runtime-image", "i", "--workers", "0"],
        ["--runtime-image", "i", "--no-such-flag"],
        ["--runtime-image", "i", "--lease-namespace", ""],
    ],
)
def test_bad_options_end_with_code_64(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(argv, {})
    assert stop.value.code == 64
    assert "--" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "env", "said"),
    [
        ([], {"BANYAN_LOG_LEVEL": "foo"}, "BANYAN_LOG_LEVEL=foo"),
        ([], {"BANYAN_IMAGE_PULL_POLICY": "never"}, "BANYAN_IMAGE_PULL_POLICY=never"),
        ([], {"BANYAN_PORT": "abc"}, "BANYAN_PORT=abc"),
        ([], {"BANYAN_RESYNC_SECONDS": "nan"}, "BANYAN_RESYNC_SECONDS=nan"),
        (["--port", "99999"], {}, "--port: '99999'"),
        (["--probe-port", "-1"], {"BANYAN_PROBE_PORT": "1"}, "--probe-port: '-1'"),
    ],
)
def test_a_bad_value_is_named_with_where_it_came_from(
    argv: list[str], env: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--runtime-image", "i", *argv], env)
    assert stop.value.code == 64
    assert said in capsys.readouterr().err


def test_a_flag_wins_over_a_variable_that_makes_no_sense() -> None:
    assert parse(["--runtime-image", "i", "--port", "1"], {"BANYAN_PORT": "abc"}).port == 1


@pytest.mark.matrix(gate=1)  # a process each
@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "hello",
        "[1",
        "{apiVersion: v1, kind: Config, contexts: [], clusters: []}",
        "{current-context: x, contexts: [], clusters: []}",
    ],
)
def test_without_a_cluster_it_says_what_to_set_and_ends_with_code_64(tmp_path: Path, content: str | None) -> None:
    config = tmp_path / "config"
    if content is not None:
        config.write_text(content)
    program = "import sys; from banyan_operator.cli import main; sys.exit(main(['run', '--runtime-image', 'i']))"
    env = {**os.environ, "KUBECONFIG": str(config)}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 64, ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "KUBECONFIG" in ended.stderr


def test_of_two_operators_for_the_same_namespaces_the_lease_is_one_wherever_they_are_installed() -> None:
    def leases(namespace: str, watched: str) -> tuple[str, ...]:
        return parse(["--runtime-image", "i", "--namespace", namespace, "--namespaces", watched], {}).leases

    assert leases("first", "") == leases("second", "") == ("kube-system",)
    assert leases("first", "b,a") == leases("second", "a, b") == ("a", "b")
    assert set(leases("first", "a,b")) & set(leases("second", "b,c")) == {"b"}


def test_nothing_waits_with_what_can_swallow_a_cancellation() -> None:
    """asyncio.wait_for of Python 3.11 does when what it waits for ends in the same moment."""
    cluster = Path(banyan_operator.cluster.__file__).parent
    found = [path.name for path in cluster.glob("*.py") if re.search(r"\bwait_for\(", path.read_text())]
    assert found == []


def test_all_workers_of_a_batch_are_asked_in_one_round_so_many_at_a_time_and_are_one_piece_of_news() -> None:
    workers = [pod(f"worker-{number}", "2026-01-01T00:00:00Z", running="worker") for number in range(200)]
    for number, worker in enumerate(workers):
        worker["metadata"] |= {"uid": f"uid-{number}", "ownerReferences": [{"uid": "job", "controller": True}]}

    async def scenario() -> None:
        now, news, asking, most, rounds = [1000.0], list[str](), 0, 0, 0
        told = asyncio.Event()

        def hear(one: dict[str, Any]) -> None:
            news.append(one["metadata"]["name"])
            told.set()

        pods = Pods(hear, lambda: now[0])

        async def fetch(one: dict[str, Any], port: int, path: str) -> dict[str, Any] | None:
            nonlocal asking, most, rounds
            asking, rounds = asking + 1, rounds + 1
            most = max(most, asking)
            await asyncio.sleep(0)
            asking -= 1
            return None if one["metadata"]["name"] == "worker-7" else {"completed": now[0]}

        pods._fetch = fetch  # type: ignore[method-assign]
        assert await pods.progress(workers) == {}
        assert await pods.progress(workers) == {}, "they are being asked"
        await told.wait()
        found = await pods.progress(workers)
        assert len(found) == 199
        assert (len(news), rounds, most) == (1, 200, AT_ONCE)
        now[0] += PROGRESS_EVERY_S - 1
        await pods.progress(workers)
        await asyncio.sleep(0)
        assert rounds == 200, "so young an answer is not asked for again"
        now[0] += 1
        told.clear()
        await pods.progress(workers)
        await told.wait()
        assert (len(news), rounds) == (2, 400)
        await pods.close()

    asyncio.run(scenario())


def test_what_more_workers_say_than_are_remembered_is_not_asked_for_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer would push out another one, and each round would be news: rounds without end."""
    monkeypatch.setattr(podclient, "REMEMBER", 10)
    workers = [pod(f"worker-{number}", "2026-01-01T00:00:00Z", running="worker") for number in range(20)]
    for number, worker in enumerate(workers):
        worker["metadata"] |= {"uid": f"uid-{number}", "ownerReferences": [{"uid": "job", "controller": True}]}

    async def scenario() -> None:
        now, told, asked = [1000.0], asyncio.Event(), list[str]()
        pods = Pods(lambda _: told.set(), lambda: now[0])

        async def fetch(one: dict[str, Any], port: int, path: str) -> dict[str, Any]:
            asked.append(one["metadata"]["uid"])
            return {"completed": now[0]}

        pods._fetch = fetch  # type: ignore[method-assign]
        await pods.progress(workers)
        await told.wait()
        assert len(await pods.progress(workers)) == 20
        await asyncio.sleep(0)
        assert len(asked) == 20
        now[0] += 1000.0
        told.clear()
        await pods.progress(workers[:1])
        await told.wait()
        assert len(await pods.progress(workers)) == 10, "what is old is forgotten"
        await pods.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        b'{"completed": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"completed": ' + b"9" * 10_000 + b"}",
        b'{"pad": "' + b"x" * 10_000_000 + b'"}',
        b"[1]",
        b"\xff\xfe{",
        b"",
    ],
    ids=["nested", "huge number", "10 MB", "a list", "no text", "nothing"],
)
def test_an_answer_that_is_none_spoils_no_other_worker_s(body: bytes) -> None:
    async def scenario() -> None:
        told = asyncio.Event()
        pods = Pods(lambda _: told.set())
        runners = []
        workers = []
        for number, said in enumerate((body, b'{"completed": 4}')):

            async def progress(_: web.Request, said: bytes = said) -> web.Response:
                return web.Response(body=said)

            app = web.Application()
            app.router.add_get("/progress", progress)
            runners.append(web.AppRunner(app))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], f"127.0.0.{number + 3}", PROGRESS_PORT).start()
            workers.append(pod(f"worker-{number}", "2026-01-01T00:00:00Z", running="worker"))
            workers[-1]["metadata"]["uid"] = f"uid-{number}"
            workers[-1]["status"]["podIP"] = f"127.0.0.{number + 3}"
        try:
            await pods.progress(workers)
            async with asyncio.timeout(20):
                await told.wait()
            assert await pods.progress(workers) == {"worker-1": {"completed": 4}}
        finally:
            await pods.close()
            for runner in runners:
                await runner.cleanup()

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [404, 409])
def test_an_answer_that_comes_late_is_not_about_the_object_that_was_made_in_between(status: int) -> None:
    """Deleted and made again under its name: what is gone is not what is there."""

    def one(uid: str, version: str) -> dict[str, Any]:
        meta = {"name": "a", "namespace": "team", "uid": uid, "resourceVersion": version}
        return {"apiVersion": "serving.banyan.dev/v1alpha1", "kind": "InferenceServer", "metadata": meta, "spec": {}}

    store = Store()
    store.note(one("first", "1"))

    class Late:
        async def patch_status(self, *_: Any) -> None:
            store.note_gone(one("first", "2"))
            store.note(one("second", "3"))
            raise ApiError(status, "NotFound" if status == 404 else "Conflict", "a")

        async def get(self, *_: Any) -> None:
            return None

    reporter = Reporter(store, Late(), None, Metrics("test"), lambda _: None)  # type: ignore[arg-type]
    with contextlib.suppress(ApiError):
        asyncio.run(reporter.write(one("first", "1"), Report(status={"phase": "Ready"})))
    found = store.get(Key("InferenceServer", "team", "a"))
    assert found is not None
    assert found["metadata"]["uid"] == "second"
