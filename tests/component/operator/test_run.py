"""The operator as a process, against an API server that misbehaves: how it begins, how it ends, and that the next goes on."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import kopf
import pytest
import yaml
from aiohttp import web
from kubernetes.aio import client as kube

from banyan_operator import operator as page
from banyan_operator.cluster import leader
from banyan_operator.cluster.connection import Connection
from banyan_operator.cluster.deadman import Deadman
from banyan_operator.cluster.manager import Manager
from banyan_operator.cluster.metrics import Metrics
from banyan_operator.cluster.options import parse
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVER
from tests.support.kube.controllers import ReadyAtOnce
from tests.support.kube.http import ApiServer, Call, refusal, serving

LEASE = kinds.LEASE.path("kube-system", "banyan-operator")
SERVER = {
    "apiVersion": "serving.banyan.dev/v1alpha1",
    "kind": "InferenceServer",
    "metadata": {"name": "smollm2", "namespace": "team"},
    "spec": {"model": {"uri": "catalog://smollm2-135m"}, "replicas": 1},
}
PATIENCE_S = 60.0


@dataclass
class Operator:
    process: asyncio.subprocess.Process
    server: ApiServer
    port: int
    log: Path

    async def page(self, path: str) -> tuple[int, str]:
        """Status 0: nobody listens."""
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.port}{path}") as answer:
                return answer.status, await answer.text()
        except aiohttp.ClientError:
            return 0, ""

    async def comes_to(self, path: str, code: int, *words: str) -> None:
        """The page answers with this code and names these."""
        answer = 0, ""
        for _ in range(int(PATIENCE_S / 0.05)):
            assert self.process.returncode is None, f"the operator has ended: {self.said()}"
            answer = await self.page(path)
            if answer[0] == code and all(word in answer[1] for word in words):
                return
            await asyncio.sleep(0.05)
        pytest.fail(f"{answer} instead of {code} with {words}")

    async def until(self, what: Callable[[], bool], why: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not what():
                    assert self.process.returncode is None, f"the operator has ended: {self.said()}"
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"{why}\n{self.said()}")

    async def leads(self) -> None:
        await self.until(lambda: bool(self.holder()), "it does not lead")

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()

    def holder(self) -> str:
        return str((self.server.objects.get(LEASE, {}).get("spec") or {}).get("holderIdentity") or "")

    def said(self) -> str:
        return self.log.read_text()


@asynccontextmanager
async def operator(
    tmp_path: Path, server: ApiServer, *args: str, user: dict[str, Any] | None = None, code: str = ""
) -> AsyncIterator[Operator]:
    """A process that runs the operator against `server`, after `code`."""
    async with serving(server) as url:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": user or {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = tmp_path / "log"
        program = f"import sys\n{code}\nfrom banyan_operator.cluster.app import main\nsys.exit(main(sys.argv[1:]))"
        words = [sys.executable, "-c", program, "--runtime-image", "i", "--port", str(port), *args]
        with log.open("w") as out:
            env = {**os.environ, "KUBECONFIG": str(tmp_path / "config"), "TICKER": str(tmp_path / "ticker")}
            process = await asyncio.create_subprocess_exec(*words, stderr=out, stdout=out, env=env)
        try:
            yield Operator(process, server, port, log)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def nothing_of_kopf_is_written(server: ApiServer) -> None:
    """No annotation, no finalizer, and of resources nothing but the status."""
    written = [call for call in server.calls if call.method != "GET"]
    assert written
    assert not [call for call in written if "kopf" in json.dumps(call.body) or "finalizers" in json.dumps(call.body)]
    of_resources = {call.path for call in written if "inferenceservers" in call.path}
    assert of_resources == {INFERENCE_SERVER.path("team", "smollm2", "status")}


def test_a_signal_ends_it_cleanly_with_the_lease_given_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ApiServer()
        server.store(INFERENCE_SERVER.path("team", "smollm2"), SERVER)
        async with operator(tmp_path, server) as found:
            await found.leads()
            await found.until(lambda: DEPLOYMENT.path("team", "smollm2") in server.objects, "it does not work")
            assert await found.page("/livez") == (200, "ok")
            assert await found.page("/readyz") == (200, "ok")
            found.process.send_signal(signal.SIGTERM)
            assert await found.ended() == 0, found.said()
            assert found.holder() == ""
            assert "Traceback" not in found.said()
        nothing_of_kopf_is_written(server)

    asyncio.run(scenario())


@pytest.mark.long  # watches the clock: on a busy machine the end of Python alone takes seconds
def test_its_end_waits_for_no_task_of_kopf(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ApiServer()
        server.store(INFERENCE_SERVER.path("team", "smollm2"), SERVER)
        async with operator(tmp_path, server) as found:
            await found.until(lambda: DEPLOYMENT.path("team", "smollm2") in server.objects, "it does not work")
            began = time.monotonic()
            found.process.send_signal(signal.SIGTERM)
            assert await found.ended() == 0, found.said()
            assert time.monotonic() - began < 4.5  # what kopf gives a task that does not end

    asyncio.run(scenario())


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("how", ["all", "one", "withdrawn"])
def test_what_ends_a_watch_ends_the_process_and_the_next_one_goes_on(tmp_path: Path, how: str) -> None:
    """An error in each watch, in one alone, or one whose CRD was deleted: pods come and go meanwhile, and the lease is given back. The
    next operator waits for the CRD, and says so."""
    labels = {"app.kubernetes.io/managed-by": "banyan-operator", "serving.banyan.dev/server": "smollm2"}

    async def scenario() -> None:
        server = ApiServer()
        server.store(INFERENCE_SERVER.path("team", "smollm2"), SERVER)

        async def busy() -> None:
            for number in range(1000):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p{number}", "labels": labels}, "spec": {}}
                server.store(kinds.POD.path("team", f"p{number}"), pod)
                await asyncio.sleep(0.2)

        async with operator(tmp_path, server) as found:
            await found.until(lambda: DEPLOYMENT.path("team", "smollm2") in server.objects, "it does not work")
            watches = lambda: [call.path for call in server.calls if call.watches]
            await found.until(lambda: INFERENCE_SERVER.path(None) in watches(), "it does not watch")
            others = asyncio.create_task(busy())
            if how == "withdrawn":
                server.withdraw(INFERENCE_SERVER)
            else:
                server.interrupt_watches(500, "etcdserver: leader changed", None if how == "all" else INFERENCE_SERVER)
            assert await found.ended() == 1
            assert "ending at once" not in found.said()  # what the dead man says
            others.cancel()
            assert found.holder() == ""
        async with operator(tmp_path, server) as found:
            if how == "withdrawn":
                await found.comes_to("/readyz", 503, "inferenceservers.serving.banyan.dev", "kubectl apply --server-side -f crds/")
                assert await found.page("/livez") == (200, "ok")
                server.withdrawn.clear()
            await found.leads()
            await found.comes_to("/readyz", 200)
            server.store(INFERENCE_SERVER.path("team", "second"), {**SERVER, "metadata": {"name": "second"}})
            await found.until(lambda: DEPLOYMENT.path("team", "second") in server.objects, "it does not work")

    asyncio.run(scenario())


@pytest.mark.long
def test_a_kind_that_kopf_has_not_found_ends_the_process(tmp_path: Path) -> None:
    """A CRD has just been applied: it can be listed, but the pages that say what is served do not have it yet."""

    async def scenario() -> None:
        server = ApiServer(unlisted={INFERENCE_SERVER})
        async with operator(tmp_path, server) as found:
            assert await found.ended() == 1
            assert "UnwatchedError: inferenceservers " in found.said()
            assert found.holder() == ""

    asyncio.run(scenario())


@pytest.mark.long
def test_a_process_whose_port_is_taken_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with operator(tmp_path, ApiServer()) as found:
            with socket.socket() as taken:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(("127.0.0.1", found.port))
                taken.listen()
                assert await found.ended() == 1
                assert os.strerror(errno.EADDRINUSE).lower() in found.said().lower()

    asyncio.run(scenario())


@pytest.mark.long
def test_a_process_that_waits_for_what_it_may_not_list_yet_ends_at_once_when_asked_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ApiServer()
        server.answer = lambda call: refusal(403, "Forbidden", "no") if "pods" in call.path else None
        async with operator(tmp_path, server) as found:
            await found.comes_to("/readyz", 503, "pods")
            found.process.send_signal(signal.SIGTERM)
            assert await found.ended() == 0

    asyncio.run(scenario())


@pytest.mark.long
def test_nothing_of_kopf_is_ever_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ApiServer()
        server.store(INFERENCE_SERVER.path("team", "smollm2"), SERVER)
        async with operator(tmp_path, server) as found:
            await found.until(lambda: DEPLOYMENT.path("team", "smollm2") in server.objects, "it does not work")
            server.store(INFERENCE_SERVER.path("team", "smollm2"), {**SERVER, "spec": {**SERVER["spec"], "replicas": 2}})  # type: ignore[dict-item]
            await found.until(lambda: server.objects[DEPLOYMENT.path("team", "smollm2")]["spec"]["replicas"] == 2, "no change")
            server.remove(INFERENCE_SERVER.path("team", "smollm2"))
            found.process.send_signal(signal.SIGTERM)
            assert await found.ended() == 0
        nothing_of_kopf_is_written(server)

    asyncio.run(scenario())


def test_each_kind_has_one_handler_and_none_returns_a_value_or_is_of_the_sort_that_writes() -> None:
    class Driver:
        def seen(self, kind: kinds.Kind, type_: str | None, manifest: dict[str, Any]) -> str:
            heard.append((kind, manifest["kind"]))
            return "what kopf would patch into the status"

    heard: list[tuple[kinds.Kind, str]] = []
    memo = kopf.Memo(manager=SimpleNamespace(driver=Driver()))
    registry = kopf.get_default_registry()
    handlers = list(registry._watching.get_all_handlers())
    watched = [kind for kind in kinds.WATCHED if not kind.optional]
    for kind in watched:
        resource = kopf.Resource(kind.group, kind.version, kind.plural, kind=kind.kind)
        (handler,) = [one for one in handlers if one.selector is not None and one.selector.check(resource)]
        event = {"type": "ADDED", "object": {"metadata": {"name": "p"}}}
        assert asyncio.run(handler.fn(event=event, resource=resource, memo=memo)) is None  # type: ignore[call-arg, arg-type]
    assert heard == [(kind, kind.kind) for kind in watched]
    assert len(handlers) == len(watched)
    assert not list(registry._changing.get_all_handlers())
    assert not list(registry._spawning.get_all_handlers())
    assert not list(registry._indexing.get_all_handlers())
    selectors = page.settings().watching.label_selectors
    assert {one.plural or one.any_name for one in selectors} == {k.plural for k in kinds.WATCHED if k.role is not kinds.Role.RESOURCE}


GONE_S = leader.GONE_S + 1.5  # the deadman looks four times a second; the machine is shared
BLOCKED = """
import asyncio, os, pathlib, threading, time
from banyan_operator.cluster import driver
async def stuck(self):
    tick = pathlib.Path(os.environ["TICKER"])
    if os.environ["HOW"] == "blocks":
        while True:
            time.sleep(0.05)
            tick.write_text(str(time.time()))
    while True:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            pass
        tick.write_text(str(time.time()))
