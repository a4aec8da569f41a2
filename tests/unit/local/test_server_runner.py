"""How many replicas are started and stopped, and where requests go."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from banyan_operator.kube.addresses import SERVER_PORT
from banyan_operator.local.ports import Ports
from banyan_operator.local.proxy import Proxy
from banyan_operator.local.server_runner import ServerRunner, next_step, targets


@dataclass(eq=False)
class Replica:
    revision: str
    ready: bool = True
    stopping: bool = False
    port: int = 0

    @property
    def ports(self) -> dict[int, int]:
        return {SERVER_PORT: self.port}


def server(generation: int = 1, **spec: Any) -> dict[str, Any]:
    kind = {"apiVersion": "serving.banyan.dev/v1alpha1", "kind": "InferenceServer"}
    return {**kind, "metadata": {"name": "chat", "namespace": "default", "generation": generation}, "spec": spec}


def replicas(text: str) -> Any:
    """`o` an old one, `n` a new one; in upper case it is ready; `x` one that is stopping."""
    return [Replica("new" if one in "nN" else "old", one.isupper(), one == "x") for one in text]


@pytest.mark.parametrize(
    ("there", "wanted", "start", "stop"),
    [
        ("", 3, 3, ""),
        ("NN", 3, 1, ""),
        ("nN", 1, 0, "n"),
        ("NNN", 1, 0, "NN"),
        ("N", 0, 0, "N"),
        ("OO", 2, 1, ""),
        ("OOn", 2, 0, ""),
        ("OON", 2, 1, "O"),
        ("ONn", 2, 0, ""),
        ("ONN", 2, 0, "O"),
        ("oO", 2, 2, "o"),
        ("xN", 1, 0, ""),
    ],
)
def test_replicas_are_replaced_one_by_one(there: str, wanted: int, start: int, stop: str) -> None:
    step = next_step(replicas(there), "new", wanted, surge=True, recreate=False)
    names = "".join({"new": "n", "old": "o"}[one.revision] for one in step.stop)
    assert (step.start, names) == (start, stop.lower())


@pytest.mark.parametrize(("there", "start", "stop"), [("OO", 1, 1), ("On", 0, 0), ("ON", 1, 1), ("NN", 0, 0)])
def test_without_room_for_another_an_old_one_goes_first(there: str, start: int, stop: int) -> None:
    step = next_step(replicas(there), "new", 2, surge=False, recreate=False)
    assert (step.start, len(step.stop)) == (start, stop)


@pytest.mark.parametrize(("there", "start", "stop"), [("OO", 0, 2), ("xx", 0, 0), ("", 2, 0)])
def test_recreate_lets_all_old_ones_end_before_new_ones_come(there: str, start: int, stop: int) -> None:
    step = next_step(replicas(there), "new", 2, surge=False, recreate=True)
    assert (step.start, len(step.stop)) == (start, stop)


def test_every_rollout_ends_with_as_many_new_replicas_as_are_wanted_and_never_serves_with_fewer() -> None:
    there = replicas("OOO")
    for _ in range(20):
        step = next_step(there, "new", 3, surge=True, recreate=False)
        there = [one for one in there if one not in step.stop] + [Replica("new", ready=False) for _ in range(step.start)]
        assert 3 <= len(there) <= 4
        assert sum(one.ready for one in there) >= 3 - len(step.stop)
        for one in there:
            one.ready = True
    assert [one.revision for one in there] == ["new"] * 3


def test_requests_go_to_the_replicas_that_are_ready() -> None:
    known: Any = [Replica("a", port=1), Replica("a", ready=False, port=2), Replica("b", port=3)]
    assert targets(known) == [1, 3]


def test_a_server_that_goes_and_comes_back_has_its_url_again() -> None:
    ports = Ports()
    machine: Any = SimpleNamespace(ports=ports, find=lambda key: None)

    async def url() -> str:
        runner = ServerRunner(server(model={"uri": "pvc://models/x"}), machine, Proxy("chat", ports.listen("chat")))
        await runner.proxy.start()
        await runner.close()
        return runner.proxy.url

    assert asyncio.run(url()) == asyncio.run(url())


def test_a_server_that_does_not_come_up_within_its_deadline_has_failed() -> None:
    """Else `--until-done` would wait for it for ever."""
    machine: Any = SimpleNamespace(find=lambda key: None)
    spec = {"model": {"uri": "pvc://models/x"}, "rollout": {"progressDeadlineSeconds": 60}}
    proxy: Any = SimpleNamespace(url="http://127.0.0.1:20001")
    runner = ServerRunner(server(**spec), machine, proxy)
    assert [runner._status({}, now)["phase"] for now in (1000.0, 1059.0, 1060.0)] == ["Pending", "Pending", "Failed"]
    runner.update(server(2, **spec))
    assert runner._status({}, 1061.0)["phase"] == "Pending"
