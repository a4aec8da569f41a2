"""What is refused, and in which words: every answer that is no success is OpenAI's error object."""

from __future__ import annotations

import functools
import json
import random
import re
import socket
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.support.server.process import MODEL, ServerProcess, StartServer

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
SHAPE = "response_format.json_schema"


def shape(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, **more}}


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
    ("path", "body", "code", "param", "message"),
    [
        (CHAT, {}, "missing_required_parameter", "messages", "Missing required parameter: 'messages'."),
        (CHAT, {"messages": [{"content": "a"}]}, "missing_required_parameter", "messages[0].role", "'messages[0].role'"),
        (CHAT, {"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content", "'messages[0].content'"),
        (CHAT, {"messages": []}, "empty_array", "messages", "Messages cannot be empty."),
        (CHAT, {"messages": "hi"}, "invalid_type", "messages", "Invalid type for 'messages': expected an array, got a string."),
        (
            CHAT,
            {"messages": [{"role": "user", "content": 5}]},
            "invalid_type",
            "messages[0].content",
            "expected a string or an array, got an integer",
        ),
        (
            CHAT,
            {"messages": USER, "temperature": "hot"},
            "invalid_type",
            "temperature",
            "Invalid type for 'temperature': expected a number, got a string.",
        ),
        (CHAT, {"messages": USER, "stop": ["a", 1]}, "invalid_type", "stop[1]", "expected a string, got an integer"),
        (CHAT, {"messages": USER, "n": True}, "invalid_type", "n", "expected an integer, got a boolean"),
        (CHAT, {"messages": USER, "stream_options": {"include_usage": 1}}, "invalid_type", "stream_options.include_usage", "a boolean"),
        (CHAT, {"messages": USER, "user": {}}, "invalid_type", "user", "expected a string, got an object"),
        (CHAT, {"messages": USER, "prediction": 5}, "invalid_type", "prediction", "expected an object, got an integer"),
        (CHAT, {"messages": USER, "safety_identifier": 5}, "invalid_type", "safety_identifier", "a string"),
        (CHAT, {"messages": USER, "prompt_cache_key": 5}, "invalid_type", "prompt_cache_key", "a string"),
        (CHAT, {"messages": USER, "metadata": {"a": {"b": 1}}}, "invalid_type", "metadata.a", "expected a string, got an object"),
        ("/v1/completions", {"prompt": "a", "user": 5}, "invalid_type", "user", "expected a string"),
        (CHAT, {"messages": USER, "response_format": shape(strict="yes")}, "invalid_type", f"{SHAPE}.strict", "expected a boolean."),
        (CHAT, {"messages": USER, "response_format": shape(name="bad name!")}, "invalid_value", f"{SHAPE}.name", "'bad name!' must be"),
        (CHAT, {"messages": USER, "response_format": shape(name="a" * 65)}, "invalid_value", f"{SHAPE}.name", "1 to 64 letters"),
        (CHAT, {"messages": USER, "temperature": 3.0}, "decimal_above_max_value", "temperature", "must be in [0, 2], got 3.0."),
        (CHAT, {"messages": USER, "max_tokens": 0}, "integer_below_min_value", "max_tokens", "max_tokens must be at least 1, got 0."),
        (CHAT, {"messages": USER, "top_logprobs": 1}, "invalid_value", "top_logprobs", "`logprobs` must be set to true"),
        (
            CHAT,
            {"messages": USER, "tools": [{"type": "function"}]},
            "missing_required_parameter",
            "tools[0].function",
            "'tools[0].function'",
        ),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "invalid_value", "tool_choice", "tool"),
        (CHAT, {"messages": USER, "guided_json": {}, "regex": "a+"}, "invalid_value", "guided_json", "guided_json"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "unsupported_content",
            "messages",
            "Model only supports text input; received unsupported content type 'image_url'.",
        ),
        (CHAT, {"messages": USER, "max_tokens": 5000}, "context_length_exceeded", "max_tokens", "maximum context length is 2048 tokens"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "word " * 3000}]},
            "context_length_exceeded",
            "messages",
            "(context_length_exceeded)",
        ),
        ("/v1/completions", {}, "missing_required_parameter", "prompt", "Missing required parameter: 'prompt'."),
        ("/v1/completions", {"prompt": ""}, "empty_array", "prompt", "Prompt cannot be empty"),
        ("/v1/completions", {"prompt": []}, "empty_array", "prompt", "Prompt cannot be empty"),
        ("/v1/completions", {"prompt": [1, 99999]}, "invalid_value", "prompt", "Token id 99999 is out of vocabulary"),
        ("/v1/completions", {"prompt": [1, "a"]}, "invalid_type", "prompt", "an array of token ids"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "integer_above_max_value", "logprobs", "greater than max allowed: 20"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "unsupported", "suffix", "'suffix'"),
        ("/generate", {}, "missing_required_parameter", "text", "Either text, input_ids or input_embeds should be provided."),
        ("/generate", {"input_ids": []}, "empty_array", "input_ids", "input_ids cannot be empty."),
        ("/generate", {"text": "a", "sampling_params": {"tempature": 1}}, "unknown_parameter", "sampling_params", "'tempature'"),
        ("/generate", {"text": "a", "sampling_params": {"top_k": "x"}}, "invalid_type", "sampling_params.top_k", "an integer"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_and_where(
    server: ServerProcess, path: str, body: dict[str, Any], code: str, param: str, message: str
) -> None:
    for stream in (False, True):
        error = refuse(server, path, {**body, "stream": stream})
        assert (error["code"], error["param"]) == (code, param)
        assert message in error["message"]


@pytest.mark.parametrize(
    "body", [b'{"messages": [', b"\xff\xfe", b"[1]", b'"text"', b"", b'{"a": NaN}', b"[" * 200_000, b'{"a":"\\ud800"}']
)
def test_what_is_no_json_object_is_named_as_such(server: ServerProcess, body: bytes) -> None:
    assert refuse(server, CHAT, body)["message"].startswith("We could not parse the JSON body of your request")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/generate", "/tokenize", "/abort_request"])
def test_a_body_that_was_forgotten_is_said_to_be_empty(server: ServerProcess, path: str) -> None:
    response = httpx.post(server.url + path, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "We could not parse the JSON body of your request: it is empty"


def test_an_unknown_model_is_not_found(server: ServerProcess) -> None:
    error = refuse(server, CHAT, {"messages": USER, "model": "gpt-9"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    served = ", ".join(f"`{card['id']}`" for card in httpx.get(f"{server.url}/v1/models").json()["data"])
    assert error["message"] == f"The model `gpt-9` does not exist. This server serves {served}."


def test_tools_of_free_text_are_refused_by_their_type(server: ServerProcess) -> None:
    error = refuse(server, CHAT, {"messages": USER, "tools": [{"type": "custom", "custom": {"name": "x"}}]}, 400)
    assert (error["code"], error["param"]) == ("unsupported", "tools[0].type")
    assert "use type 'function'" in error["message"]


def test_paths_methods_and_media_types_have_the_same_form(server: ServerProcess) -> None:
    missing = httpx.post(f"{server.url}/v1/nothing", json={})
    assert (missing.status_code, error_of(missing)["code"]) == (404, "unknown_url")
    assert "Invalid URL (POST /v1/nothing)" in error_of(missing)["message"]
    method = httpx.get(server.url + CHAT)
    assert (method.status_code, method.headers["allow"]) == (405, "POST")
    assert error_of(method)["code"] is None
    media = httpx.post(server.url + CHAT, content="{}", headers={"content-type": "text/plain"})
    assert media.status_code == 400
    assert error_of(media)["message"] == "Unsupported Media Type: Only 'application/json' is allowed"


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
    ("arguments", "code", "param", "message"),
    [
        ({"n": 0}, "integer_below_min_value", "n", "n must be at least 1, got 0."),
        ({"n": 129}, "integer_above_max_value", "n", "n must be at most 128, got 129."),
        ({"top_p": 0}, "decimal_below_min_value", "top_p", "top_p must be in (0, 1], got 0"),
        ({"temperature": -0.1}, "decimal_below_min_value", "temperature", "temperature must be in [0, 2], got -0.1."),
        ({"presence_penalty": 3}, "decimal_above_max_value", "presence_penalty", "presence_penalty must be in [-2, 2], got 3"),
        ({"frequency_penalty": -3}, "decimal_below_min_value", "frequency_penalty", "frequency_penalty must be in [-2, 2], got -3"),
        ({"max_completion_tokens": 0}, "integer_below_min_value", "max_completion_tokens", "must be at least 1, got 0."),
        ({"stop": ["x"] * 33}, "array_above_max_length", "stop", "at most 32 stop strings are allowed, got 33"),
        ({"logprobs": True, "top_logprobs": 21}, "integer_above_max_value", "top_logprobs", "Requested sample logprobs of 21, which"),
        ({"messages": []}, "empty_array", "messages", "Messages cannot be empty."),
        ({"messages": USER * 2049}, "array_above_max_length", "messages", "at most 2048 messages are allowed, got 2049"),
    ],
)  # fmt: skip
def test_each_limit_has_its_code_and_words(server: ServerProcess, arguments: dict[str, Any], code: str, param: str, message: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="None")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.chat.completions.create(**{"model": MODEL, "messages": USER, "stream": stream, **arguments})
        error = refusal.value
        assert (error.code, error.param, error.type) == (code, param, "invalid_request_error")
        assert message in error.message


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
    with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
        client.chat.completions.create(model=MODEL, messages=USER, max_tokens=10_000, stream=True)  # type: ignore[arg-type]


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
        "/v1/completions": ["prompt", "echo", "best_of", "suffix", "logprobs", "n", "seed", "stop", "ignore_eos", "min_p", "stream"],
        "/generate": ["text", "input_ids", "sampling_params", "rid", "stream", "priority", "return_logprob"],
        "/tokenize": ["prompt", "messages", "add_special_tokens", "chat_template_kwargs"],
        "/detokenize": ["tokens", "skip_special_tokens"],
        "/abort_request": ["rid", "abort_all"],
    }  # fmt: skip
    defaults = {CHAT: {"messages": USER, "max_tokens": 1}, "/v1/completions": {"prompt": "a", "max_tokens": 1}}
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


def test_with_a_key_everything_but_probes_and_metrics_asks_for_one(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha\nbeta\n")
    server = start_server("--api-keys-file", str(keys)).ready()
    document = httpx.get(f"{server.url}/openapi.json", headers={"Authorization": "Bearer beta"}).json()
    closed = [path for path, methods in document["paths"].items() if any("security" in told for told in methods.values())]
    assert {CHAT, "/docs", "/openapi.json"} <= set(closed)
    with httpx.Client(base_url=server.url) as client:
        for path in [*closed, "/nothing"]:
            for method in ("GET", "POST", "PUT", "DELETE", "HEAD"):
                response = client.request(method, path.replace("{name}", "x"), json={})
                assert response.status_code == 401, (method, path)
                if method == "HEAD":
                    continue
                if path.startswith("/v1/messages"):
                    assert response.json()["error"]["type"] == "authentication_error"
                else:
                    assert error_of(response)["code"] == "invalid_api_key"
    for path in set(document["paths"]).difference(closed):
        assert httpx.get(server.url + path).status_code == 200, path
    for header in ({"Authorization": "bearer alpha"}, {"x-api-key": "beta"}, {"api-key": "alpha"}):
        assert httpx.get(f"{server.url}/v1/models", headers=header).status_code == 200
    with pytest.raises(openai.AuthenticationError, match=r"Incorrect API key provided\."):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
    assert "alpha" not in server.log
    server.eventually(lambda: server.metric('banyan_admission_rejections_total{reason="auth"}') > 0, "a count", 2)
