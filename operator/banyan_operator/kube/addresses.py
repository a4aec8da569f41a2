"""Where our pods and Services answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SERVER_PORT: Final = 8000
"""Of a server's container: the OpenAI API, probes, /metrics."""
SERVER_PORT_NAME: Final = "http"
PROGRESS_PORT: Final = 9100
"""Of a batch worker's container: /progress and /metrics."""
PROGRESS_PORT_NAME: Final = "progress"
SERVICE_PORT: Final = 80


def in_url(host: str) -> str:
    """A name or address as it stands in a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def pods_url(server: Mapping[str, Any]) -> str:
    """The base URL of its headless Service: one address a ready pod, for clients that choose a pod themselves."""
    meta = server["metadata"]
    return f"http://{meta['name']}--pods.{meta['namespace']}.svc:{SERVER_PORT}"
