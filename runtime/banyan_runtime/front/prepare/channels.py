"""Grammars for gpt-oss. All of its output is messages in channels, so a grammar has to say in which of them what may stand:

    thought*  last        thought = <|channel|>analysis<|message|> free text <|end|><|start|>assistant

The last message is the answer, in the channel `final`, or a call. What begins it is part of the grammar, since a model that may
write anything there also writes messages that obey nothing.
"""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.chat.reasoning import Start
from banyan_runtime.front.chat.reasoning.harmony import CHANNEL, END, MESSAGE, START
from banyan_runtime.grammar.structural import AnyText, Node, Or, Sequence, Star, Tag, Text, node_of, write
from banyan_runtime.grammar.tags import Answer
from banyan_runtime.wire import Grammar

_NEXT: Final = Text(f"{START}assistant")
_FINAL: Final = Text(f"{CHANNEL}final{MESSAGE}")
_THOUGHT: Final = Tag(f"{CHANNEL}analysis{MESSAGE}", AnyText(), END)
_PREAMBLE: Final = Tag(f"{CHANNEL}commentary{MESSAGE}", AnyText(), END)
_REST: Final = Tag("", AnyText(), END)  # of a message that the prompt has begun


def in_channels(start: Start, answer: Grammar | None, calls: Answer | None) -> Grammar:
    """The whole output, of which the last message is `answer` (None: there is none) or makes calls. Raises GrammarError."""
    assert answer is not None or calls is not None
    content = None if answer is None else node_of(answer)
    if start is Start.CONTENT and content is not None:  # the prompt has begun the answer
        return Grammar("structural_tag", write(content), "bounded" if answer is None else answer.whitespace)
    return _written(start, content, calls, (_THOUGHT,), "bounded" if answer is None else answer.whitespace)


def free_in_channels(start: Start, calls: Answer) -> Grammar:
    """An output whose calls obey, and all else is free. Raises GrammarError."""
    return _written(start, AnyText(), calls, (_THOUGHT, _PREAMBLE), "bounded")


def _written(start: Start, content: Node | None, calls: Answer | None, before: tuple[Tag, ...], whitespace: str) -> Grammar:
    last: list[Node] = []
    if content is not None:
        last.append(Sequence((_FINAL, content)))
    if calls is not None:
        last.append(calls.node)
    begun = () if start is Start.OPTIONAL else (_REST, _NEXT)
    earlier: Node = before[0] if len(before) == 1 else Or(before)
    return Grammar(
        "structural_tag",
        write(Sequence((*begun, Star(Sequence((earlier, _NEXT))), last[0] if len(last) == 1 else Or(tuple(last))))),
        whitespace,
    )
