"""Responses in the background, their readers, and clients that go."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from banyan_runtime.front.deadline import HEADER as TIMEOUT
from tests.component.server.responses.conftest import CAPITAL, LONG, ask, lasting, stream
from tests.support.server.process import DEADLINE_S, MODEL, ServerProcess
from tests.support.server.raw import RawClient, post

# --- in the background ---


def test_a_response_in_the_background_is_polled_to_its_end(client: openai.OpenAI, server: ServerProcess) -> None:
    begun = ask(client, background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    ended = server.eventually(lambda: (r := client.responses.retrieve(begun.id)).status == "completed" and r, "the end")
    assert isinstance(ended, Response)
    assert lasting(ended.output) == lasting(ask(client).output)
    assert client.responses.cancel(begun.id).status == "completed"  # too late, and no error
    events = list(client.responses.retrieve(begun.id, stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response == ended


@pytest.mark.usefixtures("slowed")
def test_one_that_runs_can_be_cancelled_and_is_not_gone_on_from(client: openai.OpenAI) -> None:
    begun = ask(client, background=True, **LONG)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "Hello", previous_response_id=begun.id)
    assert refused.value.param == "previous_response_id"
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError) as synchronous:
        client.responses.cancel(ask(client, max_output_tokens=4).id)
    assert synchronous.value.type == "invalid_request_error"


def test_a_reader_that_was_cut_off_goes_on_where_it_stopped(client: openai.OpenAI) -> None:
    seen: list[Any] = []
    with client.responses.create(model=MODEL, input=CAPITAL, background=True, stream=True, temperature=0, max_output_tokens=256) as events:
        for event in events:
            seen.append(event)
            if len(seen) == 6:
                break
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response_id = seen[0].response.id
    seen += client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    assert "Paris" in seen[-1].response.output_text
    late = list(client.responses.retrieve(response_id, stream=True, starting_after=6))
    assert late == seen[7:]


@pytest.mark.usefixtures("slowed")
def test_what_is_deleted_while_it_runs_ends_and_ends_its_readers(client: openai.OpenAI, server: ServerProcess) -> None:
    with client.responses.create(model=MODEL, input=CAPITAL, background=True, stream=True, **LONG) as events:
        first = next(iter(events))
        client.responses.delete(first.response.id)  # type: ignore[union-attr]
        *_, last = events
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")  # type: ignore[union-attr]
    finish_line(server, first.response.id, "abort")  # type: ignore[union-attr]


# --- clients that go ---


def finish_line(server: ServerProcess, response_id: str, reason: str) -> None:
    """Each request ends in one line, which says how."""
    lines = server.eventually(lambda: [line for line in server.lines if line.startswith(f"Finished {response_id}")], "the finish line")
    assert len(lines) == 1
    assert f"endpoint: responses, reason: {reason}," in lines[0]


def test_every_response_has_one_finish_line(client: openai.OpenAI, server: ServerProcess) -> None:
    for options in ({}, {"stream": True}, {"background": True}):
        answer = server.post("/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 2, **options})
        found = re.search(r"resp_[0-9a-f]{32}", answer.text)
        assert found
        finish_line(server, found.group(), "length")


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_ends_its_response(server: ServerProcess, streaming: bool) -> None:
    aborted = 'banyan_requests_total{endpoint="responses",finish_reason="abort"}'
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 1900, "ignore_eos": True}
    server.until_idle()
    before = server.settled(aborted)
    if streaming:
        with server.http.stream("POST", f"{server.url}/v1/responses", json={**body, "stream": True}) as answer:
            next(answer.iter_lines())
    else:
        with RawClient(server.url) as leaving:
            leaving.send(post("/v1/responses", body))
            server.eventually(lambda: server.metric("banyan_requests_running") == 1, "a running request")
    server.eventually(lambda: server.metric(aborted) == before + 1, "the end of the generation")


@pytest.mark.usefixtures("slowed")
def test_a_deadline_ends_a_response_and_one_in_the_background_too(client: openai.OpenAI, server: ServerProcess) -> None:
    late: dict[str, Any] = {**LONG, "extra_headers": {TIMEOUT: str(DEADLINE_S)}}
    with ThreadPoolExecutor(2) as pool:
        whole, streamed = pool.submit(ask, client, **late), pool.submit(stream, client, **late)
        begun = ask(client, **late, background=True)
        with pytest.raises(openai.InternalServerError) as ended:
            whole.result()
        *_, last = streamed.result()
    assert (ended.value.status_code, ended.value.code) == (504, "timeout")
    assert (last.type, last.response.error.code) == ("response.failed", "server_error")
    server.eventually(lambda: client.responses.retrieve(begun.id).status == "failed", "the end")
    error = client.responses.retrieve(begun.id).error
    assert error is not None
    assert error.code == "server_error"
    in_time = ask(client, **{**late, "max_output_tokens": 5, "extra_headers": {TIMEOUT: "30"}}, background=True)
    server.eventually(lambda: client.responses.retrieve(in_time.id).status == "incomplete", "its end in time")