driver.Driver.work = stuck
"""


@pytest.mark.long  # watches the clock for as long as a lease holds
@pytest.mark.parametrize("how", ["blocks", "swallows"])
def test_without_the_lease_the_process_is_gone_whatever_its_tasks_do(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that never lets go of the event loop, or that takes no cancellation, and an API server that stops answering."""
    monkeypatch.setenv("HOW", how)

    async def scenario() -> None:
        server = ApiServer()
        async with operator(tmp_path, server, "--workers", "1", code=BLOCKED) as found:
            ticker = tmp_path / "ticker"
            await found.until(ticker.exists, "it does not work")
            server.silent = True
            quiet = time.time()
            began = time.monotonic()
            assert await found.ended() == 1
            assert time.monotonic() - began < GONE_S
            if how == "swallows":
                assert ticker.stat().st_mtime - quiet > leader.RENEW_DEADLINE_S - 3  # it did live on

    asyncio.run(scenario())


def test_livez_looks_at_the_age_of_the_lease() -> None:
    async def scenario() -> None:
        options = parse(["--runtime-image", "i"], {})
        manager = Manager(options, Metrics("0"), Deadman(lambda _: None), Connection(kube.Configuration(host="http://127.0.0.1:1")))
        assert manager.trouble() is None
        manager._leases[0]._renewed = time.monotonic() - leader.RENEW_DEADLINE_S - 1
        assert "11 s" in (manager.trouble() or "")
        await manager._api.close()

    asyncio.run(scenario())


