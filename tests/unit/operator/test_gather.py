from __future__ import annotations

import asyncio
from typing import Any

from banyan_operator import api as resources
from banyan_operator.cluster.gather import FOUND_FOR_S, Gatherer, References
from banyan_operator.cluster.store import Store
from banyan_operator.kube import kinds
from banyan_operator.kube.objects import Key
from tests.support.kube.http import ApiServer, connected
from tests.unit.operator.conftest import resource


def server(name: str, ready: bool = True) -> dict[str, Any]:
    conditions = [{"type": kind, "status": "True" if ready else "False"} for kind in ("Accepted", "Ready")]
    return {
        "apiVersion": "serving.banyan.dev/v1alpha1",
        "kind": "InferenceServer",
        "metadata": {"name": name, "namespace": "team", "uid": name, "generation": 1},
        "spec": {"model": {"uri": "pvc://models/x"}},
        "status": {"conditions": conditions},
    }


def test_what_healthy_resources_refer_to_is_asked_for_once_also_where_they_share_it() -> None:
    async def scenario() -> None:
        api_server, now = ApiServer(), [1000.0]
        api_server.store(
            kinds.CLAIM.path("team", "models"), {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}}
        )
        async with connected(api_server) as api:
            references = References(api, lambda: now[0])

            async def look(resource: dict[str, Any]) -> None:
                assert await references.missing(resource, resources.parse(resource)) == frozenset()

            for _ in range(5):
                for name in ("a", "b", "c"):
                    await look(server(name))
                now[0] += 2 * FOUND_FOR_S
            asked = len(api_server.calls)
            assert asked == 1
            await look(server("d", ready=False))
            await look(server("d", ready=False))
            assert len(api_server.calls) == asked + 1
            now[0] += FOUND_FOR_S  # while it is not well its claim may be why
            await look(server("d", ready=False))
            assert len(api_server.calls) == asked + 2

    asyncio.run(scenario())


def test_how_a_job_ended_that_is_heard_while_the_world_is_gathered_is_part_of_it() -> None:
    """A list may have shown before that the Job is no more, and its watch tells only then that it had ended."""
    spec = {"serverRef": {"name": "s"}, "input": {"uri": "pvc://c/in"}, "output": {"uri": "pvc://c/out/"}}
    batch, store = resource("BatchJob", "b", spec), Store()
    batch["metadata"] |= {"uid": "b", "resourceVersion": "1"}
    store.note(batch)
    owners = [{"kind": "BatchJob", "name": "b", "uid": "b", "controller": True}]
    meta = {"name": "b--plan", "namespace": "team", "uid": "j", "resourceVersion": "2", "ownerReferences": owners}
    gone = {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}

    class Asked:
        async def readyz(self, pod: Any) -> None:
            raise AssertionError

        async def progress(self, pods: Any) -> dict[str, Any]:
            store.note_gone(gone)
            return {}

    async def scenario() -> None:
        api_server = ApiServer()
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "c"}}
        api_server.store(kinds.CLAIM.path("team", "c"), claim)
        async with connected(api_server) as api:
            world = await Gatherer(store, api, Asked()).world(Key("BatchJob", "team", "b"), batch)
            assert [one["metadata"]["name"] for one in world.remains] == ["b--plan"]

    asyncio.run(scenario())
