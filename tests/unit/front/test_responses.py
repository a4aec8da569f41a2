"""Responses over real HTTP, while the test makes the plan and plays the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import pytest

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.chat.events import ToolArgs, ToolEnd, ToolStart
from banyan_runtime.front.deltas import Delta, Finished
from banyan_runtime.front.errors import ApiError, shutting_down
from banyan_runtime.front.openai.responses import events, routes
from banyan_runtime.front.openai.responses.assembly import Assembly
from banyan_runtime.front.openai.responses.ids import Side, item_id
from banyan_runtime.front.openai.responses.references import MAX_RESPONSES, Before, Kept, resolved
from banyan_runtime.front.openai.responses.schema import ResponsesRequest
from banyan_runtime.front.openai.responses.store import Record, ResponseStore
from banyan_runtime.front.parsing import parse
from banyan_runtime.front.plan import GenerateRequest, ResponsePlan, ToolUse
from banyan_runtime.front.text.text import Text
from banyan_runtime.front.text.tokenizer import Tokenizer
from banyan_runtime.wire import FinishCode
from tests.unit.front.answering import A, B, Play, Scenario, openai, player, request
from tests.unit.front.support import FakeEngine, Front, byte_level, finish, run

EOS = 2
STORE = ResponseStore()  # makes the ids of responses before there is a server
SIDES: tuple[Side, ...] = ("output", "input")


@pytest.fixture
def play(tmp_path: Path, bytes_tokenizer: Tokenizer) -> Play:
    def played(scenario: Scenario) -> None:
        async def on_that_server(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
            front.context.responses.server_id = STORE.server_id
            await scenario(front, engine, address)

        player(tmp_path, bytes_tokenizer)(on_that_server)

    return played


def response(one: GenerateRequest | None = None, **options: Any) -> ResponsePlan:
    said = {"settings": b"{}", "items": b"[]", "messages": b'[{"role":"user","content":"Hi"}]'}
    kept = {"id": STORE.new_id(), "store": True, "background": False, **said}
    return ResponsePlan(requests=(one or request(),), **openai(**{"include_reasoning": True, **kept, "previous": None, **options}))


class Client:
    """Asks for responses, whose plans it brings."""

    def __init__(self, front: Front, address: tuple[str, int]) -> None:
        self._front = front
        self.http = httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}/v1", verify=False, timeout=15)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    def create(self, plan: ResponsePlan) -> asyncio.Task[httpx.Response]:
        self._front.preparer.plans.append(plan)
        return asyncio.create_task(self.http.post("/responses", json={}))

    async def told(self, response_id: str) -> Any:
        return (await self.http.get(f"/responses/{response_id}")).json()


def parsed(stream: str) -> list[Any]:
    """The data of events."""
    return [json.loads(event.partition("data: ")[2]) for event in stream.split("\n\n") if event and not event.startswith(":")]


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_by_the_engine_has_a_status_of_its_own(play: Play, stream: bool) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        async with Client(front, address) as client:
            answer = client.create(response(stream=stream))
            await engine.send(wire.Failed(await engine.submitted(), "queue_full", ""))
            assert (await answer).status_code == 429
            assert front.rejections == ["queue_full"]
            assert front.records == []

    play(scenario)


def test_where_the_engine_may_have_no_room_a_stream_waits_for_its_word(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan_runtime.front.event_stream.FIRST_EVENT_S", 0.0)
    monkeypatch.setattr("banyan_runtime.front.generation_group.GenerationGroup.may_be_refused", True)

    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        async with Client(front, address) as client:
            answer = client.create(response(stream=True))
            one = await engine.submitted()
            await asyncio.sleep(0.05)  # longer than a stream would wait
            await engine.send(wire.Failed(one, "queue_full", ""))
            assert (await answer).status_code == 429
            assert front.rejections == ["queue_full"]

    play(scenario)


@pytest.mark.parametrize("background", [True, False])
def test_a_later_failure_is_told_in_the_response_and_counted_once(play: Play, background: bool) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        async with Client(front, address) as client:
            plan = response(stream=True, background=background)
            front.preparer.plans.append(plan)
            async with client.http.stream("POST", "/responses", json={}) as answer:
                one = await engine.submitted()
                pieces = answer.aiter_text()
                text = await anext(pieces)  # the status is told
                await engine.send(wire.Failed(one, "queue_full", "no room"))
                async for piece in pieces:
                    text += piece
            last = parsed(text)[-1]
            assert last["type"] == "response.failed"
            assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", "rate_limit_exceeded")
            assert front.rejections == ["queue_full"]
            assert front.records == []
            status = (await client.http.get(f"/responses/{last['response']['id']}")).status_code
            assert status == (200 if background else 404)  # a failure that was answered is not kept

    play(scenario)


@pytest.mark.parametrize("tail", ['"', "</tool_call>"])
@pytest.mark.parametrize("stopped", [True, False])
def test_a_call_that_could_not_be_run_is_never_complete(tmp_path: Path, stopped: bool, tail: str) -> None:
    byte_level(tmp_path, added=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + tail
    schemas = msgspec.json.encode({"f": {"type": "object"}})

    async def scenario() -> None:
        async with FakeEngine(tmp_path) as engine:
            tokenizer = Tokenizer.load(tmp_path)
            front = Front(engine, tokenizer)
            async with front.served() as address, Client(front, address) as client:
                answer = client.create(response(request(tools=ToolUse(format="hermes", schemas=schemas))))
                one = await engine.submitted()
                tokens = list(tokenizer.encode(text, add_special_tokens=False))
                code = FinishCode.STOP if stopped else FinishCode.LENGTH
                await engine.step({one: [*tokens, *([EOS] if stopped else [])]}, finish(one, code))
                told = (await answer).json()
                assert told["status"] == ("completed" if stopped else "incomplete")
                assert tail != '"' or any(item["type"] == "function_call" for item in told["output"])
                assert all(item["status"] == "incomplete" for item in told["output"] if item["type"] == "function_call")
                record = await front.context.responses.load(told["id"])
                assert record is not None
                assert b"tool_calls" not in bytes(record.messages)

    run(scenario)


@pytest.mark.parametrize(("arguments", "status"), [("{}", "completed"), ("{", "incomplete"), ("[1]", "incomplete"), ("", "incomplete")])
def test_a_call_is_complete_if_its_arguments_are_an_object(arguments: str, status: str) -> None:
    assembly = Assembly("resp_1", "tiny", {}, lambda start: "call_1", lambda rows: [], background=False)
    ended = Finished("stop", None, 0, 0, None)
    assembly.add(Delta("", "", [A], 1, [], (), None, [ToolStart(0, "f"), ToolArgs(0, arguments), ToolEnd(0)]))
    assembly.finish(ended, {})
    assert [item["status"] for item in assembly.told()["output"]] == [status]
    assert (assembly.message() is None) == (status == "incomplete")


def test_log_probabilities_of_all_tokens_are_told_with_the_text_that_follows_them() -> None:
    def tell(rows: Sequence[bytes]) -> list[dict[str, Any]]:
        return [{"token": row.decode()} for row in rows]

    assembly = Assembly("resp_1", "tiny", {}, lambda start: "call_1", tell, background=False)
    events = b"".join(
        assembly.add(Delta(content, thoughts, [A] * len(rows), behind, rows))
        for content, thoughts, rows, behind in (
            ("", "", [b"<think>"], 1),
            ("", "well", [b"well", b"</think>"], 3),
            ("", "", [b"he"], 4),  # held back
            ("he is", "", [b" is"], 5),
            (" no", "", [b" no"], 6),
            ("", "", [b"<|im_end|>"], 7),
        )
    )
    assembly.finish(Finished("stop", None, 0, 0, None), {})
    told = [json.loads(line[6:]) for line in events.split(b"\n") if line.startswith(b"data: ")]
    pieces = [[one["token"] for one in event["logprobs"]] for event in told if event["type"] == "response.output_text.delta"]
    assert pieces == [["<think>", "well", "</think>", "he", " is"], [" no"]]
    (message,) = assembly.told()["output"][-1]["content"]
    assert [one["token"] for one in message["logprobs"]] == [*pieces[0], " no", "<|im_end|>"]


def test_thoughts_between_special_tokens_are_thoughts(tmp_path: Path) -> None:
    byte_level(tmp_path, added=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"))
    (tmp_path / "config.json").write_text("{}")

    async def scenario() -> None:
        async with FakeEngine(tmp_path) as engine:
            front = Front(engine, None)
            front.context.text = Text.load(ServerConfig(model_path=str(tmp_path), reasoning_parser="qwen3"), tmp_path)
            async with front.served() as address, Client(front, address) as client:
                answer = client.create(response(request(reasoning="optional")))
                one = await engine.submitted()
                await engine.step({one: [3, A + 2, 4, B + 2, EOS]}, finish(one, FinishCode.STOP))
                thoughts, message = (await answer).json()["output"]
                assert (thoughts["content"][0]["text"], message["content"][0]["text"]) == ("a", "b")

    run(scenario)


# --- references to items ---


def recorded(response_id: str, places: range = range(1)) -> Record:
    """A response with items of the user's and as many of its own, by their places."""
    sides: dict[Side, list[Any]] = {
        side: [{"id": item_id("message", response_id, side, place), "type": "message", "role": "user", "content": side} for place in places]
        for side in ("input", "output")
    }
    told = msgspec.json.encode({"id": response_id, "status": "completed", "output": sides["output"]})
    items = msgspec.json.encode(sides["input"])
    return Record(msgspec.Raw(told), msgspec.Raw(items), msgspec.Raw(b"[]"), False)