def test_a_lease_that_another_has_taken_ends_the_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ApiServer()
        async with operator(tmp_path, server) as found:
            await found.leads()
            live = server.objects[LEASE]
            server.store(LEASE, {**live, "spec": {**live["spec"], "holderIdentity": "another"}})
            began = time.monotonic()
            assert await found.ended() == 1, found.said()
            assert time.monotonic() - began < leader.DURATION_S
            assert found.holder() == "another"
            assert "another" in found.said()

    asyncio.run(scenario())


@pytest.mark.long
def test_a_container_that_is_started_again_in_its_pod_does_not_wait_for_the_lease_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_NAME", "operator-x")
    monkeypatch.setenv("POD_UID", "of-that-pod")

    async def scenario() -> None:
        server = ApiServer()
        async with operator(tmp_path, server) as first:
            await first.leads()
            first.process.kill()
            await first.ended()
            held = first.holder()
        async with operator(tmp_path, server) as second:
            await second.until(lambda: "leading:" in second.said(), "it does not lead")
            assert "standing by" not in second.said()
            assert second.holder() == held

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("ours", ["team,other", ""])
def test_of_an_operator_for_all_and_one_for_some_namespaces_one_leads(tmp_path: Path, ours: str) -> None:
    """Their leases are two; who comes second says who leads, and follows when that one goes."""
    theirs = LEASE if ours else kinds.LEASE.path("team", "banyan-operator")

    async def scenario() -> None:
        server = ApiServer()
        spec = {"holderIdentity": "release-a/pod", "leaseDurationSeconds": 15}
        meta = {"name": "banyan-operator"}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}
        server.store(theirs, lease)
        async with operator(tmp_path, server, "--namespaces", ours) as found:
            await found.until(lambda: "release-a/pod" in found.said(), "it does not say who leads")
            assert await found.page("/readyz") == (200, "ok")
            own = [kinds.LEASE.path(name, "banyan-operator") for name in ("team", "other")] if ours else [LEASE]
            assert not [place for place in own if server.objects.get(place, {}).get("spec", {}).get("holderIdentity")]
            server.store(theirs, {**lease, "spec": {**spec, "holderIdentity": ""}})
            held = lambda: all(server.objects.get(place, {}).get("spec", {}).get("holderIdentity") for place in own)
            await found.until(held, "it does not lead")
            found.process.send_signal(signal.SIGTERM)
            assert await found.ended() == 0
            assert not [place for place in own if server.objects[place]["spec"]["holderIdentity"]]

    asyncio.run(scenario())


