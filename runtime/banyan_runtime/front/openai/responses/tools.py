"""The tools of a response, as the functions that its chat completion brings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from banyan_runtime.front.errors import invalid, invalid_type, missing, unsupported
from banyan_runtime.front.openai.responses.kinds import (
    CUSTOM,
    FUNCTION,
    KINDS,
    TEXT,
    TOOL_SEARCH,
    Kind,
    is_hosted,
    is_left_out,
    name_of,
)
from banyan_runtime.front.parsing import strangers, string_of
from banyan_runtime.front.plan import Called
from banyan_runtime.front.renaming import Renaming

Enforceable = Callable[[Mapping[str, Any]], bool]
"""Says whether arguments can be held to a schema."""

NAMESPACE: Final = "namespace"
ADDITIONAL: Final = "additional_tools"
_BRINGING: Final = (ADDITIONAL, TOOL_SEARCH.output)  # items that bring tools
_NAMESPACE_FIELDS: Final = frozenset({"type", "name", "description", "tools"})
_FORMAT_FIELDS: Final = frozenset({"type", "syntax", "definition"})


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool that the client runs."""

    where: str  # it stands in the request
    kind: Kind
    name: str  # as the client calls it, in its namespace
    namespace: str | None
    function: dict[str, Any]  # as the model sees it

    def meets(self, choice: Mapping[str, Any]) -> bool:
        """Whether this choice means it."""
        named = choice.get("name") == self.name and choice.get("namespace") in (None, self.namespace)
        return choice.get("type") == self.kind.tool and (named or not self.kind.named)


