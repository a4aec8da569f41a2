"""Grammars for models whose reasoning stands between markers that are no tokens of their own: text, which many rows of tokens spell.

So only a grammar of the whole output can tell what is a marker, as the parser of the text will (`chat/reasoning/parser.py`). Where
markers are tokens, `grammar/reasoning_gate.py` is enough, and quicker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from banyan_runtime.front.chat.reasoning import ReasoningFormat, Start
from banyan_runtime.grammar.structural import AnyText, Node, Optional, Regex, Sequence, Tag, node_of, write
from banyan_runtime.wire import Grammar

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
