"""Tools of every kind that a response can bring: what the model sees of them, how their calls are told, and what of them a history says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from banyan_runtime.front.chat.events import ToolArgs, ToolEnd, ToolStart
from banyan_runtime.front.deltas import Delta, Finished
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.openai.responses.assembly import Assembly
from banyan_runtime.front.openai.responses.free_text import FreeText
from banyan_runtime.front.openai.responses.ids import item_id, response_of
from banyan_runtime.front.openai.responses.items import messages_of
from banyan_runtime.front.openai.responses.kinds import OUTPUTS
from banyan_runtime.front.openai.responses.references import Before
from banyan_runtime.front.openai.responses.store import ResponseStore
from banyan_runtime.front.openai.responses.tools import Tools
from banyan_runtime.front.plan import Called, ResponsePlan
from banyan_runtime.front.prepare.constraints import Constraints
from banyan_runtime.front.prepare.planner import Planner
from tests.unit.front.planning import planner_of

HOSTED: Final[list[dict[str, Any]]] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "image_generation"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "mcp", "server_label": "deepwiki", "server_url": "https://x"},
    {"type": "tool_search"},
    {"type": "shell", "environment": {"type": "container_auto"}},
]
NOTE: Final = {"type": "function", "name": "note", "description": "Keeps a note.", "parameters": {"type": "object", "properties": {}}}
NOTES: Final = {"type": "namespace", "name": "mcp__notes", "description": "What to remember.", "tools": [NOTE, {**NOTE, "name": "forget"}]}
RUN: Final = {"type": "custom", "name": "run", "description": "Runs a script."}
PATCH: Final = {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}
SEARCH: Final = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}}


def tools_of(tools: list[dict[str, Any]], items: Any = (), *, enforceable: bool = True) -> Tools:
    return Tools(tools, items, lambda schema: enforceable)


def functions(tools: Tools) -> dict[str, dict[str, Any]]:
    return {tool["function"]["name"]: tool["function"] for tool in tools.functions() or ()}


@pytest.fixture(scope="module")
def planner(tiny_chat: Path) -> Planner:
    return planner_of(tiny_chat, Constraints.load(tiny_chat, (2,)))


def planned(planner: Planner, **body: Any) -> ResponsePlan:
    before = msgspec.json.encode(Before(id=ResponseStore().new_id()))
    made = planner.plan("responses", before + b"\n" + msgspec.json.encode({"input": "Hi", **body}), "request")
    assert isinstance(made, ResponsePlan)
    return made


# --- tools ---


def test_each_tool_of_the_client_is_a_function_and_those_that_servers_run_are_named(planner: Planner) -> None:
    shells: list[dict[str, Any]] = [{"type": "shell", "environment": {"type": "local"}}, {"type": "local_shell"}, {"type": "apply_patch"}]
    tools = [NOTE, *HOSTED, NOTES, RUN, PATCH, SEARCH, *shells]
    plan = planned(planner, tools=tools)
    assert plan.requests[0].tools is not None
    seen = msgspec.json.decode(plan.requests[0].tools.schemas)
    assert list(seen) == [
        "note", "mcp__notes__note", "mcp__notes__forget", "run", "edit", "tool_search", "shell", "local_shell", "apply_patch",
    ]  # fmt: skip
    assert list(seen["run"]["properties"]) == ["input"]
    assert plan.called["mcp__notes__forget"] == Called(kind="function", name="forget", namespace="mcp__notes")
    assert plan.called["run"] == Called(kind="custom", name="run")
    assert "note" not in plan.called
    left_out = [f"tools[{1 + place}]" for place in range(len(HOSTED))]
    assert list(plan.envelope.ignored) == [*left_out, f"tools[{tools.index(PATCH)}].format"]
    assert planned(planner, tools=HOSTED).requests[0].tools is None


def test_what_is_said_of_tools_reaches_the_model() -> None:
    seen = functions(tools_of([NOTES, RUN, PATCH, SEARCH, {"type": "shell"}]))
    assert seen["mcp__notes__note"]["description"] == "What to remember.\n\nKeeps a note."
    assert seen["mcp__notes__forget"]["description"] == "Keeps a note."
    assert seen["edit"]["description"].endswith('start: "a"')
    assert seen["tool_search"] == {"name": "tool_search", "description": "Finds tools.", "parameters": {"type": "object"}}
    assert seen["shell"]["parameters"]["required"] == ["commands"]


def test_functions_of_the_default_namespace_have_their_own_names() -> None:
    """OpenAI's models know functions that are in no namespace as those of `functions`, and agents put some there."""
    tools = tools_of([{"type": "namespace", "name": "functions", "description": "", "tools": [RUN]}, {**NOTES, "name": "mcp__notes__"}])
    assert list(functions(tools)) == ["run", "mcp__notes__note", "mcp__notes__forget"]
    assert tools.called()["run"] == Called(kind="custom", name="run", namespace="functions")


