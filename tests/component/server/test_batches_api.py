"""Batches, through a real server and the real client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest
from openai.types import Batch
from prometheus_client.parser import text_string_to_metric_families

from banyan_runtime.batch.host.tally import TELL_S
from tests.support.server.process import MODEL, ServerProcess

ENDED = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"
MISSING = "missing_required_parameter"


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def line(number: int, **body: Any) -> str:
    """One line as the usual scripts write it: the short url, a system prompt of its own."""
    messages = [
        {"role": "system", "content": f"{number}: You are a helpful AI assistant"},
        {"role": "user", "content": "Write a detailed story about a topic."},
    ]
    request = {"model": MODEL, "messages": messages, "max_tokens": 4} | body
    return json.dumps({"custom_id": f"request-{number}", "method": "POST", "url": "/chat/completions", "body": request})


def lines(count: int, **body: Any) -> str:
    return "".join(line(number, **body) + "\n" for number in range(1, count + 1))


def begin(client: openai.OpenAI, text: str | bytes, **more: Any) -> Batch:
    data = text.encode() if isinstance(text, str) else text
    file = client.files.create(file=("batch_requests.jsonl", data), purpose="batch")
    return client.batches.create(**({"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | more))


def end(client: openai.OpenAI, batch: Batch, limit_s: float = 120.0) -> Batch:
    """The batch once it has ended."""
    return until(client, batch, lambda seen: seen.status in ENDED, limit_s)


def until(client: openai.OpenAI, batch: Batch, seen: Callable[[Batch], bool], limit_s: float = 60.0) -> Batch:
    deadline = time.monotonic() + limit_s
    while not seen(batch):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def result(client: openai.OpenAI, identity: str | None) -> list[dict[str, Any]]:
    """The lines of a result file."""
    if identity is None:
        return []
    text = client.files.content(identity).read().decode("utf-8")
    assert text.endswith("\n")
    return [json.loads(row) for row in text.splitlines()]


def ids(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [row["custom_id"] for row in rows]


def test_the_usual_script_of_two_requests_gets_its_answers(client: openai.OpenAI) -> None:
    batch = begin(client, lines(2, max_tokens=50))
    assert batch.id.startswith("batch_")
    assert (batch.object, batch.status, batch.endpoint, batch.completion_window) == ("batch", "validating", CHAT, "24h")
    assert str(batch.request_counts) == "BatchRequestCounts(completed=0, failed=0, total=0)"
    batch = end(client, batch)
    assert batch.status == "completed"
    assert str(batch.request_counts) == "BatchRequestCounts(completed=2, failed=0, total=2)"
    assert batch.output_file_id is not None
    rows = result(client, batch.output_file_id)
    assert ids(rows) == ["request-1", "request-2"]
    for row in rows:
        assert row["id"].startswith("batch_req_")
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["request_id"]
        assert isinstance(row["response"]["body"]["choices"], list)
    assert client.files.delete(batch.output_file_id).deleted


def test_a_batch_that_has_ended_shows_its_times_tokens_model_and_files(client: openai.OpenAI) -> None:
    metadata = {"project": "x" * 512}
    batch = end(client, begin(client, lines(3), metadata=metadata, output_expires_after={"anchor": "created_at", "seconds": 3600}))
    assert batch.expires_at == batch.created_at + 86400
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times)  # type: ignore[type-var]
    assert [batch.failed_at, batch.expired_at, batch.cancelling_at, batch.cancelled_at] == [None] * 4
    assert (batch.errors, batch.error_file_id, batch.metadata, batch.model) == (None, None, metadata, MODEL)
    usages = [row["response"]["body"]["usage"] for row in result(client, batch.output_file_id)]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages) == 12
    assert batch.usage.total_tokens == batch.usage.input_tokens + 12
    assert batch.output_file_id is not None
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.expires_at) == ("batch_output", output.created_at + 3600)


def test_twenty_requests_are_all_completed_ten_seconds_later(client: openai.OpenAI) -> None:
    batch = end(client, begin(client, lines(20, max_tokens=64)), limit_s=10 * 5)
    for _ in range(5):
        seen = client.batches.retrieve(batch.id)
        assert seen.request_counts is not None
        assert (seen.id, seen.request_counts.total, seen.request_counts.completed, seen.request_counts.failed) == (batch.id, 20, 20, 0)


@pytest.mark.long
def test_five_thousand_requests_are_cancelled_at_once_and_what_was_done_is_kept(client: openai.OpenAI) -> None:
    file = client.files.create(file=("batch_requests.jsonl", lines(5000, max_tokens=128).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = until(client, batch, lambda seen: seen.request_counts is not None and seen.request_counts.completed > 20)
    began = time.monotonic()
    cancelling = client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = end(client, batch)
    assert batch.status == "cancelled"
    assert time.monotonic() - began < 15
    assert client.files.delete(file.id).deleted
    assert batch.cancelling_at is not None
    assert batch.cancelled_at is not None
    done, not_done = result(client, batch.output_file_id), result(client, batch.error_file_id)
    assert sorted(ids(done) + ids(not_done)) == sorted(f"request-{number}" for number in range(1, 5001))
    assert {row["error"]["code"] for row in not_done} == {"batch_cancelled"}
    assert {row["response"] for row in not_done} == {None}
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (5000, len(done), 0)


def test_an_online_request_is_answered_while_a_batch_runs(client: openai.OpenAI) -> None:
    batch = begin(client, lines(500, max_tokens=64))
    until(client, batch, lambda seen: seen.request_counts is not None and seen.request_counts.completed > 0)
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert answer.choices
    assert client.batches.retrieve(batch.id).status == "in_progress"
    client.batches.cancel(batch.id)
    end(client, batch)


def test_the_input_may_be_deleted_while_the_batch_runs(client: openai.OpenAI) -> None:
    batch = begin(client, lines(50, max_tokens=16))
    client.files.delete(batch.input_file_id)
    batch = end(client, batch)
    assert batch.status == "completed"
    assert len(result(client, batch.output_file_id)) == 50


def test_a_line_that_the_server_refuses_is_that_lines_error(client: openai.OpenAI) -> None:
    text = line(1) + "\n" + line(2, temperature=-1) + "\n\n" + line(3, stream=True) + "\n" + line(4, messages="no")
    batch = end(client, begin(client, "\ufeff" + text.replace("\n", "\r\n")))
    assert batch.status == "completed"
    assert str(batch.request_counts) == "BatchRequestCounts(completed=1, failed=3, total=4)"
    assert ids(result(client, batch.output_file_id)) == ["request-1"]
    refused, streamed, _ = result(client, batch.error_file_id)
    assert (refused["custom_id"], refused["error"], refused["response"]["status_code"]) == ("request-2", None, 400)
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert (streamed["custom_id"], streamed["response"], streamed["error"]["code"]) == ("request-3", None, "stream_not_supported")


def counted(server: ServerProcess) -> dict[str, float]:
    """The lines of batches by status, as the server's own metrics have them."""
    families = {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}
    return {sample.labels["status"]: sample.value for sample in families["banyan_batch_lines"].samples}


