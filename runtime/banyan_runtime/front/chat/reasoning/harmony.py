"""gpt-oss: all output is messages in channels, and reasoning is one of the channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from banyan_runtime.front.chat.reasoning.format import ReasoningFormat, Start

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
MARKERS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)


@dataclass(frozen=True, slots=True)
class HarmonyFormat(ReasoningFormat):
    """`start` and `end` are those of a message of reasoning."""

    start: str = f"{CHANNEL}analysis{MESSAGE}"
    end: str = END

    @property
    def markers(self) -> tuple[str, ...]:
        return MARKERS

    def start_state(self, generation_prompt: str) -> Start:
        """Before a message, or inside one that the prompt began."""
        header, message, body = generation_prompt.rpartition(START)[2].partition(MESSAGE)
        if not message or END in body:
            return Start.OPTIONAL
        return Start.REASONING if f"{CHANNEL}analysis" in header else Start.CONTENT
