"""GET /v1/models and one of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.admission import admit
from banyan_runtime.front.answers import to_json
from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import unknown_model


def _card(context: Context, name: str) -> dict[str, Any]:
    """One model, as OpenAI's clients read it and as Anthropic's do."""
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "object": "model",
        "created": context.created,
        "owned_by": "banyan",
        "root": context.config.model_path,
        "parent": None,
        "max_model_len": context.client.info.max_model_len,
    }


async def list_models(context: Context, request: Request) -> Response:
    """Clients poll this at start-up, so it answers 503 until the server can generate."""
    admit(context)
    cards = [_card(context, name) for name in context.config.names]
    page = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return Response(to_json({"object": "list", "data": cards, **page}), media_type="application/json")


async def one_model(context: Context, request: Request) -> Response:
    admit(context)
    name = request.path_params["name"]
    if name == "default":  # as in requests
        name = context.config.names[0]
    if not context.config.serves(name):
        raise unknown_model(name, context.config.names)
    return Response(to_json(_card(context, name)), media_type="application/json")
