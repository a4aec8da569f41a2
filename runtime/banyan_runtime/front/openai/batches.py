"""`/v1/batches`: as with files, the answer is the batch host's."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.context import Context
from banyan_runtime.front.relay import relay

CREATE: Final = {
    "application/json": {
        "schema": {
            "type": "object",
            "required": ["input_file_id", "endpoint", "completion_window"],
            "properties": {
                "input_file_id": {"type": "string"},
                "endpoint": {"type": "string"},
                "completion_window": {"type": "string"},
                "metadata": {"type": ["object", "null"], "additionalProperties": {"type": "string"}},
            },
        }
    }
}


async def create_batch(context: Context, request: Request) -> Response:
    return await relay(context.batch_host, request)


async def list_batches(context: Context, request: Request) -> Response:
    return await relay(context.batch_host, request)


async def get_batch(context: Context, request: Request) -> Response:
    return await relay(context.batch_host, request)


async def cancel_batch(context: Context, request: Request) -> Response:
    return await relay(context.batch_host, request)
