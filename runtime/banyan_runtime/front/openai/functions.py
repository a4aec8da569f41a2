"""Tools in OpenAI's older words: `functions` and `function_call`, written anew as `tools` and `tool_choice`.

The answer is told in the newer words, `tool_calls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banyan_runtime.front.errors import invalid
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
    return meant


def names(asked: ChatRequest) -> list[Renaming]:
    """What the fields of the newer words are called in the older ones."""
    functions = [(f"tools[{place}].function", f"functions[{place}]") for place in range(len(asked.functions))]
    return [*functions, ("tools", "functions"), ("tool_choice.function", "function_call"), ("tool_choice", "function_call")]
