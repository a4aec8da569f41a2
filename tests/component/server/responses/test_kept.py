"""Responses and their items that are kept: gone on from, referred to, listed, deleted, and found again by a server that comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseInputItemParam

from tests.component.server.responses.conftest import (
    CAPITAL,
    LONG,
    TOOL,
    WEATHER,
    ask,
    client_of,
    lasting,
    reference,
)
from tests.support.server.process import MODEL, ServerProcess, StartServer


@pytest.mark.parametrize("background", [False, True])
def test_a_loop_of_calls_goes_on_from_references_to_its_thoughts_and_calls(
    client: openai.OpenAI, server: ServerProcess, background: bool
) -> None:
    first = ask(client, WEATHER, tools=[TOOL], background=background)
    first = server.eventually(lambda: (r := client.responses.retrieve(first.id)).status == "completed" and r, "the end")  # type: ignore[assignment]
    assert {item.type for item in first.output} == {"reasoning", "function_call"}
    call: Any = next(item for item in first.output if item.type == "function_call")
    asked: Any = {"role": "user", "content": WEATHER}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 21}'}
    by_hand = ask(client, [asked, *(item.model_dump() for item in first.output), result], tools=[TOOL])
    referred = ask(client, [asked, *map(reference, first.output), result], tools=[TOOL])
    assert lasting(referred.output) == lasting(by_hand.output)
    assert referred.usage is not None
    assert by_hand.usage is not None
    assert referred.usage.input_tokens == by_hand.usage.input_tokens


def test_items_of_several_responses_can_be_referred_to_and_are_listed_as_what_they_are(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    answers = [ask(client, text, reasoning={"effort": "none"}) for text in (CAPITAL, WEATHER)]
    (asked,) = client.responses.input_items.list(answers[0].id).data
    turns: Any = [asked, answers[0].output[-1], {"role": "user", "content": WEATHER}, answers[1].output[-1]]
    last: Any = {"role": "user", "content": "Hello"}
    given = [turn if isinstance(turn, dict) else reference(turn) for turn in turns]
    third = ask(client, [*given, last])
    listed = client.responses.input_items.list(third.id, order="asc").data
    assert [item.id for item in listed][:2] == [asked.id, answers[0].output[-1].id]
    shown = [[part.text for part in item.content] for item in listed]  # type: ignore[union-attr]
    assert shown == [[CAPITAL], [answers[0].output_text], [WEATHER], [answers[1].output_text], ["Hello"]]
    large = {"model": MODEL, "input": [*given, last], "padding": "x" * 300_000}  # too large to be read at once
    counted = server.post("/v1/responses/input_tokens", large)
    assert third.usage is not None
    assert counted.json()["input_tokens"] == third.usage.input_tokens


def test_an_item_that_is_not_kept_is_not_found(client: openai.OpenAI) -> None:
    deleted = ask(client, max_output_tokens=4)
    client.responses.delete(deleted.id)
    passing = ask(client, max_output_tokens=4, store=False)
    for item_id, hint in ((deleted.output[0].id, False), ("msg_388f", False), ("x" * 300, False), (passing.output[0].id, True)):
        with pytest.raises(openai.NotFoundError, match=str(item_id)[:100]) as refused:
            ask(client, [reference(str(item_id)), {"role": "user", "content": "Hello"}])
        assert (refused.value.param, refused.value.code) == ("input", None)
        assert hint == ("store" in refused.value.message)


@pytest.mark.usefixtures("slowed")
def test_an_item_of_a_response_that_runs_is_waited_for(client: openai.OpenAI) -> None:
    begun = ask(client, background=True, **LONG)
    (asked,) = client.responses.input_items.list(begun.id).data
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, [reference(asked)])
    assert refused.value.param == "input"
    client.responses.cancel(begun.id)


def test_a_conversation_goes_on_from_its_id_without_its_instructions(client: openai.OpenAI) -> None:
    first = ask(client, instructions="You are a pirate.")
    second = ask(client, "And of Norway?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.instructions is None
    turns: list[ResponseInputItemParam] = [
        {"role": "user", "content": CAPITAL},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Norway?"},
    ]
    by_hand = client.responses.input_tokens.count(model=MODEL, input=turns)
    assert second.usage is not None
    assert second.usage.input_tokens == by_hand.input_tokens
    third = ask(client, "And of Spain?", previous_response_id=second.id)
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


def test_a_response_can_be_retrieved_listed_and_deleted(client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": f"{number}"} for number in range(25)]
    response = ask(client, given, max_output_tokens=4)
    assert client.responses.retrieve(response.id) == response
    listed = [item.content[0].text for item in client.responses.input_items.list(response.id)]  # type: ignore[union-attr]
    assert listed == [str(number) for number in reversed(range(25))]  # the client turns the pages
    page = client.responses.input_items.list(response.id, order="asc", limit=3)
    assert [item.content[0].text for item in page.data] == ["0", "1", "2"]  # type: ignore[union-attr]
    assert page.has_more
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=response.id) as refused:
            call(response.id)
        assert refused.value.param == "response_id"


def test_one_that_is_not_stored_leaves_no_trace(client: openai.OpenAI) -> None:
    response = ask(client, store=False, max_output_tokens=4)
    assert response.model_extra is not None
    assert response.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as refused:
        ask(client, "Hello", previous_response_id=response.id)
    assert refused.value.param == "previous_response_id"


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize(
    "hostile", ["..%2F..%2Fetc%2Fpasswd", "resp_" + "0" * 32 + ".json", "resp_%00", "x" * 5000, "resp_ffffffff" + "f" * 24, "%F0%9F%98%80"]
)
def test_an_id_of_any_shape_is_only_not_found(server: ServerProcess, hostile: str) -> None:
    for answer in (
        server.get(f"/v1/responses/{hostile}"),
        server.get(f"/v1/responses/{hostile}?stream=true"),
        server.http.delete(f"{server.url}/v1/responses/{hostile}"),
        server.post(f"/v1/responses/{hostile}/cancel", {}),
        server.get(f"/v1/responses/{hostile}/input_items"),
    ):
        assert answer.status_code == 404
        assert len(answer.content) < 1000
        assert answer.json()["error"]["param"] in ("response_id", None)  # None: a slash makes it another path


@pytest.mark.long
def test_a_server_that_comes_back_goes_on_from_the_responses_of_its_folder(start_server: StartServer, tmp_path: Path) -> None:
    """Servers of their own: the one that ends, the one that takes its folder over, and one that has neither."""
    kept = ("--response-store-path", str(tmp_path / "kept"))
    slow = ("--runner", "torch", "--drain-seconds", "1")  # it is to be cut off in the middle of an answer
    before = start_server(*kept, *slow).ready()
    client = client_of(before)
    first = ask(client, max_output_tokens=4)
    running = ask(client, background=True, **LONG)
    before.process.terminate()
    assert before.wait(30) == 0
    after, other = start_server(*kept).ready(), start_server().ready()
    client = client_of(after)
    assert client.responses.retrieve(first.id) == first
    assert ask(client, "And of Norway?", previous_response_id=first.id).status == "completed"
    cut_off = client.responses.retrieve(running.id)
    assert cut_off.error is not None
    assert (cut_off.status, cut_off.error.code) == ("failed", "server_error")
    with pytest.raises(openai.NotFoundError) as elsewhere:
        client_of(other).responses.retrieve(first.id)
    assert elsewhere.value.code == "response_not_on_this_server"