def referring(*ids: str, typed: bool = True) -> dict[str, Any]:
    return {"input": [{"type": "item_reference", "id": one} if typed else {"id": one} for one in ids]}


@pytest.mark.parametrize("typed", [True, False])
def test_items_of_responses_are_found(play: Play, monkeypatch: pytest.MonkeyPatch, typed: bool) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        ids = [STORE.new_id() for _ in range(3)]
        for one in ids[:2]:
            front.context.responses.save(one, recorded(one))
        bodies: list[bytes] = []

        async def plan(endpoint: str, body: bytes, request_id: str) -> Any:
            bodies.append(bytes(body))
            raise shutting_down()

        monkeypatch.setattr(front.preparer, "plan", plan)
        wanted = [item_id("message", one, side, 0) for one in ids[:2] for side in SIDES]
        body = referring(*wanted, item_id("message", ids[2], "output", 0), typed=typed)
        async with Client(front, address) as client:
            await client.http.post("/responses", json=body)
        before = msgspec.json.decode(bodies[0].partition(b"\n")[0], type=Before)
        assert list(before.kept) == ids[:2]
        found: Any = resolved(body["input"][:-1], before.kept)
        assert [(item["id"], item["content"]) for item in found] == list(zip(wanted, ["output", "input"] * 2, strict=True))
        with pytest.raises(ApiError, match="not found") as missing:
            resolved(body["input"], before.kept)
        assert missing.value.status == 404

    play(scenario)


