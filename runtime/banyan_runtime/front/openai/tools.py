"""The tools of a request, and which of them may or must be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from banyan_runtime.front.errors import ApiError, invalid, invalid_type, missing, unsupported
from banyan_runtime.front.openai.tool_schema import problem
from banyan_runtime.front.parsing import RequestModel, check_name

MAX_TOOLS: Final = 1024


class FunctionDefinition(RequestModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(RequestModel):
    type: str = "function"
    function: FunctionDefinition


Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names`: the tools that may be called, in the request's order."""

    mode: Mode
    names: tuple[str, ...] = ()
    named: bool = False  # one tool was chosen, to be called once
    limited: bool = False  # the others are as if they were not there: the model does not see them, and a call of one is text


def refuse_custom(tools: Any) -> Any:
    """The tools as they came. Raises ApiError for one that takes free text, which a client would run and no model here can call."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and tool.get("type") == "custom":
            raise unsupported(f"tools[{index}].type", "tools of type 'custom' are not served, use type 'function'")
    return tools


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises ApiError for tools that no model could call."""
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} tools are allowed, got {len(tools)}", "array_above_max_length")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        where, name = f"tools[{index}]", tool.function.name
        if tool.type != "function":
            raise invalid(f"{where}.type", f"Invalid value for '{where}.type': '{tool.type[:64]}'. Supported values are: function.")
        check_name(f"{where}.function.name", name)
        if name in seen:
            raise invalid(f"{where}.function.name", f"'{name}' is the name of two tools; each needs a name of its own.")
        seen.add(name)
        if tool.function.parameters is not None and (wrong := problem(tool.function.parameters)) is not None:
            message = f"Invalid schema for function '{name}': {wrong}."
            raise invalid(f"{where}.function.parameters", message, "invalid_function_parameters")


def choice_of(given: str | dict[str, Any] | None, tools: Sequence[Tool]) -> ToolChoice:
    """What `tool_choice` means for these tools. Raises ApiError."""
    names = tuple(tool.function.name for tool in tools)
    if given is None:
        return ToolChoice("auto" if names else "none", names)
    if isinstance(given, str):
        if given in ("none", "auto"):
            return ToolChoice("none" if given == "none" or not names else "auto", names)
        if given != "required":
            message = f"Invalid value for 'tool_choice': '{given[:64]}'. Supported values are: none, auto, required, or an object."
            raise invalid("tool_choice", message)
        if not names:
            raise invalid("tool_choice", "Tools cannot be empty if tool choice is set to required.")
        return ToolChoice("required", names)
    kind = given.get("type")
    if kind == "function":
        return ToolChoice("required", (_named(given, "tool_choice", names),), named=True)
    if kind == "allowed_tools":
        return _allowed(given, names)
    raise invalid("tool_choice.type", "Invalid value for 'tool_choice.type': supported values are: function, allowed_tools.")


def _named(given: Any, where: str, names: Sequence[str]) -> str:
    """The name in {"function": {"name": ...}}, which must be one of `names`."""
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise missing(f"{where}.function.name")
    if not isinstance(name, str):
        raise invalid_type(f"{where}.function.name", "expected a string.")
    if not names:
        raise invalid("tool_choice", "Tools cannot be empty if tool choice is set to a specific tool.")
    if name not in names:
        raise _unknown(name)
    return name


def _allowed(given: dict[str, Any], names: Sequence[str]) -> ToolChoice:
    allowed = given.get("allowed_tools", given)  # nested in chat completions, flat in responses
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(tools, list) or not tools:
        raise invalid_type("tool_choice.allowed_tools.tools", "expected an array of tools.")
    if len(tools) > MAX_TOOLS:
        message = f"at most {MAX_TOOLS} tools are allowed, got {len(tools)}"
        raise invalid("tool_choice.allowed_tools.tools", message, "array_above_max_length")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise invalid("tool_choice.allowed_tools.mode", "Invalid value for 'tool_choice.allowed_tools.mode': supported are auto, required.")
    picked = [_named(tool, f"tool_choice.allowed_tools.tools[{index}]", names) for index, tool in enumerate(tools)]
    return ToolChoice(mode, tuple(name for name in names if name in picked), limited=True)


def _unknown(name: str) -> ApiError:
    return invalid("tool_choice", f"Tool '{name[:64]}' not found in tools list.")