def test_tools_that_items_bring_are_offered_and_the_last_of_a_name_holds() -> None:
    found = {"type": "tool_search_output", "call_id": "c", "execution": "client", "status": "completed", "tools": [NOTES]}
    again = {**found, "tools": [{**NOTES, "tools": [{**NOTE, "description": "New."}]}]}
    servers = {**found, "execution": "server", "tools": [RUN]}
    items = [{"type": "additional_tools", "role": "developer", "tools": [RUN, HOSTED[0]]}, found, again, servers]
    tools = tools_of([{**RUN, "description": "Old."}, PATCH], items)
    seen = functions(tools)
    assert list(seen) == ["edit", "run", "mcp__notes__note", "mcp__notes__forget"]
    assert seen["run"]["description"] == "Runs a script."
    assert seen["mcp__notes__note"]["description"].endswith("New.")
    assert tools.without_effect == ["tools[1].format", "input[0].tools[1]"]


@pytest.mark.parametrize(("syntax", "enforceable"), [("regex", True), ("regex", False), ("lark", True)])
def test_a_format_that_can_be_enforced_is_and_another_is_named(syntax: str, enforceable: bool) -> None:
    tool = {**RUN, "format": {"type": "grammar", "syntax": syntax, "definition": "[a-c]+|x"}}
    tools = tools_of([tool], enforceable=enforceable)
    function, held = functions(tools)["run"], syntax == "regex" and enforceable
    assert function.get("strict", False) == held
    assert function["parameters"]["properties"]["input"].get("pattern") == ("^(?:[a-c]+|x)$" if held else None)
    assert tools.without_effect == ([] if held else ["tools[0].format"])


