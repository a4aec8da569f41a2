"""How the output of a chat is read, and what it is held to: reasoning, calls of tools, grammars."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from banyan_runtime import wire
from banyan_runtime.front.chat.reasoning import HarmonyFormat, ReasoningFormat, Start
from banyan_runtime.front.chat.reasoning.harmony import CALL
from banyan_runtime.front.chat.tools.harmony import HARMONY
from banyan_runtime.front.errors import ApiError, bad_tool, invalid
from banyan_runtime.front.openai.schema import ChatRequest
from banyan_runtime.front.openai.tools import ToolChoice
from banyan_runtime.front.plan import ReasoningStart, ToolUse
from banyan_runtime.front.prepare.channels import free_in_channels, in_channels
from banyan_runtime.front.prepare.constraints import Asked, asked_of
from banyan_runtime.front.prepare.forced import ARRAY, Leniency, forced, loose, problem, strict, tag_of
from banyan_runtime.front.prepare.sequences import Served
from banyan_runtime.front.text.text import Text
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.structural import AnyText, Node, Optional, Regex, Sequence, Tag, node_of, write
from banyan_runtime.wire import Grammar


@dataclass(frozen=True, slots=True)
class Output:
    reasoning: ReasoningStart | None
    tools: ToolUse | None
    constraint: wire.Constraint | None
    loosened: tuple[int, ...] = ()  # tools of whose schemas not all is enforced


def output_of(served: Served, asked: ChatRequest, choice: ToolChoice, opening: str) -> Output:
    """`opening`: what the template put behind the last turn. Raises ApiError."""
    text = served.text
    start = Start.CONTENT if text.reasoning is None else _start(text.reasoning.form, asked, opening)
    constrain = _in_channels if _speaks_harmony(text) else _behind_reasoning
    leniency = Leniency(served.constraints.usable)
    return Output(
        reasoning=None if text.reasoning is None else start.value,
        tools=_tools(text, asked, choice),
        constraint=constrain(served, asked, choice, start, leniency),
        loosened=tuple(index for index, tool in enumerate(asked.tools) if tool.function.name in leniency.loosened),
    )


def _start(form: ReasoningFormat, asked: ChatRequest, opening: str) -> Start:
    """Where the output begins. What goes on with content is content, unless that shows a marker."""
    if asked.continue_final_message and form.start not in opening and form.end not in opening:
        return Start.CONTENT
    return form.start_state(opening)


def _speaks_harmony(text: Text) -> bool:
    return text.reasoning is not None and isinstance(text.reasoning.form, HarmonyFormat)


def _tried(
    served: Served, asked: ChatRequest, choice: ToolChoice, leniency: Leniency, demanded: Callable[[Leniency], Asked | None]
) -> Asked | None:
    """What is demanded, where it can be used; tools that are not strict are held to what can be of their schemas. Raises ApiError."""
    untried = Leniency(lambda grammar: True)  # trying the schemas one by one is for those where the whole fails
    found = demanded(untried)
    if found is None:
        return None
    try:
        served.constraints.check(found)
    except ApiError:
        found = demanded(leniency)
        assert found is not None
        try:
            served.constraints.check(found)
        except ApiError as error:
            raise _bad_tool(served, asked, choice) or error from None
    else:
        leniency.loosened |= untried.loosened  # for what is refused untried
    return found


def _in_channels(served: Served, asked: ChatRequest, choice: ToolChoice, start: Start, leniency: Leniency) -> wire.Constraint | None:
    """For gpt-oss: the grammar is one of all its messages. Raises ApiError."""
    own = asked_of(asked)
    if own is not None and choice.mode != "required":
        served.constraints.check(own)  # as the client wrote it, so that an error is about that
    found = _tried(served, asked, choice, leniency, lambda given: _channels(served, asked, choice, start, own, given))
    if found is None:
        return None
    return found.constraint(kind="" if own is None or choice.mode == "required" else own.grammar.kind)


def _channels(served: Served, asked: ChatRequest, choice: ToolChoice, start: Start, own: Asked | None, leniency: Leniency) -> Asked | None:
    text = served.text
    tools = [tool for tool in asked.tools if tool.function.name in choice.names]
    tag = HARMONY.tag
    assert tag is not None
    several = asked.parallel_tool_calls and not choice.named and text.needed_tokenizer.added.get(CALL) not in text.defaults.eos_ids
    try:
        if choice.mode == "required":
            return Asked(in_channels(start, None, forced(tag, tools, several=several, leniency=leniency)), "tools")
        if own is not None:
            may_call = choice.mode == "auto" and text.tools is not None
            calls = forced(tag, tools, several=several, leniency=leniency) if may_call else None
            return dataclasses.replace(own, grammar=in_channels(start, own.grammar, calls))
        if choice.mode == "none" or text.tools is None or not any(tool.function.strict for tool in tools):
            return None
        return Asked(free_in_channels(start, loose(tag, tools, several=several)), "tools")
    except GrammarError as error:
        raise _bad_tools(served, asked, choice, error) from None


def _behind_reasoning(served: Served, asked: ChatRequest, choice: ToolChoice, start: Start, leniency: Leniency) -> wire.Constraint | None:
    """The model may think freely before it obeys. Raises ApiError."""
    text, found = served.text, _tried(served, asked, choice, leniency, lambda given: _demanded(served, asked, choice, given))
    if found is None:
        return None
    if text.reasoning is None or start is Start.CONTENT:
        return found.constraint()
    added, form = text.needed_tokenizer.added, text.reasoning.form
    if marked_by_tokens(form, start, added):
        return found.constraint(added[form.end], added[form.start] if start is Start.OPTIONAL else -1)
    try:
        whole = dataclasses.replace(found, grammar=behind_thoughts(form, start, found.grammar))
    except GrammarError as error:
        raise found.refusal(str(error)) from None
    served.constraints.check(whole)
    return whole.constraint(kind=found.grammar.kind)


def _demanded(served: Served, asked: ChatRequest, choice: ToolChoice, leniency: Leniency) -> Asked | None:
    """What the output must be: calls where they are required, else what the request's own constraint says. Raises ApiError."""
    text = served.text
    own = asked_of(asked)
    if choice.mode == "none":
        return own
    tools = [tool for tool in asked.tools if tool.function.name in choice.names]
    tag = tag_of(text.tools, text.needed_tokenizer.added)
    several = asked.parallel_tool_calls and not choice.named
    try:
        if choice.mode == "required":
            return Asked(forced(tag, tools, several=several, leniency=leniency).forced(), "tools")
        if own is None:
            free = strict(tag, tools, text.needed_tokenizer.added, several=several)
            return None if free is None else Asked(free, "tools")
        # The model may call a tool, or answer as it is asked to.
        with_calls = text.tools is not None and tag is not ARRAY and own.grammar.kind in ("json_schema", "json_object")
        if not with_calls:
            return own
        return dataclasses.replace(own, grammar=forced(tag, tools, several=several, leniency=leniency).or_json(own.grammar))
    except GrammarError as error:
        raise _bad_tools(served, asked, choice, error) from None


