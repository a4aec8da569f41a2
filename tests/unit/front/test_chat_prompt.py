"""Messages to prompts: templates as transformers renders them, and what a text model cannot read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.front.chat.messages import ChatMessage
from banyan_runtime.front.chat.prompt import ChatOptions, render
from banyan_runtime.front.chat.sandbox import environment
from banyan_runtime.front.chat.template import ChatTemplate, TemplateError
from banyan_runtime.front.errors import ApiError
from tests.unit.front import support
from tests.unit.front.support import CHATML

TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "You answer in <b>one</b> word & no more."},
    {"role": "user", "content": "Hauptstadt von Österreich?"},
    {"role": "assistant", "content": "Wien", "reasoning_content": "Austria's capital."},
    {"role": "user", "content": "And of 日本?"},
]


def messages(*turns: dict[str, Any]) -> list[ChatMessage]:
    return [ChatMessage.model_validate(turn) for turn in turns]


def prompt(source: str, *turns: dict[str, Any], **options: Any) -> str:
    return render(ChatTemplate(source, {}), messages(*turns), ChatOptions(**options)).text


def refused(source: str | None, *turns: dict[str, Any], **options: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        render(None if source is None else ChatTemplate(source, {}), messages(*turns), ChatOptions(**options))
    assert raised.value.status == 400
    return raised.value


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "qwen25"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True, "unknown": [1]}])
def test_a_real_template_gives_the_ids_that_transformers_gives(
    name: str, variables: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(f"{name}_tokenizer")
    reference, tokenizer = support.reference(folder), support.ours(folder)
    template = ChatTemplate(tokenizer.settings["chat_template"], tokenizer.named)
    for turns in (TURNS, TURNS[1:2], TURNS[:2]):
        rendered = render(template, messages(*turns), ChatOptions(variables=variables))
        expected = reference.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False, **variables)
        assert tokenizer.encode(rendered.text, add_special_tokens=False) == expected


def test_the_opening_is_what_the_template_puts_behind_the_last_turn() -> None:
    source = CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")
    rendered = render(ChatTemplate(source, {}), messages({"role": "user", "content": "What is </think>?"}), ChatOptions())
    assert rendered.opening == "<|im_start|>assistant\n<think>\n"


def test_an_unfinished_answer_is_continued_where_it_ends() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>Well, "}]
    rendered = render(ChatTemplate(CHATML, {}), messages(*turns), ChatOptions(continue_final_message=True))
    assert rendered.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>Well, "
    assert rendered.opening.endswith("<think>Well, ")
    assert "assistant" in refused(CHATML, turns[0], continue_final_message=True).message


def test_parts_are_joined_and_developer_becomes_system_where_the_template_does_not_know_it() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    turns = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    assert prompt(CHATML, *turns).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>")
    assert prompt("{# developer #}" + CHATML, *turns).startswith("<|im_start|>developer\n")


def test_reasoning_of_earlier_turns_reaches_the_template_under_either_name() -> None:
    source = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    for field in ("reasoning_content", "reasoning"):
        assert prompt(source, {"role": "assistant", "content": None, field: "hm"}) == "[hm|]"
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}]
    assert prompt(source, {"role": "assistant", "content": parts}) == "[hm|yes]"


def test_arguments_of_earlier_calls_are_objects_for_the_template() -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}}
    assert prompt(source, {"role": "assistant", "content": None, "tool_calls": [call]}) == '{"city": "Zürich"}'


@pytest.mark.parametrize(
    "arguments",
    ["[" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000, '{"a":"\\ud800"}', '{"\\ud83d":1}', '{"a":NaN}', '{"a":1e999}', "[1]", " "],
    ids=["brackets", "objects", "half a character", "half a key", "NaN", "infinity", "no object", "nothing"],
)
def test_arguments_that_are_no_json_object_stay_the_text_that_the_model_wrote(arguments: str) -> None:
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert prompt(source, {"role": "assistant", "content": None, "tool_calls": [call]}) == arguments


@pytest.mark.matrix(gate=3)
@pytest.mark.parametrize("print_arguments", ["{% for k, v in a | items %}{{ k }}{% endfor %}", "{{ a.items() }}", "{{ a.city.upper() }}"])
@pytest.mark.parametrize("text", ['{"city": "Wi', " ", "null", "[1]", "7", '"Wien"'])
def test_a_template_that_takes_arguments_as_an_object_alone_is_shown_none_in_place_of_text(print_arguments: str, text: str) -> None:
    calls = "{% for c in m.tool_calls %}{% set a = c.function.arguments %}<{% if a %}" + print_arguments + "{% endif %}>{% endfor %}"
    source = "{% for m in messages %}{% if m.name %}{{ raise_exception('no names') }}{% endif %}" + calls + "{% endfor %}"
    user, whole, cut = {"role": "user", "content": "x"}, {"name": "f", "arguments": '{"city": "Wien"}'}, {"name": "f", "arguments": text}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"function": whole}, {"function": cut}]}
    alone, both = ({**turn, "tool_calls": turn["tool_calls"][:1]}, turn)  # type: ignore[index]
    assert prompt(source, user, both, user) == prompt(source, user, alone, user) + "<>"
    other = refused(source, {**user, "name": "I"}, turn)
    assert (other.param, "no names" in other.message) == ("messages", True), "what else is wrong is told"


@pytest.mark.parametrize("source", ["{{ '\\ud800' }}", "{{ raise_exception('\\ud800' * 5000) }}"])
def test_half_a_character_of_a_template_reaches_neither_tokenizer_nor_client(source: str) -> None:
    error = refused(source, {"role": "user", "content": "x"})
    assert error.param == "messages"
    assert 0 < len(error.message.encode()) < 2000


def test_what_a_text_model_cannot_read_is_refused_by_name() -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    error = refused(CHATML, picture)
    assert (error.code, error.param) == ("unsupported_content", "messages")
    assert "'image_url'" in error.message


@pytest.mark.parametrize("role", ["tool", "assistant"])
def test_of_what_tools_gave_the_text_is_shown_and_the_rest_named(role: str) -> None:
    parts = [{"type": "text", "text": "Oslo:"}, {"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "rain"}]
    turns = messages({"role": "user", "content": "x"}, {"role": role, "content": parts})
    made = render(ChatTemplate(CHATML, {}), turns, ChatOptions())
    assert made.unshown == ("messages[1].content[1]",)
    assert "Oslo:\n[image_url]\nrain<|im_end|>" in made.text


def test_refusals_name_the_reason_and_never_the_server() -> None:
    assert refused(CHATML).code == "empty_array"
    assert "--chat-template" in refused(None, {"role": "user", "content": "x"}).message
    assert "roles must alternate" in refused("{{ raise_exception('roles must alternate') }}", {"role": "user", "content": "x"}).message
    assert refused(CHATML, {"role": "user", "content": "x"}, variables={"chat_template": "{{ 1 }}"}).status == 400
    assert refused(CHATML, {"role": "narrator", "content": "x"}).param == "messages[0].role"
    assert refused(CHATML, *[{"role": "user", "content": "x"}] * 2049).code == "array_above_max_length"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 100000000 }}",
        "{{ 9 ** 999999 }}",
        "{% for i in range(99999999) %}x{% endfor %}",
        "{% for i in range(90000) %}{{ 'a' * 900000 }}{% endfor %}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_hostile_or_broken_template_ends_in_an_error_and_nothing_else(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], add_generation_prompt=True, variables={})


@pytest.mark.parametrize(
    "expression",
    [
        "'%2000000d' % 1",
        "'%.*f' % (2000000, 1)",
        "'%2000000s' | format(1)",
        "'a' | center(2000000)",
        "['a'] | map('center', 2000000) | list",
        "'a' | indent(2000000, true)",
        "[1] | batch(2000000, 'x') | list",
        "{'a': 1} | tojson(indent=2000000)",
        "'a'.ljust(2000000)",
        "'{:>2000000}'.format(1)",
        "'{:>{w}}'.format(1, w=2000000)",
        "'{a:>2000000}'.format_map({'a': 1})",
        "(9 ** 64) ** 64 * (9 ** 64) ** 64 * (9 ** 64) ** 64 * (9 ** 64) ** 64 * (9 ** 64) ** 64 * (9 ** 64) ** 64 > 1",
    ],
)
def test_a_template_makes_no_huge_text_or_number_at_one_stroke(expression: str) -> None:
    with pytest.raises(TemplateError, match=r"too (long|wide|large)"):
        ChatTemplate(f"{{{{ {expression} }}}}", {}).render([], add_generation_prompt=True, variables={})


def test_widths_that_templates_really_use_are_kept() -> None:
    source = (
        "{{ '%5d|%s' % (1, 1500000000) }}{{ '%-3s' | format('a') }}{{ 'b' | center(3) }}{{ 'c' | indent(1, true) }}"
        "{{ 1500000000 | tojson }}{{ '{:>4}{}'.format(1, 1500000000) }}{{ 'd'.rjust(2) }}{{ 7 % 4 }}{{ 'ab' * 2 }}{{ 2 ** 10 }}"
    )
    assert prompt(source, {"role": "user", "content": "x"}) == "    1|1500000000a   b  c1500000000   11500000000 d3abab1024"


def test_nothing_of_a_template_is_computed_while_it_is_compiled() -> None:
    source = "{% if messages|length > 5 %}{{ 'a'|center(900000) }}{{ '%900000d' % 1 }}{% set x = 'a' * 900000 %}{% endif %}text"
    code = environment().compile(source, raw=True)
    assert "text" in code
    assert len(code) < 10_000
    with pytest.raises(TemplateError, match="autoescape"):
        ChatTemplate("{% autoescape 'a'|center(900000) %}{% endautoescape %}", {})


def test_a_template_with_a_syntax_error_says_where() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("\n{% for %}", {})


def test_generation_marks_and_loop_controls_are_understood() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert prompt(source, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}) == "a"


SHOWING = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("before", "unread"),
    [
        ("", {"tools", "documents"}),
        ("{{ tools | length if false }}{# {{ tools }} #}", {"tools", "documents"}),
        (SHOWING, {"documents"}),
        ("{% if messages[0].role == 'system' %}" + SHOWING + "{% endif %}", {"documents"}),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + SHOWING, {"documents"}),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}", {"documents"}),
        ("{% for each in documents or [] %}{{ each.title }}: {{ each.contents }}{% endfor %}", {"tools"}),
        ("{{ raise_exception('begin with a greeting') }}", set()),
    ],
    ids=["none", "named alone", "tools", "beside a system message", "no system message", "refused", "documents", "nothing known"],
)
def test_what_a_template_shows_a_model_nothing_of_is_found_out_by_trial(before: str, unread: set[str]) -> None:
    assert ChatTemplate(before + CHATML, {}).unread == unread


def test_a_trial_that_takes_too_much_says_nothing_against_a_template() -> None:
    def fail() -> Any:
        raise MemoryError

    template = ChatTemplate(CHATML, {})
    template.guard = fail
    assert template.unread == set()


def test_a_template_is_tried_once_and_only_for_who_brings_something() -> None:
    tries = 0

    @contextlib.contextmanager
    def counted() -> Iterator[None]:
        nonlocal tries
        tries += 1
        yield

    template = ChatTemplate(CHATML, {})
    template.guard = counted
    turn = messages({"role": "user", "content": "Hi"})
    tools = [{"type": "function", "function": {"name": "now"}}]
    for options, unshown, rendered in (
        (ChatOptions(), (), 2),
        (ChatOptions(tools=tools), ("tools",), 2 + 8),
        (ChatOptions(tools=tools, documents=[{"text": "x"}]), ("tools", "documents"), 2),
    ):
        before = tries
        assert render(template, turn, options).unshown == unshown
        assert tries - before == rendered