@pytest.mark.long
def test_a_namespace_that_is_gone_stops_none_of_the_others_until_it_is_there_again(tmp_path: Path) -> None:
    """The process ends when a namespace comes or goes; the next one looks after those that are there."""
    gone = "/namespaces/other/"
    said = 'pods is forbidden: User "x" cannot list resource "pods" in API group "" in the namespace "other"'
    other = SERVER | {"metadata": SERVER["metadata"] | {"namespace": "other"}}
    code = "import banyan_operator.cluster.namespaces as n\nn.LOOK_S = 0.2"

    async def scenario() -> None:
        server = ApiServer()
        refused = lambda call: refusal(403, "Forbidden", said) if gone in call.path else None
        server.answer = refused
        server.store(INFERENCE_SERVER.path("team", "smollm2"), SERVER)
        server.store(INFERENCE_SERVER.path("other", "smollm2"), other)
        async with operator(tmp_path, server, "--namespaces", "team,other", code=code) as found:
            await found.until(lambda: DEPLOYMENT.path("team", "smollm2") in server.objects, "it does not work")
            assert "namespace other" in found.said()
            assert await found.page("/readyz") == (200, "ok")
            assert "banyan_operator_absent_namespaces 1.0" in (await found.page("/metrics"))[1]
            server.answer = lambda _: None
            assert await found.ended() == 1
        async with operator(tmp_path, server, "--namespaces", "team,other", code=code) as found:
            await found.until(lambda: DEPLOYMENT.path("other", "smollm2") in server.objects, "it does not work there")
            assert "banyan_operator_absent_namespaces 0.0" in (await found.page("/metrics"))[1]
            server.answer = refused
            assert await found.ended() == 1
            assert "namespace other" in found.said()

    asyncio.run(scenario())