def test_a_format_as_a_regex_is_a_grammar_of_the_call(planner: Planner) -> None:
    def tool(definition: str) -> list[dict[str, Any]]:
        return [{**RUN, "format": {"type": "grammar", "syntax": "regex", "definition": definition}}]

    assert planned(planner, tools=tool("[0-9]{3}")).requests[0].constraint is not None
    behind = planned(planner, tools=tool("(?<=a)b"))
    assert (behind.requests[0].constraint, behind.envelope.ignored) == (None, ("tools[0].format",))


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "custom", "name": "run"}, "run"),
        ({"type": "function", "name": "forget"}, "mcp__notes__forget"),
        ({"type": "function", "name": "note"}, "note"),
        ({"type": "function", "name": "note", "namespace": "mcp__notes"}, "mcp__notes__note"),
        ({"type": "shell"}, "shell"),
    ],
)
def test_a_choice_means_the_function_that_its_tool_is(choice: dict[str, Any], chosen: str) -> None:
    tools = tools_of([NOTE, NOTES, RUN, {"type": "shell"}])
    assert tools.choice(choice) == {"type": "function", "function": {"name": chosen}}


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "custom", "name": "note"}, "tool_choice"),  # a function is called so
        ({"type": "function", "name": "note", "namespace": "gone"}, "tool_choice"),
        ({"type": "function", "name": "note", "namespace": ["mcp__notes"]}, "tool_choice"),
        ({"type": "apply_patch"}, "tool_choice"),
        ({"type": "custom"}, "tool_choice.name"),
        ({"type": "allowed_tools", "tools": [{"type": "shell"}, {"type": "computer"}]}, "tool_choice.tools[1].type"),
    ],
)
def test_a_choice_that_means_no_tool_is_refused_by_its_field(choice: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        tools_of([NOTE, NOTES, RUN, {"type": "shell"}]).choice(choice)
    assert refused.value.param == param


def test_two_tools_of_one_name_to_the_model_are_refused() -> None:
    inside = {"type": "namespace", "name": "functions", "tools": [NOTE]}
    for listed, param in (([NOTE, inside], "tools[1].tools[0]"), ([{**NOTE, "name": "shell"}, {"type": "shell"}], "tools[1]")):
        with pytest.raises(ApiError) as refused:
            tools_of(listed)
        assert refused.value.param == param


def test_of_tools_that_are_allowed_those_that_servers_run_are_left_out(planner: Planner) -> None:
    both = [{"type": "web_search"}, {"type": "custom", "name": "run"}]
    allowed: dict[str, Any] = {"type": "allowed_tools", "mode": "auto", "tools": both}
    plan = planned(planner, tools=[NOTE, RUN], tool_choice=allowed)
    assert plan.requests[0].tools is not None
    assert list(msgspec.json.decode(plan.requests[0].tools.schemas)) == ["run"]
    assert planned(planner, tools=[NOTE], tool_choice={**allowed, "tools": [{"type": "mcp"}]}).requests[0].tools is None
    with pytest.raises(ApiError) as refused:
        planned(planner, tools=[NOTE], tool_choice={**allowed, "tools": [{"type": "mcp"}, {"type": "function", "name": "x y"}]})
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("tools", "param", "code"),
    [
        ([{"name": "x"}], "tools[0].type", "missing_required_parameter"),
        ([{"type": "computer_use_preview"}], "tools[0].type", "unsupported"),
        ([{"type": ["function"]}], "tools[0].type", "unsupported"),
        ([{"type": "custom"}], "tools[0].name", "missing_required_parameter"),
        ([HOSTED[0], {"type": "function", "name": "a b"}], "tools[1].name", "invalid_value"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools", "missing_required_parameter"),
        ([{"type": "namespace", "tools": []}], "tools[0].name", "missing_required_parameter"),
        ([{"type": "namespace", "name": "n", "tools": [5]}], "tools[0].tools", "invalid_type"),
        ([{"type": "namespace", "name": "n", "tools": [NOTES]}], "tools[0].tools[0].type", "unsupported"),
        ([NOTES, NOTES], "tools[1].tools[0].name", "invalid_value"),
        ([NOTES, {**NOTES, "name": "n", "tools": [{**NOTE, "parameters": {"type": "array"}}]}], "tools[1].tools[0].parameters",
         "invalid_function_parameters"),
        ([{"type": "namespace", "name": "n" * 60, "tools": [NOTE]}], "tools[0].tools[0].name", "invalid_value"),
        ([{**RUN, "format": "lark"}], "tools[0].format", "invalid_type"),
        ([{**RUN, "format": {"type": "grammar", "syntax": "lark"}}], "tools[0].format.definition", "missing_required_parameter"),
        ([{**RUN, "format": {"type": "grammar", "syntax": "abnf", "definition": "x"}}], "tools[0].format.syntax", "invalid_value"),
        ([{**RUN, "format": {"type": "json"}}], "tools[0].format.type", "invalid_value"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_tool_is_named_where_it_stands(planner: Planner, tools: Any, param: str, code: str) -> None:
    with pytest.raises(ApiError) as refused:
        planned(planner, tools=tools)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)


# --- items of a history ---


def test_calls_of_every_kind_and_what_they_gave_are_turns() -> None:
    given: list[dict[str, Any]] = [
        {"type": "custom_tool_call", "call_id": "1", "name": "run", "namespace": "functions", "input": 'say "ä"\n'},
        {"type": "function_call", "call_id": "2", "name": "note", "namespace": "mcp__notes", "arguments": "{}"},
        {"type": "tool_search_call", "call_id": "3", "execution": "client", "arguments": {"query": "x"}},
        {"type": "local_shell_call", "call_id": "4", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "shell_call", "call_id": "5", "action": {"commands": ["ls"]}},
        {"type": "apply_patch_call", "call_id": "6", "operation": {"type": "delete_file", "path": "a"}},
    ]
    ran = [{"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    outputs: list[dict[str, Any]] = [
        {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "function_call_output", "call_id": "2", "output": "kept"},
        {"type": "tool_search_output", "call_id": "3", "execution": "client", "tools": [NOTES, RUN]},
        {"type": "local_shell_call_output", "id": "4", "output": '{"exit_code": 0}'},
        {"type": "shell_call_output", "call_id": "5", "output": ran},
        {"type": "apply_patch_call_output", "call_id": "6", "status": "failed"},
    ]
    (said, *results), _ = messages_of([*given, *outputs])
    calls = [(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in said["tool_calls"]]
    assert calls == [
        ("1", "run", {"input": 'say "ä"\n'}),
        ("2", "mcp__notes__note", {}),
        ("3", "tool_search", {"query": "x"}),
        ("4", "local_shell", given[3]["action"]),
        ("5", "shell", {"commands": ["ls"]}),
        ("6", "apply_patch", given[5]["operation"]),
    ]
    assert [one["tool_call_id"] for one in results] == list("123456")
    contents = [one["content"] for one in results]
    assert contents[:2] == [outputs[0]["output"], "kept"]
    assert [json.loads(contents[place]) for place in (2, 3, 4)] == [
        ["mcp__notes__note", "mcp__notes__forget", "run"], {"exit_code": 0}, ran,
    ]  # fmt: skip
    assert contents[5] == "failed"


def test_items_that_nobody_here_can_read_are_left_out_and_named(planner: Planner) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "tool_search_call", "execution": "server", "call_id": None, "arguments": {}},
        {"type": "additional_tools", "role": "developer", "tools": [RUN]},
    ]
    plan = planned(planner, input=items)
    assert plan.envelope.ignored == ("input[1]", "input[2]", "input[3]")
    assert json.loads(plan.messages) == [{"role": "user", "content": "Hi"}]
    assert [one["type"] for one in json.loads(plan.items)] == ["message", *(item["type"] for item in items[1:])]


def test_what_another_agent_says_is_for_the_model_to_answer() -> None:
    parts = [{"type": "input_text", "text": "Task: "}, {"type": "encrypted_content", "encrypted_content": "say hi"}]
    messages, _ = messages_of([{"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": parts}])
    assert messages == [{"role": "user", "content": "Task: say hi"}]


@pytest.mark.parametrize(
    ("item", "param", "code"),
    [
        ({"type": "compaction_trigger"}, "input[0].type", "unsupported"),  # who sends it waits for a compaction
        ({"type": {}}, "input[0].type", "unsupported"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "run"}, "input[0].input", "missing_required_parameter"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": 5}, "input[0].namespace", "invalid_type"),
        ({"type": "shell_call", "call_id": "c", "action": "ls"}, "input[0].action", "invalid_type"),
        ({"type": "shell_call_output", "call_id": "c"}, "input[0].output", "missing_required_parameter"),
        ({"type": "local_shell_call_output", "output": "x"}, "input[0].id", "missing_required_parameter"),
        ({"type": "custom_tool_call_output", "id": "c", "output": "x"}, "input[0].call_id", "missing_required_parameter"),
        ({"type": "tool_search_output", "call_id": "c"}, "input[0].tools", "missing_required_parameter"),
        ({"type": "additional_tools", "tools": [{"type": "custom"}]}, "input[0].tools[0].name", "missing_required_parameter"),
        ({"type": "agent_message", "content": "hi"}, "input[0].content", "invalid_type"),
        ({"type": "agent_message", "content": ["hi"]}, "input[0].content[0]", "invalid_value"),
    ],
)
def test_what_is_wrong_with_an_item_is_named(planner: Planner, item: Mapping[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as refused:
        planned(planner, input=[item])
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)


def test_an_output_is_listed_with_an_id_that_leads_back_to_its_response() -> None:
    own = ResponseStore().new_id()
    for kind in (*OUTPUTS, "custom_tool_call", "shell_call", "web_search_call"):
        assert response_of(item_id(kind, own, "input", 3)) == own


# --- calls that are generated ---


def told(name: str, pieces: list[str], called: Mapping[str, Called], *, ended: bool = True) -> tuple[list[Any], Any, Any]:
    """The events of one call, its item, and the turn that it makes."""
    assembly = Assembly("resp_1", "tiny", {}, lambda start: "call_1", lambda rows: [], background=False, called=called)
    said = [ToolStart(0, name), *(ToolArgs(0, piece) for piece in pieces), *([ToolEnd(0)] if ended else [])]
    events = assembly.add(Delta("", "", [5], 1, [], (), None, said))
    events += assembly.finish(Finished("stop" if ended else "length", None, 0, 0, None), {})
    read = [json.loads(event.partition(b"data: ")[2]) for event in events.split(b"\n\n") if event]
    (item,) = assembly.told()["output"]
    return read, item, assembly.message()


def kinds(events: list[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events][:-1]


def test_a_call_of_free_text_is_told_as_text() -> None:
    arguments = json.dumps({"input": 'print("ä\\n")\n'}, ensure_ascii=False)
    events, item, turn = told("run", [arguments[:13], arguments[13:20], arguments[20:]], {"run": Called(kind="custom", name="run")})
    text = 'print("ä\\n")\n'
    assert item == {
        "id": item["id"], "type": "custom_tool_call", "status": "completed", "call_id": "call_1", "name": "run", "input": text,
    }  # fmt: skip
    assert item["id"].startswith("ctc_")
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) == 3
    assert "".join(deltas) == text
    assert kinds(events) == ["output_item.added", *["custom_tool_call_input.delta"] * 3, "custom_tool_call_input.done", "output_item.done"]
    added, done = events[0]["item"], events[-3]
    assert (added["status"], added["input"], added["name"]) == ("in_progress", "", "run")
    assert (done["input"], done["item_id"], done["output_index"]) == (text, item["id"], 0)
    assert events[-2]["item"] == item
    assert turn["tool_calls"] == [{"id": "call_1", "type": "function", "function": {"name": "run", "arguments": arguments}}]


def test_a_call_in_a_namespace_names_both() -> None:
    called = {"mcp__notes__note": Called(kind="function", name="note", namespace="mcp__notes")}
    events, item, turn = told("mcp__notes__note", ["{}"], called)
    assert (item["type"], item["name"], item["namespace"], item["arguments"]) == ("function_call", "note", "mcp__notes", "{}")
    assert events[0]["item"]["namespace"] == "mcp__notes"
    assert events[-3]["name"] == "note"
    assert turn["tool_calls"][0]["function"]["name"] == "mcp__notes__note"


@pytest.mark.parametrize(
    ("tool", "arguments", "item"),
    [
        ("tool_search", {"query": "x"}, {"type": "tool_search_call", "execution": "client", "arguments": {"query": "x"}}),
        ("local_shell", {"command": ["ls"]}, {"type": "local_shell_call", "action": {"type": "exec", "env": {}, "command": ["ls"]}}),
        ("shell", {"commands": ["ls"]}, {"type": "shell_call", "action": {"commands": ["ls"]}}),
        ("apply_patch", {"type": "delete_file", "path": "a"},
         {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}}),
    ],
)  # fmt: skip
def test_calls_of_tools_without_names_hold_an_object(tool: str, arguments: Any, item: Any) -> None:
    text = json.dumps(arguments)
    events, made, turn = told(tool, [text[:5], text[5:]], {tool: Called(kind=tool, name=tool)})
    assert made == {**item, "id": made["id"], "status": "completed", "call_id": "call_1"}
    assert kinds(events) == ["output_item.added", "output_item.done"]
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == arguments
    (_, cut, nothing) = told(tool, [text[:5]], {tool: Called(kind=tool, name=tool)}, ended=False)
    assert (cut["status"], nothing) == ("incomplete", None)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("local_shell", {}),
        ("local_shell", {"command": "ls"}),
        ("apply_patch", {"type": "delete_file"}),
        ("shell", {"commands": ["ls"], "timeout_ms": "1"}),
    ],
)
def test_a_call_without_what_its_tool_needs_is_incomplete(tool: str, arguments: Any) -> None:
    _, item, turn = told(tool, [json.dumps(arguments)], {tool: Called(kind=tool, name=tool)})
    assert (item["status"], turn) == ("incomplete", None)


@pytest.mark.parametrize(
    ("arguments", "text", "status"),
    [
        ('{"input": "a\\n', "a\n", "incomplete"),
        ('{"input": "a\\', "a", "incomplete"),
        ('{"script": "a"}', '{"script": "a"}', "incomplete"),
        ('{"input": 5}', '{"input": 5}', "incomplete"),
        ('{"why": "so", "input": "a"}', "a", "completed"),
        (' {\n"input" :\t"a" }', "a", "completed"),
        ('{"input": ""}', "", "completed"),
        ('{"input": "a", "input": "b"}', "a", "incomplete"),
        ("", "", "incomplete"),
    ],
)
def test_what_is_not_a_whole_call_of_free_text_is_incomplete(arguments: str, text: str, status: str) -> None:
    _, item, _ = told("run", [arguments], {"run": Called(kind="custom", name="run")})
    assert (item["input"], item["status"]) == (text, status)


TEXTS: Final = ['say "a\\b"\n', "😀 é \u2028\t", "\\ud83d is no half", "x" * 200, "a/b\\/", "\ufffd"]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_free_text_is_the_same_however_its_json_is_cut(text: str, ascii_only: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    for size in (1, 2, 3, 5, 7, len(arguments)):
        reader = FreeText()
        given = [reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join(given) + reader.finish(arguments) == text


def test_half_of_a_character_becomes_one_that_can_be_written() -> None:
    for arguments in ('{"input": "a\\ud83d"}', '{"input": "a\\ud83d\\n"}', '{"input": "a\\ud83d\\u0041"}', '{"input": "a\\ude00b"}'):
        reader = FreeText()
        said = "".join(reader.feed(character) for character in arguments)
        assert said.startswith("a\ufffd")
        assert len(said) == (2 if arguments.endswith('d"}') else 3)
