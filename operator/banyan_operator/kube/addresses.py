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


def service_url(server: Mapping[str, Any]) -> str:
    """The base URL of an InferenceServer's Service, as the cluster's DNS knows it."""
    meta = server["metadata"]
    port = ((server.get("spec") or {}).get("service") or {}).get("port", SERVICE_PORT)
    return f"http://{meta['name']}.{meta['namespace']}.svc" + ("" if port == SERVICE_PORT else f":{port}")
