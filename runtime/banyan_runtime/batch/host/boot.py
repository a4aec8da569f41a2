"""What the server tells its batch host before anything else: one JSON line on standard input, since arguments can be read by others."""

from __future__ import annotations

import msgspec


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    storage: str  # a folder, or s3://BUCKET/PREFIX
    socket: str  # path of the Unix socket to listen on
    server: str  # URL of the server itself
    key: str  # with which it lets us in
    models: tuple[str, ...]
    endpoints: tuple[str, ...]  # paths that lines may name
    max_running: int | None  # requests that the engine computes at once
    follows: bool = False  # another host that has worked with this storage since the server began
    log_level: str
    log_format: str