@pytest.mark.long
def test_a_namespace_that_takes_no_lease_stops_none_of_the_others(tmp_path: Path) -> None:
    """It is terminating, or was never there and rights are those of the whole cluster: lists are answered."""
    place = kinds.LEASE.path("other")
    said = "unable to create new content in namespace other because it is being terminated"

    async def scenario() -> None:
        server = ApiServer()
        server.answer = lambda call: refusal(403, "Forbidden", said) if call.path == place and call.method == "POST" else None
        server.store(INFERENCE_SERVER.path("team", "smollm2"), SERVER)
        async with operator(tmp_path, server, "--namespaces", "other,team") as found:
            await found.until(lambda: DEPLOYMENT.path("team", "smollm2") in server.objects, "it does not work")
            assert "namespace other" in found.said()
            found.process.send_signal(signal.SIGTERM)
            assert await found.ended() == 0, found.said()

    asyncio.run(scenario())


@pytest.mark.long
def test_who_may_not_see_whether_another_leads_is_not_ready_and_does_not_lead_until_it_may(tmp_path: Path) -> None:
    said = 'leases.coordination.k8s.io is forbidden: User "x" cannot list resource "leases"'

    async def scenario() -> None:
        server = ApiServer()
        everywhere = kinds.LEASE.path(None)
        server.answer = lambda call: refusal(403, "Forbidden", said) if call.path == everywhere else None
        async with operator(tmp_path, server) as found:
            await found.comes_to("/readyz", 503, "leases")
            assert LEASE not in server.objects
            server.answer = lambda _: None
            await found.leads()
            assert await found.page("/readyz") == (200, "ok")

    asyncio.run(scenario())


@pytest.mark.long
def test_the_lease_is_renewed_while_the_winner_still_lists(tmp_path: Path) -> None:
    """The second list, after the lease was won, does not come about: renewals go on beside it."""

    async def scenario() -> None:
        server = ApiServer()

        held = lambda: bool((server.objects.get(LEASE, {}).get("spec") or {}).get("holderIdentity"))
        late = lambda call: held() and not call.watches and "pods" in call.path
        server.answer = lambda call: refusal(500, "InternalError", "later") if late(call) else None
        async with operator(tmp_path, server) as found:
            await found.leads()
            renewals = lambda: sum(call.method == "PUT" and call.path == LEASE for call in server.calls)
            await found.until(lambda: renewals() >= 3, "it is not renewed")
            assert (await found.page("/readyz"))[0] == 503

    asyncio.run(scenario())


@pytest.mark.long
def test_a_kind_that_may_not_be_listed_is_named_by_readyz_and_the_log_until_it_may(tmp_path: Path) -> None:
    said = 'networkpolicies.networking.k8s.io is forbidden: User "x" cannot list resource "networkpolicies"'

    async def scenario() -> None:
        server = ApiServer()
        server.answer = lambda call: refusal(403, "Forbidden", said) if "networkpolicies" in call.path and call.method == "GET" else None
        async with operator(tmp_path, server) as found:
            await found.until(lambda: "networkpolicies" in found.said(), "it is not said")
            await found.comes_to("/readyz", 503, "networkpolicies")
            assert await found.page("/livez") == (200, "ok")
            server.answer = lambda _: None
            await found.leads()
            assert await found.page("/readyz") == (200, "ok")

    asyncio.run(scenario())


