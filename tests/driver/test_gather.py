from __future__ import annotations

import asyncio
from typing import Any

from banyan_operator import api as resources
from banyan_operator.cluster.gather import FOUND_FOR_S, References
from banyan_operator.kube import kinds
from tests.driver.apiserver import ApiServer, connected


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
