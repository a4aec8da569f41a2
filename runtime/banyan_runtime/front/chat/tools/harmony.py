"""gpt-oss: messages <|start|>role to=recipient<|channel|>channel<|message|>text<|end|>. The channel analysis is reasoning, what is sent
to functions.name is a call, and all else the model says is content."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Final

from banyan_runtime.front.chat.events import Cut, Event, Reasoning
from banyan_runtime.front.chat.reader import Emit, EndOfText, Malformed, Markers, Reader, Wait
from banyan_runtime.front.chat.reasoning.format import Start
from banyan_runtime.front.chat.reasoning.harmony import CALL, CHANNEL, CONSTRAIN, END, MARKERS, MESSAGE, RETURN, START
from banyan_runtime.front.chat.reasoning.thoughts import Thoughts, TokenCount, TrimmedThoughts
from banyan_runtime.front.chat.tools import json_calls
from banyan_runtime.front.chat.tools.events import CallSink
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.parser import GrammarParser, Schemas, calls_among, salvage
from banyan_runtime.front.chat.tools.tags import NAME, ToolTag

_FIRST: Final = Markers(START, CHANNEL, MESSAGE, "to=")  # with one of these a message begins whose <|start|> the prompt has
_NEXT: Final = Markers(START, CHANNEL)
_HEADER_END: Final = Markers(MESSAGE, START, END, CALL, RETURN)
_BODY_END: Final = Markers(END, CALL, RETURN, START, CHANNEL)
_CLOSERS: Final = Markers(END, CALL, RETURN)
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT: Final = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_FUNCTIONS: Final = "functions."


class ContentThoughts:
    """Reasoning that stays in the content, as generated."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink

    def add(self, text: str) -> None:
        self._sink.text(text)

    marker = add

    def end(self) -> None:
        pass

    def held(self) -> str:
        return ""


class _Messages:
    """The grammar of all messages of an output. `calls` false: calls are content, as generated. `cut` is for the text of messages that
    are content, each of them a text of its own."""

    def __init__(self, reader: Reader, sink: CallSink, thoughts: Thoughts, start: Start, *, calls: bool, cut: Cut | None = None) -> None:
        self.thinking = start is Start.REASONING
        self._reader = reader
        self._sink = sink
        self._thoughts = thoughts
        self._start = start
        self._calls = calls
        self._cut = cut
        self._in_header = False

    @property
    def speaking(self) -> bool:
        """Whether what comes now is neither reasoning nor a header."""
        return not (self.thinking or self._in_header)

    def read(self) -> Wait[None]:
        try:
            if self._start is Start.REASONING:
                yield from self._think("")
            elif self._start is Start.CONTENT:
                yield from self._speak()
            else:
                yield from self._message(_FIRST)
            while True:
                yield from self._message(_NEXT)
        except EndOfText:
            self._thoughts.end()
            self._end_content()
            raise

    def _message(self, begins: Markers) -> Wait[None]:
        reader, sink = self._reader, self._sink
        reader.record()
        yield from reader.space()
        if (yield from reader.accept(begins, take=False)) is None:
            sink.text(reader.release())
            yield from self._speak()
            return
        yield from reader.accept(_NEXT)
        self._in_header = True
        try:
            _, end = yield from reader.word(_HEADER_END, take=False)
            if end != MESSAGE:
                raise Malformed
        except Malformed:
            self._in_header = False
            sink.text(reader.release())
            yield from self._speak()
            return
        yield from reader.accept(_HEADER_END)
        self._in_header = False
        yield from self._body(reader.release())

    def _body(self, header: str) -> Wait[None]:
        """The message behind its header, as which of the four kinds that says."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        to = "" if recipient is None else recipient.group(1)
        if to.startswith(_FUNCTIONS) and self._calls:
            yield from self._call(to.removeprefix(_FUNCTIONS), header)
        elif to.startswith(_FUNCTIONS):
            self._sink.text(header)
            self._sink.text((yield from self._until_end(self._sink.text)))
        elif to:
            yield from self._until_end(_drop)  # a built-in tool that nobody runs
        elif channel is not None and channel.group(1) == "analysis":
            yield from self._think(header)
        else:
            self._sink.line_break()
            yield from self._speak()

    def _think(self, header: str) -> Wait[None]:
        self._thoughts.marker(header)
        self.thinking = True
        end = yield from self._until_end(self._thoughts.add)
        self.thinking = False
        self._thoughts.marker(end)
        self._thoughts.end()

    def _speak(self) -> Wait[None]:
        yield from self._until_end(self._say)
        self._end_content()

    def _say(self, text: str) -> None:
        self._sink.text(text if self._cut is None else self._cut.feed(text))

    def _end_content(self) -> None:
        if self._cut is not None:
            self._sink.text(self._cut.finish())

    def _call(self, name: str, header: str) -> Wait[None]:
        reader, sink = self._reader, self._sink
        reader.record(header)
        try:
            sink.start(name)
            yield from json_calls.arguments(reader, sink, _BODY_END)
        except Malformed:
            yield from salvage(reader, sink, _BODY_END)
        yield from self._until_end(sink.text)

    def _until_end(self, emit: Emit) -> Wait[str]:
        """Pass on the rest of a message. Another one may begin before it is ended."""
        yield from self._reader.until(_BODY_END, emit, take=False)
        return (yield from self._reader.accept(_CLOSERS)) or ""


def _drop(text: str) -> None:
    pass


def _read(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
    """For a server that was told of no reasoning: it stays in the content."""
    return _Messages(reader, sink, ContentThoughts(sink), Start.OPTIONAL, calls=True).read()


class HarmonyParser:
    """Tells reasoning, content and calls. `separate` false: reasoning stays in the content, as generated."""

    enough = False

    def __init__(
        self,
        start: Start,
        *,
        calls: bool,
        separate: bool,
        stream_reasoning: bool,
        only: Container[str] | None = None,
        required: bool = False,
        cut: Cut | None = None,
    ) -> None:
        """`required`: the messages can be nothing but reasoning and calls. `cut`: what content goes through."""
        self.reasoning_tokens = 0
        self._required = required
        self._count = TokenCount()

        def read(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
            thoughts = TrimmedThoughts(sink.give, stream=stream_reasoning) if separate else ContentThoughts(sink)
            self._thoughts: Thoughts = thoughts
            self._messages = _Messages(reader, sink, thoughts, start, calls=calls, cut=cut)
            return self._messages.read()

        self._parser = GrammarParser(read, {}, only)

    def keeps(self, text: str) -> bool:
        return not self._messages.speaking

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        before = self._messages.thinking
        events = self._parser.feed(text)
        self._count.add(len(token_ids), reasoning=before and self._messages.thinking, undecided=self._parser.undecided)
        self.reasoning_tokens = self._count.tokens
        return events

    def finish(self) -> list[Event]:
        if self._messages.thinking:
            self._count.finish()
        self.reasoning_tokens = self._count.tokens
        events = self._parser.finish()
        return calls_among(events) if self._required else events

    def rescue(self) -> list[Event]:
        held = self._thoughts.held()
        return [*([Reasoning(held)] if held else []), *self._parser.rescue()]


HARMONY: Final = ToolFormat(
    names=("gpt_oss", "openai", "harmony"),
    grammar=_read,
    markers=MARKERS,
    tag=ToolTag(
        trigger=f"{CHANNEL}commentary to=",
        begin=(f"{CHANNEL}commentary to={_FUNCTIONS}", NAME, f" {CONSTRAIN}json{MESSAGE}"),
        end="",  # <|call|> is an end of the output, and no part of it
        separator=f"{CALL}{START}assistant",
    ),
)