def _bad_tools(served: Served, asked: ChatRequest, choice: ToolChoice, error: GrammarError) -> ApiError:
    whole = invalid("tools", f"Invalid schema for tools: {error}", "invalid_json_schema")
    return _bad_tool(served, asked, choice) or whole


def _bad_tool(served: Served, asked: ChatRequest, choice: ToolChoice) -> ApiError | None:
    """The error for the first tool whose schema alone is at fault."""
    if choice.mode == "none":
        return None
    tag = HARMONY.tag if _speaks_harmony(served.text) else tag_of(served.text.tools, served.text.needed_tokenizer.added)
    assert tag is not None
    for index, tool in enumerate(asked.tools):
        name = tool.function.name
        if name in choice.names and (reason := problem(tag, tool, served.constraints.problem)) is not None:
            return bad_tool(index, name, reason)
    return None


def _tools(text: Text, asked: ChatRequest, choice: ToolChoice) -> ToolUse | None:
    form = text.tools
    if choice.mode == "none" or (form is None and choice.mode == "auto"):
        return None
    tools = [tool for tool in asked.tools if not choice.limited or tool.function.name in choice.names]
    forced = choice.mode == "required" and tag_of(form, text.needed_tokenizer.added) is ARRAY
    return ToolUse(
        format="" if forced or form is None else form.names[0],
        schemas=msgspec.json.encode({tool.function.name: tool.function.parameters or {} for tool in tools}),
        limited=choice.limited,
        parallel=asked.parallel_tool_calls,
        required=choice.mode == "required",
        calls_before=sum(len(message.tool_calls or ()) for message in asked.messages),
    )


_BLANK: Final = Regex(r"\n{0,2}")


def marked_by_tokens(form: ReasoningFormat, start: Start, added: Mapping[str, int]) -> bool:
    """Whether the markers that may come are tokens of their own: those behind a prompt that ends so."""
    return form.end in added and (start is Start.REASONING or form.start in added)


def behind_thoughts(form: ReasoningFormat, start: Start, answer: Grammar) -> Grammar:
    """The whole output: reasoning, which the prompt has begun or the model may begin, and the answer. Raises GrammarError."""
    thoughts: Node = Sequence((Tag("" if start is Start.REASONING else form.start, AnyText(), form.end), _BLANK))
    if start is Start.OPTIONAL:
        thoughts = Optional(thoughts)
    return Grammar("structural_tag", write(Sequence((thoughts, node_of(answer)))), answer.whitespace)
