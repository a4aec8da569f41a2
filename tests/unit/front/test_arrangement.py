"""Conversations of every order of turns, under templates that take few: every text is in the prompt, in its order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from banyan_runtime import wire
from banyan_runtime.front.chat.arrangement import arranged, with_short_ids
from banyan_runtime.front.chat.limits import kind_of
from banyan_runtime.front.chat.messages import ChatMessage
from banyan_runtime.front.chat.prompt import ChatOptions, render
from banyan_runtime.front.chat.template import ChatTemplate
from banyan_runtime.front.openai.responses.references import Before
from banyan_runtime.front.plan import AnswerPlan, ChatPlan, Endpoint
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.text.tokenizer import Tokenizer
from tests.unit.front.planning import planner_of
from tests.unit.front.support import CHATML

Turn = dict[str, Any]
ROLES: Final = {"S": "system", "D": "developer", "U": "user", "A": "assistant", "C": "assistant", "N": "assistant", "T": "tool"}
STRICT: Final = frozenset({"^S", "^D"})  # ^: the beginning
ALL: Final = STRICT | {"SS", "SD", "DS", "DD", "US", "UD", "AS", "AD", "TS", "TD", "UU", "TU", "AA", "UN", "AN"}


def turns_of(shape: str, call_id: str = "call_1") -> list[Turn]:
    """A turn for each letter, with a text of its own: C calls, N says nothing."""
    made: list[Turn] = []
    for place, letter in enumerate(shape):
        turn: Turn = {"role": ROLES[letter], "content": None if letter == "C" else "" if letter == "N" else f"{letter}{place}"}
        if letter == "C":
            turn["tool_calls"] = [{"id": call_id, "type": "function", "function": {"name": "now", "arguments": "{}"}}]
        if letter == "T":
            turn["tool_call_id"] = call_id
        made.append(turn)
    return made


def arrange(shape: str, taken: frozenset[str]) -> list[str]:
    letters = {"": "^", "silence": "N"}

    def takes(before: str, kind: str) -> bool:
        return "".join(letters.get(one, one[:1].upper()) for one in (before, kind)) in taken

    given = [{**turn, "content": turn["content"] or ""} for turn in turns_of(shape)]
    return [f"{kind_of(turn)}: {turn['content']}".replace("\n\n", "+") for turn in arranged(given, takes)]


@pytest.mark.parametrize(
    ("shape", "taken", "made"),
    [
        ("SDUASUUCTSAAN", ALL, None),
        ("SSDU", STRICT, ["system: S0+S1+D2", "user: U3"]),
        ("DSU", STRICT, ["developer: D0+S1", "user: U2"]),
        ("DSU", frozenset({"^S"}), ["system: D0+S1", "user: U2"]),
        ("DSU", ALL - {"^D"}, ["system: D0", "system: S1", "user: U2"]),
        ("SDU", frozenset[str](), ["user: S0+D1+U2"]),
        ("SDU", frozenset({"UU"}), ["user: S0+D1+U2"]),
        ("UD", STRICT, ["user: U0+D1"]),
        ("USU", STRICT | {"UU"}, ["user: U0+S1", "user: U2"]),
        ("SUASU", STRICT, ["system: S0", "user: U1", "assistant: A2", "user: S3+U4"]),
        ("SUASSDAU", STRICT, ["system: S0", "user: U1", "assistant: A2", "user: S3+S4+D5", "assistant: A6", "user: U7"]),
        ("UCTSU", STRICT, ["user: U0", "calls: ", "tool: T2+S3+U4"]),
        ("UCTSUA", STRICT | {"TU"}, ["user: U0", "calls: ", "tool: T2", "user: S3+U4", "assistant: A5"]),
        ("UUAAU", STRICT, ["user: U0+U1", "assistant: A2+A3", "user: U4"]),
        ("UACT", STRICT, ["user: U0", "assistant: A1", "calls: ", "tool: T3"]),
        ("UNU", STRICT, ["user: U0+U2"]),
    ],
)
def test_what_is_not_taken_where_it_stands_joins_the_turn_beside_it(shape: str, taken: frozenset[str], made: list[str] | None) -> None:
    kinds = {"C": "calls", "N": "silence"}
    whole = [f"{kinds.get(one, ROLES[one])}: {'' if one in 'CN' else f'{one}{place}'}" for place, one in enumerate(shape)]
    assert arrange(shape, taken) == (whole if made is None else made)


def test_a_prompt_begins_as_the_one_before_it_did() -> None:
    earlier: list[str] = []
    for shape in ("SUS", "SUSA", "SUSASU", "SUSASUS", "SUSASUSA"):
        made = arrange(shape, STRICT)
        assert "\n".join(made).startswith("\n".join(earlier))
        earlier = made


SHOWN: Final = "{{ m.role }}={{ m.content }};{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }};{% endfor %}"
LOOP: Final = "{% for m in messages %}" + SHOWN + "{% endfor %}"
FIRST_ALONE: Final = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
TEMPLATES: Final = {
    "all": LOOP,
    "all with developers": "{# developer #}" + LOOP,
    "system first": "{% for m in messages %}" + FIRST_ALONE + SHOWN + "{% endfor %}",
    "only the first is shown": "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + SHOWN + "{% endif %}{% endfor %}",
    "the first of either": (
        "{% for m in messages if m.role not in ('system', 'developer') or m == messages[0] %}" + SHOWN + "{% endfor %}"
    ),
    "the last is shown": (
        "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}{% endfor %}{{ ns.s }};"
        "{% for m in messages if m.role != 'system' %}" + SHOWN + "{% endfor %}"
    ),
    "no system, in turn": (
        "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}"
        "{% endif %}" + SHOWN + "{% endfor %}"
    ),
    "in turn": (
        "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{% set ns = namespace(i=0) %}"
        "{% for m in rest if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (ns.i % 2 == 0) %}"
        "{{ raise_exception('turns') }}{% endif %}{% set ns.i = ns.i + 1 %}{% endfor %}" + LOOP
    ),
    "with the last question": (
        "{% for m in messages if m.role != 'system' %}{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}"
        "{{ messages[0].content }} {% endif %}" + SHOWN + "{% endfor %}"
    ),
    "refused beside tools": (
        "{% for m in messages %}{% if tools and m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        + SHOWN
        + "{% endfor %}"
    ),
}  # fmt: skip
SHAPES: Final = ("SU", "DU", "SSU", "SDU", "DDU", "UD", "USU", "SUASU", "SUSAU", "SUAUS", "SUD", "SUUAU", "SUAN", "SUAAU")
AGENTS: Final = ("SUCT", "SUCTS", "SUCTU", "SUCTSCTS", "UCTDAU")
TOOLS: Final[list[Turn]] = [{"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}}]


def rendered(source: str, turns: list[Turn], tools: list[Turn]) -> str:
    return render(ChatTemplate(source, {}), [ChatMessage.model_validate(turn) for turn in turns], ChatOptions(tools=tools)).text


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_text_is_in_the_prompt_in_its_order_whatever_the_template_takes(template: str, tools: list[Turn]) -> None:
    shapes = SHAPES if template == "no system, in turn" else SHAPES + AGENTS  # which takes no results of tools either
    for shape in shapes:
        if (shape, template) == ("SUAN", "with the last question"):  # it is the user's question that it waits for
            continue
        turns = turns_of(shape)
        prompt = rendered(TEMPLATES[template], turns, tools)
        texts = [turn["content"] for turn in turns if turn["content"]]
        found = re.findall(r"[SDUAT]\d+", prompt)
        if template == "with the last question":  # which moves it there itself
            texts, found = sorted(texts), sorted(found)
        assert found == texts, (shape, prompt)


@pytest.mark.matrix(gate=3)
@pytest.mark.parametrize("shape", [*SHAPES, *AGENTS])
def test_what_a_template_takes_is_left_as_it_is(shape: str) -> None:
    turns = turns_of(shape)
    expected = "".join(f"{turn['role']}={turn['content'] or ''};{'call_1:now;' if 'tool_calls' in turn else ''}" for turn in turns)
    assert rendered(TEMPLATES["all with developers"], turns, []) == expected
    assert rendered(TEMPLATES["all"], turns, []) == expected.replace("developer=", "system=")


def test_a_template_that_fails_whatever_it_is_told_has_nothing_moved() -> None:
    source = "{% if not mood %}{{ raise_exception('which mood?') }}{% endif %}" + LOOP
    messages = [ChatMessage.model_validate(turn) for turn in turns_of("SSUU")]
    prompt = render(ChatTemplate(source, {}), messages, ChatOptions(variables={"mood": "good"})).text
    assert prompt == "system=S0;system=S1;user=U2;user=U3;"


NINE: Final = (
    "{% for m in messages %}{% for id in (m.tool_calls or []) | map(attribute='id') | list + [m.tool_call_id] if id is defined %}"
    "{% if id | length != 9 %}{{ raise_exception('nine') }}{% endif %}[{{ id }}]{% endfor %}{% endfor %}"
)


def test_ids_of_another_server_become_nine_letters_where_the_template_takes_no_others() -> None:
    def ids(*turns: Turn) -> list[str]:
        return re.findall(r"\[([A-Za-z0-9]{9})\]", rendered(NINE, [*turns_of("U"), *turns], []))

    one, other = turns_of("CT", "call_0123456789abcdef"), turns_of("CT", "toolu_01")
    own = turns_of("CT", "abcDEF123")
    first, again, second, also, *kept = ids(*one, *other, *own)
    assert first == again != second == also
    assert kept == ["abcDEF123"] * 2
    assert ids(*one) == [first, first], "it does not depend on what else is said"
    assert rendered(LOOP, one, []).count("call_0123456789abcdef") == 1, "other templates show them as they are"


def test_calls_without_ids_get_some_and_results_are_told_apart_by_their_order() -> None:
    call: Turn = {"id": None, "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turns = [{"role": "assistant", "tool_calls": [call, call]}, {"role": "tool"}, {"role": "tool"}, {"role": "tool"}]
    calling, *results = with_short_ids(turns)
    given = [one["id"] for one in calling["tool_calls"]]
    assert [turn["tool_call_id"] for turn in results][:2] == given
    assert len({turn["tool_call_id"] for turn in results}) == 3


def test_the_content_beside_calls_is_null_only_where_a_template_asks_for_that_and_takes_it() -> None:
    asking = "{% for m in messages if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}"
    failing = "{% for m in messages %}{% if m.content is none or m.content | length == 0 %}{{ m.tool_calls[0].function.name }}{% endif %}"
    assert rendered(asking, turns_of("UCT"), []) == "now"
    assert rendered(failing + "{{ m.content | length }}{% endfor %}", turns_of("UCT"), []) == "2now02"


def test_a_call_beside_text_or_others_gets_a_turn_of_its_own_where_the_template_shows_no_other() -> None:
    alone = "{% for m in messages %}{{ m.tool_calls[0].function.name if m.content is none else m.content }};{% endfor %}"
    single = "{% for m in messages %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}" + SHOWN + "{% endfor %}"
    question, calling, result = turns_of("UCT", "a")
    calling["content"] = "Look:"
    second = {**calling["tool_calls"][0], "id": "b"}
    both = {**calling, "tool_calls": [*calling["tool_calls"], second]}
    other = {**result, "tool_call_id": "b", "content": "other"}
    assert rendered(alone, [question, calling, result], []) == "U0;Look:;now;T2;"
    expected = "user=U0;assistant=Look:;a:now;tool=T2;assistant=;b:now;tool=other;user=so;"
    for results in ([result, other], [other, result]):
        assert rendered(single, [question, both, *results, {"role": "user", "content": "so"}], []) == expected
    whole = [question, both, result, other]
    assert rendered(LOOP, whole, []) == "user=U0;assistant=Look:;a:now;b:now;tool=T2;tool=other;"


# --- every endpoint ---


def prompt_of(planner: Planner, tokenizer: Tokenizer, endpoint: Endpoint, body: Turn) -> str | int:
    """Its text, or its length where that is the answer."""
    raw = json.dumps(body).encode()
    if endpoint in ("responses", "input_tokens"):
        raw = msgspec.json.encode(Before(id="resp_1")) + b"\n" + raw
    made = planner.plan(endpoint, raw, "r")
    if isinstance(made, AnswerPlan):
        counted = msgspec.json.decode(made.body)
        return int(counted["count"] if endpoint == "tokenize" else counted["input_tokens"])
    assert isinstance(made, ChatPlan)
    return tokenizer.decode(wire.unpack_ids(made.requests[0].token_ids).tolist(), skip_special_tokens=False)


def test_all_endpoints_show_system_and_developer_turns_alike(tiny_chat: Path) -> None:
    source = "{% for m in messages %}" + FIRST_ALONE + "{% endfor %}" + CHATML
    planner, tokenizer = planner_of(tiny_chat, chat_template=source), Tokenizer.load(tiny_chat)
    system, developer, question, answer = "Be kind.", "Be brief.", "Where?", "Here."
    expected = (
        "<|im_start|>system\nBe kind.\n\nBe brief.<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\nHere.<|im_end|>\n"
        "<|im_start|>user\nBe quick.\n\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    )
    rest = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}, {"role": "developer", "content": "Be quick."}]
    rest.append({"role": "user", "content": question})
    theirs = [{**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in rest]
    first = [{"role": "system", "content": system}, {"role": "developer", "content": developer}]
    chat: Turn = {"messages": [*first, *rest]}
    response: Turn = {"instructions": system, "input": [first[1], *rest]}
    message: Turn = {"system": system, "messages": [{**first[1], "role": "system"}, *theirs]}
    assert prompt_of(planner, tokenizer, "chat", chat) == expected
    assert prompt_of(planner, tokenizer, "responses", response) == expected
    assert prompt_of(planner, tokenizer, "messages", {**message, "max_tokens": 5}) == expected
    length = len(tokenizer.encode(expected, add_special_tokens=False))
    assert prompt_of(planner, tokenizer, "tokenize", chat) == length
    assert prompt_of(planner, tokenizer, "input_tokens", response) == length
    assert prompt_of(planner, tokenizer, "count_tokens", message) == length
