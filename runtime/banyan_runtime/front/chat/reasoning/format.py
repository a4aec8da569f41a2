"""What the server knows of how a family of models marks its reasoning."""

from __future__ import annotations

import enum
from collections.abc import Container
from dataclasses import dataclass


class Start(enum.Enum):
    """Where the output begins, as the end of the prompt shows."""

    REASONING = "reasoning"  # the prompt opened the block
    OPTIONAL = "optional"  # the model may open it
    CONTENT = "content"  # the prompt closed it: thinking is off


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers of a family of models. `unmarked`: where its output begins if the prompt shows no marker."""

    start: str
    end: str
    unmarked: Start = Start.OPTIONAL
    older: ReasoningFormat | None = None  # how models write it that have no token `start`

    @property
    def markers(self) -> tuple[str, ...]:
        """What must reach the parser as text, also where it is a special token."""
        return (self.start, self.end)

    def fitting(self, added: Container[str]) -> ReasoningFormat:
        """The format of a model with these added tokens."""
        return self if self.older is None or self.start in added else self.older

    def start_state(self, generation_prompt: str) -> Start:
        """Read it off the text that the template put behind the last turn. The last marker there decides."""
        opened, closed = generation_prompt.rfind(self.start), generation_prompt.rfind(self.end)
        if opened < 0 and closed < 0:
            return self.unmarked
        return Start.REASONING if opened > closed else Start.CONTENT
