"""Probes, metrics and load. All but /health_generate answer from what the front knows; none waits for the engine."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from banyan_runtime import __version__, wire
from banyan_runtime.exposition import CONTENT_TYPE
from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import ClientGone
from banyan_runtime.front.ops.probe import GenerationProbe
from banyan_runtime.front.transport import CLIENT_CLOSED, while_connected

RETRY_AFTER: Final = {"Retry-After": "5"}
GIB: Final = 1 << 30


def router(context: Context) -> APIRouter:
    """The routes of this folder over `context`."""
    routes = APIRouter(include_in_schema=False)
    state, client, metrics = context.state, context.client, context.metrics
    probe = GenerationProbe(client)

    async def livez(request: Request) -> Response:
        return Response(status_code=200 if state.alive else 503)

    async def readyz(request: Request) -> Response:
        body = json.dumps(state.payload(time.monotonic() - client.last_heard)).encode()
        return Response(body, 200 if state.ready else 503, {} if state.ready else RETRY_AFTER, "application/json")

    async def health_generate(request: Request) -> Response:
        try:
            return Response(status_code=200 if state.ready and await while_connected(request, probe.generates()) else 503)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)  # for the counters: nobody reads it

    async def metrics_page(request: Request) -> Response:
        return Response(await metrics.render(client.stats), headers={"Content-Type": CONTENT_TYPE})

    async def load_page(request: Request) -> Response:
        return Response(metrics.render_load(client.stats), headers={"Content-Type": CONTENT_TYPE})

    async def loads(request: Request) -> Response:
        if not state.ready or client.stats is None:
            return Response(status_code=503, headers=RETRY_AFTER)
        return Response(json.dumps(_loads(client.info, client.stats)), media_type="application/json")

    for path, endpoint in (
        ("/livez", livez),
        ("/health", livez),
        ("/readyz", readyz),
        ("/ready", readyz),
        ("/health_generate", health_generate),
        ("/metrics", metrics_page),
        ("/metrics/load", load_page),
        ("/v1/loads", loads),
    ):
        routes.add_api_route(path, endpoint, methods=["GET"])
    return routes


def _loads(info: wire.EngineInfo, stats: wire.Stats) -> dict[str, Any]:
    """SGLang's GET /v1/loads, for routers that know it."""
    prompt = stats.prompt_tokens_computed + stats.prompt_tokens_cached
    usage = stats.kv_used / info.max_total_tokens
    load = {
        "dp_rank": 0,
        "timestamp": stats.last_step_unix,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_used_tokens": stats.kv_used,
        "num_total_tokens": stats.kv_used,
        "max_total_num_tokens": info.max_total_tokens,
        "max_running_requests": info.max_running_requests,
        "token_usage": round(usage, 4),
        "gen_throughput": round(stats.gen_throughput, 2),
        "cache_hit_rate": round(stats.prompt_tokens_cached / prompt, 4) if prompt else 0.0,
        "utilization": round(stats.running / info.max_running_requests, 4),
        "memory": {
            "weight_gb": round(info.weights_bytes / GIB, 2),
            "kv_cache_gb": round(info.kv_bytes / GIB, 2),
            "graph_gb": 0.0,
            "token_capacity": info.max_total_tokens,
        },
        "queues": {"waiting": stats.waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    }
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": __version__,
        "accelerator": info.device,
        "num_accelerators": 0 if info.device == "cpu" else 1,
        "loads": [load],
    }
