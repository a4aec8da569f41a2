"""Keys of users and of admins, and a server under a path, as clients of a real server meet them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.support.server.process import MODEL, ServerProcess, StartServer

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("ada: one\nbob: two\nnameless\nunnamed\n")
    return file


@pytest.fixture(scope="module")
def guarded(start_server: StartServer, keys: Path) -> ServerProcess:
    options = ("--admin-api-key", "topsecret", "--root-path", "/banyan", "--accept-any-model", "--enable-tokenizer-info-endpoint")
    return start_server("--api-keys-file", str(keys), *options).ready()


def client(server: ServerProcess, key: str, path: str = "/v1") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + path, api_key=key, max_retries=0)


def status(server: ServerProcess, path: str, key: str | None, body: dict[str, Any] | None = None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json=body or {}, headers=headers).status_code


def told_end(server: ServerProcess, request_id: str, end: str) -> bool:
    """Whether the line of this request's end has come, and ends so."""
    return any(f"Finished {request_id}." in line and line.endswith(end) for line in server.lines)


def test_commands_to_the_server_take_the_admins_key_alone(guarded: ServerProcess) -> None:
    for path, body in (("/flush_cache", {}), ("/reset_prefix_cache", {}), ("/abort_request", {"abort_all": True})):
        assert [status(guarded, path, key, body) for key in (None, "wrong", "one", "topsecret")] == [401, 401, 403, 200], path
    with pytest.raises(openai.PermissionDeniedError) as refusal:
        client(guarded, "one").post("/../flush_cache", cast_to=object)
    assert (refusal.value.code, refusal.value.type) == ("insufficient_permissions", "invalid_request_error")
    assert [status(guarded, "/abort_request", key, {"rid": "x"}) for key in (None, "one", "topsecret")] == [401, 200, 200]
    for odd in ("/flush_cache%0A", "//flush_cache", "/flush_cache/", "/%66lush_cache", "/v1/../flush_cache"):
        assert status(guarded, odd, "one") in (403, 404), odd
    for key in ("topsecret", "nameless"):
        assert key not in guarded.log


def test_requests_and_tokens_are_counted_by_the_name_of_the_key(guarded: ServerProcess) -> None:
    for key in ("one", "one", "two", "nameless"):
        answer = client(guarded, key).chat.completions.create(model=MODEL, messages=USER, max_tokens=3, temperature=0)  # type: ignore[arg-type]
        assert answer.usage is not None
        owner = {"one": ", key: ada", "two": ", key: bob"}.get(key, "")
        guarded.eventually(functools.partial(told_end, guarded, answer.id, f" s{owner}"), "its line", 5)
    tokens = 'banyan_api_key_tokens_total{key="%s",kind="generation"}'
    assert guarded.metric(tokens % "ada") == 2 * guarded.metric(tokens % "bob") > 0
    assert guarded.metric(tokens % "other") > 0, "what has no name"
    assert guarded.metric('banyan_api_key_requests_total{key="bob"}') == 1


def test_the_tokens_of_a_key_are_those_that_usage_tells(guarded: ServerProcess) -> None:
    counted = 'banyan_api_key_tokens_total{key="other",kind="%s"}'
    before = [guarded.metric(counted % kind) for kind in ("prompt", "generation")]
    asking = client(guarded, "nameless")
    told = [
        asking.chat.completions.create(model=MODEL, messages=USER, max_tokens=3, n=4).usage,  # type: ignore[arg-type]
        asking.completions.create(model=MODEL, prompt=["Hello there", "And you?"], max_tokens=2, n=2, best_of=3).usage,
    ]
    assert all(usage is not None for usage in told)
    sums = [sum(usage.prompt_tokens for usage in told if usage), sum(usage.completion_tokens for usage in told if usage)]

    def grown() -> list[float]:
        return [guarded.metric(counted % kind) - old for kind, old in zip(("prompt", "generation"), before, strict=True)]

    guarded.eventually(lambda: grown() == sums, f"counts that have grown by {sums}", 5)


def test_keys_come_and_go_with_the_file(guarded: ServerProcess, keys: Path) -> None:
    before = keys.read_text()
    try:
        fresh = keys.with_name("fresh")
        fresh.write_text("bob: two\neve: three\n")
        fresh.replace(keys)
        guarded.eventually(lambda: status(guarded, "/abort_request", "three") == 200, "the new key", 5)
        assert [status(guarded, "/abort_request", key) for key in ("one", "two")] == [401, 200]
    finally:
        keys.write_text(before)
    guarded.eventually(lambda: status(guarded, "/abort_request", "one") == 200, "the old key", 5)


def test_a_server_under_a_path_answers_with_it_and_without(guarded: ServerProcess) -> None:
    for path in ("/v1", "/banyan/v1"):
        assert [card.id for card in client(guarded, "one", path).models.list()] == [MODEL]
    assert guarded.status("/banyan/health") == 200
    assert status(guarded, "/banyan/flush_cache", "one") == 403
    headers = {"Authorization": "Bearer one"}
    document = httpx.get(f"{guarded.url}/banyan/openapi.json", headers=headers).json()
    assert document["servers"] == [{"url": "/banyan"}]
    assert "'/banyan/openapi.json'" in httpx.get(f"{guarded.url}/banyan/docs", headers=headers).text
    files = httpx.get(f"{guarded.url}/banyan/v1/files?limit=5", headers=headers)
    assert (files.status_code, files.json()["data"]) == (200, [])
    missing = httpx.get(f"{guarded.url}/banyanx/v1/models", headers=headers)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")


def test_any_model_is_served_where_that_is_asked_for(guarded: ServerProcess) -> None:
    name = "org/some model:7"
    answer = client(guarded, "one").completions.create(model=name, prompt="a", max_tokens=1)
    assert answer.model == name
    assert client(guarded, "one").models.retrieve(name).id == name


def test_clients_that_tokenize_themselves_learn_how(guarded: ServerProcess, tiny_chat: Path) -> None:
    settings = json.loads((tiny_chat / "tokenizer_config.json").read_text())
    told = httpx.get(f"{guarded.url}/tokenizer_info", headers={"Authorization": "Bearer one"}).json()
    assert set(told) == {"tokenizer_class", "bos_token", "eos_token", "pad_token", "chat_template"}
    assert (told["tokenizer_class"], told["eos_token"]) == (settings["tokenizer_class"], settings["eos_token"])
    assert "messages" in told["chat_template"]


@pytest.mark.parametrize("path", ["/abort_request", "/abort_requests"])
def test_a_key_ends_its_own_requests_and_an_admin_anybodys(guarded: ServerProcess, path: str) -> None:
    def abort(rid: str, key: str) -> None:
        assert status(guarded, path, key, {"rid": rid, "request_ids": [rid]}) == 200

    for mine, others in (("one", ["two", "nameless", "unnamed"]), ("nameless", ["one", "unnamed"]), ("one", [])):
        wish: dict[str, Any] = {"rid": f"mine-{len(others)}", "ignore_eos": True}
        with guarded.slowed():
            asked = client(guarded, mine).completions.create(model=MODEL, prompt="a", max_tokens=1500, stream=True, extra_body=wish)
            chunks = iter(asked)
            next(chunks)
            for other in others:
                abort(wish["rid"], other)
            for _ in range(20):
                next(chunks)  # it goes on
            abort(wish["rid"], mine if others else "topsecret")
            *_, last = chunks
        assert last.choices[0].finish_reason == "abort"
    abort("unheard-of", "one")
