"""What the server knows of a format of tool calls."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from banyan_runtime.front.chat.tools.ids import IdMaker, call_id
from banyan_runtime.front.chat.tools.parser import Grammar, GrammarParser, Schemas, ToolParser
from banyan_runtime.front.chat.tools.tags import ToolTag


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    names: tuple[str, ...]  # of --tool-call-parser; `-` and `_` are the same
    grammar: Grammar
    openers: tuple[str, ...] = ()  # begin a call wherever they stand, so also the end of reasoning
    markers: tuple[str, ...] = ()  # must reach the parser as text, also where they are special tokens
    tag: ToolTag | None = None  # None: calls are forced as a JSON array
    plain_tag: ToolTag | None = None  # instead, where `tag_marker` is no token of the vocabulary
    tag_marker: str | None = None
    make_id: IdMaker = call_id

    def parser(self, tools: Schemas, *, limited: bool = False) -> ToolParser:
        """A parser for one choice. `limited`: calls of other tools are text."""
        return GrammarParser(self.grammar, tools, tools if limited else None)

    def tag_for(self, added: Container[str]) -> ToolTag | None:
        """How models with these added tokens write calls."""
        return self.tag if self.tag_marker is None or self.tag_marker in added else self.plain_tag