def test_what_is_read_for_references_is_bounded(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_BYTES", 1000)

    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        response_id = STORE.new_id()
        front.context.responses.save(response_id, recorded(response_id, range(10)))
        async with Client(front, address) as client:
            answer = await client.http.post("/responses", json=referring(item_id("message", response_id, "output", 3)))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
            many = [item_id("message", STORE.new_id(), "output", 0) for _ in range(MAX_RESPONSES + 1)]
            answer = await client.http.post("/responses", json=referring(*many))
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "array_above_max_length")

    play(scenario)


def test_an_item_that_was_sent_again_and_changed_is_found_as_it_was() -> None:
    first, second = STORE.new_id(), STORE.new_id()
    own = item_id("message", first, "output", 0)
    record = recorded(second)
    changed = msgspec.Raw(msgspec.json.encode([{"id": own, "content": "changed"}]))
    kept = {first: Kept(recorded(first).response, msgspec.Raw(b"[]")), second: Kept(record.response, changed)}
    (found,) = resolved(referring(own)["input"], kept)
    assert isinstance(found, dict)
    assert found["content"] == "output"


# --- in the background ---


async def begun(client: Client, engine: FakeEngine, **options: Any) -> tuple[str, int]:
    """A response in the background: its id, and the engine's."""
    answer = client.create(response(background=True, **options))
    one = await engine.submitted()
    return (await answer).json()["id"], one