def settled(server: ServerProcess) -> dict[str, float]:
    """The counts, once those of earlier tests' batches have all been told."""
    seen = counted(server)
    while True:
        time.sleep(2.5 * TELL_S)
        if (now := counted(server)) == seen:
            return now
        seen = now


@pytest.mark.long
def test_the_lines_of_batches_are_counted_on_the_servers_metrics_whatever_becomes_of_the_host(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    before = settled(server)
    end(client, begin(client, lines(3) + "\n" + line(4, temperature=-1)))
    cancelled = begin(client, lines(500, max_tokens=128))
    client.batches.cancel(cancelled.id)
    counts = end(client, cancelled).request_counts
    assert counts is not None
    more = {"completed": 3 + counts.completed, "failed": 1 + counts.failed, "expired": 0}
    more["cancelled"] = counts.total - counts.completed - counts.failed
    after = {status: before[status] + more[status] for status in before}
    server.eventually(lambda: counted(server) == after, "all lines are counted")
    host = server._child("banyan_runtime.batch.host.process")
    assert host is not None
    host.kill()
    host.wait()
    client.with_options(max_retries=8).files.list()  # of a new host
    assert counted(server) == after


def test_a_batch_without_one_good_line_has_no_output_file(client: openai.OpenAI) -> None:
    batch = end(client, begin(client, lines(3, temperature=-1)))
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert len(result(client, batch.error_file_id)) == 3


def changed(number: int, **fields: Any) -> str:
    """A line with other fields; None leaves one out."""
    value = json.loads(line(number)) | fields
    return json.dumps({name: field for name, field in value.items() if field is not None})


@pytest.mark.matrix(gate=4)
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", [("empty_file", None, None)]),
        ("\n \n", [("empty_file", None, None)]),
        (line(1) + "\n\nnot json\n" + line(2), [("invalid_json_line", 3, None)]),
        (line(1) + "\n" + line(2) + "\n" + line(1), [("duplicate_custom_id", 3, "custom_id")]),
        (changed(1, custom_id=None) + "\n" + changed(2, body=None), [(MISSING, 1, "custom_id"), (MISSING, 2, "body")]),
        (changed(1, method="GET"), [("invalid_method", 1, "method")]),
        (changed(1, url="/v1/embeddings"), [("url_mismatch", 1, "url")]),
        (line(1, model="other"), [("model_not_found", 1, "body.model")]),
        (b"\xff\xfe\n" + line(2).encode(), [("invalid_json_line", 1, None)]),
    ],
)  # fmt: skip
def test_a_file_that_is_no_batch_fails_with_the_lines_that_are_wrong(
    client: openai.OpenAI, text: str | bytes, found: list[tuple[str, int | None, str | None]]
) -> None:
    batch = begin(client, text)
    assert batch.status == "validating"
    batch = end(client, batch)
    assert (batch.status, batch.output_file_id, batch.error_file_id, batch.in_progress_at) == ("failed", None, None, None)
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line, error.param) for error in batch.errors.data] == found
    assert all(error.message for error in batch.errors.data)


