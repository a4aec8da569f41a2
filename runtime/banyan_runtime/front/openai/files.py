"""`/v1/files`: who asks and how much was checked before; the answer is the batch host's."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.context import Context
from banyan_runtime.front.relay import relay

UPLOAD: Final = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["file", "purpose"],
            "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
        }
    }
}


async def create_file(context: Context, request: Request) -> Response:
    return await relay(context.batch_host, request)


async def list_files(context: Context, request: Request) -> Response:
    return await relay(context.batch_host, request)


async def get_file(context: Context, request: Request) -> Response:
    return await relay(context.batch_host, request)


async def get_file_content(context: Context, request: Request) -> Response:
    return await relay(context.batch_host, request)


async def delete_file(context: Context, request: Request) -> Response:
    return await relay(context.batch_host, request)
