"""What surrounds every request: ids, counts, and the answer to a defect of our own."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.app import create_app
from banyan_runtime.front.context import Context
from banyan_runtime.front.metrics import Metrics
from banyan_runtime.front.ops.http import HttpCounter
from banyan_runtime.front.routes import ROUTES
from banyan_runtime.front.state import ServerState
from tests.support.server.raw import serving


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
    assert response.headers["x-should-retry"] == "false"
    assert int(response.headers["openai-processing-ms"]) >= 0
    page = httpx.get(f"{url}/metrics").text
    assert any("banyan_http_requests_total" in line and f'method="{method}"' in line and 'code="500"' in line for line in page.splitlines())


def test_a_defect_is_not_met_again_by_openais_client(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="None", max_retries=5)
    with pytest.raises(openai.InternalServerError) as failure:
        client.models.list()
    assert (failure.value.code, failure.value.type) == ("internal_error", "server_error")
    page = httpx.get(f"{url}/metrics").text
    (count,) = re.findall(r'banyan_http_requests_total\{(?=.*code="500").*\} ([\d.]+)', page)
    assert float(count) == 1


def test_the_description_names_every_path_and_what_it_takes(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json").json()
    config = ServerConfig(model_path="x")
    table = {
        (re.sub(r":\w+", "", route.path), method.lower()) for route in ROUTES if route.when(config) for method in route.methods.split()
    }
    assert {(path, method) for path, told in document["paths"].items() for method in told} == table
    told = [told for methods in document["paths"].values() for told in methods.values()]
    assert len({each["operationId"] for each in told}) == len(told)
    for path, methods in document["paths"].items():
        for each in methods.values():
            assert [given["name"] for given in each.get("parameters", ()) if given["in"] == "path"] == re.findall(r"\{(\w+)\}", path)
            assert "Error" in each["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
    schemas = document["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in re.findall(r'"\$ref": ?"([^"]+)"', json.dumps(document))} <= set(schemas)


def described(**options: Any) -> tuple[Context, Any]:
    state = ServerState("x", phase="ready")
    client: Any = BrokenClient()
    context = Context(ServerConfig(model_path="x", **options), client, None, Metrics("x", state), state)
    return context, create_app(context).openapi()


@pytest.mark.parametrize("options", [{}, {"api_key": "u"}, {"admin_api_key": "a"}, {"api_key": "u", "admin_api_key": "a"}])
def test_the_description_says_who_is_refused(options: dict[str, Any]) -> None:
    context, document = described(**options)
    for route in ROUTES:
        if not route.when(context.config):
            continue
        told = document["paths"][re.sub(r":\w+", "", route.path)][route.methods.split()[0].lower()]
        for address, key in (("127.0.0.1", None), ("10.0.0.9", None), ("10.0.0.9", "u")):
            headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
            refusal = context.gate.check({"type": "http", "headers": headers, "client": (address, 1)}, route.access)
            assert refusal is None or str(refusal.status) in told["responses"], (route.path, address, key)
        nobody = context.gate.check({"type": "http", "headers": [], "client": ("127.0.0.1", 1)}, route.access)
        assert ("security" in told) == ("401" in told["responses"]) == (nobody is not None), route.path
        assert {name for one in told.get("security", ()) for name in one} <= set(document["components"]["securitySchemes"])


def test_the_description_says_what_an_answer_is_and_how_it_may_fail() -> None:
    _, document = described()
    paths = document["paths"]

    def gives(path: str, method: str = "post", status: str = "200") -> set[str]:
        return set(paths[path][method]["responses"][status].get("content", ()))

    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"):
        assert gives(path) == {"application/json", "text/event-stream"}
        assert {"400", "404", "413", "429", "500", "503", "504"} <= set(paths[path]["post"]["responses"])
        assert "Retry-After" in paths[path]["post"]["responses"]["429"]["headers"]
        assert [one["name"] for one in paths[path]["post"]["parameters"]] == ["X-Request-Timeout"]
    assert gives("/v1/embeddings") == {"application/json"}
    assert "429" not in paths["/tokenize"]["post"]["responses"]
    assert (gives("/abort_request"), gives("/health", "get"), gives("/metrics", "get")) == (set(), set(), {"text/plain"})
    assert gives("/health", "get", "503") == set()
    for path, model in (("/v1/messages", "MessagesError"), ("/v1/responses", "Error")):
        schema = paths[path]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
        assert schema["$ref"].endswith(f"/{model}")
    fields = {name: set(told["properties"]) for name, told in document["components"]["schemas"].items() if "properties" in told}
    assert {"temperature", "top_p", "seed", "parallel_tool_calls", "min_p"} <= fields["ResponsesRequest"]
    assert {"min_p", "seed", "chat_template_kwargs"} <= fields["MessagesRequest"]
    assert "n" not in fields["ResponsesRequest"]
    assert {"instruct", "instruction"} <= fields["RerankRequest"]
    assert {"messages", "truncate_prompt_tokens"} <= fields["EmbeddingRequest"]