def test_no_more_than_a_hundred_problems_are_listed(client: openai.OpenAI) -> None:
    batch = end(client, begin(client, "no\n" * 500))
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.line for error in batch.errors.data] == list(range(1, 101))


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("url", ["/v1/chat/completions", "/chat/completions", "https://api.openai.com/v1/chat/completions"])
def test_every_way_to_write_the_url_is_taken(client: openai.OpenAI, url: str) -> None:
    assert end(client, begin(client, changed(1, url=url))).status == "completed"


@pytest.mark.matrix(gate=5)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": "file-unknown"}, "input_file_id"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"endpoint": None}, "endpoint"),
        ({"endpoint": "/v1/audio/speech"}, "endpoint"),
        ({"completion_window": None}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "99d"}, "completion_window"),
        ({"metadata": "text"}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"seconds": 3600}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
def test_a_wrong_field_of_a_new_batch_is_named(client: openai.OpenAI, server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    file = client.files.create(file=("a.jsonl", lines(1).encode()), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields
    body = {name: value for name, value in body.items() if value is not None}
    refused = server.http.post(server.url + "/v1/batches", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)


def test_a_file_of_another_purpose_and_what_is_no_json_are_refused(client: openai.OpenAI, server: ServerProcess) -> None:
    file = client.files.create(file=("a.jsonl", lines(1).encode()), purpose="user_data")
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert refused.value.param == "input_file_id"
    headers = {"Content-Type": "application/json"}
    for body in (b"{", b"[]", b"\xff", b"[" * 5000):
        assert server.http.post(server.url + "/v1/batches", content=body, headers=headers).status_code == 400


def test_a_batch_that_has_ended_cannot_be_cancelled_and_an_unknown_one_is_not_found(client: openai.OpenAI) -> None:
    batch = end(client, begin(client, lines(1)))
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.cancel(batch.id)
    assert "'completed'" in refused.value.message
    for call in (client.batches.cancel, client.batches.retrieve):
        with pytest.raises(openai.NotFoundError) as unknown:
            call("batch_unknown")
        assert (unknown.value.param, unknown.value.code) == ("id", None)


def test_a_batch_can_be_cancelled_while_it_is_validated(client: openai.OpenAI) -> None:
    batch = begin(client, lines(5000))
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = end(client, batch)
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    written = len(result(client, batch.output_file_id)) + len(result(client, batch.error_file_id))
    assert written == batch.request_counts.total


def test_a_create_whose_answer_was_lost_makes_no_second_batch(client: openai.OpenAI) -> None:
    batch = begin(client, lines(500, max_tokens=64), metadata={"a": "b"})

    def again(**more: Any) -> Batch:
        fields: dict[str, Any] = {
            "input_file_id": batch.input_file_id,
            "endpoint": CHAT,
            "completion_window": "24h",
            "metadata": {"a": "b"},
        }
        headers = more.pop("headers")
        return client.batches.create(**(fields | more), extra_headers=headers)

    assert again(headers={"x-stainless-retry-count": "1"}).id == batch.id
    ended = end(client, begin(client, lines(1)))
    fields: dict[str, Any] = {"input_file_id": ended.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
    assert client.batches.create(**fields, extra_headers={"x-stainless-retry-count": "1"}).id == ended.id
    others = [again(headers={"x-stainless-retry-count": "1"}, metadata={"a": "c"}), again(headers={})]
    keyed = [again(headers={"Idempotency-Key": "k"}), again(headers={"Idempotency-Key": "k"})]
    assert keyed[0].id == keyed[1].id
    all_ids = {batch.id, *(other.id for other in others), keyed[0].id}
    assert len(all_ids) == 4
    for identity in all_ids:
        client.batches.cancel(identity)
    for made in (batch, *others, keyed[0]):
        end(client, made)


def test_a_new_batch_that_is_too_large_is_told_the_limit(server: ServerProcess) -> None:
    refused = server.http.post(server.url + "/v1/batches", json={"metadata": {"a": "x" * 300_000}})
    assert refused.status_code == 413
    error = refused.json()["error"]
    assert (error["param"], error["code"], "262144" in error["message"]) == ("body", "request_too_large", True)


def test_a_list_is_paged_newest_first(client: openai.OpenAI, server: ServerProcess) -> None:
    made = [begin(client, "no").id for _ in range(5)]
    listed = [batch.id for batch in client.batches.list(limit=2)]  # the client asks for page after page
    assert listed[:5] == made[::-1]
    assert len(listed) == len(set(listed))
    page = client.batches.list(limit=2, after=made[3])
    assert ([batch.id for batch in page.data], page.has_more) == (made[1:3][::-1], True)
    for query in ("limit=0", "limit=101", "limit=x"):
        assert server.http.get(f"{server.url}/v1/batches?{query}").status_code == 400
    raw = server.http.get(f"{server.url}/v1/batches?limit=1").json()
    assert (raw["object"], raw["first_id"], raw["last_id"], raw["has_more"]) == ("list", made[4], made[4], True)
