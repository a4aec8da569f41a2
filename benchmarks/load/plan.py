"""What is asked, as data: which prompts, how long the answers, what waits for what. Nothing here knows a server or a clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `prompt`: token ids; in a conversation those of this turn alone. `max_tokens`: what the answer has, EOS ignored."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Requests one after another, each sent when the one before was answered; the first not before `due_s` seconds."""

    asks: tuple[Ask, ...]
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Sessions, begun in their order, at most `concurrent` at a time.

    `conversation`: each request is sent as text, with all earlier prompts and answers of its session before it.
    """

    name: str
    sessions: tuple[Session, ...]
    concurrent: int
    temperature: float = 0.0
    conversation: bool = False

    @property
    def asks(self) -> list[Ask]:
        return [ask for session in self.sessions for ask in session.asks]

    @property
    def output_tokens(self) -> int:
        return sum(ask.max_tokens for ask in self.asks)