def test_what_goes_while_a_watch_is_interrupted_is_noticed_by_the_next_resync(tmp_path: Path) -> None:
    """410 after a gap: kopf lists again and shows what is there, which is nothing. The one Deployment that has gone is made again."""

    async def scenario() -> None:
        server = ApiServer()
        server.store(INFERENCE_SERVER.path("team", "smollm2"), SERVER)
        place = DEPLOYMENT.path("team", "smollm2")
        async with operator(tmp_path, server, "--resync-seconds", "3") as found:
            await found.until(lambda: place in server.objects, "it does not work")
            server.deaf_watches = True
            server.remove(place)
            await asyncio.sleep(0.2)
            server.deaf_watches = False
            server.interrupt_watches(410, "Expired")
            await found.until(lambda: place in server.objects, "it is not made again")
            assert 'banyan_operator_resync_repairs_total{kind="Deployment"}' in (await found.page("/metrics"))[1]

    asyncio.run(scenario())


PLUGIN = """#!{python}
import json, pathlib
count = pathlib.Path("{count}")
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
status = {{"token": f"token-{{number}}"}}
print(json.dumps({{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}}))
"""


@pytest.mark.long
def test_a_login_by_exec_plugin_serves_lists_and_watches_and_is_repeated_when_its_token_is_refused(tmp_path: Path) -> None:
    plugin, count = tmp_path / "plugin", tmp_path / "count"
    plugin.write_text(PLUGIN.format(python=sys.executable, count=count))
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "interactiveMode": "Never"}}
    good = {"token-2"}

    def check(call: Call) -> web.Response | None:
        token = call.headers.get("Authorization", "").partition(" ")[2]
        return None if token in good else refusal(401, "Unauthorized", "Unauthorized")

    async def scenario() -> None:
        server = ApiServer(answer=check)
        code = "from banyan_operator.cluster import connection; connection.RENEW_EVERY_S = 0.5"
        async with operator(tmp_path, server, user=user, code=code) as found:
            await found.leads()
            await found.until(lambda: any(call.watches for call in server.calls), "it does not watch")
            assert count.read_text() == "2"  # one login, and one more for the refused token: for lists and watches together
            await asyncio.sleep(1)  # credentials that were fresh just now are not worth another login
            good.clear()
            good.add("token-3")
            server.store(INFERENCE_SERVER.path("team", "smollm2"), SERVER)
            await found.until(lambda: DEPLOYMENT.path("team", "smollm2") in server.objects, "it did not log in again")

    asyncio.run(scenario())


@pytest.mark.long
def test_credentials_that_are_refused_for_a_moment_are_tried_again(tmp_path: Path) -> None:
    """There are no others. Kopf alone would take none that it was refused with."""

    async def scenario() -> None:
        server = ApiServer()
        async with operator(tmp_path, server) as found:
            await found.leads()
            await found.until(lambda: any(call.watches for call in server.calls), "it does not watch")
            refused: list[str] = []

            def refuse(call: Call) -> web.Response:
                refused.append(call.path)
                return refusal(401, "Unauthorized", "Unauthorized")

            server.answer = refuse
            server.interrupt_watches(410, "Expired")
            await found.until(lambda: INFERENCE_SERVER.path(None) in refused, "it does not ask")
            server.answer = lambda _: None
            server.store(INFERENCE_SERVER.path("team", "smollm2"), SERVER)
            await found.until(lambda: DEPLOYMENT.path("team", "smollm2") in server.objects, "it does not work")

    asyncio.run(scenario())


@pytest.mark.long  # 18 s of looking on
def test_an_idle_operator_calls_for_nothing_but_its_watches_and_its_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ApiServer()
        ReadyAtOnce(server.kept)
        for number in range(20):
            server.store(INFERENCE_SERVER.path("team", f"s{number}"), {**SERVER, "metadata": {}})
        status = lambda number: server.objects[INFERENCE_SERVER.path("team", f"s{number}")].get("status") or {}
        async with operator(tmp_path, server) as found:
            await found.until(lambda: all(status(number).get("phase") == "Ready" for number in range(20)), "they do not get ready")
            await asyncio.sleep(6)  # what it still has to find out
            server.calls.clear()
            await asyncio.sleep(12)  # what is not settled is looked at every 10 s
            others = [f"{call.method} {call.path}" for call in server.calls if not call.watches and call.path != LEASE]
            assert others == []

    asyncio.run(scenario())
