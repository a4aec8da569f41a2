"""What surrounds every request: ids, counts, and the answer to a defect of our own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.app import create_app
from banyan_runtime.front.context import Context
from banyan_runtime.front.metrics import Metrics
from banyan_runtime.front.ops.http import HttpCounter
from banyan_runtime.front.state import ServerState
from tests.server.raw import serving


class BrokenClient:
    """An engine client with a defect."""

    last_heard = 0.0
    stats = None

    @property
    def info(self) -> Any:
        raise ZeroDivisionError("a defect")


@pytest.fixture
def url() -> Iterator[str]:
    state = ServerState("x", phase="ready")
    metrics = Metrics("x", state)
    text: Any = object()
    client: Any = BrokenClient()
    app = create_app(Context(ServerConfig(model_path="x"), client, text, metrics, state))
    with serving(HttpCounter(app, metrics)) as url:
        yield url


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_defect_is_answered_without_detail_logged_under_the_requests_id_and_counted(
    url: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        response = httpx.request(method, f"{url}/v1/models", headers={"x-request-id": "one-of-mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "one-of-mine")
    assert response.headers["content-type"] == "application/json"
    if method == "GET":
        assert response.json()["error"] == {
            "message": "Internal server error",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    assert "request one-of-mine failed" in caplog.text
    assert "ZeroDivisionError: a defect" in caplog.text
    page = httpx.get(f"{url}/metrics").text
    assert any("banyan_http_requests_total" in line and f'method="{method}"' in line and 'code="500"' in line for line in page.splitlines())
