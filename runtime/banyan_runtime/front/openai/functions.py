"""Tools in OpenAI's older words: `functions` and `function_call`, written anew as `tools` and `tool_choice`.

The answer is told in the older words too: clients that speak them read nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from banyan_runtime.front.chat.events import ToolEvent
from banyan_runtime.front.errors import invalid
from banyan_runtime.front.openai.calls import Calls
from banyan_runtime.front.openai.schema import ChatRequest
from banyan_runtime.front.renaming import Renaming


def in_newer_words(asked: ChatRequest, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The body that a request in older words means; None: there are none of them in it. Raises ApiError."""
    choice = asked.function_call
    if isinstance(choice, str) and choice not in ("none", "auto"):
        message = f"Invalid value for 'function_call': '{choice[:64]}'. Supported values are: none, auto, or an object."
        raise invalid("function_call", message)
    if asked.tools and asked.functions:
        raise invalid("functions", "functions and tools exclude each other; tools are the newer ones.")
    if asked.tools and choice not in (None, "auto"):
        raise invalid("function_call", "function_call and tools exclude each other; with tools, say tool_choice.")
    if not asked.functions:
        if isinstance(choice, dict):
            raise invalid("function_call", "function_call names a function, and there are no functions.")
        return None
    if asked.tool_choice is not None:
        raise invalid("tool_choice", "functions and tool_choice exclude each other; with functions, say function_call.")
    meant = {name: value for name, value in body.items() if name not in ("functions", "function_call")}
    meant["tools"] = [{"type": "function", "function": function} for function in body["functions"]]
    meant["tool_choice"] = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
    meant["parallel_tool_calls"] = False  # there is a word for one call alone
    return meant


def names(asked: ChatRequest) -> list[Renaming]:
    """What the fields of the newer words are called in the older ones."""
    functions = [(f"tools[{place}].function", f"functions[{place}]") for place in range(len(asked.functions))]
    return [*functions, ("tools", "functions"), ("tool_choice.function", "function_call"), ("tool_choice", "function_call")]


class FunctionCall(Calls):
    """The one call of a choice."""

    reason = "function_call"

    def message(self) -> dict[str, Any]:
        told = [{"name": call.name, "arguments": call.arguments} for call in self.calls]
        return {"tool_calls": None, "function_call": told[0] if told else None}

    def chunks(self, events: Sequence[ToolEvent]) -> list[dict[str, Any]]:
        return [{"function_call": told["function"]} for told in self.deltas(events)]
