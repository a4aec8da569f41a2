"""A server whose grammars xgrammar compiles."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.server.process import StartServer

pytestmark = pytest.mark.long  # a server of another grammar backend
pytest.importorskip("xgrammar", reason="xgrammar is not installed (it brings triton along): pip install 'banyan-runtime[xgrammar]'")


def test_a_server_names_the_field_of_a_grammar_that_does_not_compile(start_server: StartServer) -> None:
    server = start_server("--grammar-backend", "xgrammar").ready()
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
    for stream in (False, True):
        answer = server.post("/v1/chat/completions", {**body, "regex": "[A-Z", "stream": stream})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "regex")
    answer = server.post(
        "/v1/chat/completions", {**body, "response_format": {"type": "json_schema", "json_schema": {"schema": {"oneOf": [{}]}}}}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    for schema in ({"type": "string", "minLength": 5, "maxLength": 2}, {"uniqueItems": True}):  # found by the compiler, and before it
        asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        error = server.post("/v1/chat/completions", {**body, "response_format": asked}).json()["error"]
        assert (error["param"], error["code"]) == ("response_format", "invalid_json_schema")
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^(a)\1$"}}, "required": ["a"]}
    asked = {"type": "json_schema", "name": "n", "schema": schema}
    error = server.post("/v1/responses", {"input": "Hello", "text": {"format": asked}}).json()["error"]
    assert (error["param"], error["code"]) == ("text.format", "invalid_json_schema")
    claude = {**body, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    message = server.post("/v1/messages", claude).json()["error"]["message"]
    assert "output_config.format" in message
    older = {**body, "functions": [{"name": "f", "parameters": schema}], "function_call": {"name": "f"}}
    error = server.post("/v1/chat/completions", older).json()["error"]
    assert (error["param"], error["code"]) == ("functions", "invalid_json_schema")
    answer = server.post("/v1/chat/completions", {**body, "regex": "[A-Z]{3}"})
    assert re.fullmatch("[A-Z]{3}", answer.json()["choices"][0]["message"]["content"])
