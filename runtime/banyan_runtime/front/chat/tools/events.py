"""What a grammar of tool calls gives out, with the rules for white space that all formats share."""

from __future__ import annotations

from collections.abc import Container

from banyan_runtime.front.chat.events import Content, Event, ToolArgs, ToolEnd, ToolStart
from banyan_runtime.front.chat.reader import Malformed, Reader


class CallSink:
    """Makes events of text and calls, and forgets the reader's record when a call begins.

    White space waits for what follows: it is dropped before a call and between calls, and kept between visible texts. `only`: the
    tools that may be called; None: whatever the model calls, since who asks knows best what there is.
    """

    def __init__(self, reader: Reader, only: Container[str] | None = None) -> None:
        self.events: list[Event] = []
        self.calls = 0
        self.open = False  # a call has begun whose arguments are not complete
        self.silent = True  # the open call has no arguments yet
        self._reader = reader
        self._only = only
        self._space: list[str] = []
        self._inside: list[str] = []  # content amid the open call: it comes behind it
        self._spoken = False  # some visible content was given out
        self._after_call = False

    def text(self, text: str) -> None:
        """Content, as generated."""
        if self.open:
            self._inside.append(text)
            return
        solid = text.rstrip()
        if not solid:
            self._space.append(text)
            return
        whole = "".join(self._space) + solid
        self._space = [text[len(solid) :]]
        if self._after_call and not self._spoken:
            whole = whole.lstrip()
        self._spoken, self._after_call = True, False
        self.events.append(Content(whole))

    def give(self, event: Event) -> None:
        """An event of another kind."""
        self.events.append(event)

    def line_break(self) -> None:
        """Set what follows apart from the content before it."""
        if self._spoken:
            self._space.append("\n")

    def start(self, name: str, id: str | None = None) -> None:
        """A call begins. Raises Malformed for a name that no tool can have, or that may not be called."""
        if not name or not name.isprintable() or (self._only is not None and name not in self._only):
            raise Malformed
        self._reader.commit()
        self._leave()
        self._space = []
        self._after_call = self.open = self.silent = True
        self.events.append(ToolStart(self.calls, name, id))
        self.calls += 1

    def args(self, fragment: str) -> None:
        if fragment:
            self.silent = False
            self.events.append(ToolArgs(self.calls - 1, fragment))

    def end(self) -> None:
        """The arguments are complete; none at all are an empty object."""
        if self.silent:
            self.args("{}")
        self.events.append(ToolEnd(self.calls - 1))
        self._leave()

    def _leave(self) -> None:
        """No call is open any more."""
        self.open = False
        inside, self._inside = self._inside, []
        for text in inside:
            self.text(text)

    def drain(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def held(self) -> str:
        """White space that would be given out if only content followed."""
        return "".join(self._inside) + ("" if self._after_call else "".join(self._space))

    def finish(self) -> None:
        self._leave()
        if space := self.held():
            self.events.append(Content(space))
        self._space = []