def test_one_that_is_deleted_is_not_written_down_again(play: Play, tmp_path: Path) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        front.context.responses = ResponseStore(tmp_path / "kept")
        async with Client(front, address) as client:
            response_id, one = await begun(client, engine)
            assert (await client.http.delete(f"/responses/{response_id}")).json()["deleted"]
            assert await engine.aborted() == one
            await engine.step({}, finish(one, FinishCode.ABORT))
            await front.context.responses.close()
            assert not list((tmp_path / "kept").rglob("resp_*"))
            assert (await client.http.get(f"/responses/{response_id}")).status_code == 404

    play(scenario)


def test_readers_of_one_that_is_deleted_hear_that_it_was_cancelled(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        async with Client(front, address) as client:
            response_id, one = await begun(client, engine)
            await engine.step({one: [A]})
            run_ = front.context.responses_live[response_id]
            reader = asyncio.create_task(client.http.get(f"/responses/{response_id}?stream=true"))
            while not run_._listeners:
                await client.told(response_id)
            saved: list[str] = []
            await client.http.delete(f"/responses/{response_id}")
            assert await engine.aborted() == one
            monkeypatch.setattr(front.context.responses, "save", lambda kept, _: saved.append(kept))
            await engine.step({}, finish(one, FinishCode.ABORT))
            last = parsed((await reader).text)[-1]
            assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
            assert (last["response"]["id"], last["response"]["output"][0]["content"][0]["text"]) == (response_id, "a")
            assert not saved
            assert (await client.http.get(f"/responses/{response_id}?stream=true")).status_code == 404

    play(scenario)


def test_one_that_an_earlier_life_of_the_server_did_not_end_has_failed(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        async with Client(front, address) as client:
            response_id = STORE.new_id()
            told = msgspec.json.encode({"id": response_id, "status": "in_progress", "error": None})
            front.context.responses.save(response_id, Record(msgspec.Raw(told), msgspec.Raw(b"[]"), msgspec.Raw(b"[]"), True))
            found = await client.told(response_id)
            assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
            assert (await client.http.post(f"/responses/{response_id}/cancel")).status_code == 200

    play(scenario)


def test_a_response_of_another_server_is_refused_by_a_code_of_its_own(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        async with Client(front, address) as client:
            there = ResponseStore().new_id()
            for answer, param in (
                (await client.http.get(f"/responses/{there}"), "response_id"),
                (await client.http.delete(f"/responses/{there}"), "response_id"),
                (await client.http.post("/responses", json={"input": "Hi", "previous_response_id": there}), "previous_response_id"),
                (await client.http.post("/responses", json=referring(item_id("message", there, "output", 0))), "input"),
            ):
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (404, "response_not_on_this_server", param)

    play(scenario)


def test_one_cannot_be_in_the_background_where_nothing_is_kept(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        front.context.responses = ResponseStore(None, 0.0)
        async with Client(front, address) as client:
            answer = await client.create(response(background=True))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")
            assert not front.context.responses_live

    play(scenario)


def test_events_that_grow_too_many_are_given_up_and_the_response_goes_on(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LOG_BYTES", 2000)

    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        async with Client(front, address) as client:
            response_id, one = await begun(client, engine)
            for _ in range(10):
                await engine.step({one: [A]})
            await engine.step({one: [EOS]}, finish(one, FinishCode.STOP))
            while (told := await client.told(response_id))["status"] != "completed":
                pass
            assert told["output"][0]["content"][0]["text"] == "a" * 10
            again = await client.http.get(f"/responses/{response_id}?stream=true")
            assert (again.status_code, again.json()["error"]["param"]) == (400, "stream")

    play(scenario)


def test_several_readers_hear_the_same_events_from_where_they_want(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        async with Client(front, address) as client:
            response_id, one = await begun(client, engine)
            await engine.step({one: [A]})
            run_ = front.context.responses_live[response_id]
            while (await client.told(response_id))["status"] == "queued":
                pass
            readers = [asyncio.create_task(client.http.get(f"/responses/{response_id}?stream=true&starting_after={n}")) for n in (0, 2, 4)]
            while len(run_._listeners) < len(readers):
                await client.told(response_id)
            await engine.step({one: [B, EOS]}, finish(one, FinishCode.STOP))
            heard = [parsed((await reader).text) for reader in readers]
            assert [each[0]["sequence_number"] for each in heard] == [1, 3, 5]
            assert heard[0][2:] == heard[1]
            assert heard[1][2:] == heard[2]
            assert heard[0][-1]["response"]["output"][0]["content"][0]["text"] == "ab"
            assert (await client.http.get(f"/responses/{response_id}?stream=true&starting_after=x")).status_code == 400

    play(scenario)


def test_a_query_is_read_as_clients_write_it_and_what_is_wrong_in_it_is_named(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        async with Client(front, address) as client:
            response_id, one = await begun(client, engine)
            await engine.step({one: [A, EOS]}, finish(one, FinishCode.STOP))
            while (await client.told(response_id))["status"] != "completed":
                pass

            async def asked(query: str) -> httpx.Response:
                return await client.http.get(f"/responses/{response_id}?{query}")

            for value in ("true", "True", "TRUE", "1"):
                assert (await asked(f"stream={value}")).headers["content-type"].startswith("text/event-stream")
            for value in ("false", "False", "0"):
                assert (await asked(f"stream={value}")).json()["id"] == response_id
            for query, param in (("stream=bogus", "stream"), ("stream=", "stream"), ("starting_after=3", "starting_after")):
                refused = await asked(query)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
            assert (await asked("stream=bogus")).json()["error"]["message"] == (
                "Invalid value for 'stream': 'bogus'. Supported values are: true, false, 1, 0."
            )
            for query in ("include=bogus", "include[]=a&include[]=b&include_obfuscation=false", "include=x&stream=true"):
                assert (await asked(query)).headers["x-banyan-ignored"] == "include"
            assert "x-banyan-ignored" not in (await asked("stream=true&starting_after=1&include_obfuscation=false")).headers

    play(scenario)


def test_characters_at_which_clients_cut_lines_are_escaped_in_events_that_are_kept(play: Play) -> None:
    async def scenario(front: Front, engine: FakeEngine, address: tuple[str, int]) -> None:
        async with Client(front, address) as client:
            settings = json.dumps({"instructions": "a\u2028b"}, ensure_ascii=False).encode()
            response_id, one = await begun(client, engine, settings=settings)
            await engine.step({one: [EOS]}, finish(one, FinishCode.STOP))
            while (await client.told(response_id))["status"] != "completed":
                pass
            told = (await client.http.get(f"/responses/{response_id}?stream=true")).text
            assert told.splitlines() == told.split("\n")[:-1]
            assert parsed(told)[0]["response"]["instructions"] == "a\u2028b"

    play(scenario)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"a": "b", "long": "v" * 513}, "Invalid 'metadata.long': its value has 513 characters, at most 512 are allowed. Shorten it."),
        ({"k" * 100: "v"}, f"Invalid 'metadata': the key '{'k' * 64}…' has 100 characters, at most 64 are allowed. Shorten it."),
    ],
)
def test_the_pair_of_metadata_that_is_too_long_is_named(metadata: dict[str, str], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(ResponsesRequest, {"input": "Hi", "metadata": metadata}).check()
    assert (refused.value.param, refused.value.message) == ("metadata", message)
