from __future__ import annotations

import asyncio
from typing import Any

from banyan_operator.cluster.recorder import AGGREGATE_S, BURST, Recorder
from banyan_operator.plan import Event
from tests.support.kube.http import ApiServer, connected

SERVER = {
    "apiVersion": "serving.banyan.dev/v1alpha1",
    "kind": "InferenceServer",
    "metadata": {"name": "smollm2", "namespace": "team", "uid": "u1"},
}
READY = Event("Normal", "Ready", "1/1 replicas are ready")


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def run(scenario: Any) -> ApiServer:
    async def go() -> ApiServer:
        server, clock = ApiServer(), Clock()
        async with connected(server) as api:
            await scenario(server, clock, lambda: Recorder(api, clock))
        return server

    return asyncio.run(go())


def counts(server: ApiServer) -> list[int]:
    return [found["count"] for found in server.objects.values()]


def test_a_repeat_raises_the_count_also_after_a_restart() -> None:
    async def scenario(server: ApiServer, clock: Clock, make: Any) -> None:
        recorder = make()
        await recorder.post(SERVER, READY)
        clock.now += 5
        await recorder.post(SERVER, READY)
        await make().post(SERVER, READY)  # an operator that knows of neither

    server = run(scenario)
    assert counts(server) == [3]
    (event,) = server.objects.values()
    assert event["involvedObject"]["name"] == "smollm2"
    assert (event["type"], event["reason"], event["message"]) == ("Normal", "Ready", "1/1 replicas are ready")
    assert event["firstTimestamp"] < event["lastTimestamp"]


def test_another_message_is_another_event() -> None:
    async def scenario(server: ApiServer, clock: Clock, make: Any) -> None:
        recorder = make()
        await recorder.post(SERVER, READY)
        await recorder.post(SERVER, Event("Normal", "Ready", "2/2 replicas are ready"))

    assert counts(run(scenario)) == [1, 1]


def test_a_flood_of_events_of_one_resource_is_cut() -> None:
    async def scenario(server: ApiServer, clock: Clock, make: Any) -> None:
        recorder = make()
        for number in range(50):
            await recorder.post(SERVER, Event("Warning", "CrashLoop", f"crash {number}"))
        clock.now += AGGREGATE_S
        await recorder.post(SERVER, READY)

    assert len(run(scenario).objects) == BURST + 1


def test_a_long_message_is_cut_at_a_whole_character() -> None:
    async def scenario(server: ApiServer, clock: Clock, make: Any) -> None:
        await make().post(SERVER, Event("Warning", "CrashLoop", "ü" * 2000))

    (event,) = run(scenario).objects.values()
    assert len(event["message"].encode()) <= 1024
    assert event["message"].endswith("ü...")
