"""How an address to listen on is written where it is told of."""

from __future__ import annotations


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
