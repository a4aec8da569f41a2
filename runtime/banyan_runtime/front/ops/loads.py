"""GET /v1/loads and /load: how busy this server is, for routers that know SGLang's or vLLM's answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime import __version__, wire
from banyan_runtime.exposition import CONTENT_TYPE
from banyan_runtime.front.admission import admit
from banyan_runtime.front.answers import to_json
from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import invalid, unavailable

GIB: Final = 1 << 30
SECTIONS: Final = ("core", "memory", "spec", "lora", "disagg", "queues", "all")  # spec, lora and disagg are always empty here
QUERY: Final = ("dp_rank", "include", "format")


async def loads(context: Context, request: Request) -> Response:
    """SGLang's load report: `include=` sections of it, `format=` json or prometheus."""
    sections = _sections(request.query_params.get("include", "all"))
    form = request.query_params.get("format", "json")
    if form not in ("json", "prometheus"):
        raise invalid("format", "format must be json or prometheus.")
    if request.query_params.get("dp_rank", "0") != "0":
        raise invalid("dp_rank", "dp_rank must be 0: this server is one rank.")
    admit(context)
    info, stats = context.client.info, context.client.stats
    if stats is None:
        raise unavailable("The engine has not told its load yet.")
    load = _load(info, stats, sections)
    if form == "prometheus":
        return Response("".join(_lines(load)), headers={"Content-Type": CONTENT_TYPE})
    body = {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": __version__,
        "accelerator": info.device,
        "num_accelerators": 0 if info.device == "cpu" else 1,
        "loads": [load],
    }
    return Response(to_json(body), media_type="application/json")


async def load(context: Context, request: Request) -> Response:
    """vLLM's load report: how many sequences are open."""
    admit(context)
    sequences = context.client.open_requests
    if context.sequences_elsewhere is not None:
        sequences += await context.sequences_elsewhere()
    return Response(to_json({"server_load": sequences}), media_type="application/json")


def _sections(include: str) -> frozenset[str]:
    """Raises ApiError for a section that there is not."""
    asked = {name.strip() for name in include.split(",")}
    unknown = sorted(asked.difference(SECTIONS))
    if unknown:
        raise invalid("include", f"include has no section '{unknown[0][:50]}'; there are {', '.join(SECTIONS)}.")
    return frozenset(SECTIONS) if "all" in asked else frozenset(asked)


def _load(info: wire.EngineInfo, stats: wire.Stats, sections: frozenset[str]) -> dict[str, Any]:
    load: dict[str, Any] = {"dp_rank": 0, "timestamp": stats.last_step_unix}
    if "core" in sections:
        prompt = stats.prompt_tokens_computed + stats.prompt_tokens_cached
        load |= {
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "num_waiting_uncached_tokens": stats.queued_tokens,
            "num_used_tokens": stats.kv_used,
            "num_total_tokens": stats.kv_used + stats.queued_tokens,
            "num_active_tokens": stats.kv_used,
            "max_total_num_tokens": info.max_total_tokens,
            "max_running_requests": info.max_running_requests,
            "token_usage": round(stats.kv_used / info.max_total_tokens, 4),
            "gen_throughput": round(stats.gen_throughput, 2),
            "cache_hit_rate": round(stats.prompt_tokens_cached / prompt, 4) if prompt else 0.0,
            "utilization": round(stats.running / info.max_running_requests, 4),
            "total_prefill_uncached_tokens": stats.prompt_tokens_computed,
            "total_prefill_busy_us": round(stats.prefill.seconds.sum * 1e6),
        }
    if "memory" in sections:
        load["memory"] = {
            "weight_gb": round(info.weights_bytes / GIB, 2),
            "kv_cache_gb": round(info.kv_bytes / GIB, 2),
            "graph_gb": round(info.graph_bytes / GIB, 2),
            "token_capacity": info.max_total_tokens,
        }
    if "queues" in sections:
        load["queues"] = {"waiting": stats.waiting, "grammar": stats.held, "paused": 0, "retracted": stats.retracted, "prealloc_ready": 0}
    return load


def _lines(load: Mapping[str, Any]) -> Iterator[str]:
    """The numbers as SGLang's gauges."""
    for name, value in load.items():
        for part, number in value.items() if isinstance(value, dict) else [("", value)]:
            series = f"sglang_{name}_{part}" if part else f"sglang_{name}"
            if name != "dp_rank":
                yield f'# TYPE {series} gauge\n{series}{{dp_rank="0"}} {number}\n'
