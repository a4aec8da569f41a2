"""Responses with `truncation: "auto"`: what is left out of a conversation that is too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.openai.responses.references import Before
from banyan_runtime.front.plan import ResponsePlan
from banyan_runtime.front.prepare import responses
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.prepare.truncation import droppable
from banyan_runtime.front.text.text import Text
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front.planning import planner_of

NAMES: Final = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or () %}!{{ c.id }}{% endfor %};{% endfor %}"
ALTERNATING: Final = (
    "{% set t = messages | selectattr('role', 'ne', 'system') | list %}"
    "{% if t[0].role != 'user' %}{{ raise_exception('a user begins') }}{% endif %}" + NAMES
)
LONG: Final = " w" * 900  # tokens; two of these fit, three do not


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}


def output(name: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": text}


@pytest.fixture(scope="module")
def planner(tiny_chat: Path) -> Planner:
    return planner_of(tiny_chat, chat_template=NAMES)


def planned(planner: Planner, given: Any, *, history: list[Any] | None = None, **options: Any) -> ResponsePlan:
    before = msgspec.json.encode(Before(id="resp_1", history=msgspec.Raw(msgspec.json.encode(history or []))))
    body = json.dumps({"input": given, "truncation": "auto", "max_output_tokens": 16, **options}).encode()
    made = planner.plan("responses", before + b"\n" + body, "request")
    assert isinstance(made, ResponsePlan)
    return made


def shown(tiny_chat: Path, planner: Planner, given: Any, **options: Any) -> str:
    """The prompt, its long texts shortened."""
    ids = wire.unpack_ids(planned(planner, given, **options).requests[0].token_ids).tolist()
    return _tokenizer(tiny_chat).decode(ids, skip_special_tokens=False).replace(LONG, "~")


def _tokenizer(folder: Path) -> Tokenizer:
    return Text.load(ServerConfig(model_path=str(folder)), folder).needed_tokenizer


@pytest.mark.parametrize(
    ("given", "options", "prompt"),
    [
        ([user("a" + LONG), assistant("b" + LONG), user("hi")], {}, "user:a~;assistant:b~;user:hi;"),
        ([user("a" + LONG), assistant("b" + LONG), user("c" + LONG)], {}, "assistant:b~;user:c~;"),
        ([user("a" + LONG), assistant("b" + LONG), user("hi")], {"max_output_tokens": 1000}, "assistant:b~;user:hi;"),
        ([user("a" + LONG), assistant("b" + LONG), user("c" + LONG)], {"instructions": "Be brief."},
         "system:Be brief.;assistant:b~;user:c~;"),
        ([user("a" + LONG), {"role": "developer", "content": "kind"}, user("b" + LONG), user("c" + LONG)], {},
         "system:kind;user:b~;user:c~;"),
        ([user("a"), call("1"), output("1", LONG), user("b" + LONG), user("c" + LONG)], {}, "user:b~;user:c~;"),
        ([user("a"), call("1"), call("2"), output("1", LONG), output("2", LONG), call("3"), output("3", LONG)], {},
         "user:a;assistant:!3;tool:~;"),
        ([user("c" + LONG)], {"history": [user("a" + LONG), assistant("b" + LONG)]}, "assistant:b~;user:c~;"),
    ],
)  # fmt: skip
def test_the_oldest_items_are_left_out_until_the_rest_fits(
    planner: Planner, tiny_chat: Path, given: Any, options: dict[str, Any], prompt: str
) -> None:
    assert shown(tiny_chat, planner, given, **options) == prompt


def test_a_template_that_wants_a_user_to_begin_gets_one(tiny_chat: Path) -> None:
    alternating = planner_of(tiny_chat, chat_template=ALTERNATING)
    given = [user("a" + LONG), assistant("b" + LONG), user("c"), assistant("d"), user("e" + LONG)]
    assert shown(tiny_chat, alternating, given) == "user:c;assistant:d;user:e~;"


def test_the_whole_conversation_is_kept_and_shown(planner: Planner) -> None:
    given = [user("a" + LONG), assistant("b" + LONG), user("c" + LONG)]
    made = planned(planner, given)
    assert [message["content"] for message in json.loads(made.messages)] == [one["content"] for one in given]
    assert len(json.loads(made.items)) == 3


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ([user("a" + LONG), assistant("b" + LONG), user("c" + LONG)], {"truncation": "disabled"}),
        ([user("a" + LONG), assistant("b" + LONG), user("c" + LONG)], {"truncation": None}),
        ([user("a"), user(LONG * 3)], {}),
        ([user("a"), user("b")], {"instructions": LONG * 3}),
        ([user(LONG * 2), call("1"), output("1", LONG)], {}),
        (LONG * 3, {}),
    ],
)
def test_what_does_not_fit_is_refused_as_without_it(planner: Planner, given: Any, options: dict[str, Any]) -> None:
    found = []
    for truncation in (options, {"truncation": "disabled"}):
        with pytest.raises(ApiError) as raised:
            planned(planner, given, **{**options, **truncation})
        found.append((raised.value.status, raised.value.code, raised.value.param, raised.value.message))
    assert found[0][:3] == (400, "context_length_exceeded", "input")
    assert found[0] == found[1]


def test_calls_are_left_out_with_what_they_gave() -> None:
    def calling(*ids: str) -> dict[str, Any]:
        return {"role": "assistant", "content": None, "tool_calls": [{"id": one} for one in ids]}

    def tool(one: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": one, "content": ""}

    messages = [tool("x"), calling("1", "2"), tool("1"), user("a"), tool("2"), calling("1"), tool("1"), user("b"), calling("3"), tool("3")]
    assert droppable(messages) == [[0], [1, 2, 4], [3], [5, 6]]


def test_few_of_many_are_tried(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    plan_chat = responses.plan_chat

    def spy(served: Any, body: Any, request_id: str) -> Any:
        tried.append(len(body["messages"]))
        return plan_chat(served, body, request_id)

    monkeypatch.setattr(responses, "plan_chat", spy)
    planned(planner, [user(f"{number} w w w w w w") for number in range(1000)])
    assert len(tried) < 13
