"""The kinds of tools and of items, and what becomes of each.

A model knows functions alone. Each tool that a client runs is a function to it, whose calls are told in items of the kind that the client
waits for, and read back from them where they stand in a history. What OpenAI's servers would run is left out, and so is what tells of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

TEXT: Final = "input"  # the one parameter of a tool that takes free text
_DEFAULT_NAMESPACE: Final = "functions"  # where OpenAI's models see the functions that are in no other


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of tools that clients run."""

    tool: str  # their type
    fields: frozenset[str]  # of such a tool, that have an effect
    call: str  # the type of items that tell of calls
    called_with: str  # the field of such an item that holds what the tool is called with
    form: Literal["json", "text", "object"] = "object"  # of that field: arguments as JSON, the free text alone, arguments as an object
    output: str  # the type of items that tell of what a call gave
    event: str = ""  # the events that tell of this field while it is written; empty: there are none
    always: Mapping[str, Any] = field(default_factory=dict)  # what the object has, unless the arguments say otherwise
    beside: Mapping[str, Any] = field(default_factory=dict)  # further fields of a call's item
    description: str = ""  # of the one function that all tools of a kind without names are
    parameters: Mapping[str, Any] = field(default_factory=dict)  # its schema

    @property
    def named(self) -> bool:
        """Whether a tool has a name of its own, else it is called by its kind."""
        return self.form != "object"

    def takes(self, given: Mapping[str, Any]) -> bool:
        """Whether a client can run a call with these arguments, as far as the schema is ours."""
        if self.named or "parameters" in self.fields:
            return True
        types = {name: _TYPES[known["type"]] for name, known in self.parameters["properties"].items()}
        return all(name in given for name in self.parameters["required"]) and all(
            isinstance(value, types.get(name, object)) for name, value in given.items()
        )


def _object(required: tuple[str, ...], **properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_TYPES: Final[Mapping[str, type]] = {"string": str, "array": list, "integer": int}
_STRING: Final = {"type": "string"}
_STRINGS: Final = {"type": "array", "items": _STRING}
_NUMBER: Final = {"type": "integer"}

FUNCTION: Final = Kind(
    tool="function",
    fields=frozenset({"name", "description", "parameters", "strict", "defer_loading"}),
    call="function_call",
    called_with="arguments",
    form="json",
    output="function_call_output",
    event="response.function_call_arguments",
)
CUSTOM: Final = Kind(
    tool="custom",
    fields=frozenset({"name", "description", "format", "defer_loading"}),
    call="custom_tool_call",
    called_with="input",
    form="text",
    output="custom_tool_call_output",
    event="response.custom_tool_call_input",
    parameters=_object((TEXT,), **{TEXT: {"type": "string", "description": "All that the tool is given, as text."}}),
)
TOOL_SEARCH: Final = Kind(
    tool="tool_search",
    fields=frozenset({"execution", "description", "parameters"}),
    call="tool_search_call",
    called_with="arguments",
    output="tool_search_output",
    beside={"execution": "client"},
    description="Searches for further tools. Those that are found can be called afterwards.",
    parameters=_object(("query",), query=_STRING),
)
LOCAL_SHELL: Final = Kind(
    tool="local_shell",
    fields=frozenset(),
    call="local_shell_call",
    called_with="action",
    output="local_shell_call_output",
    always={"type": "exec", "env": {}},
    description="Runs a command, given as its list of words, and returns its output.",
    parameters=_object(("command",), command=_STRINGS, working_directory=_STRING, timeout_ms=_NUMBER),
)
SHELL: Final = Kind(
    tool="shell",
    fields=frozenset({"environment"}),
    call="shell_call",
    called_with="action",
    output="shell_call_output",
    description="Runs shell commands one after another, and returns what each wrote and how it ended.",
    parameters=_object(("commands",), commands=_STRINGS, timeout_ms=_NUMBER, max_output_length=_NUMBER),
)
APPLY_PATCH: Final = Kind(
    tool="apply_patch",
    fields=frozenset(),
    call="apply_patch_call",
    called_with="operation",
    output="apply_patch_call_output",
    description=(
        "Creates, updates or deletes one file. The diff of a new file is its lines, each behind '+'. The diff of an update is sections: "
        "a line '@@', then lines behind ' ' that stay, '-' that go and '+' that come. A deletion has no diff."
    ),
    parameters=_object(
        ("type", "path"),
        type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        path=_STRING,
        diff=_STRING,
    ),
)
_ALL: Final = (FUNCTION, CUSTOM, TOOL_SEARCH, LOCAL_SHELL, SHELL, APPLY_PATCH)
KINDS: Final[Mapping[str, Kind]] = {kind.tool: kind for kind in _ALL}
CALLS: Final[Mapping[str, Kind]] = {kind.call: kind for kind in _ALL}
OUTPUTS: Final[Mapping[str, Kind]] = {kind.output: kind for kind in _ALL}

_HOSTED: Final = frozenset({"file_search", "code_interpreter", "image_generation", "mcp"})
_WEB_SEARCH: Final = "web_search"  # its versions have dates behind it
_LEFT_OUT: Final = frozenset(
    {
        "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call", "mcp_list_tools",
        "mcp_approval_request", "mcp_approval_response", "compaction", "compaction_summary", "context_compaction", "configuration_update",
    }
)  # fmt: skip
"""Items of tools that OpenAI's servers run, and those that only its servers can read."""


def is_hosted(tool: Mapping[str, Any]) -> bool:
    """Whether OpenAI's servers would run this tool."""
    kind, environment = str(tool.get("type")), tool.get("environment")
    if kind == TOOL_SEARCH.tool:
        return tool.get("execution") != "client"
    if kind == SHELL.tool:
        return isinstance(environment, dict) and str(environment.get("type")).startswith("container")
    return kind in _HOSTED or kind.startswith(_WEB_SEARCH)


def is_left_out(item: Mapping[str, Any]) -> bool:
    """Whether the model is shown nothing of this item."""
    kind = str(item.get("type"))
    searched = kind in (TOOL_SEARCH.call, TOOL_SEARCH.output) and item.get("execution") == "server"
    return searched or kind in _LEFT_OUT


def name_of(namespace: str | None, name: str) -> str:
    """What the model calls a tool of a namespace."""
    return name if namespace in (None, "", _DEFAULT_NAMESPACE) else f"{namespace.rstrip('_')}__{name}"
