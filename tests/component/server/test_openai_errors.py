"""What is refused: every answer that is no success is OpenAI's error object."""

from __future__ import annotations

import functools
import json
import random
import re
import socket
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.support.server.process import MODEL, ServerProcess

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"


def refuse(server: ServerProcess, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = httpx.post(server.url + path, content=content, headers={"content-type": "application/json; charset=utf-8"})
    assert response.status_code == status, response.text
    return error_of(response)


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    expected = "server_error" if response.status_code >= 500 else "invalid_request_error"
    assert error["type"] == expected
    return error


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        (CHAT, {}, "missing_required_parameter", "messages"),
        (CHAT, {"messages": USER, "stop": ["a", 1]}, "invalid_type", "stop[1]"),
        (CHAT, {"messages": USER, "temperature": 3.0}, "decimal_above_max_value", "temperature"),
        (COMPLETIONS, {"prompt": [1, 99999]}, "invalid_value", "prompt"),
        (GENERATE, {"text": "a", "sampling_params": {"tempature": 1}}, "unknown_parameter", "sampling_params"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_and_where(
    server: ServerProcess, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    """All that is wrong with requests is in tests/unit/front/test_refusals.py."""
    for stream in (False, True):
        error = refuse(server, path, {**body, "stream": stream})
        assert (error["code"], error["param"]) == (code, param)


@pytest.mark.matrix(gate=3)
@pytest.mark.parametrize(
    "body", [b'{"messages": [', b"\xff\xfe", b"[1]", b'"text"', b"", b'{"a": NaN}', b"[" * 200_000, b'{"a":"\\ud800"}']
)
def test_what_is_no_json_object_is_named_as_such(server: ServerProcess, body: bytes) -> None:
    error = refuse(server, CHAT, body)
    assert (error["param"], error["code"]) == (None, None)


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/generate", "/tokenize", "/abort_request"])
def test_a_body_that_was_forgotten_is_said_to_be_empty(server: ServerProcess, path: str) -> None:
    response = httpx.post(server.url + path, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_an_unknown_model_is_not_found(server: ServerProcess) -> None:
    error = refuse(server, CHAT, {"messages": USER, "model": "gpt-9"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert all(f"`{card['id']}`" in error["message"] for card in httpx.get(f"{server.url}/v1/models").json()["data"])


def test_tools_of_free_text_are_refused_by_their_type(server: ServerProcess) -> None:
    error = refuse(server, CHAT, {"messages": USER, "tools": [{"type": "custom", "custom": {"name": "x"}}]}, 400)
    assert (error["code"], error["param"]) == ("unsupported", "tools[0].type")


def test_paths_methods_and_media_types_have_the_same_form(server: ServerProcess) -> None:
    missing = httpx.post(f"{server.url}/v1/nothing", json={})
    assert (missing.status_code, error_of(missing)["code"]) == (404, "unknown_url")
    method = httpx.get(server.url + CHAT)
    assert (method.status_code, method.headers["allow"]) == (405, "POST")
    assert error_of(method)["code"] is None
    media = httpx.post(server.url + CHAT, content="{}", headers={"content-type": "text/plain"})
    assert media.status_code == 400
    assert error_of(media)["code"] is None


def test_a_body_that_is_too_large_is_refused_before_it_is_parsed(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=5) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {33 << 20}\r\n\r\n"
        connection.sendall(head.encode())
        answer = ""
        while not answer.endswith("}}"):  # head and body may come apart; a server that waits for the body makes recv time out
            delta = connection.recv(4096)
            assert delta, answer
            answer += delta.decode()
    assert answer.startswith("HTTP/1.1 413")
    assert '"code":"request_too_large"' in answer

    def chunks() -> Any:
        for _ in range(33):
            yield b" " * (1 << 20)

    counted = httpx.post(server.url + CHAT, content=chunks(), headers={"content-type": "application/json"}, timeout=30)
    assert counted.status_code == 413


def test_an_error_does_not_repeat_a_clients_megabytes(server: ServerProcess) -> None:
    body = {"messages": USER, "stop": [7] * 200_000, "model": "m" * 100_000}
    response = httpx.post(server.url + CHAT, json=body, timeout=10)
    assert response.status_code == 400
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    ("kind", "status", "code", "method", "path", "headers"),
    [
        (openai.NotFoundError, 404, "unknown_url", "post", "/nothing", {}),
        (openai.APIStatusError, 405, None, "get", "/chat/completions", {}),
        (openai.BadRequestError, 400, None, "post", "/chat/completions", {"Content-Type": "text/plain"}),
        (openai.APIStatusError, 413, "request_too_large", "post", "/chat/completions", {"X-Size": str(33 << 20)}),
        (openai.APIStatusError, 431, "headers_too_large", "post", "/chat/completions", {"X-Long": "x" * 20_000}),
    ],
)
def test_what_comes_before_a_body_is_read_reaches_the_sdk_too(
    server: ServerProcess, kind: type[openai.APIStatusError], status: int, code: str | None, method: str, path: str, headers: dict[str, str]
) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)
    body = {"prompt": "x" * int(headers.get("X-Size", "1"))}
    ask = client.get if method == "get" else functools.partial(client.post, body=body)
    with pytest.raises(openai.APIStatusError) as refusal:
        ask(path, cast_to=object, options={"headers": headers})
    error = refusal.value
    assert (type(error), error.status_code, error.code, error.type) == (kind, status, code, "invalid_request_error")
    assert error.request_id


def test_the_sdk_raises_its_own_exceptions(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="None", max_retries=0)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=USER, temperature=3)  # type: ignore[arg-type]
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=USER)  # type: ignore[arg-type]
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=USER, max_tokens=10_000, stream=True)  # type: ignore[arg-type]
    assert long.value.code == "context_length_exceeded"


def test_broken_bodies_never_break_the_server(server: ServerProcess) -> None:
    """Hundreds of bodies of wrong values in right places; each ends below 500, and the next request is served."""
    dice = random.Random(5)
    values: list[Any] = [
        None, True, -1, 0, 3, 2**31, 2**63, 2**70, -(2**70), 1e308, -0.5, "", "a", "\x00", "é", [], [[]], [None], [1], ["a"], {}, {"a": 1},
        {"type": "text"}, [{"type": "text"}], [{"role": "user", "content": "x"}], [{"role": "assistant", "content": None}], "auto", "none",
    ]  # fmt: skip
    fields = {
        CHAT: ["messages", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "stop_token_ids", "stream", "stream_options",
               "chat_template_kwargs", "min_tokens", "tools", "response_format", "priority", "rid", "cache_salt", "reasoning_effort"],
        COMPLETIONS: ["prompt", "echo", "best_of", "suffix", "logprobs", "n", "seed", "stop", "ignore_eos", "min_p", "stream"],
        "/generate": ["text", "input_ids", "sampling_params", "rid", "stream", "priority", "return_logprob"],
        "/tokenize": ["prompt", "messages", "add_special_tokens", "chat_template_kwargs"],
        "/detokenize": ["tokens", "skip_special_tokens"],
        "/abort_request": ["rid", "abort_all"],
    }  # fmt: skip
    defaults = {CHAT: {"messages": USER, "max_tokens": 1}, COMPLETIONS: {"prompt": "a", "max_tokens": 1}}
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for _ in range(400):
            path = dice.choice(list(fields))
            body: dict[str, Any] = dict(defaults.get(path, {}))
            for field in dice.sample(fields[path], min(len(fields[path]), dice.randrange(1, 4))):
                body[field] = dice.choice(values)
            if path in defaults and body.get("max_tokens") is None:
                body["max_tokens"] = 1
            response = client.post(path, json=body)
            assert response.status_code < 500, (path, body, response.text)
            if response.status_code >= 400:
                error_of(response)
        assert client.post(CHAT, json={"messages": USER, "max_tokens": 1}).status_code == 200


def test_the_openapi_document_describes_the_bodies_that_are_read(server: ServerProcess) -> None:
    document = server.get("/openapi.json").json()
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schemas = document["components"]["schemas"]
    assert {"messages", "temperature", "stream_options"} <= set(schemas[body.rpartition("/")[2]]["properties"])
    references = set(re.findall(r'"\$ref": ?"#/components/schemas/(\w+)"', server.get("/openapi.json").text))
    assert references <= set(schemas)