class Tools:
    """Those of the request, and those that its items bring: of two with the same name, the last that an item brings."""

    def __init__(self, given: Sequence[Mapping[str, Any]], items: str | Sequence[Mapping[str, Any]], enforceable: Enforceable) -> None:
        """Raises ApiError."""
        self.without_effect: list[str] = []  # tools that are left out, and fields
        self._enforceable = enforceable
        listed = list(self._offered(given, "tools"))
        brought: dict[str, Offered] = {}
        for index, item in enumerate(() if isinstance(items, str) else items):
            if item.get("type") in _BRINGING and not is_left_out(item):
                where = f"input[{index}]"
                brought |= {one.function["name"]: one for one in self._offered(tools_of(item, where), f"{where}.tools")}
        names: dict[str, Offered] = {}
        for one in listed:
            other = names.setdefault(one.function["name"], one)
            if (one.kind, one.namespace) != (other.kind, other.namespace):
                message = f"the model would know it as '{one.function['name'][:64]}', like {other.where}. Rename one of them."
                raise invalid(one.where, f"Invalid value for '{one.where}': {message}")
        self.offered = [one for one in listed if one.function["name"] not in brought] + list(brought.values())

    def functions(self) -> list[dict[str, Any]] | None:
        """`tools` of the chat completion."""
        return [{"type": "function", "function": one.function} for one in self.offered] or None

    def choice(self, given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """`tool_choice` of the chat completion. Raises ApiError."""
        if not isinstance(given, dict):
            return given
        if given.get("type") != "allowed_tools":
            return self._chosen(given, "tool_choice")
        tools, mode, allowed = given.get("tools"), given.get("mode", "auto"), _allowed(given)
        if isinstance(tools, list):
            if tools and not allowed and mode == "auto":
                return "none"  # all that may be called was left out
            tools = [self._chosen(tool, f"tool_choice.tools[{index}]") if isinstance(tool, dict) else tool for index, tool in allowed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    def names(self, choice: str | dict[str, Any] | None) -> list[Renaming]:
        """What the fields of the chat completion are called in the request."""
        names = [("tool_choice.function", "tool_choice"), ("tool_choice.allowed_tools", "tool_choice")]
        for place, (index, _) in enumerate(_allowed(choice) if isinstance(choice, dict) else ()):
            names.append((f"tool_choice.allowed_tools.tools[{place}].function", f"tool_choice.tools[{index}]"))
        for place, one in enumerate(self.offered):
            function = f"tools[{place}].function"
            names += [(f"tools[{place}]", one.where), (function, one.where)]
            if one.kind is CUSTOM:
                names.append((f"{function}.parameters", f"{one.where}.format"))
        return names

    def called(self) -> dict[str, Called]:
        """How calls are told, by the names that the model knows; those of plain functions are missing."""
        return {
            one.function["name"]: Called(kind=one.kind.tool, name=one.name, namespace=one.namespace)
            for one in self.offered
            if one.kind is not FUNCTION or one.namespace is not None
        }

    def _chosen(self, choice: Mapping[str, Any], where: str) -> dict[str, Any]:
        kind = choice.get("type")
        if not isinstance(kind, str) or kind not in KINDS:
            raise unsupported(f"{where}.type", f"tools of type '{str(kind)[:40]}' are not served")
        name = string_of(choice, "name", where) if KINDS[kind].named else kind
        meant = next((one for one in self.offered if one.meets(choice)), None)
        if meant is None:
            raise invalid("tool_choice", f"Tool '{name[:64]}' of type '{kind}' not found in tools list.")
        return {"type": "function", "function": {"name": meant.function["name"]}}

    def _offered(self, tools: Sequence[Mapping[str, Any]], where: str, space: Mapping[str, Any] | None = None) -> Iterator[Offered]:
        """`space`: the namespace that they are in."""
        namespace: str | None = None if space is None else space["name"]
        about = "" if space is None else _description(space, where.rpartition(".")[0])
        for index, tool in enumerate(tools):
            place, kind = f"{where}[{index}]", tool.get("type")
            if kind is None:
                raise missing(f"{place}.type")
            if is_hosted(tool):
                self.without_effect.append(place)
            elif kind == NAMESPACE and space is None:
                string_of(tool, "name", place)
                self.without_effect += strangers(tool, _NAMESPACE_FIELDS, place)
                yield from self._offered(tools_of(tool, place), f"{place}.tools", tool)
            elif isinstance(kind, str) and kind in KINDS:
                self.without_effect += strangers(tool, KINDS[kind].fields | {"type"}, place)
                name = string_of(tool, "name", place) if KINDS[kind].named else kind
                function = self._function(KINDS[kind], tool, place)
                if about:  # what is said of a namespace is said with its first tool
                    function["description"], about = _joined(about, function.get("description")), ""
                yield Offered(place, KINDS[kind], name, namespace, {**function, "name": name_of(namespace, name)})
            else:
                raise unsupported(f"{place}.type", f"tools of type '{str(kind)[:40]}' are not served")

    def _function(self, kind: Kind, tool: Mapping[str, Any], where: str) -> dict[str, Any]:
        """What the model sees of a tool."""
        description = _description(tool, where) or kind.description
        if kind is FUNCTION:
            return {name: tool[name] for name in tool if name in ("name", "description", "parameters", "strict")}
        parameters = (tool.get("parameters") if "parameters" in kind.fields else None) or kind.parameters
        function = {"name": "", "description": description, "parameters": parameters}
        if kind is CUSTOM:
            self._hold(function, tool.get("format"), f"{where}.format")
        return function

    def _hold(self, function: dict[str, Any], form: Any, where: str) -> None:
        """Hold a tool's free text to its format, as far as that can be done; else the model is told of it, and nothing more."""
        if form is None or (isinstance(form, dict) and form.get("type") == "text"):
            return
        if not isinstance(form, dict):
            raise invalid_type(where, "expected an object.")
        if form.get("type") != "grammar":
            raise invalid(f"{where}.type", f"Invalid value for '{where}.type': supported values are: text, grammar.")
        self.without_effect += strangers(form, _FORMAT_FIELDS, where)
        syntax, definition = string_of(form, "syntax", where), string_of(form, "definition", where)
        if syntax not in ("lark", "regex"):
            raise invalid(f"{where}.syntax", f"Invalid value for '{where}.syntax': supported values are: lark, regex.")
        if syntax == "regex":
            text = {**CUSTOM.parameters["properties"][TEXT], "pattern": f"^(?:{definition})$"}
            schema = {**CUSTOM.parameters, "properties": {TEXT: text}}
            if self._enforceable(schema):
                function |= {"parameters": schema, "strict": True}
                return
        said = f"What it is given must match this {syntax} {'grammar' if syntax == 'lark' else 'expression'}:\n{definition}"
        function["description"] = _joined(function["description"], said)
        self.without_effect.append(where)


def _description(tool: Mapping[str, Any], where: str) -> str:
    return "" if tool.get("description") is None else string_of(tool, "description", where)


def _joined(*texts: str | None) -> str:
    return "\n\n".join(filter(None, texts))


def tools_of(holder: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """The tools in a namespace or in an item. Raises ApiError."""
    tools = holder.get("tools")
    if tools is None:
        raise missing(f"{where}.tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid_type(f"{where}.tools", "expected an array of objects.")
    return tools


def names_in(tools: Sequence[Mapping[str, Any]], namespace: str | None = None) -> list[str]:
    """What the model calls these tools."""
    names: list[str] = []
    for tool in tools:
        own = str(tool.get("name") or tool.get("type"))
        inside = tool.get("tools")
        names += names_in(inside, own) if isinstance(inside, list) and namespace is None else [name_of(namespace, own)]
    return names


def _allowed(choice: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """The tools that a choice allows, with their places in it, without those that are left out."""
    tools = choice.get("tools")
    return [one for one in enumerate(tools if isinstance(tools, list) else ()) if not (isinstance(one[1], dict) and is_hosted(one[1]))]
