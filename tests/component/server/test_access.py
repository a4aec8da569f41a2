"""Keys of users and of admins, and a server under a path, as clients of a real server meet them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

from tests.component.server.test_batches_api import begin, end, ids, lines, result
from tests.component.server.test_files_api import host_of
from tests.support.server.process import MODEL, ServerProcess, StartServer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("ada: one\nbob: two\nnameless\nunnamed\n")
    return file


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage") / "kept"


@pytest.fixture(scope="module")
def guarded(start_server: StartServer, keys: Path, storage: Path) -> ServerProcess:
    """A server of its own, for it asks for keys, and serves no vectors."""
    options = ("--admin-api-key", "topsecret", "--accept-any-model", "--enable-tokenizer-info-endpoint")
    return start_server("--api-keys-file", str(keys), "--file-storage-path", str(storage), *options).ready()


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
    before = [guarded.settled(counted % kind) for kind in ("prompt", "generation")]
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


@pytest.mark.matrix(gate=1)
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


# --- messages, pages, files and batches ---


def test_everything_but_probes_and_metrics_asks_for_a_key(guarded: ServerProcess) -> None:
    before = guarded.settled('banyan_admission_rejections_total{reason="auth"}')
    document = httpx.get(f"{guarded.url}/openapi.json", headers={"Authorization": "Bearer two"}).json()
    closed = [path for path, methods in document["paths"].items() if any("security" in told for told in methods.values())]
    assert {CHAT, "/docs", "/openapi.json"} <= set(closed)
    with httpx.Client(base_url=guarded.url) as asking:
        for path in [*closed, "/nothing"]:
            for method in ("GET", "POST", "PUT", "DELETE", "HEAD"):
                response = asking.request(method, path.replace("{name}", "x"), json={})
                assert response.status_code == 401, (method, path)
                if method == "HEAD":
                    continue
                error = response.json()["error"]
                if path.startswith("/v1/messages"):
                    assert error["type"] == "authentication_error"
                else:
                    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    for path in set(document["paths"]).difference(closed):
        assert httpx.get(guarded.url + path).status_code == 200, path
    for header in ({"Authorization": "bearer one"}, {"x-api-key": "two"}, {"api-key": "one"}):
        assert httpx.get(f"{guarded.url}/v1/models", headers=header).status_code == 200
    with pytest.raises(openai.AuthenticationError) as refused:
        client(guarded, "wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    guarded.eventually(lambda: guarded.metric('banyan_admission_rejections_total{reason="auth"}') > before, "a count")


def test_a_foreign_page_is_asked_for_the_key_alone(guarded: ServerProcess) -> None:
    foreign = {"Origin": "http://evil.example"}
    assert httpx.post(f"{guarded.url}/flush_cache", headers=foreign).status_code == 401
    assert httpx.options(f"{guarded.url}/flush_cache", headers=foreign).status_code == 401
    allowed = httpx.post(f"{guarded.url}/flush_cache", headers={**foreign, "Authorization": "Bearer topsecret"})
    assert (allowed.status_code, "access-control-allow-origin" in allowed.headers) == (200, False)


def test_a_wrong_key_is_told_as_messages_tell_it_below_their_paths(guarded: ServerProcess) -> None:
    asking = anthropic.Anthropic(base_url=guarded.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as barred:
        asking.messages.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=1)
    assert barred.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    for path in ("/v1/messages/batches", "/v1/messages/x/y"):
        refused = httpx.post(guarded.url + path, json={}, headers={"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    good = anthropic.Anthropic(base_url=guarded.url, api_key="one", max_retries=0)
    assert good.messages.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=1).content


def test_files_ask_for_the_key_and_none_is_among_the_hosts_arguments(guarded: ServerProcess) -> None:
    assert guarded.get("/v1/files").status_code == 401
    client(guarded, "one").files.create(file=b"x", purpose="user_data")
    words = " ".join(host_of(guarded).cmdline())
    assert "topsecret" not in words
    assert "nameless" not in words
    assert len(words) < 200, "keys go through the pipe, not through arguments"


def test_a_batch_is_answered_though_its_lines_bring_no_key(guarded: ServerProcess) -> None:
    asking = client(guarded, "one")
    batch = end(asking, begin(asking, lines(3)))
    assert (batch.status, ids(result(asking, batch.output_file_id))) == ("completed", ["request-1", "request-2", "request-3"])


def test_an_endpoint_that_the_server_lacks_is_refused_to_a_batch(guarded: ServerProcess) -> None:
    """This server serves no vectors."""
    with pytest.raises(openai.BadRequestError) as refused:
        begin(client(guarded, "one"), lines(1), endpoint="/v1/embeddings")
    assert refused.value.param == "endpoint"


def test_an_idempotency_key_belongs_to_one_request_of_one_client(guarded: ServerProcess, storage: Path) -> None:
    first, second = client(guarded, "one"), client(guarded, "two")
    file, other = (first.files.create(file=("a.jsonl", lines(1).encode()), purpose="batch").id for _ in range(2))
    fields: dict[str, Any] = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    keyed = {"Idempotency-Key": "k"}
    before = len(list(first.batches.list()))
    made = first.batches.create(**fields, extra_headers=keyed)
    expiry = {"anchor": "created_at", "seconds": 3600}
    changes: list[dict[str, Any]] = [
        {"input_file_id": other},
        {"endpoint": "/v1/completions"},
        {"completion_window": "1h"},
        {"metadata": {"a": "b"}},
        {"output_expires_after": expiry},
    ]
    for change in changes:
        with pytest.raises(openai.BadRequestError) as refused:
            first.batches.create(**(fields | change), extra_headers=keyed)
        assert refused.value.param == "Idempotency-Key"
    assert second.batches.create(**fields, extra_headers=keyed).id != made.id
    first.files.delete(file)
    assert first.batches.create(**fields, extra_headers=keyed).id == made.id
    assert len(list(first.batches.list())) == before + 2
    known = guarded.log
    with pytest.raises(openai.BadRequestError) as long:
        first.batches.create(**fields, extra_headers={"Idempotency-Key": "k" * 9000})
    assert long.value.param == "Idempotency-Key"
    assert "Traceback" not in guarded.log[len(known) :]
    kept = list((storage / "idempotency").iterdir())
    assert len(kept) == 2
    assert not [path for path in kept if b"nameless" in path.read_bytes() or b"two" in path.read_bytes() or "two" in path.name]
