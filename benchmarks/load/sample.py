"""What came of one request, and of a plan, as times."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    """Seconds count from the beginning of the plan. A request that failed has an `error` and no times but `sent`."""

    turn: int  # 0 for the first request of its session
    sent: float
    pieces: list[float] = field(default_factory=list)  # when a piece of the text came; of a token or, with some servers, of several
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None where the server does not tell
    error: str = ""


@dataclass(slots=True)
class Played:
    """A plan's samples in no order, the wall time from the first request to the last byte, and the CPU time of the client."""

    samples: list[Sample]
    wall_s: float
    client_cpu_s: float = 0.0
