"""Pods as real processes: in which order they start and end, and when they are started again."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from banyan_operator.local import pod as pods
from banyan_operator.local.accelerators import Accelerators
from banyan_operator.local.pod import Machine, Pod
from banyan_operator.local.ports import Ports
from banyan_operator.local.volumes import Volumes

NOTE = "import sys, time; log = open({log!r}, 'a', buffering=1)\n"
STAYS = NOTE + "import signal\nprint('{name} starts', file=log)\ndef end(*_): print('{name} ends', file=log); sys.exit(0)\n"
STAYS += "signal.signal(signal.SIGTERM, end)\ntime.sleep(600)"
LOADS = """
import http.server, os
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503), self.end_headers(), self.wfile.write(b'{{"state": "loading"}}')
http.server.HTTPServer(("127.0.0.1", int(os.environ["BANYAN_PORT"])), Answer).handle_request()
"""
ENDS = NOTE + "print('{name} runs', file=log); sys.exit({code})"


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "events"
        self.said: list[str] = []
        self.secrets: dict[str, Any] = {}

    def container(self, name: str, text: str, code: int = 0, **spec: Any) -> dict[str, Any]:
        return {"name": name, "command": [sys.executable, "-c", text.format(log=str(self.log), name=name, code=code)], **spec}

    def events(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def machine(self, http: aiohttp.ClientSession, devices: tuple[str, ...]) -> Machine:
        volumes = Volumes(self.folder / "state", self.folder / "cache", {}, lambda: [])
        find = lambda key: self.secrets.get(key.name)
        return Machine(volumes, Accelerators(devices), Ports(), http, self.folder / "logs", find, self.said.append, lambda: None)

    def run(self, spec: dict[str, Any], until: Callable[[Pod], bool] = lambda pod: pod.over, devices: tuple[str, ...] = ()) -> Pod:
        """Run a pod until that comes true, then stop it."""

        async def life() -> Pod:
            async with aiohttp.ClientSession() as http:
                pod = Pod("p-", "default", {"metadata": {}, "spec": spec}, self.machine(http, devices))
                task = asyncio.create_task(pod.run())
                async with asyncio.timeout(30):
                    while not until(pod):  # noqa: ASYNC110 (a test's own question)
                        await asyncio.sleep(0.02)
                    pod.stop()
                    await task
                return pod

        return asyncio.run(life())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(pods, "FIRST_BACKOFF_S", 0.1)
    monkeypatch.setattr(pods, "RETRY_S", 0.1)
    return Bench(tmp_path)


def test_init_containers_run_before_and_sidecars_around_the_rest(bench: Bench) -> None:
    init = [bench.container("first", ENDS), bench.container("side", STAYS, restartPolicy="Always")]
    waits = NOTE + "while 'side starts' not in open({log!r}).read(): time.sleep(0.02)\n" + ENDS
    spec = {"initContainers": init, "containers": [bench.container("main", waits)], "restartPolicy": "Never"}
    pod = bench.run(spec, lambda pod: pod.over and "side ends" in bench.events())
    assert bench.events() == ["first runs", "side starts", "main runs", "side ends"]
    assert (pod.phase, pod.observed().containers[0].ended is not None) == ("Succeeded", True)
    assert not (bench.folder / "state" / "pods").exists() or not list((bench.folder / "state" / "pods").iterdir())


@pytest.mark.parametrize(
    ("policy", "code", "again"), [("Always", 0, True), ("Never", 1, False), ("OnFailure", 1, True), ("OnFailure", 0, False)]
)
def test_what_ends_is_started_again_as_its_policy_says(bench: Bench, policy: str, code: int, again: bool) -> None:
    spec = {"containers": [bench.container("main", ENDS, code)], "restartPolicy": policy}
    pod = bench.run(spec, lambda pod: pod.over or len(bench.events()) >= 3)
    assert (len(bench.events()) >= 3) == again
    if again:
        assert pod.observed().containers[0].restarts >= 2
    else:
        assert pod.phase == ("Failed" if code else "Succeeded")


def test_a_pod_waits_for_an_accelerator_and_a_container_for_its_secret(bench: Bench) -> None:
    limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    waiting = bench.run({"containers": [bench.container("main", ENDS, **limits)]}, lambda pod: pod.observed().unschedulable is not None)
    assert (waiting.failed, bench.events()) == (True, [])
    env = [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "k"}}}]
    spec = {"containers": [bench.container("main", ENDS, env=env, **limits)], "restartPolicy": "Never"}

    def until(pod: Pod) -> bool:
        if pod.observed().containers[0].waiting == "CreateContainerConfigError":
            bench.secrets["keys"] = {"k": b"v"}
        return pod.over

    assert bench.run(spec, until, devices=("7",)).phase == "Succeeded"
    assert any('secret "keys" not found' in line for line in bench.said)


def test_a_pod_that_waits_has_the_accelerator_as_soon_as_another_ends(bench: Bench) -> None:
    """Else a batch would be taken for one that waits in vain, when the one before it has ended."""
    spec = {"containers": [bench.container("main", ENDS, resources={"limits": {"nvidia.com/gpu": "1"}})], "restartPolicy": "Never"}

    async def story() -> None:
        async with aiohttp.ClientSession() as http:
            machine = bench.machine(http, ("7",))
            first, second = (Pod(name, "default", {"metadata": {}, "spec": spec}, machine) for name in ("a-", "b-"))
            tasks = [asyncio.create_task(one.run()) for one in (first, second)]
            await tasks[0]
            await asyncio.sleep(0)
            assert second.observed().unschedulable is None
            await tasks[1]

    asyncio.run(story())
    assert bench.events() == ["main runs"] * 2


@pytest.mark.parametrize("env", [[{"name": "X", "value": "hush\0"}], [{"name": "A=B", "value": "hush"}]])
def test_what_no_process_can_be_given_is_told_and_its_value_is_not(bench: Bench, env: list[dict[str, str]]) -> None:
    spec = {"containers": [bench.container("main", ENDS, env=env)]}
    bench.run(spec, lambda pod: pod.observed().containers[0].waiting == "CreateContainerConfigError")
    assert "container main" in bench.said[0]
    assert "hush" not in "".join(bench.said)


def test_what_a_server_said_of_its_loading_is_forgotten_when_it_ends(bench: Bench) -> None:
    heard: list[Any] = []

    def until(pod: Pod) -> bool:
        heard.append(pod.readyz)
        return pod.over

    probe = {"startupProbe": {"httpGet": {"path": "/readyz", "port": 30000}, "failureThreshold": 100}}
    server = bench.container("server", LOADS, env=[{"name": "BANYAN_PORT", "value": "30000"}], **probe)
    pod = bench.run({"containers": [server], "restartPolicy": "Never"}, until)
    assert {"state": "loading"} in heard
    assert pod.readyz is None
